"""Chapter 16: drafts are drawn, and the text keeps exactly the distribution of plain drawing."""
from collections import Counter
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import one_hot

from chapters.depth import AdaptiveDrafter, keep_each, select_kept
from chapters.mtp import first_round, forward_hidden, keep, likeliest, mtp_rounds, read_again
from chapters.rejection import (SamplingDrafter, accept, distribution, emitted, generate_sampled, overlap, p_value,
                                residual, rounds_of, sampled_rounds, throws, verdict)
from checkpoints import PITFALL
from qwen_helpers.cache import AttentionState, State, rollback, snapshot
from scripted import CLOSE, MIX, RIGHT, WRONG, Scripted, World, apart, distance, remembered

FEW = PITFALL | dict(vocab_size=4, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
HONEST = 1e-3           # with a fixed seed honest counts have a chance above this, wrong ones far below
quick = settings(max_examples=200, deadline=None, derandomize=True)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("rejection"))


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """A model of four tokens."""
    return World(tmp_path_factory.mktemp("few"), FEW, prompt=[1, 2], length=4)


def dice(seed):
    return torch.Generator().manual_seed(seed)


def normal(weights):
    weights = torch.tensor(weights, dtype=torch.float64)
    return weights / weights.sum()


# The rule, exactly

weight = st.sampled_from([0, 0, 1e-12, 1e-3, 0.5, 1, 1, 3]) | st.floats(0, 1)
two_distributions = st.integers(1, 6).flatmap(lambda n: st.tuples(*[
    st.lists(weight, min_size=n, max_size=n).filter(lambda w: sum(w) > 1e-9).map(normal)] * 2))


@quick
@given(two_distributions)
def test_the_result_is_the_target(sides):
    """What is emitted, computed and not drawn, for supports that overlap, are disjoint, or are one token."""
    p_target, p_draft = sides
    through, again = emitted(p_target, p_draft)
    torch.testing.assert_close(through + again, p_target, rtol=0, atol=1e-14)
    torch.testing.assert_close(through.sum(), overlap(p_target, p_draft), rtol=0, atol=1e-14)
    torch.testing.assert_close(overlap(p_target, p_draft), 1 - (p_target - p_draft).abs().sum() / 2, rtol=0, atol=1e-14)


@quick
@given(two_distributions)
def test_a_refused_token_is_never_drawn_again(sides):
    """So the token after a reject differs from the draft, and chapter 14's `keep` counts right."""
    p_target, p_draft = sides
    rest = residual(p_target, p_draft)
    assert not (rest[accept(p_target, p_draft) < 1] > 0).any()
    assert not (rest[p_target == 0] > 0).any() and not accept(p_target, p_draft)[(p_target == 0) & (p_draft > 0)].any()
    assert float(rest.sum()) == pytest.approx(1) or float((p_target - p_draft).max()) < 1e-15


@quick
@given(two_distributions)
def test_equal_sides_refuse_nothing_and_one_token_is_chapter_14(sides):
    p_target, p_draft = sides
    assert bool((accept(p_target, p_target) == 1).all()) and not residual(p_target, p_target).any()
    sure, n = one_hot(p_target.argmax(), len(p_target)).double(), int(p_target.argmax())
    assert accept(sure, p_draft).tolist() == [1.0 if p_draft[i] <= sure[i] else float(i == n) for i in range(len(sure))]
    if p_draft[n] < 1:
        assert torch.equal(residual(sure, p_draft), sure)


def test_three_words_by_hand():
    p_target, p_draft = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.7, 0.1])
    torch.testing.assert_close(accept(p_target, p_draft), torch.tensor([1, 3 / 7, 1]))
    torch.testing.assert_close(residual(p_target, p_draft), torch.tensor([0.75, 0, 0.25]))
    assert float(overlap(p_target, p_draft)) == pytest.approx(0.6)


# The rule, in counts

PAIRS = {"apart": ([0.5, 0.3, 0.2], [0.2, 0.7, 0.1]), "a zero in the draft": ([0.6, 0.3, 0.1], [0.0, 0.5, 0.5]),
         "a zero in the target": ([0.7, 0.0, 0.3], [0.3, 0.4, 0.3]), "near": ([0.4, 0.35, 0.25], [0.38, 0.36, 0.26]),
         "disjoint": ([1.0, 0.0, 0.0], [0.0, 0.5, 0.5])}
