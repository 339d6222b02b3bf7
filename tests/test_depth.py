"""Chapter 15: several drafts a round, states kept per position, in one text and in a batch; exact for every N."""
import copy
from functools import partial
from itertools import cycle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.modeling_layers import MtpModel

import chapters.depth
from chapters.chunk import chunk_rule, gated_delta_rule
from chapters.deltanet import causal_conv, recurrent_rule, some_tokens
from chapters.depth import (AdaptiveDrafter, BatchDrafter, CopyFirstDrafter, DeepDrafter, LookupDrafter, depth_batch,
                            depth_rounds, keep_each, right_edge, select, select_kept, select_rows)
from chapters.mtp import mtp_rounds
from chapters.sample import generate
from checkpoints import PITFALL
from qwen_helpers.cache import AttentionState, DeltaState, State, rollback, snapshot
from qwen_helpers.weights import load_weights
from scripted import CLOSE, MIX, RIGHT, WRONG, Scripted, World, apart, distance, remembered

DEPTHS = [1, 2, 3, 4, 5, 6]             # the conv kernel is 4: from N = 4 on a trail is longer than the window
WORDS = torch.tensor([3, 28, 0, 17, 9, 12, 5, 21, 7, 14])
KINDS = {
    "plain": DeepDrafter,
    "unsure": partial(DeepDrafter, p_min=0.08),
    "never sure": partial(DeepDrafter, p_min=2.0),
    "trimmed": partial(DeepDrafter, words=WORDS),
    "adaptive": AdaptiveDrafter,
    "all at once": partial(AdaptiveDrafter, p_min=0.06, words=WORDS),
    "lookup": lambda model, mtp, N: LookupDrafter(N),
    "copy first": CopyFirstDrafter,
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("depth"))


def play(world, drafter, budget=40, stop=(), save=keep_each, back=select_kept):
    """The rounds of one run with a trail: yields (round, tokens emitted so far, state)."""
    state, emitted = State(world.model), []
    for done in mtp_rounds(world.model, None, world.prompt, budget, stop, state=state, drafter=drafter, save=save,
                           back=back):
        emitted += done.kept
        yield done, emitted, state


def text_of(world, drafter, **options):
    return [token for done, *_ in play(world, drafter, **options) for token in done.kept]


def trails(state):
    return [trail for layer in state.layers if isinstance(layer, DeltaState)
            for trail in (layer.S_after, layer.conv_after)]


def head_apart(world, drafter, emitted):
    """How far the head's cache and last output are from one pass over the text."""
    (k, v), last = world.head_pass(len(emitted))
    return distance([drafter.state.k, drafter.state.v, drafter.last], [k, v, last])


# What the layers leave on the way

@pytest.mark.parametrize("T", [1, 2, 5, 20])
def test_the_recurrence_shows_each_S(T):
    parts, seen = [x.double() for x in some_tokens(B=2, H=3, T=T, K=4, V=6)], []
    out, last = recurrent_rule(*parts, seen)
    for t in range(T):
        first = [x[:, :, :t + 1] for x in parts[:5]]
        assert distance([seen[t]], [recurrent_rule(*first, parts[5])[1]]) == 0
    assert len(seen) == T and distance([seen[-1], out], [last, recurrent_rule(*parts)[0]]) == 0


@pytest.mark.parametrize("T", [1, 2, 5])
@pytest.mark.parametrize("kernel", [2, 4])
def test_the_convolution_shows_each_window(T, kernel):
    x, window, weight = torch.randn(2, 3, T), torch.randn(2, 3, kernel - 1), torch.randn(3, kernel)
    seen = []
    y, last = causal_conv(x, window, weight, seen)
    windows = [causal_conv(x[..., :t + 1], window, weight)[1] for t in range(T)]
    assert distance(seen, windows) == 0 and torch.equal(seen[-1], last)
    assert torch.equal(y, causal_conv(x, window, weight)[0])


