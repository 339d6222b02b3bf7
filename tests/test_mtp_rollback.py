"""Rollback: after every round the state is that of plain decoding of the accepted text, in every part."""
from itertools import zip_longest

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chapters.mtp import mtp_rounds
from qwen_helpers.cache import DeltaState, State, rollback, snapshot
from scripted import CLOSE, MIX, RIGHT, WRONG, World, apart, cut_only, play, remembered

COUNTS = [1, 2, 3, 4]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("rollback"))


def forgetting(part):
    """A rollback that brings back everything but S, or everything but the conv window."""
    def undo(state, saved):
        delta = [layer for layer in state.layers if isinstance(layer, DeltaState)]
        left = [getattr(layer, part).clone() for layer in delta]
        rollback(state, saved)
        for layer, value in zip(delta, left):
            setattr(layer, part, value)
    return undo


def after_first_reject(world, undo):
    """How far the state is from plain decoding once a draft was rejected."""
    return next(world.apart(state, emitted) for done, emitted, state, _ in play(world, WRONG, 2, undo=undo)
                if done.rolled_back)


def test_the_fixture_reaches_both_paths(world):
    """A fixture where the drafts are always right never rolls back, and one token over and over hides everything."""
    assert len(set(world.text)) > 20
    rounds = [done for done, *_ in play(world, MIX, 3)]
    assert {done.rolled_back for done in rounds[1:]} == {True, False}
    assert {done.accepted for done in rounds} == {0, 1, 2, 3}


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("bits", [RIGHT, WRONG, MIX])
def test_rejected_tokens_leave_no_trace_in_S(world, bits, count):
    """Rejected tokens stay in the recurrent state: the text drifts after the first reject, with no error."""
    for _, emitted, state, _ in play(world, bits, count):
        assert emitted == world.text[:len(emitted)]
        assert world.apart(state, emitted)["S"] < CLOSE
    assert len(emitted) == 40


def test_control_S_not_restored(world):
    assert after_first_reject(world, forgetting("S"))["S"] > 1e-3
    *_, (_, emitted, _, _) = play(world, WRONG, 2, undo=cut_only)
    assert emitted != world.text[:40]


@pytest.mark.parametrize("count, accepted", [(n, a) for n in COUNTS for a in range(n + 1)])
def test_the_conv_window_is_that_of_the_accepted_text(world, count, accepted):
    """S restored, conv window forgotten: it must hold the last 3 conv inputs of the accepted prefix."""
    bits = "1" * accepted + "0" * (count - accepted)
    for done, emitted, state, _ in play(world, bits, count, budget=20):
        assert world.apart(state, emitted)["window"] < CLOSE
        if len(done.drafted) == count:
            assert done.accepted == accepted


def test_control_window_forgotten(world):
    assert after_first_reject(world, forgetting("conv"))["window"] > 1e-3


@pytest.mark.parametrize("count", COUNTS)
def test_nothing_accepted_is_the_moment_before_the_drafts(world, count):
    """Accepted = 0 indexes slot -1, which in Python is the last and most wrong state."""
    seen = []

    def watched(state, saved):
        rollback(state, saved)
        seen.append(remembered(state))

    rounds = play(world, WRONG, count, undo=watched)
    next(rounds)
    done, emitted, state, _ = next(rounds)
    assert done.accepted == 0 and done.rolled_back
    assert set(apart(seen[0], world.plain[0]).values()) == {0.0}
    assert max(world.apart(state, emitted).values()) < CLOSE


def test_control_the_last_slot(world):
    """The state after all draft rows, which slot -1 holds."""
    assert after_first_reject(world, cut_only)["S"] > 1e-3


class Unknown:
    """A layer's state of some new type, which looks like the others."""

    def snapshot(self):
        return 0

    def check(self, saved):
        pass

    def restore(self, saved):
        pass


def test_an_unknown_layer_type_raises(world):
    """A rollback that quietly does nothing for a layer type it does not know."""
    state = State(world.model)
    saved = snapshot(state)
    state.layers[1] = Unknown()
    with pytest.raises(TypeError, match="Unknown has no rollback"):
        snapshot(state)
    with pytest.raises(TypeError, match="Unknown has no rollback"):
        rollback(state, saved)


