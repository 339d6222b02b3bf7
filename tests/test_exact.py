"""What is claimed exact is exact: random models, prompts, drafts, budgets and stops (fp64, `make soak`: 10,000)."""
import shutil

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from chapters.batch import generate_batch, left_pad
from chapters.chunk import chunk_rule
from chapters.deltanet import recurrent_rule
from chapters.depth import (AdaptiveDrafter, CopyFirstDrafter, DeepDrafter, LookupDrafter, depth_batch, keep_each,
                            select_kept)
from chapters.model import Model
from chapters.mtp import MTP, Drafter, generate_mtp, mtp_rounds, read_again
from chapters.sample import generate
from checkpoints import PITFALL, write_checkpoint
from qwen_helpers.cache import State, snapshot
from scripted import CLOSE, Scripted, World, apart, distance, read, remembered, row_apart

LENGTH = 20                 # tokens that a text of these tests has at most
seeds = st.integers(0, 2**32 - 1)


@st.composite
def shapes(draw):
    """A config of any shape: layer pattern, heads, groups, K ≠ V, kernel, rotary part, tied or not."""
    kinds = draw(st.lists(st.sampled_from(["linear_attention", "full_attention"]), min_size=1, max_size=5))
    groups, keys = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    head = draw(st.sampled_from([2, 4, 6, 8]))
    return PITFALL | dict(
        vocab_size=draw(st.integers(2, 40)), hidden_size=draw(st.integers(2, 24)),
        intermediate_size=draw(st.integers(1, 30)), num_hidden_layers=len(kinds), layer_types=kinds,
        num_key_value_heads=groups,
        num_attention_heads=groups * draw(st.integers(1, 3)), head_dim=head, linear_num_key_heads=keys,
        linear_num_value_heads=keys * draw(st.integers(1, 3)), linear_key_head_dim=draw(st.integers(1, 8)),
        linear_value_head_dim=draw(st.integers(1, 8)), linear_conv_kernel_dim=draw(st.integers(1, 6)),
        tie_word_embeddings=draw(st.booleans()),
        rope_parameters=PITFALL["rope_parameters"] | dict(partial_rotary_factor=draw(st.sampled_from([2 / head, 1.0]))))


def texts(shape, **sizes):
    """Lists of token ids of a model of this shape."""
    return st.lists(st.integers(0, shape["vocab_size"] - 1), **sizes)


@st.composite
def cases(draw):
    """(arguments of a World, a budget, a set of stop tokens)."""
    shape = draw(shapes())
    prompt = draw(texts(shape, min_size=1, max_size=30))
    stop = draw(st.sets(st.integers(0, shape["vocab_size"] + 3), max_size=2))
    return dict(text=shape, prompt=prompt, length=LENGTH, seed=draw(seeds)), draw(st.integers(0, LENGTH)), stop