@pytest.mark.parametrize("T", [1, 3, 4, 9, 15, 16, 40])
def test_a_trail_is_plain_decoding_of_each_prefix(world, T):
    """Also where the chunked rule would be used, and longer than the window; element 0 is the state before."""
    state = State(world.model)
    world.model(world.prompt, state)
    before = remembered(state)
    start = keep_each(state)
    logits = world.model(world.ids[:, start:start + T], state)
    for n in range(T + 1):
        mine = copy.deepcopy(state)
        select(mine, start, n)
        assert max(apart(remembered(mine), before if n == 0 else world.plain[n]).values()) < CLOSE
    bare = State(world.model)
    world.model(world.prompt, bare)
    assert distance([world.model(world.ids[:, start:start + T], bare)], [logits]) < CLOSE


def test_without_a_trail_long_texts_are_read_in_chunks(world, monkeypatch):
    called = []
    monkeypatch.setattr("chapters.chunk.chunk_rule", lambda *args: called.append(1) or chunk_rule(*args))
    state = State(world.model)
    assert gated_delta_rule is world.model.layers[0].linear_attn.rule
    world.model(world.ids[:, :20], state)
    assert len(called) == 3 and set(trails(state)) == {None}


# One text

@pytest.mark.parametrize("N", DEPTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_any_drafter_gives_plain_text_and_state(world, kind, N):
    """fp64, after every round: text, S, window, keys and values, pos and the head's cache are those of plain decoding."""
    drafter = KINDS[kind](world.model, world.mtp, N)
    for done, emitted, state in play(world, drafter):
        assert emitted == world.text[:len(emitted)]
        assert max(world.apart(state, emitted).values()) < CLOSE
        assert set(trails(state)) == {None}
        if kind != "lookup":
            assert drafter.state.length == state.pos and head_apart(world, drafter, emitted) < CLOSE
    assert len(emitted) == 40


@pytest.mark.parametrize("N, accepted", [(n, a) for n in DEPTHS for a in range(n + 1)])
def test_every_accepted_count(world, N, accepted):
    """S, windows, K/V and the head's cache, with states kept per position."""
    drafter = Scripted(world, "1" * accepted + "0" * (N - accepted), N)
    for done, emitted, state in play(world, drafter, budget=30):
        assert emitted == world.text[:len(emitted)]
        assert max(world.apart(state, emitted).values()) < CLOSE
        assert head_apart(world, drafter, emitted) < CLOSE
        if len(done.drafted) == N:
            assert done.accepted == accepted and len(done.kept) == accepted + 1


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.text("01", min_size=1, max_size=12), st.integers(1, 6), st.integers(0, 30))
def test_any_script_and_budget(world, bits, N, budget):
    assert text_of(world, Scripted(world, bits, N), budget=budget) == world.text[:budget]


def test_more_drafts_than_a_chunk_needs(world):
    """20 drafts: the trail needs the recurrence where the chunked rule would run."""
    for bits in (RIGHT, WRONG, "1" * 17 + "0"):
        for _, emitted, state in play(world, Scripted(world, bits, 20), budget=50):
            assert emitted == world.text[:len(emitted)]
            assert max(world.apart(state, emitted).values()) < CLOSE


@pytest.mark.parametrize("N", [1, 3, 6])
@pytest.mark.parametrize("budget", range(10))
def test_the_budget_is_exact(world, N, budget):
    for drafter in (Scripted(world, RIGHT, N), DeepDrafter(world.model, world.mtp, N)):
        assert text_of(world, drafter, budget=budget) == world.text[:budget]


