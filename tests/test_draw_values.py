"""Pictures tell the numbers they were given: each is read back from the axes, and so are colours, names and limits."""
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.patches import Circle, FancyBboxPatch

from qwen_helpers import draw
from qwen_helpers.draw import COLOUR


def words(artists):
    return [part.get_text() for part in artists]


def ticks(axis):
    """What stands at each tick: place -> label."""
    return dict(zip(axis.get_ticklocs(), words(axis.get_ticklabels())))


def legend(owner):
    """Name -> colour in a legend of lines or bars."""
    box = owner.get_legend() if hasattr(owner, "get_legend") else owner.legends[0]
    inks = [part.get_facecolor() if hasattr(part, "get_facecolor") else part.get_color() for part in box.legend_handles]
    return dict(zip(words(box.get_texts()), map(to_hex, inks)))


def below(ax, *places):
    """Whether points of `ax`, given as y, stand one below the other on the paper."""
    heights = [ax.transData.transform((0, y))[1] for y in places]
    return heights == sorted(heights, reverse=True) and len(set(heights)) == len(heights)


def hexes(*names):
    return [to_hex(COLOUR[name]) for name in names]


def numbered(bars):
    """(left end, right end, middle) of each horizontal bar."""
    return [(bar.get_x(), bar.get_x() + bar.get_width(), bar.get_y() + bar.get_height() / 2) for bar in bars]


# ---- lines

X, LOSS, RATE = [1.0, 10.0, 100.0], [4.0, 0.5, 2.0], [1.0, 3.0, 8.0]


def curves(ax):
    """Name -> (x, y, colour) of the lines that are no marks."""
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata()), to_hex(line.get_color()))
            for line in ax.lines if not line.get_label().startswith("_")}


@pytest.mark.parametrize("kind", [list, torch.tensor, lambda x: torch.tensor(x).bfloat16(), np.array,
                                  lambda x: [torch.tensor(part) for part in x]])
def test_lines_go_through_their_numbers_in_their_colours(kind):
    drawn = {"accepted": LOSS, "mine": RATE, "other": X, "third": X}
    picture = draw.lines(kind(X), {name: kind(y) for name, y in drawn.items()}, "A title", "steps", "loss",
                         colours={"mine": "#123456"})
    ax, = picture.fig.axes
    seen = curves(ax)
    assert {name: values[:2] for name, values in seen.items()} == {name: (X, y) for name, y in drawn.items()}
    inks = {name: ink for name, (*_, ink) in seen.items()}
    assert inks["accepted"] == to_hex(COLOUR["accepted"]) and inks["mine"] == "#123456"
    assert len(set(inks.values())) == 4 and not {inks["other"], inks["third"]} & set(hexes("value", "pale"))
    assert legend(ax) == inks
    assert (ax.get_xlabel(), ax.get_ylabel(), picture.fig.get_suptitle()) == ("steps", "loss", "A title")
    assert "accepted 4 to 2" in picture.alt and "mine 1 to 8" in picture.alt


@pytest.mark.parametrize("log", ["", "x", "y", "xy"])
def test_a_log_axis_is_the_one_that_was_asked_for(log):
    ax, = draw.lines(X, {"a": LOSS}, "t", log=log).fig.axes
    assert [ax.get_xscale(), ax.get_yscale()] == ["log" if name in log else "linear" for name in "xy"]


def test_marks_stand_where_they_are_put():
    ax, = draw.lines(X, {"a": LOSS}, "t", marks={"here": 10, "there": 42.5}).fig.axes
    marks = [list(line.get_xdata()) for line in ax.lines if line.get_label() != "a"]
    assert marks == [[10, 10], [42.5, 42.5]]
    assert [(part.get_text().strip(), part.xy[0]) for part in ax.texts] == [("here", 10), ("there", 42.5)]
    assert list(curves(ax)) == ["a"]


def test_limits_points_and_a_line_without_a_name():
    ax, = draw.lines(X, {"": LOSS}, "t", limits=(-1, 9), points=True).fig.axes
    assert ax.get_ylim() == (-1, 9) and ax.get_legend() is None and ax.lines[0].get_marker() == "o"
    ax, = draw.lines(X, {"a": LOSS}, "t").fig.axes
    low, high = ax.get_ylim()
    assert low <= 0.5 and high >= 4 and ax.lines[0].get_marker() == "None" and list(legend(ax)) == ["a"]


