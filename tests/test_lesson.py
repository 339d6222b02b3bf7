"""The instruments of lessons: what compares, grades, tells figures, cuts texts, asks the machine, and moves.

A tick under a proof is worth what `close` would have said had the proof been wrong.
"""
import io
import json
import math
import os
import re
from functools import cache
from types import SimpleNamespace

import ipywidgets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from qwen_helpers import draw, lesson
from qwen_helpers.lesson import apart, check, close, few, label, measured, near, pieces
from qwen_helpers.machine import needs
from qwen_helpers.weights import REAL_CONFIG, TINY, load_config, load_tokenizer, load_weights
from qwen_helpers.widgets import Transcript, chat_box, demo, knob

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
WIDE, COARSE = (F32, F64), (F16, BF16)
THEIRS = [8.0, 4.0]                                     # in a coarse dtype 16 last bits of 8 are rounding
ROUNDING = {F16: 0.125, BF16: 1.0}
quick = settings(max_examples=60, deadline=None, derandomize=True)
tk = load_tokenizer(TINY)


def passes(ours, theirs, **how):
    """Whether `close` lets two things pass; for tensors of one shape `near` must say the same."""
    try:
        close(ours, theirs, "both", **how)
        said = True
    except AssertionError:
        said = False
    ours, theirs = torch.as_tensor(ours), torch.as_tensor(theirs)
    if ours.shape == theirs.shape:
        assert near(ours, theirs, **{"tol": 1e-5} | how) == said
    return said


# ---- close, near, apart

@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("tol", [None, 1e-3, 0.5])
@pytest.mark.parametrize("sign", [1, -1])
def test_just_inside_the_tolerance_passes_and_just_outside_raises(dtype, tol, sign):
    how = {} if tol is None else {"tol": tol}
    theirs = torch.tensor([1.0, 0.0, -3.0], dtype=dtype)
    for share, wanted in (0.99, True), (1.01, False):
        off = torch.tensor([0, sign * share * (tol or 1e-5), 0], dtype=dtype)
        assert passes(theirs + off, theirs, **how) == wanted
        assert passes(theirs, theirs + off, **how) == wanted


def test_the_default_of_near_is_a_thousandth():
    assert near(torch.tensor([0.00099]), torch.zeros(1)) and not near(torch.tensor([0.00101]), torch.zeros(1))


@pytest.mark.parametrize("dtype", COARSE)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_coarse_dtype_is_given_sixteen_last_bits_of_the_largest(dtype, sign):
    """Whichever side is kept in it; the next number beyond raises."""
    allowed = ROUNDING[dtype]
    beyond = allowed + torch.finfo(dtype).eps * 4
    theirs = torch.tensor(THEIRS)
    for off, wanted in (allowed, True), (beyond, False):
        ours = theirs + torch.tensor([0, sign * off])
        assert ours.to(dtype).float().equal(ours)
        for a, b in (ours.to(dtype), theirs.to(dtype)), (ours.to(dtype), theirs), (ours, theirs.to(dtype)):
            assert passes(a, b) == wanted
        assert not passes(ours, theirs)                             # kept and computed in fp32: no excuse


@pytest.mark.parametrize("dtype", COARSE)
@pytest.mark.parametrize("kept", [F32, F64])
def test_what_is_kept_finer_than_it_was_computed_rounds_as_it_was_computed(dtype, kept):
    theirs = torch.tensor(THEIRS, dtype=kept)
    for share, wanted in (0.999, True), (1.001, False):
        ours = theirs + torch.tensor([0, share * ROUNDING[dtype]], dtype=kept)
        assert passes(ours, theirs, dtype=dtype) == wanted
        assert not passes(ours, theirs, dtype=F32) and not passes(ours, theirs, dtype=F64)


def test_the_coarsest_dtype_decides():
    ours, theirs = torch.tensor([8.0, 5.0]), torch.tensor(THEIRS)
    assert passes(ours.half(), theirs.bfloat16()) and passes(ours.bfloat16(), theirs.half())
    assert passes(ours.half(), theirs.half(), dtype=BF16)
    assert not passes(ours.half(), theirs.half(), dtype=F32)


@pytest.mark.parametrize("dtype", COARSE)
def test_only_what_theirs_holds_makes_room(dtype):
    """A far too large number of ours is not its own excuse."""
    assert not passes(torch.tensor([1000.0, 4.0], dtype=dtype), torch.tensor(THEIRS, dtype=dtype))
    assert not passes(torch.tensor([-8.0, 4.0], dtype=dtype), torch.tensor(THEIRS, dtype=dtype))


