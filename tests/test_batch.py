"""Chapter 13: rows of unequal length in one batch are what each is alone."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chapters.batch import generate_batch, left_pad
from chapters.sample import generate
from scripted import CLOSE, World, read, row_apart

quick = settings(max_examples=25, deadline=None, derandomize=True)
prompts = st.lists(st.lists(st.integers(0, 28), min_size=1, max_size=80), min_size=1, max_size=3)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("batch"))


@pytest.mark.parametrize("length", [1, 3, 14, 63, 64, 65])
@pytest.mark.parametrize("pad", [0, 1, 2, 5, 70])
def test_padding_leaks_nowhere(world, length, pad):
    """Left padding leaks through conv and S: [pad, pad, a, b, c] equals [a, b, c] in logits, S and window."""
    row = (world.ids[0].tolist() * 2)[:length]
    ids, pads = torch.tensor([[7] * pad + row]), torch.tensor([pad])
    assert row_apart(world.model, row, 0, pad, *read(world.model, ids, pads)) < CLOSE


def test_control_pads_unmasked(world):
    row = world.ids[0, :9].tolist()
    assert row_apart(world.model, row, 0, 2, *read(world.model, torch.tensor([[7, 7] + row]))) > 1e-2


def test_control_pads_masked_in_attention_only(world, monkeypatch):
    """What a batch meant for a pure transformer does: S and window take the padding in."""
    forward = type(world.model.layers[0].linear_attn).forward
    monkeypatch.setattr(type(world.model.layers[0].linear_attn), "forward",
                        lambda self, x, state=None, mask=None: forward(self, x, state))
    row = world.ids[0, :9].tolist()
    logits, state = read(world.model, torch.tensor([[7, 7] + row]), torch.tensor([2]))
    assert row_apart(world.model, row, 0, 2, logits, state) > 1e-2


@quick
@given(prompts, st.sets(st.integers(1, 79), max_size=5))
def test_prefill_in_several_calls_with_pads(world, rows, cuts):
    """Cuts may fall inside the padding of a row, where it has not one real token yet."""
    ids, pads = left_pad(rows)
    cuts = [cut for cut in cuts if cut < ids.shape[1]]
    logits, state = read(world.model, ids, pads, cuts)
    assert bool(logits.isfinite().all()) and state.pos == ids.shape[1]
    for b, row in enumerate(rows):
        assert row_apart(world.model, row, b, int(pads[b]), logits, state) < CLOSE


def test_a_batch_without_padding_equals_its_rows(world):
    rows = world.ids[0, :60].view(3, 20).tolist()
    logits, state = read(world.model, torch.tensor(rows))
    assert all(row_apart(world.model, row, b, 0, logits, state) < CLOSE for b, row in enumerate(rows))


def test_left_pad():
    ids, pads = left_pad([[5], [1, 2, 3], [8, 9]], pad=4)
    assert ids.tolist() == [[4, 4, 5], [1, 2, 3], [4, 8, 9]] and pads.tolist() == [2, 0, 1]


@quick
@given(prompts, st.integers(0, 12), st.sets(st.integers(0, 28), max_size=3))
def test_each_row_of_generate_batch_equals_its_solo_run(world, rows, budget, stop):
    """Lengths from 1 to 80, a row that stops early among rows that go on, the stop token included."""
    assert generate_batch(world.model, rows, budget, stop) == \
        [generate(world.model, torch.tensor([row]), budget, stop) for row in rows]


def test_one_row_stops_and_the_others_go_on(world):
    rows = [world.ids[0, :n].tolist() for n in (7, 12, 30, 33)]
    stop = {generate(world.model, torch.tensor(rows[:1]), 3)[2]}
    texts = generate_batch(world.model, rows, 20, stop)
    assert texts == [generate(world.model, torch.tensor([row]), 20, stop) for row in rows]
    assert len(texts[0]) <= 3 and max(map(len, texts)) > 3