def test_whole_numbers_have_whole_ticks():
    ax, = draw.lines([1, 2, 3], {"a": [1, 2, 3]}, "t").fig.axes
    assert all(float(tick).is_integer() for axis in (ax.xaxis, ax.yaxis) for tick in axis.get_ticklocs())


# ---- bars

NAMES, VALUES, SPANS = ["river", "lake", "sea"], [0.25, 0.75, 0.5], [(0.125, 0.5), (0.5, 0.875), (0.5, 0.625)]


def error_bars(ax):
    """The two ends of each error bar, and its y."""
    holder, = (part for part in ax.containers if hasattr(part, "has_xerr"))
    return [(start[0], end[0], start[1]) for start, end in holder.lines[2][0].get_segments()]


@pytest.mark.parametrize("kind", [list, torch.tensor, lambda x: torch.tensor(x).bfloat16(), np.array])
def test_bars_end_at_their_values_the_first_on_top(kind):
    picture = draw.bars(NAMES, kind(VALUES), "A title", "share", limit=1)
    ax, = picture.fig.axes
    assert numbered(ax.patches) == [(0, value, i) for i, value in enumerate(VALUES)]
    assert ticks(ax.yaxis) == dict(enumerate(NAMES)) and below(ax, 0, 1, 2)
    assert ax.get_xlim()[0] <= 0 and ax.get_xlim()[1] == 1 and ax.get_xlabel() == "share"
    assert {to_hex(bar.get_facecolor()) for bar in ax.patches} == set(hexes("plain"))
    assert "river 0.25; lake 0.75; sea 0.5" in picture.alt and picture.fig.get_suptitle() == "A title"


def test_without_a_limit_all_of_a_bar_is_seen():
    ax, = draw.bars(NAMES, [1, 70, -5], "t").fig.axes
    assert ax.get_xlim()[0] <= -5 and ax.get_xlim()[1] >= 70
    assert numbered(ax.patches)[2][1] == -5


@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_error_bars_end_at_the_ends_of_their_intervals(kind):
    ax, = draw.bars(NAMES, VALUES, "t", intervals=kind(SPANS)).fig.axes
    assert error_bars(ax) == [(low, high, i) for i, (low, high) in enumerate(SPANS)]


def test_an_interval_that_rounding_ends_below_its_value_ends_at_it():
    ax, = draw.bars(["all"], [1.0], "t", intervals=[(0.5, 1 - 2 ** -53)]).fig.axes
    assert error_bars(ax) == [(0.5, 1.0, 0)]


def test_texts_stand_behind_the_bar_or_its_interval():
    ax, = draw.bars(NAMES, VALUES, "t", texts=["a", "b", "c"]).fig.axes
    assert [(part.get_text(), *part.xy) for part in ax.texts] == [("a", 0.25, 0), ("b", 0.75, 1), ("c", 0.5, 2)]
    ax, = draw.bars(NAMES, VALUES, "t", texts=["a", "b", "c"], intervals=SPANS).fig.axes
    assert [(part.get_text(), *part.xy) for part in ax.texts] == [("a", 0.5, 0), ("b", 0.875, 1), ("c", 0.625, 2)]
    assert all(part.get_position()[0] > 0 for part in ax.texts)


def test_bars_in_colours_of_their_own_with_marks():
    ax, = draw.bars(NAMES, VALUES, "t", colours=[COLOUR["query"], COLOUR["key"], COLOUR["state"]],
                    marks={"plain": 0.625, "goal": 0.9}).fig.axes
    assert [to_hex(bar.get_facecolor()) for bar in ax.patches] == hexes("query", "key", "state")
    assert {line.get_label(): list(line.get_xdata()) for line in ax.lines} == {"plain": [0.625] * 2, "goal": [0.9] * 2}
    assert words(ax.get_legend().get_texts()) == ["plain", "goal"]


# ---- stacks

ROWS = {"plain way": {"verify": [4.0, 2.0]},
        "drafted": {"verify": [1.0, 0.5], "drafted": [2.0, 1.5], "back": [0.25, 0.0]}}