@pytest.mark.parametrize("index", range(10))
@pytest.mark.parametrize("bits, N", [(RIGHT, 6), (RIGHT, 4), (MIX, 5), (WRONG, 3)])
def test_a_stop_token_inside_an_accepted_run(world, bits, N, index):
    """Nothing after it is emitted, and the states end there too."""
    index = world.text.index(world.text[index])
    drafter = Scripted(world, bits, N)
    *_, (done, emitted, state) = play(world, drafter, stop={world.text[index]})
    assert emitted == world.text[:index + 1]
    assert max(world.apart(state, emitted).values()) < CLOSE and head_apart(world, drafter, emitted) < CLOSE


def test_a_drafted_stop_token_must_be_verified(world):
    stop = next(world.wrong(token) for token in world.text[1:20] if world.wrong(token) not in world.text[:20])
    rounds = [done for done, *_ in play(world, Scripted(world, WRONG, 5), budget=20, stop={stop})]
    assert any(stop in done.drafted for done in rounds)
    assert [token for done in rounds for token in done.kept] == world.text[:20]


def test_it_equals_snapshot_and_second_forward(world):
    """Chapter 14's way back and this one, round by round: same rounds, same states."""
    for bits, N in [(MIX, 3), (MIX, 6), (WRONG, 2)]:
        ours = play(world, Scripted(world, bits, N))
        theirs = play(world, Scripted(world, bits, N), save=snapshot, back=chapters.mtp.read_again)
        for (done, _, state), (other, _, old) in zip(ours, theirs, strict=True):
            assert (done.kept, done.accepted, done.rolled_back) == (other.kept, other.accepted, other.rolled_back)
            assert max(apart(remembered(state), remembered(old)).values()) < CLOSE


def test_a_reject_costs_no_second_forward(world):
    calls = []
    handle = world.model.norm.register_forward_hook(lambda *_: calls.append(1))
    rounds = [done for done, *_ in play(world, Scripted(world, MIX, 4))]
    handle.remove()
    assert any(done.rolled_back for done in rounds) and len(calls) == len(rounds)


def off_by_one(model, state, start, ids):
    select(state, start, ids.shape[1] - 1)
    state.pos += 1


def last_slot(model, state, start, ids):
    """Index -1, which in Python is the state after all drafts."""
    for layer in state.layers:
        if isinstance(layer, AttentionState):
            layer.cut(start + ids.shape[1])
        else:
            layer.S_after = layer.conv_after = None
    state.pos = start + ids.shape[1]


def forgetting(part):
    def back(model, state, start, ids):
        left = [getattr(layer, part) for layer in state.layers if isinstance(layer, DeltaState)]
        select_kept(model, state, start, ids)
        for layer, value in zip(state.layers, left):
            setattr(layer, part, value)
    return back


@pytest.mark.parametrize("back, part", [(off_by_one, "S"), (off_by_one, "window"), (last_slot, "S"),
                                        (last_slot, "window"), (forgetting("S"), "S"), (forgetting("conv"), "window")])
def test_control_a_wrong_select(world, back, part):
    """Each fault leaves its part of the state wrong after the first reject."""
    rounds = play(world, Scripted(world, MIX, 4), back=back)
    wrong = next(world.apart(state, emitted) for done, emitted, state in rounds if done.rolled_back)
    assert wrong[part] > 1e-3


def test_control_a_wrong_select_spoils_the_text(world):
    assert text_of(world, Scripted(world, WRONG, 3), back=last_slot) != world.text[:40]


class Unknown:
    """A layer's state of some new type."""


def broken_trails(state):
    """Every way in which a trail of three tokens may not fit, as (name, change to a copy, start, n)."""
    def shorter(name):
        return lambda state: getattr(state.layers[1], name).pop()

    def without(name):
        return lambda state: setattr(state.layers[2], name, None)
    start = state.pos - 3
    yield from ((f"n = {n!r}", lambda state: None, start, n) for n in (-1, 4, 1.0, None, "1"))
    yield from ((f"{name} short", shorter(name), start, 2) for name in ("S_after", "conv_after"))
    yield from ((f"{name} missing", without(name), start, 2) for name in ("S_after", "conv_after"))
    yield "another start", lambda state: None, start - 1, 2
    yield "a later start", lambda state: None, start + 1, 1
    yield "attention cut", lambda state: state.layers[3].cut(start), start, 2
    yield "pos moved", lambda state: setattr(state, "pos", state.pos + 1), start, 2
    yield "unknown", lambda state: state.layers.__setitem__(1, Unknown()), start, 2