N_DRAWS = 200_000


def sides_of(name):
    return tuple(map(normal, PAIRS[name]))


def odds(said, p):
    return p_value(said.bincount(minlength=len(p)), p)


@pytest.mark.parametrize("name", PAIRS)
def test_frequencies_and_acceptance(name):
    """Vocabulary of 3, 200,000 draws: frequencies equal p_target, acceptance equals the sum of min."""
    p_target, p_draft = sides_of(name)
    said, taken = rounds_of(p_target, p_draft, N_DRAWS, dice(7))
    assert odds(said, p_target) > HONEST
    rate = float(overlap(p_target, p_draft))
    assert abs(float(taken.double().mean()) - rate) <= 4 * (rate * (1 - rate) / N_DRAWS) ** 0.5


@pytest.mark.parametrize("name", ["apart", "a zero in the draft", "a zero in the target", "near"])
def test_control_no_residual_fails(name):
    p_target, p_draft = sides_of(name)
    said, _ = rounds_of(p_target, p_draft, N_DRAWS, dice(7), refill=lambda t, d: t)
    assert odds(said, p_target) < HONEST


def test_control_temperature_left_out_fails():
    warm_target, warm_draft = sides_of("apart")
    cold_target, cold_draft = normal((warm_target ** 2).tolist()), normal((warm_draft ** 2).tolist())
    right, _ = rounds_of(cold_target, cold_draft, N_DRAWS, dice(7))
    wrong, _ = rounds_of(cold_target, cold_draft, N_DRAWS, dice(7), accept=lambda t, d: accept(warm_target, warm_draft))
    assert odds(right, cold_target) > HONEST > 1e-6 > odds(wrong, cold_target)


def test_control_every_draft_accepted_fails():
    p_target, p_draft = sides_of("near")
    said, _ = rounds_of(p_target, p_draft, N_DRAWS, dice(7), accept=lambda t, d: torch.ones(3))
    assert odds(said, p_target) < 1e-6


def test_chance_against_published_values():
    """Chi-squared tables: 3.841 at one degree and 5.991 at two leave 5 %."""
    assert p_value(torch.tensor([60, 40]), torch.tensor([0.5, 0.5])) == pytest.approx(0.0455, abs=1e-4)
    third = torch.full((3,), 1 / 3)
    assert p_value(torch.tensor([100, 100, 100]), third) == 1
    assert p_value(torch.tensor([117, 97, 86]), third) == pytest.approx(0.0846, abs=1e-4)     # 4.94: exp(-4.94 / 2)
    assert p_value(torch.tensor([100, 100, 1]), torch.tensor([0.5, 0.5, 0.0])) < 1e-6


@pytest.mark.parametrize("N", [1, 2, 3, 4])
def test_verdict_on_fixed_distributions(N):
    """N drafts: each text that a round may keep comes as often as the target wants it."""
    p_target = torch.stack([normal(w) for w in ([5, 3, 2], [1, 1, 8], [3, 0, 3], [2, 2, 1], [1, 6, 3])])[:N + 1]
    p_draft = torch.stack([normal(w) for w in ([2, 7, 1], [1, 2, 3], [1, 1, 1], [0, 4, 1])])[:N]
    draw, texts, n = dice(N), Counter(), 8000
    for _ in range(n):
        drafted = [int(throws(p, 1, draw)) for p in p_draft]
        wants = verdict(p_target, p_draft, drafted, draw)
        accepted, kept = keep(drafted, wants, ())
        assert kept == wants and len(wants) == accepted + 1
        texts[tuple(kept)] += 1
    expected = exact(lambda prefix: p_target[len(prefix)], lambda prefix: p_draft[len(prefix)] if len(prefix) < N else None)
    assert odds_of(texts, expected) > HONEST


def exact(target_after, draft_after, prefix=(), weight=1.0):
    """text -> probability of each text that a round may keep; `draft_after` gives None where nothing is drafted."""
    p_target, p_draft = target_after(prefix), draft_after(prefix)
    if p_draft is None:
        return {(*prefix, y): weight * float(p) for y, p in enumerate(p_target) if p > 0}
    through, again = emitted(p_target, p_draft)
    texts = {(*prefix, y): weight * float(p) for y, p in enumerate(again) if p > 0}
    for x in through.nonzero()[:, 0].tolist():
        texts |= exact(target_after, draft_after, (*prefix, x), weight * float(through[x]))
    return texts


