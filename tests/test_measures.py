"""What chapters measure by: shares, bytes, bits, repetitions, an interval, loops, and the model of the speed-up.

At the end two promises of one line each that no text shows if they are broken.
"""
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chapters.attention import attention_map
from chapters.cache import bytes_per_token, fixed_bytes
from chapters.chunk import chunk_rule
from chapters.deltanet import recurrent_rule
from chapters.model import Model, bits_of
from chapters.mtp import break_even, by_type, loop_start, medians, speedup, tally, wilson
from chapters.rejection import SamplingDrafter
from chapters.sample import entropy, repeats
from checkpoints import PITFALL, write_checkpoint
from qwen_helpers.cache import State
from scripted import World

quick = settings(max_examples=60, deadline=None, derandomize=True)


@pytest.mark.parametrize("hits, n, low, high", [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0),
                                                (50, 100, 0.4038, 0.5962), (0, 0, 0.0, 1.0)])
def test_wilson_against_published_values(hits, n, low, high):
    assert wilson(hits, n) == pytest.approx((low, high), abs=1e-4)


@quick
@given(st.integers(1, 500), st.floats(0, 1))
def test_wilson_holds_the_rate_and_solves_its_equation(n, share):
    """Its ends are the rates p with |p - hits/n| = z · sqrt(p (1 - p) / n)."""
    hits = round(share * n)
    low, high = wilson(hits, n)
    assert 0 <= low + 1e-12 and low - 1e-12 <= hits / n <= high + 1e-12 and high <= 1 + 1e-12
    for p in (low, high):
        assert (p - hits / n) ** 2 == pytest.approx(1.96 ** 2 * p * (1 - p) / n, abs=1e-9)


@pytest.mark.parametrize("ids, start", [([1, 2, 3, 4, 5], 5), ([1, 2, 7, 7, 7], 2), ([1, 2, 7, 7], 4),
                                        ([9, 1, 2, 1, 2, 1, 2], 1), ([9, 1, 2, 1, 2, 1], 6), ([5, 5, 5], 0), ([], 0),
                                        ([5, 5, 5, 1], 4)])
def test_loop_start(ids, start):
    """A tail of at least three equal pieces is a loop; a repetition that ends is none."""
    assert loop_start(ids) == start


@quick
@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(3, 6))
def test_a_loop_begins_no_later_than_it_was_made_to(head, piece, times):
    ids = head + piece * times
    start = loop_start(ids)
    assert start <= len(head)
    tail = ids[start:]
    assert any(tail[p:] == tail[:-p] and len(tail) >= 3 * p for p in range(1, 17))


@quick
@given(st.floats(0.5, 3), st.floats(0, 1), st.floats(0.1, 3))
def test_break_even_is_where_the_speedup_is_one(verify, draft, redo):
    a = break_even(verify, draft, redo)
    assert speedup(a, verify, draft, redo) == pytest.approx(1)
    assert speedup(a + 0.1, verify, draft, redo) > 1


def test_speedup_by_hand():
    """Two tokens for one verify and one draft; or one token for verify, draft and a second forward."""
    assert speedup(1.0, 1.1, 0.2) == pytest.approx(2 / 1.3)
    assert speedup(0.0, 1.1, 0.2) == pytest.approx(1 / 2.3)


def rounds(*parts):
    """Rounds that drafted, kept and accepted so much."""
    return [SimpleNamespace(drafted=[0] * drafted, kept=[0] * kept, accepted=accepted)
            for drafted, kept, accepted in parts]


def test_rounds_are_counted_until_the_text_loops():
    """Those that drafted and begin before the loop; all of them where there is none."""
    looped = SimpleNamespace(entry={"type": "code"}, plain=[1, 2, 3, 4, 5, 5, 5, 5],
                             rounds=rounds((0, 1, 0), (1, 2, 1), (1, 1, 0), (1, 2, 1), (1, 2, 1)))
    free = SimpleNamespace(entry={"type": "prose"}, plain=[1, 2, 3, 4], rounds=rounds((0, 1, 0), (1, 2, 1), (0, 1, 0)))
    assert tally([looped]) == (2, 1) and tally([free]) == (1, 1)
    assert tally([looped, free]) == (3, 2) and tally([]) == (0, 0)
    assert by_type([looped, free, looped]) == {"code": [looped, looped], "prose": [free], "all": [looped, free, looped]}