def test_a_trail_that_does_not_fit_changes_nothing(world):
    state = State(world.model)
    world.model(world.prompt, state)
    keep_each(state)
    world.model(world.ids[:, 7:10], state)
    for name, change, start, n in broken_trails(state):
        broken = copy.deepcopy(state)
        change(broken)
        known = [layer for layer in broken.layers if not isinstance(layer, Unknown)]
        before = remembered(broken)
        with pytest.raises((ValueError, TypeError)):
            select(broken, start, n)
        assert set(apart(remembered(broken), before).values()) == {0.0}, name
        assert [getattr(layer, "S_after", 0) is None for layer in known].count(True) == (name == "S_after missing"), name
    select(state, start=7, n=2)
    assert max(apart(remembered(state), world.plain[2]).values()) < CLOSE


def test_without_a_trail_there_is_nothing_to_select(world):
    state = State(world.model)
    world.model(world.prompt, state)
    with pytest.raises(ValueError, match="no trail of 7 tokens"):
        select(state, 0, 3)
    state.layers[0] = Unknown()
    with pytest.raises(TypeError, match="Unknown has no rollback"):
        keep_each(state)


def test_memory_is_freed_after_each_round(world):
    """N + 1 tables while verifying; afterwards a state holds what it needs and not one view of the rest."""
    for bits in (RIGHT, WRONG, MIX):
        for _, _, state in play(world, Scripted(world, bits, 5)):
            parts = [part for layer in state.layers[:3] for part in (layer.S, layer.conv)]
            assert sum(part.untyped_storage().nbytes() for part in parts) == sum(part.nbytes for part in parts)
            assert state.nbytes == sum(part.nbytes for part in parts) + state.layers[3].nbytes


def test_a_selected_state_can_be_rolled_back(world):
    """Both ways may alternate on one state."""
    state = State(world.model)
    world.model(world.prompt, state)
    start = keep_each(state)
    world.model(world.ids[:, 7:12], state)
    select(state, start, 2)
    saved = snapshot(state)
    world.model(world.ids[:, 9:12], state)
    rollback(state, saved)
    assert max(apart(remembered(state), world.plain[2]).values()) < CLOSE


# The drafters

def their_head(world):
    """transformers' draft head with the world's weights."""
    text = dict(PITFALL, num_mtp_layers=1, mtp_layer_types=["full_attention"])
    main = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**text)).double().eval()
    weights = load_weights(world.path, dtype=torch.float64)
    main.load_state_dict({"model." + name: value for name, value in weights.items()}
                         | {"lm_head.weight": weights["embed_tokens.weight"]})
    head = MtpModel(main, 1).double().eval()
    names = {"pre_fc_norm_embedding": "layers.0.enorm", "pre_fc_norm_hidden": "layers.0.hnorm",
             "fc": "layers.0.eh_proj", "layers.0": "layers.0.mtp_block", "norm": "layers.0.post_norm"}
    state = {new + name.removeprefix(old): value for name, value in world.mtp.state_dict().items()
             for old, new in names.items() if name.startswith(old + ".")}
    assert not head.load_state_dict(state, strict=False).unexpected_keys
    return head


def chain(world, N, step):
    """Drafts by a head without any cache: each round of the chain reads the whole text and its own outputs again."""
    T, drafted = world.prompt.shape[1], []
    ids, hidden = world.ids[:, 1:T + 1], world.hidden[:, :T]
    for _ in range(N):
        out = step(world.model.embed_tokens(ids), hidden)
        drafted.append(int(world.model.lm_head(out[0, -1]).argmax()))
        ids = torch.cat([ids, ids.new_tensor([drafted[-1:]])], dim=1)
        hidden = torch.cat([hidden, out[:, -1:]], dim=1)
    return drafted, out[:, -1]


