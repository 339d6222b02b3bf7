"""Pictures of odd content: dollars, scripts without a font, many lines, wide numbers, long tokens."""
import math
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from qwen_helpers import draw

ODD = {"kana": "これは", "Hangul": "한국어", "Thai": "ภาษาไทย", "Devanagari": "हिन्दी", "Arabic": "العربية",
       "emoji": "🐉", "family": "👩‍👧", "heart": "❤️", "skin tone": "👍🏽", "flag": "🇩🇪", "rare": "龘", "plane 2": "𠀀",
       "tab": "\t", "return": "\r", "controls": "\0\x1b\x85", "private": "\ue000", "unassigned": "\u0378",
       "not a character": "\uffff", "half a pair": "\ud800", "accent": "e\u0301\u0302", "accent alone": "\u0301",
       "accent of another script": "a\u0e34", "format": "\u200b\ufeff\u202e", "fillers": "\u3164\u2800",
       "spaces": "\xa0\u3000\u2028", "mixed": "a 日本語のテキスト\t龘 b"}


@pytest.fixture
def own_fonts(monkeypatch):
    """No font is installed but the course's own."""
    manager, own = draw.font_manager.fontManager, draw.STYLE["font.family"]
    monkeypatch.setattr(manager, "ttflist", [font for font in manager.ttflist if font.name in own])
    draw.family.cache_clear()
    yield
    draw.family.cache_clear()


def pictures(texts):
    """Each kind of picture, with these texts wherever one can stand."""
    many, ones, title = len(texts), [1] * len(texts), " ".join(texts)
    first, last = texts[0], texts[-1]
    yield draw.tokens(texts, title, notes=texts)
    yield draw.lines([1, 2], {text: [1, 2] for text in texts}, title, first, last, marks={first: 1})
    yield draw.bars(texts, ones, title, last, texts=texts, marks={first: 2})
    yield draw.bars([first], [1], title, last)
    yield draw.stacks(texts, {last: {first: ones, "b": ones}}, title, last)
    yield draw.heat(np.eye(many), title, texts, texts, first, last, names=[first])
    yield draw.dials({first: ones}, texts, title)
    begin = SimpleNamespace(pos=9, drafted=[], verified=[0], accepted=0, kept=[0], rolled_back=False, confirmed=-1,
                            draft_pos=9)
    go_on = SimpleNamespace(pos=11, drafted=[1, 2], verified=[*range(3)], accepted=2, kept=[*range(many)],
                            rolled_back=False, confirmed=0, draft_pos=11)
    yield draw.round_frame([begin, go_on], 1, lambda ids: [texts[i] for i in ids])


@pytest.mark.parametrize("some", range(4))
def test_any_text_is_drawn_without_a_warning_and_kept_in_the_alt_text(some):
    texts = [*ODD.values()][some::4]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for picture in pictures(texts):
            picture.png(True)
            assert texts[0] in picture.alt


@pytest.mark.parametrize("text, shown", [
    ("龘", "⟨U+9F98⟩"), ("a🐉b", "a⟨U+1F409⟩b"), ("これは", "□□□"), ("日本", "日本"), ("\t", "⇥"), ("\r\n", "⟨CR⟩↵"),
    ("\x1b", "⟨U+001B⟩"), ("\u200d", "⟨U+200D⟩"), ("\u3000", "⟨U+3000⟩"), ("\ue000", "⟨U+E000⟩"), ("\u0301", "◌\u0301"),
    ("a\u0e34", "a⟨U+0E34⟩"), ("é e\u0301", "é␣e\u0301"), ("", "")])
def test_what_no_font_draws_can_be_seen_and_fits_its_box(text, shown, own_fonts):
    picture = draw.tokens([text, "x"])
    picture.png()
    ax = picture.fig.axes[0]
    assert ax.texts[0].get_text() == shown and draw.drawable(shown) == shown
    box, inside = ax.patches[0].get_window_extent(), ax.texts[0].get_window_extent()
    assert box.x0 <= inside.x0 and inside.x1 <= box.x1


