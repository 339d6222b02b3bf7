"""Each chapter as a class uses it: opened in JupyterLab in Chromium, run, every slider moved by keyboard and mouse.

What is timed is told at the end of the run and fails nothing: machines differ.
"""
import statistics

import pytest
from playwright.sync_api import expect

from browser import Chapter, jupyterlab
from notebook import PATHS, cells

expect.set_options(timeout=30_000)


@pytest.fixture(scope="module")
def lab(browser, tmp_path_factory):
    with jupyterlab(tmp_path_factory.mktemp("lab")) as url:
        yield url


@pytest.fixture(scope="module")
def chapter(request, browser, lab):
    opened = Chapter(browser, lab, request.param.stem)
    opened.run_all()
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def times(tell):
    """kind -> pairs (milliseconds, what was waited for)."""
    taken = {}
    yield taken
    for kind, waits in taken.items():
        ms, last = [wait for wait, _ in waits], max(waits)
        tell(f"{kind}: median {statistics.median(ms):.0f} ms, 95 % within {statistics.quantiles(ms, n=20)[-1]:.0f} ms, "
             f"{len(ms)} times, longest {last[0]:.0f} ms ({last[1]})")


def chapters(*parts):
    """The chapters in which a cell holds one of `parts`; all when none is given."""
    paths = [path for path in PATHS if not parts or any(part in source for part in parts
                                                        for _, source, _ in cells(path, "code"))]
    return pytest.mark.parametrize("chapter", paths, ids=[path.stem for path in paths], indirect=True, scope="module")


@chapters()
def test_opened_and_run(chapter):
    assert chapter.trouble() == []
    assert chapter.demos()


@chapters()
def test_keyboard_moves_every_slider(chapter, times):
    for demo in chapter.demos():
        for slider in demo.sliders():
            start, before, share = slider.value(), demo.shown(), slider.share()
            away, back = ("ArrowLeft", "ArrowRight") if share > 0.99 else ("ArrowRight", "ArrowLeft")
            waits, seen = [slider.press(away)], {demo.shown()}
            assert slider.value() != start, slider.name
            waits.append(slider.press(back))
            assert (slider.value(), demo.shown()) == (start, before), slider.name
            for end in ("Home", "End"):
                waits.append(slider.press(end))
                seen.add(demo.shown())
            slider.bring_back(start, share)
            assert demo.shown() == before, f"{slider.name}: back from its end, the first picture does not return"
            assert seen - {before}, f"{slider.name}: there is only one picture"
            times.setdefault("from key press to picture", []).extend((ms, slider.name) for ms in waits if ms)
    assert chapter.trouble() == []


@chapters()
def test_mouse_drags_a_slider_of_every_demo(chapter):
    for demo in chapter.demos():
        slider = demo.sliders()[0]
        start, before, share = slider.value(), demo.shown(), slider.share()
        slider.drag(0 if share > 0.99 else 1)
        assert slider.value() != start and demo.shown() != before, slider.name
        slider.bring_back(start, share)
        assert (slider.value(), demo.shown()) == (start, before), slider.name
    assert chapter.trouble() == []


@chapters("play=True", "rounds_player(")
def test_player_plays_pauses_steps_and_stops(chapter):
    for demo in (demo for demo in chapter.demos() if demo.play.count()):
        slider = demo.sliders()[0]
        slider.press("Home")
        first, before = slider.value(), demo.shown()
        demo.play.click()
        expect(slider.readout).not_to_have_text(first)
        second = slider.value()
        expect(slider.readout).not_to_have_text(second)
        demo.play.click()                               # a pause
        paused, played = slider.value(), demo.shown()
        assert played != before, demo.name
        chapter.page.wait_for_timeout(1200)             # longer than one round is shown
        assert slider.value() == paused, demo.name
        slider.press("ArrowRight")
        assert slider.value() != paused and demo.shown() != played, demo.name
        demo.stop.click()
        expect(slider.readout).to_have_text(first)
        assert demo.shown() == before, demo.name
    assert chapter.trouble() == []


@chapters("chat_box(")
def test_chat_box_streams_answers(chapter, times):
    line, page = chapter.page.locator(".chat-line input"), chapter.page.locator(".chat-page")
    send, new = (chapter.page.locator(f"button.chat-{name}") for name in ("send", "new"))
    new.click()
    expect(page).to_have_text("…")
    for question, ask in ("水的沸点是多少？", lambda: line.press("Enter")), ("What is a poem?", send.click):
        waits, texts = zip(*chapter.ask(question, ask))
        assert len(set(texts)) >= 3 and all(b.startswith(a) for a, b in zip(texts, texts[1:])), texts
        assert texts[0].endswith(question) and question in texts[-1] and "assistant" in texts[-1]
        assert line.input_value() == ""
        times.setdefault("from question to first words", []).append((waits[1], question))
    new.click()
    expect(page).to_have_text("…")
    assert chapter.trouble() == []