def first_drafts(world, drafter, monkeypatch):
    """What the drafter proposes after the prompt, and the head's output behind its last guess."""
    next(play(world, drafter, budget=1))
    outs, guess = [], type(drafter).guess
    with monkeypatch.context() as patch:
        patch.setattr(type(drafter), "guess", lambda self: outs.append(self.last) or guess(self))
        drafted = drafter.propose()
    return drafted, outs[-1]


@pytest.mark.parametrize("N", DEPTHS)
def test_the_chain_of_drafts_is_that_of_transformers(world, monkeypatch, N):
    """At depth 2 and more the head takes its own output after its norm, and its own draft; caches change nothing."""
    head = their_head(world)

    def step(emb, hidden):
        with torch.no_grad():
            return head.forward_layer(0, hidden, torch.arange(emb.shape[1])[None], None, inputs_embeds=emb)
    drafted, out = first_drafts(world, DeepDrafter(world.model, world.mtp, N), monkeypatch)
    theirs, last = chain(world, N, step)
    assert drafted == theirs and distance([out], [last]) < 1e-6     # transformers' RoPE tables are fp32


def test_control_the_output_before_the_norm(world, monkeypatch):
    def before(emb, hidden):
        kept = []
        handle = world.mtp.norm.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
        world.mtp(emb, hidden, 0)
        handle.remove()
        return kept[0]

    def step(emb, hidden):
        T, out = world.prompt.shape[1], world.mtp(emb, hidden, 0)
        return out if emb.shape[1] > T else before(emb, hidden)     # only the first output handed on is wrong
    _, out = first_drafts(world, DeepDrafter(world.model, world.mtp, 2), monkeypatch)
    assert distance([out], [chain(world, 2, lambda emb, hidden: world.mtp(emb, hidden, 0))[1]]) < CLOSE
    assert distance([out], [chain(world, 2, step)[1]]) > 1e-3


def test_drafting_leaves_the_head_as_it_was(world):
    drafter = DeepDrafter(world.model, world.mtp, 5)
    next(play(world, drafter, budget=1))
    before = [drafter.state.k.clone(), drafter.state.v.clone(), drafter.last.clone()]
    assert drafter.propose() == drafter.propose()
    assert distance([drafter.state.k, drafter.state.v, drafter.last], before) == 0


def test_p_min_stops_before_the_first_unsure_token(world):
    """With p_min a drafter proposes the run of sure tokens that it would have proposed without."""
    free = DeepDrafter(world.model, world.mtp, 6, p_min=1e-9)
    next(play(world, free, budget=1))
    sure, guess = [], DeepDrafter.guess
    free.guess = lambda: sure.append(guess(free)) or sure[-1]
    drafted = free.propose()
    for limit in (0.0, 0.05, 0.08, 0.1, 0.2, 1.1):
        drafter = DeepDrafter(world.model, world.mtp, 6, p_min=limit)
        next(play(world, drafter, budget=1))
        run = next((i for i, (_, p) in enumerate(sure) if p < limit), 6)
        assert drafter.propose() == drafted[:run]
    head = world.mtp(world.model.embed_tokens(world.ids[:, 1:8]), world.hidden[:, :7], 0)[0, -1]
    assert float(sure[0][1]) == pytest.approx(float(world.model.lm_head(head).softmax(-1).max()))