def odds_of(texts, expected):
    """The chance of counted texts; 0 if one of them cannot be."""
    if set(texts) - set(expected):
        return 0.0
    assert sum(expected.values()) == pytest.approx(1, abs=1e-5)
    return p_value(torch.tensor([texts[text] for text in expected]), torch.tensor(list(expected.values())))


# Its edges

def test_rounding_leaves_nothing_to_refuse(monkeypatch):
    """p_target below p_draft by rounding, and nothing above it: the draft stays, whatever the dice say."""
    p_draft = torch.tensor([0.5, 0.5])
    p_target = torch.tensor([[0.5, 0.5 - 6e-8], [1.0, 0.0]])
    assert accept(p_target[0], p_draft)[1] < 1 and not residual(p_target[0], p_draft).any()
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor(1.0 - 2 ** -24))
    assert verdict(p_target, p_draft[None], [1], dice(0)) == [1, 0]


def test_dice_of_zero_do_not_accept_what_the_target_excludes(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor(0.0))
    rows = torch.eye(3)
    assert verdict(rows[[0, 2]], rows[[1]], [1], dice(0)) == [0]


def test_a_tiny_residual_is_drawn_from():
    """Weights far below what their sum could carry still name the right token."""
    p_target, p_draft = torch.tensor([1 - 1e-30, 0.0, 1e-30]), torch.tensor([1.0, 0.0, 0.0])
    assert residual(p_target, p_draft).tolist() == [0, 0, 1]


def test_temperature_zero_is_one_hot_and_the_limit():
    logits = torch.tensor([[0.0, 2.0, 1.9], [3.0, 1.0, 2.0]])
    assert distribution(logits, 0, 2, 0.5).tolist() == [[0, 1, 0], [1, 0, 0]]
    torch.testing.assert_close(distribution(logits, 1e-3), distribution(logits, 0))


# In the loop

def run(world, N=1, budget=24, stop=(), seed=0, trail=True, kind=SamplingDrafter, knobs=None, **options):
    """The rounds of one sampled run: yields (round, tokens so far, state, drafter)."""
    knobs = dict(temperature=1.0) if knobs is None else knobs
    state, drafter, emitted = State(world.model), kind(world.model, world.mtp, dice(seed), knobs, N=N, **options), []
    save, back = (keep_each, select_kept) if trail else (snapshot, read_again)
    for done in mtp_rounds(world.model, world.mtp, world.prompt, budget, stop, state=state, drafter=drafter,
                           choose=drafter.choose, save=save, back=back):
        emitted += done.kept
        yield done, emitted, state, drafter


def text_of(world, *args, **options):
    return [token for done, *_ in run(world, *args, **options) for token in done.kept]


class Sure(Scripted):
    """Drafts by script; says that it drew them from a distribution which gives them `share`, the rest to all others."""

    share = 1.0

    def choose(self, logits, drafted):
        V = self.model.cfg.vocab_size
        p_draft = [torch.full((V,), (1 - self.share) / (V - 1)).index_fill(0, torch.tensor(token), self.share)
                   for token in drafted]
        return verdict(distribution(logits, 0), p_draft, drafted, dice(len(self.tokens)))


@pytest.mark.parametrize("share", [1.0, 0.3, 0.001])
@pytest.mark.parametrize("bits", [RIGHT, WRONG, MIX])
@pytest.mark.parametrize("N", [1, 2, 3, 4])
def test_temperature_zero_is_greedy_for_any_draft(world, bits, N, share):
    drafter = Sure(world, bits, N)
    drafter.share = share
    rounds = list(mtp_rounds(world.model, world.mtp, world.prompt, 40, drafter=drafter, choose=drafter.choose))
    assert [token for done in rounds for token in done.kept] == world.text[:40]
    wanted = sum(done.accepted for done in rounds)
    assert wanted == 0 if bits == WRONG else wanted > 0


@pytest.mark.parametrize("N", [1, 2, 3, 4])
def test_temperature_zero_of_the_head_is_greedy(world, N):
    assert generate_sampled(world.model, world.mtp, world.prompt, 60, temperature=0, N=N) == world.text
    accepted = sum(done.accepted for done, *_ in run(world, N, 60, knobs=dict(temperature=0)))
    assert accepted > 0