def test_stacks_begin_where_the_part_before_them_ends():
    picture = draw.stacks(["code", "prose"], ROWS, "A title", "ms", colours={"verify": "#123456"})
    ax, = picture.fig.axes
    whole, first, second, third = (numbered(part) for part in ax.containers)
    assert [[bar[:2] for bar in part] for part in (whole, first, second, third)] == [
        [(0, 4), (0, 2)], [(0, 1), (0, 0.5)], [(1, 3), (0.5, 2)], [(3, 3.25), (2, 2)]]
    assert [bar[2] for bar in first] == [bar[2] for bar in second] == [bar[2] for bar in third]
    assert below(ax, whole[0][2], first[0][2], whole[1][2], first[1][2])                # row by row, label by label
    assert ticks(ax.yaxis) == {0: "code", 1: "prose"} and ax.get_xlabel() == "ms"
    assert all(abs(bar[2] - i) < 0.5 for part in (whole, first) for i, bar in enumerate(part))
    assert "code, plain way 4; prose, plain way 2; code, drafted 3.25; prose, drafted 2" in picture.alt


def test_a_part_has_one_colour_in_all_rows_and_is_named_once():
    ax, = draw.stacks(["code", "prose"], ROWS, "t", colours={"verify": "#123456"}).fig.axes
    inks = [{to_hex(bar.get_facecolor()) for bar in part} for part in ax.containers]
    assert inks[0] == inks[1] == {"#123456"} and inks[2] == set(hexes("drafted")) and inks[3] not in (inks[0], inks[2])
    assert legend(ax) == {"verify": "#123456", "drafted": to_hex(COLOUR["drafted"]), "back": inks[3].pop()}


def test_sums_stand_at_the_ends_of_stacks():
    ax, = draw.stacks(["code", "prose"], ROWS, "t").fig.axes
    assert [(part.get_text().split(maxsplit=1), part.xy[0]) for part in ax.texts] == [
        (["4", "plain way"], 4), (["2", "plain way"], 2), (["3.25", "drafted"], 3.25), (["2", "drafted"], 2)]
    middles = [bar[2] for i in (0, 1) for bar in numbered(ax.containers[i])]
    assert [part.xy[1] for part in ax.texts] == middles
    assert ax.get_xlim()[0] == 0 and ax.get_xlim()[1] > 4
    assert draw.stacks(["code", "prose"], ROWS, "t", limit=7).fig.axes[0].get_xlim() == (0, 7)


# ---- heat

WARM = torch.tensor([[0.0, 1.0, 2.0], [4.0, 0.25, 0.5]])
COLD = torch.tensor([[-1.0, 0.5, -0.004], [0.25, -2.0, 0.5]])


@pytest.mark.parametrize("given, limit, expected", [(WARM, None, 4), (COLD, None, 2), ([WARM, COLD], None, 4),
                                                    ([COLD, WARM], None, 4), (COLD, 8, 8), (torch.zeros(2, 3), None, 1),
                                                    ([COLD.bfloat16(), COLD.half()], None, 2)])
def test_a_heat_map_holds_its_numbers_on_a_scale_even_about_zero(given, limit, expected):
    *axes, bar = draw.heat(given, "t", limit=limit).fig.axes
    matrices = given if isinstance(given, list) else [given]
    assert len(axes) == len(matrices)
    for ax, matrix in zip(axes, matrices):
        image, = ax.images
        assert np.array_equal(image.get_array(), matrix.float().numpy()) and image.origin == "upper"
        assert (image.norm.vmin, image.norm.vmax) == (-expected, expected)
        cold, zero, hot = (image.to_rgba(x * expected)[:3] for x in (-0.7, 0.0, 0.7))
        assert cold[2] > cold[0] and hot[0] > hot[2] and min(zero) > 0.95
    assert bar.get_ylim() == (-expected if any(float(m.min()) < 0 for m in matrices) else 0, expected)