def test_a_trimmed_head_drafts_the_best_of_its_words(world):
    drafter = DeepDrafter(world.model, world.mtp, 1, words=WORDS)
    next(play(world, drafter, budget=1))
    logits = world.model.lm_head(drafter.last)[0]
    assert drafter.propose() == [int(WORDS[logits[WORDS].argmax()])]
    rounds = [done for done, *_ in play(world, DeepDrafter(world.model, world.mtp, 3, words=WORDS))]
    assert {token for done in rounds for token in done.drafted} <= set(WORDS.tolist())
    everything = DeepDrafter(world.model, world.mtp, 3, words=torch.arange(29))
    assert [done.drafted for done, *_ in play(world, everything)] == \
        [done.drafted for done, *_ in play(world, DeepDrafter(world.model, world.mtp, 3))]


class ScriptedAdaptive(AdaptiveDrafter):
    """Adapts N as the real one does; what it drafts is scripted."""

    def __init__(self, world, bits):
        super().__init__(world.model, world.mtp, N=1, most=4)
        self.script = Scripted(world, bits, 1)

    def read(self, tokens, hidden):
        self.script.tokens += tokens[0].tolist()
        super().read(tokens, hidden)

    def propose(self):
        self.script.count = self.N
        drafted = self.script.propose()
        self.tried = len(drafted)
        return drafted


def test_adaptive_depth_grows_and_shrinks(world):
    def depths(bits):
        return [len(done.drafted) for done, *_ in play(world, ScriptedAdaptive(world, bits), budget=25)][1:-1]
    assert depths(RIGHT)[:5] == [1, 2, 3, 4, 4]
    assert set(depths(WRONG)) == {1}
    mixed = ScriptedAdaptive(world, MIX)
    before, rounds = 1, list(play(world, mixed, budget=40))
    for done, *_ in rounds[1:-1]:
        assert len(done.drafted) == before
        before = min(before + 1, 4) if done.accepted == len(done.drafted) else max(before - 1, 1)
    assert len({len(done.drafted) for done, *_ in rounds}) > 2


@pytest.mark.parametrize("text, N, expected", [
    ([1, 2, 3, 9, 1, 2, 3], 2, [9, 1]), ([1, 2, 3, 9, 1, 2, 3], 6, [9, 1, 2, 3]),
    ([5, 6, 7], 3, []), ([4], 3, []), ([], 3, []), ([8, 8], 3, [8]),
    ([1, 2, 3, 7, 2, 3, 8, 3, 5, 2, 3], 1, [8]),                # two tokens agree: the latest place
    ([1, 2, 3, 7, 6, 2, 3, 8, 1, 2, 3], 1, [7]),                # three agree: better than a later two
])
def test_prompt_lookup_by_hand(text, N, expected):
    drafter = LookupDrafter(N)
    drafter.read(torch.tensor([text], dtype=torch.long), None)
    assert drafter.propose() == expected


@pytest.mark.parametrize("text, copy, expected", [
    ([1, 2, 3, 9, 1, 2, 3], 2, [9, 1]), ([1, 2, 7, 5, 1, 2], 6, [7, 5, 1, 2]),
    ([1, 2, 3, 9, 5, 3], 6, None), ([4], 6, None),              # one token alone is not believed: the head drafts
])
def test_copy_first_by_hand(world, text, copy, expected):
    first, deep = CopyFirstDrafter(world.model, world.mtp, 3, copy), DeepDrafter(world.model, world.mtp, 3)
    ids = torch.tensor([text])
    for drafter in first, deep:
        drafter.read(ids, world.model.hidden(ids))
    assert first.propose() == (expected or deep.propose())
    assert first.text == text and first.state.length == len(text)


def test_ten_runs_give_the_same_acceptance(world):
    def run():
        kinds = [kind(world.model, world.mtp, 3) for kind in KINDS.values()]
        return [[(done.drafted, done.accepted) for done in
                 depth_rounds(world.model, world.prompt, 30, drafter=kind)] for kind in kinds]
    first = run()
    assert all(run() == first for _ in range(9))
    assert all(any(done[0] for done in rounds) for name, rounds in zip(KINDS, first) if name != "never sure")


