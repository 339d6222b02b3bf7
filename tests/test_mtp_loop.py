"""The loop of chapter 14: budgets, stop tokens, counting, near-ties, and nothing kept between two calls."""
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import chapters.mtp
from chapters.batch import generate_batch
from chapters.model import Model
from chapters.mtp import MTP, generate_mtp, keep, mtp_rounds
from chapters.sample import generate, stream
from checkpoints import PITFALL, write_checkpoint
from qwen_helpers.cache import State, rollback
from scripted import CLOSE, MIX, RIGHT, WRONG, Scripted, World, cut_only, play

NEAR = 1e-3             # logits this close may change places in fp32
SHAPES = {
    "long prompt": (PITFALL, list(range(29)) * 3),
    "attention first": (PITFALL | dict(layer_types=["full_attention", "linear_attention"] * 2), [5, 6, 7]),
    "untied, equal heads": (PITFALL | dict(tie_word_embeddings=False, linear_num_key_heads=4), [8, 1]),
    "one token of prompt": (PITFALL | dict(num_key_value_heads=1, linear_conv_kernel_dim=2), [11]),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("loop"))


def text_of(world, bits, count, **options):
    return [token for done, *_ in play(world, bits, count, **options) for token in done.kept]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.text("01", min_size=1, max_size=12), st.integers(1, 4), st.integers(0, 40))
def test_any_drafts_give_the_oracles_text(world, bits, count, budget):
    assert text_of(world, bits, count, budget=budget) == world.text[:budget]


@pytest.mark.parametrize("name", SHAPES)
def test_other_models_and_prompts(tmp_path, name):
    world = World(tmp_path / "model", *SHAPES[name], length=34)
    for _, emitted, state, drafter in play(world, MIX, 4, budget=30):
        assert emitted == world.text[:len(emitted)]
        assert max(world.apart(state, emitted).values()) < CLOSE
        assert drafter.state.length == state.pos


@pytest.mark.parametrize("budget", range(10))
def test_the_budget_is_exact(world, budget):
    """max_new_tokens overshoot: budgets 1 to 9 with RIGHT and 4 drafts give the exact length."""
    assert text_of(world, RIGHT, 4, budget=budget) == world.text[:budget]
    assert len(generate_mtp(world.model, world.mtp, world.prompt, budget)[0]) == budget


@pytest.mark.parametrize("cap, kept", [(1, [10]), (2, [10, 11]), (3, [10, 11, 7]), (4, [10, 11, 7]), (5, [10, 11, 7])])
def test_cap_and_stop_in_the_right_order(cap, kept):
    """[10, 11, STOP, 20, 21], cap 5, ends at STOP."""
    verified = [10, 11, 7, 20, 21]
    assert keep(verified[:cap - 1], verified[:cap], {7}) == (cap - 1, kept)


@pytest.mark.parametrize("index", range(10))
@pytest.mark.parametrize("bits, count", [(RIGHT, 4), (MIX, 3), (WRONG, 2)])
def test_a_stop_token_inside_an_accepted_run(world, bits, count, index):
    """Nothing after it is emitted, and the state ends there too."""
    index = world.text.index(world.text[index])
    *_, (done, emitted, state, drafter) = play(world, bits, count, stop={world.text[index]})
    assert emitted == world.text[:index + 1] and done.kept[-1] == world.text[index]
    assert max(world.apart(state, emitted).values()) < CLOSE
    assert drafter.state.length == state.pos


def test_a_drafted_stop_token_must_be_verified(world):
    """A drafted stop token ends the text unverified: the draft proposes it, the target does not."""
    stop = next(world.wrong(token) for token in world.text[1:20] if world.wrong(token) not in world.text[:20])
    rounds = [done for done, *_ in play(world, WRONG, 2, budget=20, stop={stop})]
    assert any(stop in done.drafted for done in rounds)
    assert [token for done in rounds for token in done.kept] == world.text[:20]


@pytest.mark.parametrize("budget", [0, 1, 2, 6, 7, 20])
@pytest.mark.parametrize("stops", [(), (0,), (6,), (6, 3), (7, 9)])
def test_all_ways_to_generate_agree_on_budget_and_stop(world, budget, stops):
    """Plain, streaming and speculative runs differ in whether the stop token is included."""
    stop = {world.text[i] for i in stops}
    ends = [i + 1 for i, token in enumerate(world.text) if token in stop] + [budget]
    expected = world.text[:min(*ends, budget)]
    assert generate(world.model, world.prompt, budget, stop) == expected
    assert list(stream(world.model, world.prompt, budget, stop)) == expected
    assert generate_mtp(world.model, world.mtp, world.prompt, budget, stop)[0] == expected
    assert text_of(world, MIX, 3, budget=budget, stop=stop) == expected
    assert generate_batch(world.model, world.prompt.tolist(), budget, stop) == [expected]


def test_no_draft_is_accepted_unverified(world):
    """The first drafted token accepted unverified: WRONG, one draft: 0 accepted."""
    rounds = [done for done, *_ in play(world, WRONG, 1)][1:]
    assert [done.accepted for done in rounds] == [0] * len(rounds)
    assert [len(done.kept) for done in rounds] == [1] * 39


def first_flip(plain, margins, other):
    """The plain run's lead of top-1 over top-2 where another run first leaves it; None if it never does."""
    return next((margin for mine, margin, theirs in zip(plain, margins, other) if mine != theirs), None)


