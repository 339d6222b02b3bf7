"""Chapter 11: the distribution under its knobs, drawing from it, and loops that agree on budget and seed."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chapters.sample import generate, pick, probabilities, stream
from scripted import World, oracle

quick = settings(max_examples=50, deadline=None, derandomize=True)
LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0])
P = LOGITS.softmax(-1)                                      # ranked: tokens 1, 3, 2, 0, 4


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("sample"))


def among(tokens):
    """P with all other tokens cut."""
    left = torch.tensor([float(P[i]) if i in tokens else 0.0 for i in range(5)])
    return left / left.sum()


def kept(p):
    return {i for i, share in enumerate(p.tolist()) if share > 0}


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 3.0, 100.0])
def test_temperature_divides_logits(temperature):
    expected = torch.tensor([float((x / temperature).exp()) for x in LOGITS.double()])
    torch.testing.assert_close(probabilities(LOGITS, temperature), expected / expected.sum())


@pytest.mark.parametrize("top_k, tokens", [(0, {0, 1, 2, 3, 4}), (1, {1}), (2, {1, 3}), (5, {0, 1, 2, 3, 4}),
                                           (99, {0, 1, 2, 3, 4})])
def test_top_k_keeps_the_likeliest_and_their_ratios(top_k, tokens):
    p = probabilities(LOGITS, 1.0, top_k=top_k)
    assert kept(p) == tokens
    torch.testing.assert_close(p, among(tokens))


@pytest.mark.parametrize("top_p, tokens", [(1.0, {0, 1, 2, 3, 4}), (0.999, {0, 1, 2, 3, 4}), (0.9, {1, 2, 3}),
                                           (0.7, {1, 3}), (0.6, {1}), (0.01, {1}), (1e-12, {1}), (0.0, {1})])
def test_top_p_keeps_the_fewest_that_reach_it(top_p, tokens):
    """P is .64 .24 .09 .03 .01 by rank; even top_p = 0 keeps the likeliest."""
    p = probabilities(LOGITS, 1.0, top_p=top_p)
    assert kept(p) == tokens and float(p.sum()) == pytest.approx(1)
    torch.testing.assert_close(p, among(tokens))


@quick
@given(st.lists(st.integers(-1280, 1280).map(lambda n: n / 64), min_size=1, max_size=30),       # so that ties are real
       st.floats(0.05, 5), st.integers(0, 40), st.floats(0, 1))
def test_probabilities_are_a_distribution_that_keeps_the_order(logits, temperature, top_k, top_p):
    logits = torch.tensor(logits)
    p = probabilities(logits, temperature, top_k, top_p)
    assert float(p.sum()) == pytest.approx(1, abs=1e-5) and float(p.min()) >= 0
    assert float(p[logits.argmax()]) == float(p.max()) > 0
    assert float(logits[p > 0].min()) >= float(logits[p == 0].max()) if bool((p == 0).any()) else True


def test_probabilities_take_rows_at_once():
    rows = torch.stack([LOGITS, LOGITS.flip(0), LOGITS * 2])
    together = probabilities(rows[None], 0.8, 3, 0.9)
    assert torch.equal(together[0], torch.stack([probabilities(row, 0.8, 3, 0.9) for row in rows]))


def test_frequencies_follow_the_probabilities():
    """20,000 picks: each token within five standard deviations of its share, and none that was cut."""
    draw, n = torch.Generator().manual_seed(0), 20_000
    picks = torch.tensor([pick(LOGITS, 1.3, top_k=4, top_p=0.97, draw=draw) for _ in range(n)])
    p = probabilities(LOGITS, 1.3, top_k=4, top_p=0.97)
    share = picks.bincount(minlength=5) / n
    assert bool(((share - p).abs() <= 5 * (p * (1 - p) / n).sqrt()).all()) and share[4] == 0


def test_temperature_zero_is_the_likeliest():
    assert pick(LOGITS) == pick(LOGITS, 0, top_k=2, top_p=0.5) == 1
    assert all(pick(LOGITS, 1e-3, draw=torch.Generator().manual_seed(i)) == 1 for i in range(20))


def test_greedy_text_is_the_oracles(world):
    assert generate(world.model, world.prompt, 60) == world.text
    long = world.ids[:, :40]
    assert generate(world.model, long, 10) == oracle(world.model, long, 10)


@quick
@given(st.integers(0, 12), st.sampled_from([0, 0.7, 1.5]), st.sampled_from([0, 1, 8]), st.sampled_from([1.0, 0.8]),
       st.sets(st.integers(0, 28), max_size=4), st.integers(0, 3))
def test_generate_is_the_stream_in_a_list(world, budget, temperature, top_k, top_p, stop, seed):
    """The budget is exact, a stop token comes last and is included, and a seed gives one text."""
    options = dict(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    text = generate(world.model, world.prompt, budget, stop, **options)
    assert text == list(stream(world.model, world.prompt, budget, stop, **options))
    assert not stop & set(text[:-1])
    assert len(text) == budget or text[-1] in stop
    unstopped = generate(world.model, world.prompt, budget, **options)
    assert text == unstopped[:len(text)]


def test_top_k_of_one_is_greedy_at_any_temperature(world):
    assert generate(world.model, world.prompt, 20, temperature=2.0, top_k=1, seed=5) == world.text[:20]


def test_seeds_differ_and_repeat(world):
    texts = [generate(world.model, world.prompt, 12, temperature=1.0, seed=seed) for seed in (0, 1, 2, 0)]
    assert texts[0] == texts[3] and len(set(map(tuple, texts))) == 3


def test_the_stream_computes_as_it_goes(world, monkeypatch):
    """One forward for each token, none ahead, and the cache is really used: after the prompt one token at a time."""
    read, hidden = [], world.model.hidden

    def watched(ids, state):
        read.append(ids.shape[1])
        return hidden(ids, state)

    monkeypatch.setattr(world.model, "hidden", watched)
    tokens = stream(world.model, world.prompt, 4)
    assert read == []
    next(tokens), next(tokens)
    assert read == [7, 1]
    list(tokens)
    assert read == [7, 1, 1, 1]
