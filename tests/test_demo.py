"""`make demo`: runs a chapter without a browser, prints its table, writes a page that asks for nothing outside."""
import re

import nbformat
import pytest

from qwen_helpers import chapters, demo
from qwen_helpers.site import page
from qwen_helpers.chapters import NOTEBOOKS

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


def test_formulas_are_readable_without_a_script():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(
        "# T\n\nA $S_t$ and $$\\frac{1 + a}{v}$$ and `$x` and\n\n```\n$y$ $z$\n```\n\nand $\\nothing{$ and 5 $.")])
    html = page(notebook, NOTEBOOKS)
    assert re.findall(r'<img class="formula" alt="([^"]*)" src="data:image/svg', html) == ["S_t", "\\frac{1 + a}{v}"]
    body = html[html.index("<main>"):html.index("</main>")]
    assert "$x" in body and "$y$ $z$" in body and "$\\nothing{$" in body and "5 $." in body


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