class Adaptive(SamplingDrafter, AdaptiveDrafter):
    """Draws its drafts, and drafts more after full acceptance."""


class Loose(SamplingDrafter):
    """A draft side that is not trimmed: exact all the same."""

    def guess(self):
        self.knobs, own = dict(temperature=1.5), self.knobs
        guessed = super().guess()
        self.knobs = own
        return guessed


@pytest.mark.parametrize("kind, N", [(SamplingDrafter, 1), (SamplingDrafter, 3), (Loose, 2), (Adaptive, 2)])
@pytest.mark.parametrize("knobs", [dict(temperature=1.3, top_k=3), dict(temperature=1.0, top_p=0.6),
                                   dict(temperature=0.7, top_k=9, top_p=0.8)])
def test_no_token_outside_the_targets_support(world, kind, N, knobs):
    drafted = accepted = outside = 0
    for seed in range(4):
        rounds = [done for done, *_ in run(world, N, 24, seed=seed, kind=kind, knobs=knobs)]
        text = [token for done in rounds for token in done.kept]
        ids = torch.cat([world.prompt, torch.tensor([text])], dim=1)
        p_target = distribution(world.model(ids)[0], **knobs)[world.prompt.shape[1] - 1:-1]
        assert len(text) == 24 and bool((p_target[range(24), text] > 0).all())
        at = 0
        for done in rounds:
            outside += sum(p_target[at + i, token] == 0 for i, token in enumerate(done.drafted[:done.accepted + 1]))
            at += len(done.kept)
            drafted, accepted = drafted + len(done.drafted), accepted + done.accepted
    assert 0 < accepted < drafted and outside > 0          # drafts outside were made, and refused


@pytest.mark.parametrize("N", [1, 2, 3, 4])
@pytest.mark.parametrize("trail", [True, False])
def test_state_and_head_after_every_round_are_those_of_plain_reading(world, N, trail):
    """S, windows, keys, values and pos, and the head's keys and values, whatever was accepted."""
    seen = set()
    for seed in range(3):
        plain, read = State(world.model), world.prompt
        world.model.hidden(read, plain)
        for done, emitted, state, drafter in run(world, N, 20, seed=seed, trail=trail):
            for token in emitted[read.shape[1] - world.prompt.shape[1]:-1]:
                world.model.hidden(torch.tensor([[token]]), plain)
                read = torch.cat([read, torch.tensor([[token]])], dim=1)
            assert max(apart(remembered(state), remembered(plain)).values()) < CLOSE
            head = AttentionState()
            following = torch.cat([read[:, 1:], torch.tensor([emitted[-1:]])], dim=1)
            world.mtp(world.model.embed_tokens(following), world.model.hidden(read), 0, head)
            assert distance([drafter.state.k, drafter.state.v], [head.k, head.v]) < CLOSE
            seen.add((done.accepted, len(done.drafted)))
    assert {(n, N) for n in range(min(N, 2) + 1)} <= seen


@pytest.mark.parametrize("N", [1, 3])
def test_both_ways_back_give_the_same_text(world, N):
    assert text_of(world, N, seed=4) == text_of(world, N, seed=4, trail=False) \
        == generate_sampled(world.model, world.mtp, world.prompt, 24, seed=4, N=N)


@pytest.mark.parametrize("N", [1, 2, 4])
@pytest.mark.parametrize("budget", range(10))
def test_the_budget_is_exact(world, budget, N):
    assert len(generate_sampled(world.model, world.mtp, world.prompt, budget, seed=budget, N=N)) == budget


@pytest.mark.parametrize("N", [1, 2, 4])
def test_stop_tokens_end_the_text_only_when_they_are_kept(world, N):
    """Inside an accepted run, at its end, or drafted and refused: the text is the long one up to its first stop."""
    inside = refused = 0
    for seed in range(4):
        long = text_of(world, N, 40, seed=seed)
        for stop in range(0, 29, 6):
            rounds = list(run(world, N, 40, {stop}, seed))
            done, text, state, drafter = rounds[-1]
            ends = [i + 1 for i, token in enumerate(long) if token == stop] + [40]
            assert text == long[:ends[0]]
            assert state.pos == drafter.state.length == world.prompt.shape[1] + len(text) - 1
            inside += ends[0] < 40 and len(done.kept) <= done.accepted
            refused += any(stop in done.drafted and stop not in done.kept for done, *_ in rounds)
    assert inside > 0 and refused > 0