@pytest.mark.parametrize("dtype", COARSE)
def test_a_tolerance_above_rounding_is_the_tolerance(dtype):
    theirs = torch.tensor(THEIRS, dtype=dtype)
    assert passes(theirs + 2, theirs, tol=2) and not passes(theirs + 2.5, theirs, tol=2)


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
@pytest.mark.parametrize("ours, theirs", [(math.nan, 1), (1, math.nan), (math.nan, math.nan), (math.inf, 1),
                                          (1, math.inf), (math.inf, math.inf), (-math.inf, math.inf), (1, -math.inf)])
@pytest.mark.parametrize("how", [{}, {"tol": 0}, {"tol": 1.0}, {"dtype": BF16}], ids=str)
def test_what_is_no_finite_number_raises(dtype, ours, theirs, how):
    """On either side, on both too, and beside good numbers."""
    pair = [torch.tensor([0.5, x, 2.0], dtype=dtype) for x in (ours, theirs)]
    with pytest.raises(AssertionError):
        close(*pair, "broken", **how)
    assert not near(*pair, **how)


@pytest.mark.parametrize("one, other", [((2,), (3,)), ((2,), (1,)), ((1,), (2,)), ((), (1,)), ((3, 1), (1, 3)),
                                        ((2, 3), (3,)), ((1, 4), (4,)), ((2, 3), (3, 2)), ((2, 3), (6,)), ((0,), (1,))])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_shapes_that_differ_raise(one, other, dtype):
    """Though one could be broadcast to the other; both are named. They are never near."""
    with pytest.raises(AssertionError, match=re.escape(f"{one}") + ".*" + re.escape(f"{other}")):
        close(torch.ones(one, dtype=dtype), torch.ones(other, dtype=dtype), "shapes")
    assert not near(torch.ones(one, dtype=dtype), torch.ones(other, dtype=dtype))


def neighbours(dtype):
    """A number and the one next to it."""
    if dtype == torch.bool:
        return torch.tensor([True]), torch.tensor([False])
    if dtype.is_floating_point:
        one = torch.ones(1, dtype=dtype)
        return one, one + torch.finfo(dtype).eps
    most = min(torch.iinfo(dtype).max, 2 ** 53)                     # what fp64 tells apart
    return torch.tensor([most], dtype=dtype), torch.tensor([most - 1], dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, F16, BF16, F32, F64])
@pytest.mark.parametrize("how", [{}, {"dtype": BF16}], ids=str)
def test_a_tolerance_of_zero_is_exact_in_every_dtype(dtype, how):
    one, other = neighbours(dtype)
    assert passes(one, one.clone(), tol=0, **how)
    assert not passes(one, other, tol=0, **how) and not passes(other, one, tol=0, **how)


def test_whole_numbers_and_truths():
    yes, no = torch.tensor([True, False]), torch.tensor([True, True])
    assert passes(yes, yes.clone()) and not passes(yes, no)
    assert passes(yes, torch.tensor([1, 0])) and passes(torch.tensor([1, 2]), torch.tensor([1.0, 2.0]))
    assert not passes(torch.tensor([3, 4]), torch.tensor([3, 5])) and not passes(torch.tensor([0, 255]).byte(), yes)


def test_lists_numbers_and_arrays():
    assert passes([1, 2], [1, 2]) and passes([1.0, 2.0], torch.tensor([1.0, 2.0])) and passes(3, 3.0)
    assert passes(0.1, torch.tensor(0.1)) and passes(np.array([1.0, 2.0]), [1.0, 2.0])
    assert not passes([1, 2], [1, 3]) and not passes(3, 4) and not passes(0.1, 0.2) and not passes([[1]], [1])


@pytest.mark.parametrize("dtype", [F16, BF16, F32, torch.int64])
def test_nothing_equals_nothing_of_the_same_shape(dtype):
    assert passes(torch.empty(0, 3, dtype=dtype), torch.empty(0, 3, dtype=dtype))
    assert not passes(torch.empty(0, 3, dtype=dtype), torch.empty(3, 0, dtype=dtype))


def test_gradients_and_strides_are_no_matter():
    x = torch.arange(6.0).view(2, 3).requires_grad_()
    assert passes(x.mT, x.detach().mT.contiguous()) and not passes(x * 1.001, x)


@quick
@given(st.lists(st.floats(-100, 100, width=16), min_size=1, max_size=8), st.integers(0, 7), st.floats(-5, 5, width=16),
       st.sampled_from([F16, BF16, F32, F64]), st.sampled_from([F16, BF16, F32, F64, None]))
