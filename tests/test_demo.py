"""`make demo`: runs a chapter without a browser, prints its table, writes a page that asks for nothing outside."""
import re

import nbformat
import pytest

import chapters
from qwen_publish import demo
from qwen_publish.site import page
from chapters import NOTEBOOKS

CHAPTER = NOTEBOOKS / "14_mtp.ipynb"


def requests(html):
    """Everything that a browser would fetch when it opens the page."""
    html = re.sub(r"/\*.*?\*/", "", html, flags=re.S)                   # comments of style sheets
    found = re.findall(r"(?:\bsrc|\bsrcset|\bposter|\bdata|<link[^>]*\bhref)\s*=\s*[\"']?([^\"'\s>]+)", html)
    found += re.findall(r"url\(\s*[\"']?([^\"')]+)", html) + re.findall(r"@import\s+[\"']?([^\"';]+)", html)
    return [address for address in found if not address.startswith(("data:", "#"))]


def test_what_counts_as_a_request():
    assert requests('<script src="https://x/y.js"></script><img src=a.png><style>@import "b.css"; a {background: '
                    'url(//c)}</style><link rel=x href="d.css"><a href="https://e">') == \
        ["https://x/y.js", "a.png", "d.css", "//c", "b.css"]


@pytest.fixture(scope="module")
def saved():
    return nbformat.read(CHAPTER, as_version=4)


def test_the_page_asks_for_nothing(saved):
    html = page(saved, NOTEBOOKS)
    assert requests(html) == []
    assert len(re.findall('src="data:image/png;base64', html)) >= 5      # the pictures that cells drew
    assert len(re.findall('src="data:image/svg', html)) >= 1             # the drawings beside the text


def body(source):
    """What a page shows of a text cell."""
    html = page(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(source)]), NOTEBOOKS)
    return html[html.index("<main>"):html.index("</main>")]


def test_formulas_are_mathml_and_need_no_script():
    found = body("# T\n\nA $S_t$ and $$\\frac{1 + a}{v}$$ and `$x` and\n\n```\n$y$ $z$\n```\n\n"
                 "and $\\nothing{$ and 5 $.")
    assert re.findall(r'<math\b[^>]* display="(\w+)"[^>]*>(.*?)</math>', found) == [
        ("inline", "<mrow><msub><mi>S</mi><mi>t</mi></msub></mrow>"),
        ("block", "<mrow><mfrac><mrow><mn>1</mn><mo>+</mo><mi>a</mi></mrow><mrow><mi>v</mi></mrow></mfrac></mrow>")]
    assert "$x" in found and "$y$ $z$" in found and "$\\nothing{$" in found and "5 $." in found


@pytest.mark.parametrize("tex", ["\\nothing{", "\\nothing x", "\\frac{1}{", "x_1_2", "\\left(a",
                                 "\\begin{aligned}a&=b\\end{aligned}"])
def test_a_formula_that_cannot_be_set_stays_as_it_is(tex):
    assert f"<p>so ${tex.replace('&', '&amp;')}$ it is</p>" in body(f"so ${tex}$ it is")


def test_words_of_a_formula_stay_whole_and_names_of_functions_stand_apart():
    found = body(r"$\ln p_\mathrm{target} + \mathrm{softplus}(x)$")
    assert "<mtext>target</mtext>" in found and "<mtext>softplus</mtext>" in found
    assert re.search(r'<mi>ln</mi><mspace width="0.17em"></mspace><msub><mi>p</mi>', found)


def test_formulas_in_folded_text_are_set_and_its_code_is_left_alone():
    found = body("<details><summary>Why $t + 1$?</summary>Since $$x < y$$ holds; <code>$a$ $b$</code>.</details>")
    assert re.findall(r'<math\b[^>]* display="(\w+)"', found) == ["inline", "block"] and "<code>$a$ $b$</code>" in found


def test_escaped_dollars_are_money():
    assert "<p>$5 or $6</p>" in body(r"\$5 or \$6")


def test_tags_of_a_text_stay_as_they_are_written():
    found = body("<details><summary>Hint</summary>\n\nLook **here**: <i>now</i>.\n\n</details>\n\nAfter.")
    assert re.search(r"<details><summary>Hint</summary>\s*<p>Look <strong>here</strong>: <i>now</i>.</p>\s*</details>",
                     found)


def test_pictures_are_inside_and_notebooks_are_linked_as_their_pages():
    picture = next((NOTEBOOKS / "pictures").glob("*.svg")).name
    found = body(f'![one](pictures/{picture}) and <img alt="two" src="pictures/{picture}">\n\n[it](14_mtp.ipynb), '
                 "[part](15_depth.ipynb#A-part), [this](../data/prompts), [far](https://example.org/a.ipynb)")
    assert found.count('src="data:image/svg+xml;base64,') == 2
    assert re.findall('href="(.*?)"', found) == ["14_mtp.html", "15_depth.html#A-part", "https://example.org/a.ipynb"]
    assert '<span title="data/prompts in the repository">this</span>' in found


def test_a_missing_picture_is_one_sentence():
    with pytest.raises(chapters.ChapterError, match="^a text shows the picture .*none.svg, which cannot be read"):
        body("![none](pictures/none.svg)")


def test_a_still_stands_for_the_sliders_that_a_notebook_saved():
    """JupyterLab saves what moves beside the picture."""
    data = {"application/vnd.jupyter.widget-view+json": {"model_id": "a"}, "text/html": "<b>moves</b>",
            "image/png": "AAAA", "text/plain": 'a "still" <of> it'}
    output = nbformat.v4.new_output("display_data", data, metadata={"live": "It <moves>"})
    html = page(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("x", outputs=[output])]), NOTEBOOKS)
    image, = re.findall("<img[^>]*data:image/png;base64,AAAA[^>]*>", html)
    assert "<b>moves</b>" not in html and f"<figure>{image}<figcaption>It &lt;moves&gt;</figcaption></figure>" in html
    assert re.search("alt=('a \"still\" &lt;of&gt; it'|\"a &quot;still&quot; &lt;of&gt; it\")", image)


def test_the_table_is_in_the_saved_chapter(saved):
    shown = "\n".join(demo.tables(saved))
    for word in ("rounds", "hits", "interval"):
        assert word in shown
    assert len(shown.splitlines()) >= 8                                  # a head and seven types of text


def test_the_demo_runs_prints_and_leaves_the_notebook_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(chapters, "NOTEBOOKS", tmp_path)
    cells = [nbformat.v4.new_code_cell("from qwen_helpers import find_model\nfind_model().name"),
             nbformat.v4.new_code_cell("print('type rounds')\nprint('json 12')", metadata={"tags": ["table"]})]
    path = tmp_path / "90_toy.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    before = path.read_bytes()
    file = demo.main("toy", out=tmp_path / "out")
    assert "type rounds\njson 12\n" in capsys.readouterr().out
    assert path.read_bytes() == before
    assert file == tmp_path / "out" / "90_toy.html" and "json 12" in file.read_text()


def test_a_chapter_that_stops_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(chapters, "NOTEBOOKS", tmp_path)
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")]), tmp_path / "90_toy.ipynb")
    with pytest.raises(SystemExit, match="^chapter 90_toy stops at cell 1, .*ZeroDivisionError"):
        demo.main("toy", out=tmp_path)