def fp32_runs(path, prompt, undo=rollback):
    """One first_flip for each script, between plain and speculative decoding in fp32."""
    model = Model.from_pretrained(path)
    mtp = MTP.from_pretrained(model.cfg, path)
    plain = generate(model, prompt, 64)
    state, steps = State(model), [prompt, *torch.tensor(plain)[:, None, None]]
    lead = [model(step, state)[0, -1].topk(2).values for step in steps]
    margins = [float(first - second) for first, second in lead]
    world = SimpleNamespace(model=model, mtp=mtp, prompt=prompt, text=plain, wrong=lambda token: (token + 1) % 29)
    for bits, count in [(RIGHT, 4), (WRONG, 3), (MIX, 2), (MIX, 4)]:
        yield first_flip(plain, margins, text_of(world, bits, count, budget=60, undo=undo))


def test_fp32_differs_only_at_near_ties(tmp_path):
    """One row against several rows differ in the last bits, so near-ties may flip the text; each is reported."""
    flips, runs = [], 0
    for seed in range(6):
        path = write_checkpoint(tmp_path / str(seed), dtype=torch.float32, seed=seed)
        prompt = torch.randint(29, (1, 3 + 9 * seed), generator=torch.Generator().manual_seed(seed))
        found = list(fp32_runs(path, prompt))
        runs += len(found)
        flips += [margin for margin in found if margin is not None]
    print(f"fp32: {len(flips)} of {runs} runs left the plain text, at leads of {flips}")
    assert all(margin < NEAR for margin in flips)


def test_control_a_drift_is_not_excused(tmp_path):
    path = write_checkpoint(tmp_path / "model", dtype=torch.float32, seed=1)
    flips = fp32_runs(path, torch.tensor([[3, 1, 4, 1, 5, 9, 2]]), undo=cut_only)
    assert any(margin is not None and margin > NEAR for margin in flips)


def ways(world):
    """Each way to generate, as prompt -> tokens."""
    model, mtp = world.model, world.mtp
    yield lambda ids: generate(model, ids, 20)
    yield lambda ids: generate(model, ids, 20, temperature=1.0, top_k=9, seed=3)
    yield lambda ids: generate_mtp(model, mtp, ids, 20)
    yield lambda ids: generate_batch(model, [ids[0].tolist(), [1, 2]], 20)
    yield lambda ids: [(done.kept, done.drafted, done.pos) for done in mtp_rounds(model, mtp, ids, 20)]


def test_no_state_between_calls(world):
    """generate(A), generate(B), generate(A): first and third are equal, and an abandoned run leaves nothing."""
    A, B = world.prompt, torch.tensor([[20, 21, 22, 23, 24, 25, 26, 27, 28]])
    weights = {name: value.clone() for name, value in world.model.state_dict().items()}
    for way in ways(world):
        first, other = way(A), way(B)
        next(mtp_rounds(world.model, world.mtp, B, 20))
        assert way(A) == first != other
    assert all(torch.equal(value, weights[name]) for name, value in world.model.state_dict().items())


@pytest.mark.parametrize("bits, rate", [(RIGHT, 1), (WRONG, 0), ("110", 2 / 3), ("1000", 1 / 4)])
def test_acceptance_is_counted_right(world, monkeypatch, bits, rate):
    """Acceptance miscounted: RIGHT gives 1.0, WRONG 0.0, MIX its exact share."""
    monkeypatch.setattr(chapters.mtp, "Drafter", lambda model, mtp: Scripted(world, bits, 1))
    ids, rounds, hits = generate_mtp(world.model, world.mtp, world.prompt, 40)
    assert ids == world.text[:40]
    assert hits == (bits * 40)[:rounds].count("1") == pytest.approx(rate * rounds, abs=1)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("bits", [RIGHT, WRONG, MIX, "110"])
def test_emitted_is_rounds_plus_accepted(world, bits, count):
    rounds = [done for done, *_ in play(world, bits, count)]
    assert sum(len(done.kept) for done in rounds) == len(rounds) + sum(done.accepted for done in rounds) == 40


def test_the_real_head_drafts(world):
    """A flag accepted but nothing drafted: drafted > 0 is asserted."""
    rounds = list(mtp_rounds(world.model, world.mtp, world.prompt, 40))
    assert rounds[0].drafted == [] and all(len(done.drafted) == 1 for done in rounds[1:-1])
    assert all(len(done.verified) == len(done.drafted) + 1 for done in rounds)
    ids, drafting, hits = generate_mtp(world.model, world.mtp, world.prompt, 40)
    assert drafting == sum(bool(done.drafted) for done in rounds) > 20
    assert 0 < hits == sum(done.accepted for done in rounds) < drafting


def test_a_round_says_what_it_did(world):
    """Its confirmed token, the probability and lead of each verified one, and a repr with ticks and crosses."""
    before = []
    for done, emitted, _, _ in play(world, MIX, 3, budget=20):
        rows = len(before) + world.prompt.shape[1] - 1      # the row that predicts the first verified token
        logits = world.model.lm_head(world.hidden)[0, rows:rows + 1][0]
        first, second = logits.topk(2).values.tolist()
        assert done.confirmed == (before[-1] if before else -1)
        assert done.sure[0] == pytest.approx(float(logits.softmax(-1).max()))
        assert done.margin[0] == pytest.approx(first - second, abs=1e-9)
        assert len(done.sure) == len(done.margin) == len(done.verified)
        assert set(done.seconds) == {"draft", "verify", "rollback"} and min(done.seconds.values()) >= 0
        assert repr(done).count("✓") == done.accepted
        assert ("rolled back" in repr(done)) == done.rolled_back
        before = list(emitted)