def test_a_font_of_the_system_draws_what_the_own_ones_lack(monkeypatch):
    draw.family.cache_clear()
    assert draw.family("水") in draw.STYLE["font.family"]
    monkeypatch.setitem(draw.STYLE, "font.family", ["DejaVu Sans"])     # the other is then one of many
    draw.family.cache_clear()
    picture = draw.tokens(["水"])
    assert draw.family("水") not in (None, "DejaVu Sans") and draw.drawable("水") == "水"
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        drawn = picture.png()
    monkeypatch.undo()
    draw.family.cache_clear()
    assert picture.fig.axes[0].texts[0].get_fontfamily() == ["DejaVu Sans"] and drawn != draw.tokens(["□"]).png()


def test_texts_in_the_own_fonts_are_drawn_as_they_are():
    for text in "The cat, 水的沸点是多少？", "αβγ → ∑ ½ “x” — é", "$x$ #!", "مرحبا", "two\nlines", "Tromsø, Łódź, Ünal":
        assert draw.drawable(text) == text
        assert {draw.family(letter) for letter in draw.letters(text.replace("\n", ""))} <= {*draw.STYLE["font.family"]}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64])
def test_numbers_are_taken_from_tensors_of_any_dtype_and_lists_of_them(dtype):
    for given in torch.tensor([1, 2], dtype=dtype), [torch.tensor(1, dtype=dtype), torch.tensor(2, dtype=dtype)], \
            (torch.tensor(1, dtype=dtype), 2):
        assert draw.numbers(given).dtype == float and draw.numbers(given).tolist() == [1, 2]
    assert draw.numbers([torch.ones(2, dtype=dtype, requires_grad=dtype.is_floating_point)] * 3).shape == (3, 2)
    draw.lines([1, 2], {"a": [torch.tensor(1, dtype=dtype)] * 2}, "lists").png(True)


def test_dollars_are_dollars():
    for text in "$x$", "$\\foo$", "$$":
        draw.tokens([text], f"«{text}»", notes=[text]).png(True)
        draw.bars([text], [1], text).png(True)
    assert draw.canvas("$a$")[0]._suptitle.get_parse_math() is False


def test_thirty_lines_and_their_names_leave_room_for_each_other():
    picture = draw.lines([1, 2], {f"{i}": [i, i] for i in range(30)}, "many")
    figure = picture.fig
    picture.png(True)
    lines, names = (part.get_window_extent() for part in (figure.axes[0], figure.axes[0].get_legend()))
    assert lines.width > 0.5 * figure.bbox.width and names.height < 0.85 * figure.bbox.height


@pytest.mark.parametrize("x, text", [(64, "64"), (0.01, "0.01"), (20_000, "20,000"), (1e12, "10¹²"), (2e-6, "2·10⁻⁶")])
def test_ticks_are_written_as_people_do(x, text):
    assert draw.number(x) == text


@pytest.mark.parametrize("drafts", [1, 3, 8])
@pytest.mark.parametrize("word", ["a", "half a character", "x" * 40])
def test_no_cell_of_a_round_covers_its_verdict(drafts, word):
    first = SimpleNamespace(pos=9, drafted=[], verified=[0], accepted=0, kept=[0], rolled_back=False, confirmed=-1,
                            draft_pos=9)
    second = SimpleNamespace(pos=11, drafted=[1] * drafts, verified=[2] * (drafts + 1), accepted=0, kept=[2],
                             rolled_back=True, confirmed=0, draft_pos=11)
    picture = draw.round_frame([first, second], 1, lambda ids: [word for _ in ids])
    picture.png()
    boxes = {part: part.get_window_extent() for part in picture.fig.axes[1].texts}
    verdict = next(box for part, box in boxes.items() if "cut K/V" in part.get_text())
    cells = [part.get_bbox_patch().get_window_extent() for part in boxes if part.get_bbox_patch()]
    assert not any(verdict.overlaps(cell) for cell in cells)
    assert all(cell.x1 <= picture.fig.bbox.x1 for cell in cells) and math.isfinite(verdict.x0)


def test_the_text_of_a_round_keeps_what_fits():
    rounds = [SimpleNamespace(pos=i, drafted=[1] * (i > 0), verified=[1], accepted=0, kept=[1], rolled_back=False,
                              confirmed=1, draft_pos=i) for i in range(200)]
    text = draw.round_frame(rounds, 199, lambda ids: [f"t{n}" for n in range(len(ids))]).fig.axes[0].texts
    assert text[0].get_text() == "…" and text[-1].get_text() == "t199"
    assert min(part.get_position()[1] for part in text) > -2