# In a batch

LENGTHS = [7, 3, 12, 1]


class ScriptedBatch(BatchDrafter):
    """Reads through the real head; each row drafts by a bit pattern of its own. `scripts`: (prompt, oracle, bits)."""
    scripts = ()

    def __init__(self, model, mtp, pads, N):
        super().__init__(model, mtp, pads, N)
        self.rows = [(oracle, cycle(bits), [1]) for _, oracle, bits in self.scripts]

    def propose(self):
        rows = []
        for oracle, bits, done in self.rows:
            coming = (oracle + [0] * self.N)[done[0]:done[0] + self.N]
            rows.append([token if next(bits) == "1" else (token + 1) % 29 for token in coming])
        return torch.tensor(rows)

    def take(self, rows, columns, pads, last):
        super().take(rows, columns, pads, last)
        self.rows = [self.rows[row] for row in rows]

    def emitted(self, counts):
        for (_, _, done), count in zip(self.rows, counts):
            done[0] = count


def batch_of(world, patterns):
    """Prompts of several lengths with their oracles and bit patterns."""
    prompts = [world.ids[0, 2 * i:2 * i + n].tolist() for i, n in enumerate(LENGTHS[:len(patterns)])]
    return [(prompt, generate(world.model, torch.tensor([prompt]), 40), bits) for prompt, bits in zip(prompts, patterns)]


def row_apart(world, state, drafter, b, ids):
    """How far row b of a batch is from its text alone, without its last token: the model's state and the head's.

    Infinite where its tokens are not the last of `state.pos` columns."""
    solo, head, T = State(world.model), AttentionState(), len(ids) - 1
    row = torch.tensor([ids])
    hidden = world.model.hidden(row[:, :-1], solo)
    out = world.mtp(world.model.embed_tokens(row[:, 1:]), hidden, 0, head)
    pad = int(state.pads[b])
    if state.pos - pad != T or drafter.state.length != state.pos:
        return float("inf")
    ours, theirs = [drafter.last[b:b + 1]], [out[:, -1]]
    for mine, alone in zip([*state.layers, drafter.state], [*solo.layers, head]):
        parts = ("k", "v") if hasattr(alone, "k") else ("S", "conv")
        ours += [getattr(mine, part)[b:b + 1, :, pad if part in "kv" else 0:] for part in parts]
        theirs += [getattr(alone, part) for part in parts]
    return distance(ours, theirs)


def play_batch(world, monkeypatch, patterns, N, most=30, stop=()):
    """depth_batch with scripted drafts: its texts, and after each round the worst distance of any row from its solo run."""
    scripts, worst = batch_of(world, patterns), []
    monkeypatch.setattr(ScriptedBatch, "scripts", scripts)
    monkeypatch.setattr(chapters.depth, "BatchDrafter", ScriptedBatch)
    texts, real = {}, chapters.depth.batch_round

    def watched(model, drafter, state, live, most, stop):
        for text, (prompt, *_) in zip(live, scripts) if not texts else ():
            texts[id(text)] = prompt
        drafter.emitted([len(text) for text in live])
        live = real(model, drafter, state, live, most, stop)
        worst.append(max([row_apart(world, state, drafter, b, texts[id(text)] + text) for b, text in enumerate(live)],
                         default=0.0))
        if live and int(state.pads.min()) != 0:             # K/V longer than the longest row needs
            worst.append(float("inf"))
        return live

    monkeypatch.setattr(chapters.depth, "batch_round", watched)
    return depth_batch(world.model, world.mtp, [prompt for prompt, *_ in scripts], most, stop, N), worst