def test_apart_by_hand(values, place, off, kept, computed):
    """The difference in full precision, what is allowed, and what rounds: eps is 2^-10 in fp16, 2^-7 in bf16."""
    theirs = torch.tensor(values, dtype=kept)
    ours = theirs.clone()
    ours[place % len(values)] += off
    gap, allowed, coarse = apart(ours, theirs, 1e-4, computed)
    assert gap == max(abs(a - b) for a, b in zip(ours.tolist(), theirs.tolist()))
    assert coarse == max(kept, computed or kept, key={F64: 0, F32: 1, F16: 2, BF16: 3}.get)
    share = {F16: 1 / 64, BF16: 1 / 8}.get(coarse, 0)
    assert allowed == pytest.approx(max(1e-4, share * max(map(abs, theirs.tolist()))))


@pytest.mark.parametrize("dtype, kind", [(F16, "float16"), (BF16, "bfloat16")])
def test_what_is_printed_names_the_difference_and_the_rounding(dtype, kind, capsys):
    theirs = torch.tensor(THEIRS, dtype=dtype)
    close(theirs + torch.tensor([0, 0.0625]).to(dtype), theirs, "a sum")
    said = f"✓ a sum: largest difference 6.2e-02 in {kind}; up to {ROUNDING[dtype]:.0e} is rounding\n"
    assert capsys.readouterr().out == said
    close(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]) + 4e-6, "fp32")
    assert re.fullmatch(r"✓ fp32: largest difference [34]\.\de-06\n", capsys.readouterr().out)
    with pytest.raises(AssertionError, match=f"^a sum: largest difference 2.0e.00 is above .* in {kind}$"):
        close(theirs + 2, theirs, "a sum")
    with pytest.raises(AssertionError, match="^fp32: largest difference 5.0e-01 is above 1e-05$"):
        close(0.5, 0.0, "fp32")
    assert capsys.readouterr().out == ""                            # no tick where it raises


# ---- check

MISTAKES = {"the sum": 6.0, "the largest": 3.0, "the last": 3.0}
NOT_YET = "✗ not these numbers yet"


def grade(capsys, answer, right=2.0, mistakes=MISTAKES, **how):
    check(answer, right, mistakes, **how)
    return capsys.readouterr().out.strip()


@pytest.mark.parametrize("answer, said", [(2.0, "✓ right"), (2, "✓ right"), (torch.tensor(2.0), "✓ right"),
                                          (6.0, "✗ the sum"), (3.0, "✗ the largest"), (2.1, NOT_YET),
                                          (math.nan, NOT_YET), (math.inf, NOT_YET)])
def test_an_answer_is_right_or_a_named_mistake_or_neither(capsys, answer, said):
    """Of two mistakes with one value the first is named."""
    assert grade(capsys, answer) == said


def test_a_right_answer_is_right_though_a_mistake_gives_it_too(capsys):
    assert grade(capsys, 2.0, mistakes={"by luck": 2.0}) == "✓ right"


@pytest.mark.parametrize("tol", [1e-5, 1e-2])
def test_an_answer_may_be_off_by_the_tolerance(capsys, tol):
    right = torch.tensor([1.0, 0.0])
    assert grade(capsys, right + torch.tensor([0, 0.9 * tol]), right, {}, tol=tol) == "✓ right"
    assert grade(capsys, right + torch.tensor([0, 1.1 * tol]), right, {}, tol=tol) == NOT_YET
    assert grade(capsys, right + torch.tensor([0, 0.9 * tol]), right + 1, {"one off": right}, tol=tol) == "✗ one off"


def test_whole_numbers_are_exact(capsys):
    right = torch.tensor([100_000_000, 2])
    assert grade(capsys, [100_000_000, 2], right, {}) == "✓ right"
    assert grade(capsys, [100_000_001, 2], right, {}) == NOT_YET
    assert grade(capsys, 5_000_001, 5_000_000, {"one more": 5_000_001}) == "✗ one more"
    assert grade(capsys, 5_000_000.4, 5_000_000, {}) == NOT_YET
    assert grade(capsys, [True, False], torch.tensor([True, False]), {}) == "✓ right"
    assert grade(capsys, [True, True], torch.tensor([True, False]), {}) == NOT_YET