def until(text, budget, stop):
    """What is left of a text by its budget and its stop tokens; a stop token comes last."""
    ends = [i + 1 for i, token in enumerate(text) if token in stop]
    return text[:min([budget, *ends])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A place for one model after the other."""
    return tmp_path_factory.mktemp("exact") / "model"


def empty(folder):
    """The folder with nothing in it: weights are mapped from disk, so a file that is in use is not written over."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def model_of(folder, shape, seed):
    path = write_checkpoint(empty(folder), shape, seed=seed)
    model = Model.from_pretrained(path, torch.float64)
    return model, MTP.from_pretrained(model.cfg, path, torch.float64)


def drafters(vocab_size):
    """Ways to draft, world -> drafter: by script, by the head at any depth, unsure, trimmed, adaptive, copying."""
    depth, p_min = st.integers(0, 6), st.sampled_from([0.0, 0.05, 0.2, 2.0])
    words = st.none() | st.permutations(range(vocab_size)).flatmap(
        lambda order: st.integers(1, vocab_size).map(lambda n: torch.tensor(order[:n])))
    deep = st.fixed_dictionaries(dict(N=depth, p_min=p_min, words=words))
    bits = st.text("01", min_size=1, max_size=8)
    return st.one_of(
        st.builds(lambda bits, count: lambda world: Scripted(world, bits, count), bits, depth),
        st.just(lambda world: Drafter(world.model, world.mtp)),
        deep.map(lambda how: lambda world: DeepDrafter(world.model, world.mtp, **how)),
        deep.map(lambda how: lambda world: AdaptiveDrafter(world.model, world.mtp, **how)),
        deep.map(lambda how: lambda world: CopyFirstDrafter(world.model, world.mtp, **how)),
        st.builds(lambda N, n: lambda world: LookupDrafter(N, n), depth, st.integers(1, 4)))


@given(cases(), st.data())
def test_speculative_is_plain_in_text_and_state_after_every_round(folder, case, data):
    """Also S, windows, keys and values, pos and the head's own cache, whichever drafter and whichever way back."""
    how, budget, stop = case
    world = World(empty(folder), **how)
    drafter = data.draw(drafters(world.model.cfg.vocab_size))(world)
    save, back = data.draw(st.sampled_from([(snapshot, read_again), (keep_each, select_kept)]))
    state, emitted = State(world.model), []
    for done in mtp_rounds(world.model, world.mtp, world.prompt, budget, stop, state=state, drafter=drafter, save=save,
                           back=back):
        emitted += done.kept
        assert emitted == world.text[:len(emitted)]
        assert max(world.apart(state, emitted).values()) < CLOSE
        if drafter.state.length:
            (k, v), last = world.head_pass(len(emitted))
            assert distance([drafter.state.k, drafter.state.v, drafter.last], [k, v, last]) < CLOSE
        assert isinstance(drafter, LookupDrafter) or drafter.state.length == state.pos
    assert emitted == until(world.text, budget, stop) == generate(world.model, world.prompt, budget, stop)
    assert generate_mtp(world.model, world.mtp, world.prompt, budget, stop)[0] == emitted


@given(shapes(), seeds, st.integers(0, LENGTH), st.integers(1, 6), st.data())
def test_a_row_of_a_batch_is_its_solo_run(folder, shape, seed, budget, N, data):
    """Plain and with N drafts a round, rows of unequal length that stop at different times."""
    model, mtp = model_of(folder, shape, seed)
    rows = data.draw(st.lists(texts(shape, min_size=1, max_size=30), min_size=1, max_size=4))
    stop = data.draw(st.sets(st.integers(0, shape["vocab_size"] - 1), max_size=2))
    alone = [generate(model, torch.tensor([row]), budget, stop) for row in rows]
    assert generate_batch(model, rows, budget, stop) == alone
    assert depth_batch(model, mtp, rows, budget, stop, N) == alone


@given(shapes(), seeds, st.data())
def test_prefill_in_any_cut_is_prefill_in_one(folder, shape, seed, data):
    """Logits and state, in a batch with padding as well; cuts may fall inside the padding of a row."""
    model, _ = model_of(folder, shape, seed)
    rows = data.draw(st.lists(texts(shape, min_size=1, max_size=90), min_size=1, max_size=3))
    ids, pads = left_pad(rows)
    cuts = data.draw(st.sets(st.integers(1, max(1, ids.shape[1] - 1)), max_size=6))
    logits, state = read(model, ids, pads, cuts)
    whole, at_once = read(model, ids, pads)
    real = torch.arange(ids.shape[1]) >= pads[:, None]
    assert distance([logits[real]], [whole[real]]) < CLOSE and state.pos == at_once.pos
    for b, row in enumerate(rows):
        assert row_apart(model, row, b, int(pads[b]), logits, state) < CLOSE
    if len(rows) == 1:
        plain, no_pads = read(model, ids, cuts=cuts)
        assert distance([plain], [whole]) < CLOSE
        assert max(apart(remembered(no_pads), remembered(at_once)).values()) < CLOSE


@given(st.integers(1, 130), st.integers(1, 64), st.integers(1, 3), st.integers(1, 4), st.integers(1, 8),
       st.integers(1, 8), st.sampled_from([0.0, 1e-3, 0.1, 1.0, 10.0]), st.sampled_from([0.0, 1.0, 100.0]), seeds)
def test_chunks_are_the_recurrence_from_any_state(T, C, B, H, K, V, decay, filled, seed):
    """Outputs and last S, for any sizes, for S from empty to huge, from no decay to nearly all of it in a token."""
    dice = torch.Generator().manual_seed(seed)
    q, k, v, S = (torch.randn(*size, generator=dice, dtype=torch.float64)
                  for size in ((B, H, T, K), (B, H, T, K), (B, H, T, V), (B, H, K, V)))
    g, beta = -decay * torch.rand(B, H, T, generator=dice).double(), torch.rand(B, H, T, generator=dice).double()
    parts = q, F.normalize(k, dim=-1), v, g, beta, filled * S
    for ours, theirs in zip(chunk_rule(*parts, C=C), recurrent_rule(*parts)):
        assert float((ours - theirs).abs().max()) < CLOSE * max(1, float(theirs.abs().max()))