def test_steps_take_turns_and_their_median_is_told():
    order = []
    times = medians({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, repeats=5)
    assert order == ["a", "b"] * 5 and list(times) == ["a", "b"] and min(times.values()) >= 0


@pytest.mark.parametrize("heads, groups", [(1, 1), (4, 4), (6, 2)])
def test_shares_of_attention_against_a_loop(heads, groups):
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(n, 5, 3, dtype=torch.float64, generator=draw) for n in (heads, groups))
    share = attention_map(q, k)
    assert share.shape == (heads, 5, 5) and not share.triu(1).any()
    for h in range(heads):
        for t in range(5):
            weight = [math.exp(float(q[h, t] @ k[h // (heads // groups), s]) / math.sqrt(3)) for s in range(t + 1)]
            assert share[h, t, :t + 1].tolist() == pytest.approx([w / sum(weight) for w in weight])


def test_bytes_by_formula_are_those_of_a_state(tmp_path):
    model = Model.from_pretrained(write_checkpoint(tmp_path / "model", PITFALL), torch.float32)
    for tokens in (0, 1, 20):
        state = State(model)
        if tokens:
            model(torch.arange(tokens)[None], state)
        assert state.nbytes == fixed_bytes(model.cfg) + tokens * bytes_per_token(model.cfg, width=4)
    assert bytes_per_token(model.cfg) == bytes_per_token(model.cfg, width=2) == bytes_per_token(model.cfg, width=4) / 2


def test_bits_by_hand():
    """A fair choice among 2^n is n bits; a token that is given 1/8 costs 3."""
    assert entropy(torch.full((4, 8), 1 / 8)).tolist() == pytest.approx([3] * 4)
    assert float(entropy(torch.eye(3)[0])) == 0
    assert float(entropy(torch.tensor([0.5, 0.25, 0.25, 0.0]))) == pytest.approx(1.5)
    p = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.75, 0.125], [1 / 3, 1 / 3, 1 / 3]])
    assert bits_of(p.log()[None], torch.tensor([[2, 0, 2]])) == pytest.approx((1 + 3) / 2)


@quick
@given(st.lists(st.integers(0, 2), max_size=14), st.integers(1, 4))
def test_what_repeats_was_there_before(tokens, n):
    def ends(i):
        return tokens[i - n + 1:i + 1] if i >= n - 1 else None
    assert repeats(tokens, n) == [ends(i) is not None and any(ends(j) == ends(i) for j in range(i))
                                  for i in range(len(tokens))]


@pytest.mark.parametrize("decay", [1, 40])
def test_gradients_in_chunks_are_those_of_the_recurrence(decay):
    """Where the decay is strong too: there exp overflows above the diagonal, and 0 · ∞ would be no gradient."""
    draw = torch.Generator().manual_seed(0)
    q, k, v, g, beta, S = (torch.randn(*shape, generator=draw) for shape in
                           ((1, 2, 40, 4), (1, 2, 40, 4), (1, 2, 40, 3), (1, 2, 40), (1, 2, 40), (1, 2, 4, 3)))
    k, g, beta = torch.nn.functional.normalize(k, dim=-1), -decay * g.abs(), beta.sigmoid()
    parts = [x.requires_grad_() for x in (q, k, v, g, beta, S)]
    ours, theirs = (torch.autograd.grad(y.square().sum() + last.sum(), parts)
                    for y, last in (chunk_rule(*parts, C=16), recurrent_rule(*parts)))
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_drafts_are_drawn_from_what_the_head_says_of_its_words(tmp_path):
    """Each word under its own id, in whatever order the words are named; any other p_draft would be exact too."""
    world, words = World(tmp_path / "model", length=1), torch.tensor([3, 28, 0, 17, 9])
    dice, knobs = torch.Generator().manual_seed(0), {"temperature": 0.7}
    drafter = SamplingDrafter(world.model, world.mtp, dice, knobs, words=words)
    drafter.read(world.ids[:, 1:], world.hidden[:, :-1])
    logits = world.model.lm_head(drafter.last)[0] / 0.7
    drafted = {token for _ in range(60) for token in drafter.propose()[:1]}
    share = logits[words].exp() / logits[words].exp().sum()
    expected = torch.zeros(29).index_copy(0, words, share.float())
    torch.testing.assert_close(drafter.p_draft[0].float(), expected)
    assert drafted <= set(words.tolist()) and len(drafted) > 1
