"""`make html` and `make show`: pages that need no network, a player that is true to its rounds, slides that fit."""
import os
import re
import signal
import socket
import subprocess
import sys
import time

import nbformat
import pytest
from nbconvert.exporters import SlidesExporter
from playwright.sync_api import expect

from browser import LOCAL
from notebook import PATHS, each_notebook
import chapters
from qwen_publish import ROOT, refresh, site, slides
from qwen_helpers.draw import ROUNDS
from qwen_helpers.weights import TINY

WIDE, HIGH = 1280, 720


def toy(folder, *cells, name="90_toy"):
    path = folder / f"{name}.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=list(cells)), path)
    return path


def text(source):
    return nbformat.v4.new_markdown_cell(source)


def code(source, outputs=(), tags=()):
    return nbformat.v4.new_code_cell(source, outputs=list(outputs), metadata={"tags": list(tags)})


def printed(words):
    return [nbformat.v4.new_output("stream", text=words)]


def marks(*cells):
    found = slides.mark(nbformat.v4.new_notebook(cells=list(cells)))
    return [cell.metadata.get("slideshow", {}).get("slide_type", "-") for cell in found.cells]


def test_the_rule_of_slides():
    assert marks(text("# A title?"), code("import os"), code("x = 1"), text("More."), code("x")) == \
        ["slide", "skip", "-", "subslide", "-"]
    assert marks(text("# T"), text("Short."), text("## Part")) == ["slide", "-", "slide"]
    assert marks(text("# T"), code("x"), text("Under it."), text("And this.")) == ["slide", "-", "subslide", "-"]
    assert marks(text("# T\n\n**Predict:** how much?"), code("a = 1"), code("a", printed("1"))) == ["slide", "-", "fragment"]
    assert marks(text("# T\n\nA prediction."), code("a", printed("1"))) == ["slide", "-"]
    assert marks(text("## Your turn: count"), code("answer = None", tags=["no-import"]), code("x"), text("## On"),
                 code("def mistake(): pass", tags=["no-import"])) == ["slide", "skip", "-", "slide", "-"]
    assert marks(text("# T\n\n```\n# no heading\n```"), text("```\n# none\n```")) == ["slide", "-"]


@each_notebook
def test_slide_marks_are_set_and_nbconvert_makes_a_talk_of_them(path):
    saved, marked = nbformat.read(path, as_version=4), slides.mark(nbformat.read(path, as_version=4))
    kinds = [cell.metadata.get("slideshow") for cell in saved.cells]
    assert kinds == [cell.metadata.get("slideshow") for cell in marked.cells], "run python -m qwen_publish.refresh"
    body, _ = SlidesExporter().from_notebook_node(saved, {"metadata": {"path": str(path.parent)}})
    asked = [kind["slide_type"] for kind in kinds if kind]
    assert len(re.findall(r"<section\b", body)) == 2 * asked.count("slide") + asked.count("subslide")
    assert 8 <= asked.count("slide") and len(re.findall(r'class="fragment"', body)) == asked.count("fragment")