def test_a_wrong_shape_is_named_unless_a_mistake_has_it(capsys):
    right = torch.ones(2, 3)
    assert grade(capsys, torch.ones(3, 2), right, {}) == "✗ the shape is (3, 2), it should be (2, 3)"
    assert grade(capsys, torch.ones(3), right, {}) == "✗ the shape is (3,), it should be (2, 3)"
    assert grade(capsys, 1.0, right, {}) == "✗ the shape is (), it should be (2, 3)"
    assert grade(capsys, torch.ones(3, 2), right, {"turned": right.T}) == "✗ turned"


@pytest.mark.parametrize("answer, kind", [("two", "str"), (["two"], "list"), ({}, "dict"), (object(), "object"),
                                          (print, "builtin_function_or_method"), ([[1], [1, 2]], "list")])
def test_what_is_not_numbers_is_named(capsys, answer, kind):
    assert grade(capsys, answer) == f"✗ this is a {kind}, not a number or a tensor of numbers"


def test_nothing_yet_is_no_mistake(capsys):
    assert grade(capsys, None).startswith("… nothing here yet")


# ---- figures, pieces, repetitions

@pytest.fixture
def bench(tmp_path, monkeypatch):
    """A bench.json of the test's own."""
    names = ["packing it", "packing it, twice", "a step", "a step packing it", "steps"]
    figures = [dict(figure=name, ratio=1.234 + i, lowest=i, highest=9.999) for i, name in enumerate(names)]
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(dict(machine="A machine", cores=7, torch="9.8", date="2001-02-03", figures=figures)))
    monkeypatch.setattr(lesson, "BENCH", file)


@pytest.mark.parametrize("parts, told", [(["packing"], [0, 1]), (["packing it,"], [1]), (["step"], [4]),
                                         (["a step", "packing it"], [0, 1, 2, 3]), (["Packing"], []), (["twice"], [])])
def test_measured_tells_the_figures_whose_names_begin_so(bench, capsys, parts, told):
    lines = ["packing it: 1.23 (0.00 to 10.00)", "packing it, twice: 2.23 (1.00 to 10.00)",
             "a step: 3.23 (2.00 to 10.00)", "a step packing it: 4.23 (3.00 to 10.00)", "steps: 5.23 (4.00 to 10.00)"]
    measured(*parts)
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "A machine, 7 cores, torch 9.8, 2001-02-03" and rest == [lines[i] for i in told]


words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=6)
marks = st.sampled_from(["<|im_start|>", "<|im_end|>", "<think>", "🙂", "👩‍🚀", "长江", " ", "\n"])


@quick
@given(st.lists(st.one_of(words, marks), max_size=12).map("".join))
def test_pieces_together_are_the_text(text):
    """Special tokens are shown too, and no piece holds half a character."""
    ids = tk.encode(text).ids
    parts = pieces(tk, ids)
    assert len(parts) == len(ids) and "".join(parts) == tk.decode(ids, skip_special_tokens=False)
    assert not any("\ufffd" in part for part in parts)


def test_a_character_comes_with_its_last_half():
    ids = tk.encode("a🙂b").ids
    parts = pieces(tk, ids)
    assert len(ids) > 3 and "".join(parts) == "a🙂b" and parts.index("🙂") == len(parts) - 2
    assert parts[1:-2] == [""] * (len(parts) - 3)
    assert pieces(tk, ids[:2]) == ["a", ""] and pieces(tk, []) == []


def test_each_special_token_is_a_piece():
    names = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    assert pieces(tk, [tk.token_to_id(name) for name in names]) == names


def test_labels_of_tokens():
    half = tk.encode("🙂").ids[0]
    space, line, mark = tk.encode(" ").ids[0], tk.encode("\n").ids[0], tk.token_to_id("<|im_end|>")
    assert [label(tk, token) for token in (half, space, line, mark)] == ["½", "␣", "↵", "<|im_end|>"]
    word = tk.encode("the river").ids[1]
    assert label(tk, word) == tk.decode([word]).replace(" ", "␣")


@cache
def sized(folder):
    """What `few` looks at: a model's config."""
    return SimpleNamespace(cfg=load_config(folder))