def test_a_seed_gives_one_text(world):
    """Ten runs alike, round for round; other seeds, other texts; nothing is kept between calls."""
    runs = [[(done.drafted, done.kept, done.accepted) for done in sampled_rounds(
        world.model, world.mtp, world.prompt, 24, seed=3, N=2, temperature=0.9, top_p=0.9)] for _ in range(10)]
    assert all(again == runs[0] for again in runs)
    texts = [tuple(generate_sampled(world.model, world.mtp, world.prompt, 24, seed=seed)) for seed in range(5)]
    assert len(set(texts)) == 5


def test_acceptance_is_the_overlap_in_the_loop(world):
    """Hits of many rounds against the sum of overlaps at the places where they were drafted."""
    promised, hits = [], 0
    for seed in range(40):
        *_, (_, text, _, _) = rounds = list(run(world, 1, 20, seed=seed))
        ids = torch.cat([world.prompt, torch.tensor([text])], dim=1)
        hidden = world.model.hidden(ids)
        guess = world.model.lm_head(world.mtp(world.model.embed_tokens(ids[:, 1:]), hidden[:, :-1], 0))[0]
        shared = overlap(distribution(world.model.lm_head(hidden)[0, 1:]), distribution(guess))
        place = world.prompt.shape[1] - 2
        for done, *_ in rounds:
            if done.drafted:
                promised.append(float(shared[place]))
                hits += done.accepted
            place += len(done.kept)
    spread = sum(p * (1 - p) for p in promised) ** 0.5
    assert len(promised) > 300 and abs(hits - sum(promised)) < 3 * spread


# The distribution of texts, in a model of four tokens

def place(world, kind, N, knobs, seed, **options):
    """A drafter after the prompt and one token, and the model's logits after that token and any drafts."""
    drafter, state = kind(world.model, world.mtp, dice(seed), knobs, N=N, **options), State(world.model)
    start, = first_round(world.model, drafter, world.prompt, state, likeliest).kept
    before = snapshot(state)

    @cache
    def logits_after(drafted):
        rollback(state, before)
        return forward_hidden(world.model, torch.tensor([[start, *drafted]]), state)[0][0]
    return drafter, logits_after


def count_rounds(world, kind, N, seed=0, n=2000, knobs=None, choose=None, **options):
    """(how often each text is kept in n rounds from one place, the exact probability of each, drafts accepted)."""
    knobs = dict(temperature=0.9) if knobs is None else knobs
    drafter, logits_after = place(world, kind, N, knobs, seed, **options)
    texts, drawn_from, hits = Counter(), {}, 0
    for _ in range(n):
        drafted = drafter.propose()
        drawn_from |= {tuple(drafted[:i]): drafter.p_draft[i] for i in range(len(drafted))}
        wants = (choose or type(drafter).choose)(drafter, logits_after(tuple(drafted)), drafted)
        accepted, kept = keep(drafted, wants, ())
        texts[tuple(kept)] += 1
        hits += accepted
    return texts, exact(lambda prefix: distribution(logits_after(prefix)[-1], **knobs), drawn_from.get), hits


class Cheat(SamplingDrafter):
    """Throws an unsure draft away after it was drawn."""

    def guess(self):
        token, _ = super().guess()
        return token, self.p_draft[-1][int(token)]


WAYS = {"1": (SamplingDrafter, 1, {}), "2": (SamplingDrafter, 2, {}), "3": (SamplingDrafter, 3, {}),
        "4": (SamplingDrafter, 4, {}), "untrimmed": (Loose, 2, dict(knobs=dict(temperature=0.9, top_k=3))),
        "few words": (SamplingDrafter, 2, dict(words=torch.tensor([0, 2]))),
        "p_min": (SamplingDrafter, 3, dict(p_min=0.4))}


@pytest.mark.parametrize("way", WAYS)
def test_a_round_keeps_texts_as_the_target_wants_them(few, way):
    """Counts of all texts of a round against their exact probabilities: 1 to 4 drafts, and other draft sides."""
    kind, N, options = WAYS[way]
    texts, expected, hits = count_rounds(few, kind, N, seed=N, **options)
    assert len(expected) > 4 and hits > 100
    assert odds_of(texts, expected) > HONEST
    assert max(map(len, texts)) == N + 1
    if way == "few words":
        assert {text[0] for text in texts} == {0, 1, 2, 3}
    if way == "p_min":
        assert {len(text) for text in expected} > {1, 4}