def test_digits_stand_in_their_cells():
    ax, _ = draw.heat(COLD, "t", digits=1).fig.axes
    assert {part.get_position(): part.get_text() for part in ax.texts} == {
        (0, 0): "-1.0", (1, 0): "0.5", (2, 0): "0.0", (0, 1): "0.2", (1, 1): "-2.0", (2, 1): "0.5"}
    inks = {part.get_position(): part.get_color() for part in ax.texts}
    assert inks[1, 1] == "white" and inks[0, 0] == inks[2, 0] == "black"                # what can be read on its colour
    assert not draw.heat(COLD, "t").fig.axes[0].texts


def test_names_of_rows_columns_and_maps():
    left, right, _ = draw.heat([WARM, COLD], "A title", x=["a", "b", "c"], y=["up", "down"], xlabel="key",
                               ylabel="query", names=["warm", "cold"]).fig.axes
    assert ticks(left.xaxis) == ticks(right.xaxis) == {0: "a", 1: "b", 2: "c"}
    assert ticks(left.yaxis) == {0: "up", 1: "down"} and ticks(right.yaxis) == {} and below(left, 0, 1)
    assert [ax.get_title(loc="left") for ax in (left, right)] == ["warm", "cold"]
    assert [ax.get_xlabel() for ax in (left, right)] == ["key", "key"]
    assert [ax.get_ylabel() for ax in (left, right)] == ["query", ""]


# ---- tokens

def box_of(ax, text):
    """The box in whose middle a text stands."""
    x, y = text.get_position()
    inside = [box for box in ax.patches if isinstance(box, FancyBboxPatch)
              and box.get_x() < x < box.get_x() + box.get_width() and box.get_y() < y < box.get_y() + box.get_height()]
    assert len(inside) == 1 and x == pytest.approx(inside[0].get_x() + inside[0].get_width() / 2)
    return inside[0]


def test_tokens_stand_in_boxes_of_their_colours():
    ax, = draw.tokens(["a b", "\n", "river", "x"], "t", colours=["accepted", "pale", "rejected", "#123456"]).fig.axes
    assert words(ax.texts) == ["a␣b", "↵", "river", "x"]
    inks = [to_hex(box_of(ax, text).get_facecolor()) for text in ax.texts]
    assert inks == [*hexes("accepted", "pale", "rejected"), "#123456"]
    assert [text.get_color() for text in ax.texts] == ["white", "black", "white", "black"]
    assert {to_hex(box.get_facecolor()) for box in draw.tokens(["a", "b"]).fig.axes[0].patches} == set(hexes("pale"))


def test_tokens_are_read_from_left_to_right_and_on_in_the_next_row():
    texts = [f"word{i}" for i in range(40)]
    ax, = draw.tokens(texts, "t").fig.axes
    places = [(-text.get_position()[1], text.get_position()[0]) for text in ax.texts]
    assert words(ax.texts) == texts and places == sorted(places) and len({y for y, _ in places}) > 3
    boxes = [box_of(ax, text) for text in ax.texts]
    (left, right), (bottom, top) = ax.get_xlim(), ax.get_ylim()
    assert all(left < box.get_x() and box.get_x() + box.get_width() < right for box in boxes)
    assert all(bottom < box.get_y() and box.get_y() + box.get_height() < top for box in boxes)
    in_row = [(a, b) for a, b in zip(boxes, boxes[1:]) if a.get_y() == b.get_y()]
    assert all(a.get_x() + a.get_width() < b.get_x() for a, b in in_row)


def test_each_note_stands_under_its_token():
    texts, notes = ["a", "longer", "b"], ["1", "2", "a long note"]
    ax, = draw.tokens(texts, "t", notes=notes).fig.axes
    place = {part.get_text(): part.get_position() for part in ax.texts}
    for text, note in zip(texts, notes):
        assert place[text][0] == place[note][0] and place[text][1] > place[note][1] > place[text][1] - 1


# ---- dials