def test_only_a_stale_chapter_is_run_and_none_is_saved(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(chapters, "NOTEBOOKS", tmp_path)
    fresh = toy(tmp_path, text("# Is it fresh?\n\n![A map of all](x_map.svg)\n\n[on](91_old.ipynb)"),
                code("print(1)", printed("kept")), name="90_fresh")
    old = toy(tmp_path, text("# Is it old?"), code("print('run ' + 'now')"), name="91_old")
    (tmp_path / "x_map.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
    before = fresh.read_bytes(), old.read_bytes()
    monkeypatch.setattr(refresh, "stale", lambda path: "its own code changed" if path == old else "")
    site.main(["--out", str(tmp_path / "out")])
    assert "91_old: its own code changed, so it is run" in capsys.readouterr().out
    assert (fresh.read_bytes(), old.read_bytes()) == before
    pages = {path.name: path.read_text("utf-8") for path in (tmp_path / "out").iterdir()}
    assert sorted(pages) == ["90_fresh.html", "91_old.html", "index.html"]
    assert "kept" in pages["90_fresh.html"] and "run now" in pages["91_old.html"]
    assert 'href="91_old.html"' in pages["90_fresh.html"] and "Is it old?" in pages["index.html"]
    assert re.search(r'<a (?=[^>]*rel="prev")[^>]*href="90_fresh.html"', pages["91_old.html"])
    site.main(["--saved", "--out", str(tmp_path / "saved")])
    assert "is run" not in capsys.readouterr().out
    assert "run now" not in (tmp_path / "saved" / "91_old.html").read_text("utf-8")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The site of the saved chapters as they are; whether they are fresh, another test asks."""
    return site.build(tmp_path_factory.mktemp("site") / "out", saved=True).parent


@pytest.fixture(params=["light", "dark"])
def theme(request):
    return request.param


@pytest.fixture
def opened(browser):
    """Opens an address in a page without a network; `page.problems` collects what goes wrong."""
    pages = []

    def open_(address, theme="light"):
        page = browser.new_page(viewport={"width": WIDE, "height": HIGH}, color_scheme=theme)
        pages.append(page)
        page.set_default_navigation_timeout(180_000)        # Voilà sends the page while the cells run
        page.problems = []
        page.on("pageerror", lambda error: page.problems.append(f"JavaScript: {error}"))

        def guard(route):
            if route.request.url.startswith("file:") or LOCAL.match(route.request.url):
                return route.continue_()
            page.problems.append(f"outside request: {route.request.url}")
            route.abort()

        page.context.route("**/*", guard)
        page.goto(str(address))
        return page

    yield open_
    for page in pages:
        assert page.problems == []
        page.context.close()


CONTRAST = """selector => [...document.querySelectorAll(selector)].map(element => {
  const light = colour => { const [r, g, b] = colour.match(/[\\d.]+/g).map(x => (x /= 255) <= 0.04045 ? x / 12.92 :
    ((x + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  let ground = element;
  while (/, 0\\)|transparent/.test(getComputedStyle(ground).backgroundColor) && ground.parentElement) ground = ground.parentElement;
  const [a, b] = [light(getComputedStyle(element).color), light(getComputedStyle(ground).backgroundColor)];
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
})"""


def test_pages_open_from_the_file_system(built, opened, theme):
    for file in sorted(built.glob("*.html")):
        page = opened(file.as_uri(), theme)
        broken = page.locator("img").evaluate_all("all => all.filter(image => !image.complete || !image.naturalWidth).length")
        assert not broken and not page.locator("img:not([alt])").count(), file.name
        for link in set(page.locator("a").evaluate_all("all => all.map(link => link.getAttribute('href'))")):
            target = link.partition("#")[0]
            assert re.match("https?:", link) or not target or (built / target).is_file(), (file.name, link)
        assert min(page.evaluate(CONTRAST, "p, h1, h2, td, a, summary, pre.output, figcaption, math")) >= 4.5, file.name
        page.context.close()


def test_index_leads_to_every_chapter(built, opened):
    page = opened((built / "index.html").as_uri())
    for path in PATHS:
        expect(page.locator(f'a[href="{path.stem}.html"]')).to_have_count(1)
        assert site.question(nbformat.read(path, as_version=4)) in page.locator("table").text_content()
    page.locator(f'a[href="{PATHS[0].stem}.html"]').focus()
    page.keyboard.press("Enter")
    for path in PATHS[1:]:
        page.locator("a[rel=next]").click()
        expect(page).to_have_url((built / f"{path.stem}.html").as_uri())


def test_folded_details_open_by_keyboard(built, opened):
    page = opened((built / "14_mtp.html").as_uri())
    summary = page.locator("summary").first
    summary.focus()
    page.keyboard.press("Enter")
    expect(page.locator("details").first).to_have_attribute("open", "")


def stories(path):
    """(story, alt text of its still) of each player that a chapter saved."""
    for cell in nbformat.read(path, as_version=4).cells:
        for output in cell.get("outputs", []):
            if ROUNDS in output.get("data", {}):
                yield output.data[ROUNDS], output.data["text/plain"]


def test_players_tell_their_rounds(built, opened):
    """Each frame against the story, and the story against the picture that Python drew."""
    found = [(path, *pair) for path in PATHS for pair in stories(path)]
    assert {"00_start", "14_mtp"} <= {path.stem for path, *_ in found}
    for path, story, alt in found:
        start, rounds, texts = story["start"], story["rounds"], story["texts"]
        emitted = sum(r["kept"] for r in rounds[:start + 1])
        assert alt == f"{rounds[start]['title']}. {rounds[start]['tally']}. Text: {''.join(texts[:emitted])}"
        page = opened((built / f"{path.stem}.html").as_uri())
        player = page.locator(".player").nth([p for p in found if p[0] == path].index((path, story, alt)))
        slider, following = player.locator("input"), player.get_by_label("Next")
        expect(player.locator("h3")).to_have_text(rounds[start]["title"])
        slider.focus()
        page.keyboard.press("Home")
        done = []
        for i, r in enumerate(rounds):
            done += texts[len(done):len(done) + r["kept"]]
            assert player.locator("h3").text_content() == r["title"]
            assert player.locator(".tally").text_content() == r["tally"]
            assert player.locator(".state").text_content() == r["origin"]
            assert player.locator(".verdict").text_content() == r["verdict"]
            shown = [t.replace("\n", "↵").replace(" ", "␣") for t in done][-36:]
            assert player.locator(".token").all_text_contents() == shown
            assert player.locator(".token.accepted").count() == min(r["accepted"], r["kept"])
            assert player.locator(".work .wrong").count() == max(0, len(r["draft"]) - 1 - r["accepted"])
            assert player.locator(".bar i").all_text_contents() == [str(r["pos"]), str(r["head"])]
            if i + 1 < len(rounds):
                following.click()
        player.get_by_label("Back").click()
        assert player.locator("h3").text_content() == rounds[-2]["title"]
        page.context.close()


def test_player_plays_and_pauses(built, opened):
    page = opened((built / "14_mtp.html").as_uri())
    player = page.locator(".player").first
    title = player.locator("h3")
    player.get_by_label("Next").focus()
    first = title.text_content()
    player.get_by_label("Play").click()
    expect(title).not_to_have_text(first)
    player.get_by_label("Pause").click()
    paused = title.text_content()
    page.wait_for_timeout(1200)
    assert title.text_content() == paused


def test_slides_fit_the_projector(built, opened, tell):
    smallest = []
    for path in PATHS:
        page = opened(f"{(built / path.stem).as_uri()}.html#talk")
        count = int(page.locator(".place output").text_content().split("/")[1])
        for i in range(count):
            expect(page.locator("section.now")).to_have_count(1)
            for _ in range(page.locator("section.now :is(.fragment, .long):not(.told)").count()):
                page.keyboard.press("PageDown")
            high, wide = page.evaluate("[document.documentElement.scrollHeight, document.documentElement.scrollWidth]")
            assert high <= HIGH and wide <= WIDE, (path.stem, i + 1, high, wide)
            smallest.append(float(page.locator("section.now").evaluate("section => section.style.zoom || 1")))
            page.keyboard.press("PageDown")
        assert page.url.endswith(f"#talk-{count}")
        page.keyboard.press("Escape")
        expect(page.locator("section").first).to_be_visible()
        page.context.close()
    small = sum(zoom < 1 for zoom in smallest)
    tell(f"slides: {len(smallest)} in {len(PATHS)} chapters, {small} drawn smaller to fit {WIDE}x{HIGH}, at least {min(smallest)}")
    assert small <= 0.05 * len(smallest)


@pytest.fixture
def talk(tmp_path, opened):
    """Opens cells as a talk, in a window of 1280 x 720 or of another size."""
    def open_(*cells, size=(WIDE, HIGH)):
        notebook = slides.mark(nbformat.v4.new_notebook(cells=list(cells)))
        (tmp_path / "page.html").write_text(site.page(notebook, tmp_path), "utf-8")
        page = opened((tmp_path / "page.html").as_uri())
        page.set_viewport_size({"width": size[0], "height": size[1]})
        page.keyboard.press("s")
        return page
    return open_


TALL = "x\n" * 18


def screens(page):
    """The text of each screen; none may be empty before its keys."""
    count = int(page.locator(".place output").text_content().split(" / ")[1])
    for _ in range(count):
        assert page.locator("section.now").inner_text().strip()
        for _ in range(page.locator("section.now :is(.fragment, .long):not(.told)").count()):
            page.keyboard.press("PageDown")
        yield " ".join(page.locator("section.now").inner_text().split())
        page.keyboard.press("PageDown")


@pytest.mark.parametrize("size", [(WIDE, HIGH), (1920, 1080), (800, 500)], ids=str)
def test_a_cell_without_room_goes_on_the_next_screen_and_in_each_window_on_the_same(talk, size):
    page = talk(text("# T\n\n**Predict:** how many?"), code("a = 1"), code(TALL, printed("a result")), code("b = 2"),
                code(TALL), text("Under it."), text("And this."), size=size)
    tall = TALL.replace("\n", " ")
    assert list(screens(page)) == ["T Predict: how many? a = 1", f"{tall}a result b = 2", tall.strip(),
                                   "Under it. And this."]
    page.keyboard.press("Escape")
    expect(page.get_by_role("heading")).to_be_visible()


def test_a_result_without_room_under_its_code_takes_the_place_of_the_code(talk):
    page = talk(text("# T"), code(TALL, printed(TALL)), code("y"))
    source, result = page.locator(".highlight").first, page.locator("pre.output")
    page.keyboard.press("PageDown")
    expect(source).to_be_visible()
    expect(result).to_be_hidden()
    page.keyboard.press("PageDown")
    expect(source).to_be_hidden()
    expect(result).to_be_visible()
    page.keyboard.press("PageDown")
    expect(page.locator(".place output")).to_have_text("3 / 3")


def test_a_prediction_waits_for_its_result(talk):
    page = talk(text("# T\n\n**Predict:** one or two?"), code("1 + 1", printed("it is two")), text("Two."))
    expect(page.get_by_text("it is two")).to_be_hidden()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_text("it is two")).to_be_visible()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_text("Two.", exact=True)).to_be_visible()
    page.keyboard.press("ArrowLeft")
    expect(page.get_by_text("it is two")).to_be_visible()


@pytest.fixture
def show(tmp_path):
    """The address of the running `make show`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path / "show.log"
    env = os.environ | {"QWEN_MODEL": str(TINY), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    server = subprocess.Popen(
        ["make", "-o", ".venv/ready", "show", f"PY={sys.executable}", f"ARGS=--no-browser --port={port}"],
        cwd=ROOT, env=env, stdout=log.open("wb"), stderr=subprocess.STDOUT, start_new_session=True)
    try:
        end = time.monotonic() + 60
        while "is running at" not in log.read_text("utf-8"):
            assert server.poll() is None and time.monotonic() < end, f"Voilà did not start: {log.read_text('utf-8')}"
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)


def test_the_show_is_live_and_offline(show, opened):
    page = opened(show)
    pictures = page.locator("img.demo-picture")
    expect(pictures).to_have_count(3, timeout=180_000)
    assert "from chapters" not in page.locator("body").inner_text()         # its code is not shown
    for knob, number in ("round", 0), ("prompts_of_each_type", 1), ("accepted", 2), ("verify", 2), ("draft", 2):
        before = pictures.nth(number).get_attribute("src")
        page.locator(f".knob-{knob} .noUi-handle").focus()
        page.keyboard.press("ArrowRight")
        expect(pictures.nth(number)).not_to_have_attribute("src", before, timeout=120_000)
    before = pictures.nth(0).get_attribute("src")
    page.locator(".knob-kind .noUi-handle").focus()
    page.keyboard.press("ArrowRight")
    expect(pictures.nth(0)).not_to_have_attribute("src", before, timeout=60_000)
    assert "".join(page.locator(".demo-trouble").all_text_contents()).strip() == ""


def test_keys_work_after_a_click(built, opened):
    page = opened((built / "00_start.html").as_uri())
    place = page.locator(".place output")
    page.locator("#talk").click()
    page.keyboard.press("ArrowRight")
    expect(place).to_have_text(re.compile("^2 /"))
    page.get_by_label("Next slide").click()
    page.keyboard.press("ArrowLeft")
    expect(place).to_have_text(re.compile("^2 /"))
    page.get_by_label("Part of the chapter").select_option(index=2)
    at = int(place.text_content().split("/")[0])
    page.keyboard.press("ArrowRight")
    expect(place).to_have_text(re.compile(f"^{at + 1} /"))