def broken_snapshots(saved):
    """Every way in which a snapshot of this state may be short or malformed."""
    pos, parts = saved
    S, conv = parts[0]
    yield "a layer short", (pos, parts[:-1])
    yield "a layer too many", (pos, [*parts, parts[0]])
    yield "layers out of order", (pos, parts[::-1])
    for name, part in [("S alone", S), ("no window", (S,)), ("window first", (conv, S)), ("nothing", None),
                       ("a wider S", (S[:, :, :, 1:], conv)), ("another batch", (S.expand(2, -1, -1, -1), conv)),
                       ("fp32", (S.float(), conv.float())), ("text", ("S", "conv"))]:
        yield name, (pos, [*parts[:2], part, parts[3]])
    for name, length in [("too long", 1000), ("negative", -1), ("none", None), ("a tensor", S)]:
        yield name, (pos, [*parts[:3], length])
    for name, other in [("pos beyond", pos + 1), ("pos negative", -1), ("pos missing", None)]:
        yield name, (other, parts)
    yield "not a snapshot", None


def test_a_malformed_snapshot_changes_nothing(world):
    """A snapshot that is short or malformed restores only some layers."""
    state = State(world.model)
    world.model(world.prompt, state)
    saved = snapshot(state)
    world.model(world.ids[:, 7:10], state)
    saved = state.pos, saved[1]                             # so that only the part in question is wrong
    before = remembered(state)
    for name, broken in broken_snapshots(saved):
        with pytest.raises((ValueError, TypeError)):
            rollback(state, broken)
        assert set(apart(remembered(state), before).values()) == {0.0}, name


def test_control_a_naive_restore(world):
    """What zip does with a snapshot that is one layer short: no error, and a state of two moments."""
    state = State(world.model)
    world.model(world.prompt, state)
    pos, parts = snapshot(state)
    world.model(world.ids[:, 7:10], state)
    before = remembered(state)
    for layer, part in zip(state.layers, parts[:-1]):
        layer.restore(part)
    assert max(apart(remembered(state), before).values()) > 0


def test_a_batch_is_refused(world):
    """A batch row rolled back by another row's count: the draft loop takes one text."""
    with pytest.raises(ValueError, match="one"):
        next(mtp_rounds(world.model, world.mtp, world.prompt.expand(2, -1), 5))


def test_two_texts_at_once_do_not_disturb_each_other(world):
    """Two interleaved runs, one always accepted and one always rolled back: each equals its solo run."""
    runs = [play(world, RIGHT, 2, budget=30), play(world, WRONG, 3, budget=30)]
    for moments in zip_longest(*runs):
        for _, emitted, state, _ in filter(None, moments):
            assert max(world.apart(state, emitted).values()) < CLOSE
            assert emitted == world.text[:len(emitted)]
    assert len(emitted) == 30


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.sets(st.integers(1, 29), max_size=6))
def test_prefill_in_several_calls(world, cuts):
    """A call with several tokens on a filled cache starts from zero: prefill 7 then 3 equals prefill 10."""
    ids, edges = world.ids[:, :30], [0, *sorted(cuts), 30]
    whole, state = State(world.model), State(world.model)
    expected = world.model(ids, whole)
    logits = torch.cat([world.model(ids[:, a:b], state) for a, b in zip(edges, edges[1:])], dim=1)
    assert float((logits - expected).abs().max()) < CLOSE
    assert max(apart(remembered(state), remembered(whole)).values()) < CLOSE


def test_snapshot_bytes_do_not_grow_with_the_prompt(world):
    """Snapshot size grows with the prompt: what a snapshot holds in memory must not depend on prompt length."""
    sizes = set()
    for length in (1, 20, 60):
        state = State(world.model)
        world.model(world.ids[:, :length], state)
        parts = [part for pair in snapshot(state)[1] if isinstance(pair, tuple) for part in pair]
        sizes.add(sum(part.untyped_storage().nbytes() for part in parts))
    assert len(sizes) == 1


def test_the_state_itself_does_not_hold_the_prompt(world):
    """The conv window is three inputs, not a view that keeps the inputs of the whole prompt in memory."""
    state = State(world.model)
    world.model(world.ids, state)
    parts = [part for layer in state.layers[:3] for part in (layer.S, layer.conv)]
    held, needed = sum(part.untyped_storage().nbytes() for part in parts), sum(part.nbytes for part in parts)
    assert held == needed


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.text("01", min_size=1, max_size=12), st.integers(1, 4))
def test_every_cache_has_the_rows_that_were_written(world, bits, count):
    """Head's cache one row off after a reject: both stacks stand at all but the last emitted token, every round."""
    for done, emitted, state, drafter in play(world, bits, count, budget=20):
        rows = world.prompt.shape[1] + len(emitted) - 1
        assert done.pos == done.draft_pos == state.pos == rows == state.layers[3].length
        assert drafter.state.length == len(drafter.tokens) == rows
        assert max(world.apart(state, emitted).values()) < CLOSE
    assert emitted == world.text[:20]