@pytest.mark.parametrize("N", DEPTHS)
@pytest.mark.parametrize("patterns", [(RIGHT, WRONG), (RIGHT, WRONG, MIX), (MIX, "10", "110", "0111"), (MIX,)])
def test_each_row_of_a_batch_equals_its_solo_run(world, monkeypatch, patterns, N):
    """Rows of different accepted counts: text, S, window, keys and values, and the head's cache, after every round."""
    texts, worst = play_batch(world, monkeypatch, patterns, N)
    assert texts == [oracle[:30] for _, oracle, _ in batch_of(world, patterns)]
    assert len(worst) > 5 and max(worst) < CLOSE


def first_rows_count(select):
    return lambda state, start, rows, kept: select(state, start, rows, [kept[0]] * len(kept))


def one_pad_too_few(select):
    def wrong(state, start, rows, kept):
        columns = select(state, start, rows, kept)
        state.pads = (state.pads - 1).clamp(min=0)
        return columns
    return wrong


def windows_forgotten(select):
    def wrong(state, start, rows, kept):
        left = [layer.conv[rows] for layer in state.layers[:3]]
        columns = select(state, start, rows, kept)
        for layer, conv in zip(state.layers, left):
            layer.conv = conv
        return columns
    return wrong


@pytest.mark.parametrize("fault", [first_rows_count, one_pad_too_few, windows_forgotten])
def test_control_each_row_of_a_batch_equals_its_solo_run(world, monkeypatch, fault):
    """A row rolled back by another row's count; a column of padding taken for text; windows not selected."""
    monkeypatch.setattr(chapters.depth, "select_rows", fault(select_rows))
    texts, worst = play_batch(world, monkeypatch, (RIGHT, WRONG, MIX), 3)
    assert max(worst) > 1e-3


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 28), min_size=1, max_size=30), min_size=1, max_size=4), st.integers(0, 12),
       st.sets(st.integers(0, 28), max_size=3), st.integers(1, 6))
def test_batches_of_any_prompts(world, prompts, most, stop, N):
    """Budgets, stop tokens inside accepted runs, rows that end with their first token: each row equals its solo run."""
    assert depth_batch(world.model, world.mtp, prompts, most, stop, N) == \
        [generate(world.model, torch.tensor([prompt]), most, stop) for prompt in prompts]


@pytest.mark.parametrize("index", range(6))
def test_a_row_that_stops_leaves_the_others_alone(world, monkeypatch, index):
    oracle = batch_of(world, (RIGHT, WRONG, MIX))[0][1]
    stop = {oracle[index]}
    texts, worst = play_batch(world, monkeypatch, (RIGHT, WRONG, MIX), 5, stop=stop)
    for text, (_, oracle, _) in zip(texts, batch_of(world, (RIGHT, WRONG, MIX))):
        end = next((i + 1 for i, token in enumerate(oracle[:30]) if token in stop), 30)
        assert text == oracle[:end]
    assert max(worst) < CLOSE


def test_right_edge_by_hand():
    """Rows of 5 - 2 and 7 - 0 real tokens: seven columns are enough, the short row moves to the right."""
    columns, pads = right_edge(torch.tensor([2, 0]), torch.tensor([5, 7]))
    assert columns.tolist() == [[0, 0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6]] and pads.tolist() == [4, 0]
    columns, pads = right_edge(torch.tensor([3, 1]), torch.tensor([6, 6]))
    assert columns.tolist() == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]] and pads.tolist() == [2, 0]


@pytest.mark.parametrize("rows, kept", [([0], [9]), ([0], [-1]), ([0, 1], [1]), ([0, 1], [1, 4])])
def test_a_batch_select_that_does_not_fit_changes_nothing(world, rows, kept):
    state = State(world.model, 2, torch.tensor([0, 2]))
    world.model(world.ids[:, :20].view(2, 10), state)
    start = keep_each(state)
    world.model(world.ids[:, 20:26].view(2, 3), state)
    before = remembered(state)
    with pytest.raises(ValueError):
        select_rows(state, start, rows, kept)
    assert set(apart(remembered(state), before).values()) == {0.0} and state.pads.tolist() == [0, 2]