def test_hands_point_where_their_angles_say():
    names = [f"clock {i}" for i in range(10)]
    angles = {"query": torch.linspace(0, 3, 10), "mine": [-1.0] * 10}
    fig = draw.dials(angles, names, "t", colours={"mine": "#123456"}).fig
    ax, = fig.axes
    faces = [patch.center for patch in ax.patches if isinstance(patch, Circle)]
    assert len(faces) == 10 and words(ax.texts) == names
    rows = [(-y, x) for x, y in faces]
    assert rows == sorted(rows) and len({y for y, _ in rows}) == 2
    found = {"query": [], "mine": []}
    for hand in ax.lines:
        (x0, x1), (y0, y1) = hand.get_xdata(), hand.get_ydata()
        name = "mine" if to_hex(hand.get_color()) == "#123456" else "query"
        assert name == "mine" or to_hex(hand.get_color()) == to_hex(COLOUR["query"])
        assert (x0, y0) == faces[len(found[name])] and math.hypot(x1 - x0, y1 - y0) < 1
        found[name].append(math.atan2(y1 - y0, x1 - x0))
    assert found["query"] == pytest.approx(angles["query"].tolist()) and found["mine"] == pytest.approx(angles["mine"])
    assert words(fig.legends[0].get_texts()) == ["query", "mine"]
    for face, text in zip(faces, ax.texts):
        assert text.xy[0] == face[0] and text.xy[1] < face[1] - 1


# ---- the rounds of a draft run

def run():
    """A prompt of 5 tokens, a round whose drafts are all right, and one that goes back."""
    return [SimpleNamespace(confirmed=-1, drafted=[], verified=[10], accepted=0, kept=[10], rolled_back=False, pos=5,
                            draft_pos=5),
            SimpleNamespace(confirmed=10, drafted=[11, 12], verified=[11, 12, 13], accepted=2, kept=[11, 12, 13],
                            rolled_back=False, pos=8, draft_pos=8),
            SimpleNamespace(confirmed=13, drafted=[14, 99], verified=[14, 15, 16], accepted=1, kept=[14, 15],
                            rolled_back=True, pos=10, draft_pos=10)]


def frame(i):
    return draw.round_frame(run(), i, lambda ids: [f"t{token}" for token in ids])


def edges(ax):
    """Text -> colour of the frame around it."""
    return {(part.get_text(), part.get_position()[1]): to_hex(part.get_bbox_patch().get_edgecolor())
            for part in ax.texts if part.get_bbox_patch()}


@pytest.mark.parametrize("i, pos, head, cut", [(0, 5, 5, 0), (1, 8, 8, 0), (2, 10, 10, 1)])
def test_a_round_shows_how_far_both_caches_go_and_what_is_cut(i, pos, head, cut):
    caches = frame(i).fig.axes[2]
    assert [bar[:2] for bar in numbered(caches.patches)] == [(0, pos), (0, head), (pos, pos + cut)]
    assert ticks(caches.yaxis) == {1: "K/V, model", 0: "K/V, head"}
    assert [bar[2] for bar in numbered(caches.patches)] == pytest.approx([1, 0, 1]) and caches.get_xlim()[1] >= 11
    assert f"{pos} tokens in it" in words(caches.texts)[0]


def test_a_round_shows_each_token_right_or_wrong():
    """Drafts above what the model says there: right ones, a wrong one, and what is not kept."""
    right, wrong, plain = *hexes("accepted", "rejected"), "#444444"
    assert edges(frame(1).fig.axes[1]) == {("t10", 1): "#888888", ("t11", 1): right, ("t12", 1): right,
                                           ("t11", 0): right, ("t12", 0): right, ("t13", 0): plain}
    assert edges(frame(2).fig.axes[1]) == {("t13", 1): "#888888", ("t14", 1): right, ("t99", 1): wrong,
                                           ("t14", 0): right, ("t15", 0): plain, ("t16", 0): "#cccccc"}


def test_a_round_shows_the_text_so_far_and_counts_it():
    text = ["t10", "t11", "t12", "t13", "t14", "t15"]
    told = [(1, "accepted 0 of 0", 1), (4, "accepted 2 of 2 (100%)", 2), (6, "accepted 3 of 4 (75%)", 4)]
    for i, (count, tally, forwards) in enumerate(told):
        picture = frame(i)
        assert words(picture.fig.axes[0].texts) == text[:count]
        assert tally in picture.alt and f"{count} tokens from {forwards} forwards" in picture.alt
    ax = frame(2).fig.axes[0]
    assert [to_hex(box_of(ax, part).get_facecolor()) for part in ax.texts[-2:]] == hexes("accepted", "plain")