def test_a_small_model_repeats_all_and_says_nothing(capsys):
    for many in (0, 2, 100, [], list("abcdefgh" * 5)):
        assert few(sized(TINY), many) == many
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("many, least", [(0, 0), (2, 2), (3, 3), (4, 3), (24, 3), (31, 3), (32, 4), (100, 12)])
def test_a_large_model_repeats_an_eighth_and_at_least_three(capsys, many, least):
    items = [object() for _ in range(many)]
    assert few(sized(REAL_CONFIG), many) == least
    said = capsys.readouterr().out
    taken = few(sized(REAL_CONFIG), items)
    assert capsys.readouterr().out == said
    assert said.count("\n") == (least < many) and (least == many or re.search(rf"\b{least} of {many}\b", said))
    places = [items.index(item) for item in taken]
    assert len(places) == least and places == sorted(set(places))           # in order, none twice
    assert many < 24 or all(8 <= b - a <= 11 for a, b in zip(places, places[1:]))       # and from all parts of the list


# ---- the machine

@pytest.mark.parametrize("weights, enough", [(0.9, False), (1.1, True)])
def test_a_machine_must_hold_the_weights_in_fp32_and_a_gigabyte(monkeypatch, weights, enough):
    """Measured in the weights of the embedded model and of its draft head, four bytes a number."""
    count = sum(x.numel() for part in ("model.", "mtp.") for x in load_weights(TINY, part).values())
    there = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": int(1e9 + weights * 4 * count) // 4096}
    monkeypatch.setattr(os, "sysconf", there.__getitem__)
    (_, found, trouble), = [need for need in needs(TINY) if need[0] == "memory"]
    assert found == f"{there['SC_PAGE_SIZE'] * there['SC_PHYS_PAGES'] / 1e9:.1f} GB" and (trouble == "") == enough


# ---- sliders

def test_a_knob_has_the_range_that_was_asked_for():
    choices = (0, 10, 3), (0.0, 2.0, 0.7), (1, 9, 5, 2), ["a", "b"]
    whole, real, stepped, chosen = (knob("top_k", choice) for choice in choices)
    assert isinstance(whole, ipywidgets.IntSlider) and (whole.min, whole.max, whole.value, whole.step) == (0, 10, 3, 1)
    assert isinstance(real, ipywidgets.FloatSlider) and (real.min, real.max, real.value) == (0, 2, 0.7)
    assert real.step == pytest.approx(0.04) and (stepped.value, stepped.step) == (5, 2)
    assert chosen.options == ("a", "b") and chosen.value == "a" and chosen.description == "top k"


class Shade:
    """Stands in for a Picture: one grey pixel."""

    def __init__(self, grey):
        self.grey = grey

    def png(self, quick=False):
        out = io.BytesIO()
        Image.new("L", (1, 1), self.grey).save(out, "png")
        return out.getvalue()

    def _repr_mimebundle_(self, **_):
        return {"image/png": self.png(), "text/plain": str(self.grey)}, {}


def test_a_slider_redraws_the_picture_of_its_value():
    box = demo(lambda grey, more: Shade(10 * grey + more), play=True, grey=(0, 9, 4), more=(0, 5, 1))
    grey, more = (part for part in box.children if isinstance(part, ipywidgets.IntSlider))
    button, image = (next(part for part in box.children if isinstance(part, kind))
                     for kind in (ipywidgets.Play, ipywidgets.Image))

    def shown():
        return Image.open(io.BytesIO(image.value)).getpixel((0, 0))

    assert shown() == 41 and box.still.grey == 41 and (button.min, button.max, button.value) == (0, 9, 4)
    grey.value = 7
    assert shown() == 71
    more.value = 0
    assert shown() == 70 and box.still.grey == 41


def test_a_chat_box_keeps_what_was_said():
    """Each question is asked with all that was said before, and the card shows it."""
    heard = []

    def stream(messages, **how):
        heard.append([m["content"] for m in messages])
        yield from ("<b>", f"<b> {len(messages)}")

    box = chat_box(SimpleNamespace(stream=stream), "one", "two", " ")
    assert heard == [["one"], ["one", "<b> 1", "two"]]
    assert [(m["role"], m["content"]) for m in box.still] == [("user", "one"), ("assistant", "<b> 1"), ("user", "two"),
                                                             ("assistant", "<b> 3")]
    page = box.children[1].value
    assert page == Transcript(box.still).html() and "&lt;b&gt; 3" in page and "<b> 3" not in page


# ---- what a picture is made of

def test_numbers_of_anything():
    """Tensors of any dtype, with gradients too, arrays, lists, and lists of tensors."""
    wanted = [[1.0, 2.0], [3.0, 4.5]]
    x = torch.tensor(wanted)
    for held in (x, x.bfloat16(), x.half(), x.double(), x.detach().requires_grad_(), x.numpy(), wanted, list(x),
                 tuple(x.bfloat16())):
        got = draw.numbers(held)
        assert got.dtype == float and got.tolist() == wanted