def first_token_odds(few, texts, knobs):
    _, logits_after = place(few, SamplingDrafter, 1, knobs, 0)
    firsts = torch.tensor([text[0] for text, times in texts.items() for _ in range(times)])
    return odds(firsts, distribution(logits_after(())[-1], **knobs))


def no_residual(drafter, logits, drafted):
    p_target = distribution(logits, **drafter.knobs)
    if torch.rand((), generator=drafter.dice) < accept(p_target[0], drafter.p_draft[0])[drafted[0]]:
        return [*drafted, int(throws(p_target[1], 1, drafter.dice))]
    return throws(p_target[0], 1, drafter.dice).tolist()


def warm_ratio(drafter, logits, drafted):
    """The temperature left out of the ratio: the drafts of a colder side are weighed as if they were not."""
    p_target = distribution(logits)
    return verdict(p_target, drafter.p_draft, drafted, drafter.dice)


@pytest.mark.parametrize("wrong", [no_residual, warm_ratio])
def test_control_wrong_rules_fail_in_the_model(few, wrong):
    knobs = dict(temperature=0.6)
    right = count_rounds(few, SamplingDrafter, 1, knobs=knobs)[0]
    texts = count_rounds(few, SamplingDrafter, 1, knobs=knobs, choose=wrong)[0]
    assert first_token_odds(few, right, knobs) > HONEST > 1e-6 > first_token_odds(few, texts, knobs)


def test_control_a_draft_thrown_away_after_it_was_drawn(few):
    """p_min must look at the distribution; looking at the drawn token makes its text too rare."""
    knobs = dict(temperature=0.9)
    right = count_rounds(few, SamplingDrafter, 1, knobs=knobs, p_min=0.5, n=8000)[0]
    texts = count_rounds(few, Cheat, 1, knobs=knobs, p_min=0.5, n=8000)[0]
    assert first_token_odds(few, right, knobs) > HONEST > 1e-6 > first_token_odds(few, texts, knobs)


def test_equal_tokens_are_exact_and_waste_drafts(few):
    """The naive rule, a fresh draw that must equal the draft: accepted with the sum of products instead of minima."""
    def naive(drafter, logits, drafted):
        return throws_of(distribution(logits, **drafter.knobs), drafter.dice)

    def throws_of(rows, draw):
        return [int(throws(p, 1, draw)) for p in rows]

    knobs, n = dict(temperature=0.9), 2000
    texts, _, hits = count_rounds(few, SamplingDrafter, 1, knobs=knobs, choose=naive)
    _, _, better = count_rounds(few, SamplingDrafter, 1, knobs=knobs)
    drafter, logits_after = place(few, SamplingDrafter, 1, knobs, 0)
    drafter.propose()
    p_target, p_draft = distribution(logits_after(())[-1], **knobs), drafter.p_draft[0]
    assert first_token_odds(few, texts, knobs) > HONEST
    for count, rate in (hits, (p_target * p_draft).sum()), (better, overlap(p_target, p_draft)):
        assert abs(count / n - rate) < 4 * (rate * (1 - rate) / n) ** 0.5
    assert hits < better


@pytest.mark.parametrize("kind, N", [(SamplingDrafter, 2), (Adaptive, 1)])
def test_whole_texts_have_the_joint_distribution_of_plain_drawing(few, kind, N):
    """The first three tokens of 800 texts of the loop against their exact joint probabilities."""
    knobs, n = dict(temperature=0.8), 800
    joint = {}
    for text in torch.cartesian_prod(*[torch.arange(4)] * 3):
        rows = few.model(torch.cat([few.prompt, text[None, :-1]], dim=1))[0, few.prompt.shape[1] - 1:]
        joint[tuple(text.tolist())] = float(distribution(rows, **knobs)[range(3), text].prod())
    drafted = Counter(tuple(text_of(few, N, 5, seed=seed, kind=kind, knobs=knobs)[:3]) for seed in range(n))
    assert odds_of(drafted, joint) > HONEST
    other = {text: p ** 1.3 for text, p in joint.items()}
    assert odds_of(drafted, {text: p / sum(other.values()) for text, p in other.items()}) < HONEST
