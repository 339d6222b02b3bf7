"""Pictures of odd content: dollars, many lines, wide numbers, long tokens."""
import math
from types import SimpleNamespace

import pytest

from qwen_helpers import draw


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
