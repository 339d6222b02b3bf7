"""The draft head reads row (token t+1, hidden t after the final norm), each row once, none missing."""
import copy

import pytest
import torch

import chapters.model
import chapters.mtp
from chapters.mtp import Drafter, forward_hidden, generate_mtp, mtp_rounds
from qwen_helpers.cache import State
from scripted import CLOSE, MIX, RIGHT, WRONG, Scripted, World, distance, play

SCRIPTS = [(RIGHT, 4), (WRONG, 1), (MIX, 2), (MIX, 3)]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("head"))


def rms(x, w):
    """(1 + w) · x / rms(x), written out once more."""
    return (1 + w) * x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


class Cold(Scripted):
    """Fault: the prompt never goes through the head, but for its last row."""

    def read(self, tokens, hidden):
        super().read(tokens, hidden)
        if len(self.hidden) == 1:
            self.state.cut(0)
            Drafter.read(self, tokens[:, -1:], hidden[:, -1:])


class Late(Scripted):
    """Fault: row j takes token j, not j+1."""

    def read(self, tokens, hidden):
        super().read(torch.cat([self.world.prompt[:, :1], tokens[:, :-1]], dim=1), hidden)


class Skipping(Scripted):
    """Fault: accepted drafts are not written to the head's cache, only the last kept token is."""

    def read(self, tokens, hidden):
        super().read(tokens, hidden)
        if len(self.hidden) > 1 and tokens.shape[1] > 1:
            self.state.cut(self.state.length - tokens.shape[1])
            Drafter.read(self, tokens[:, -1:], hidden[:, -1:])


class Overcut(Scripted):
    """Fault: one row too many is cut before the next is written."""

    def read(self, tokens, hidden):
        if self.hidden:
            self.state.cut(self.state.length - 1)
        super().read(tokens, hidden)


class Restarting(Scripted):
    """Fault: the rows of every call count from position 0."""

    def read(self, tokens, hidden):
        self.tokens += tokens[0].tolist()
        self.hidden.append(hidden)
        self.last = self.mtp(self.model.embed_tokens(tokens), hidden, 0, self.state)[:, -1]


def first_read(world, drafter=Scripted):
    """The head's output at the last row of the prompt, as the loop has it before its first draft."""
    return next(play(world, RIGHT, 1, drafter=drafter))[3].last


def test_the_prompt_goes_through_the_head(world):
    """Head's cache cold: the first draft logits equal the head run over the whole prompt without a cache."""
    P = world.prompt.shape[1]
    whole = world.mtp(world.model.embed_tokens(world.ids[:, 1:P + 1]), world.hidden[:, :P], 0)[:, -1]
    assert distance([world.model.lm_head(first_read(world))], [world.model.lm_head(whole)]) < CLOSE
    assert distance([first_read(world, Cold)], [whole]) > 1e-3                              # the control


def rows(world, ids, shift=0):
    """The head's output for each row of a text, as the loop's prefill pairs tokens and hiddens."""
    class Recorder(Drafter):
        def read(self, tokens, hidden):
            tokens = torch.cat([ids[:, :shift], tokens], dim=1)[:, :hidden.shape[1]]
            self.rows = self.mtp(self.model.embed_tokens(tokens), hidden, 0, self.state)

    recorder = Recorder(world.model, world.mtp)
    next(mtp_rounds(world.model, world.mtp, ids, 1, drafter=recorder))
    return recorder.rows[0]                                                                 # (T, D)


@pytest.mark.parametrize("k", [2, 5, 9])
def test_row_j_takes_token_j_plus_1_with_hidden_j(world, k):
    """Wrong pairing: changing token j+2 must not change row j; changing token j+1 must."""
    changed = world.ids[:, :12].clone()
    changed[0, k] = world.wrong(int(changed[0, k]))
    for shift, first in [(0, k - 1), (1, k)]:               # shift 1 is the control: row j takes token j
        same = (rows(world, changed, shift) - rows(world, world.ids[:, :12], shift)).abs().amax(-1) < CLOSE
        assert same.tolist()[:first + 1] == [True] * first + [False]


@pytest.mark.parametrize("bits, count", SCRIPTS)
def test_every_round_feeds_the_pairs_of_the_text(world, bits, count):
    """Over all rounds the head reads token t+1 beside hidden t of a forward without a cache, in order."""
    for _, emitted, _, drafter in play(world, bits, count):
        T = len(drafter.tokens)
        assert drafter.tokens == world.ids[0, 1:T + 1].tolist()
        assert distance([torch.cat(drafter.hidden, dim=1)], [world.hidden[:, :T]]) < CLOSE
        assert T == world.prompt.shape[1] + len(emitted) - 1


def cache_is_that_of_one_pass(world, drafter):
    *_, (_, emitted, _, drafter) = play(world, MIX, 3, drafter=drafter)
    (k, v), last = world.head_pass(len(emitted))
    return distance([drafter.state.k, drafter.state.v, drafter.last], [k, v, last]) < CLOSE


@pytest.mark.parametrize("bits, count", SCRIPTS)
def test_the_heads_cache_equals_one_pass_over_the_text(world, bits, count):
    """Accepted draft never written to the head's cache, or one row too many cut."""
    for _, emitted, _, drafter in play(world, bits, count):
        (k, v), last = world.head_pass(len(emitted))
        assert distance([drafter.state.k, drafter.state.v, drafter.last], [k, v, last]) < CLOSE


@pytest.mark.parametrize("fault", [Cold, Late, Skipping, Overcut, Restarting])
def test_control_the_heads_cache_equals_one_pass_over_the_text(world, fault):
    assert cache_is_that_of_one_pass(world, Scripted)
    assert not cache_is_that_of_one_pass(world, fault)


def test_the_real_heads_own_drafts(world):
    """The head left alone, mostly rejected on random weights: text and cache are the same."""
    state, drafter, emitted = State(world.model), Drafter(world.model, world.mtp), []
    for done in mtp_rounds(world.model, world.mtp, world.prompt, 40, state=state, drafter=drafter):
        emitted += done.kept
        (k, v), last = world.head_pass(len(emitted))
        assert distance([drafter.state.k, drafter.state.v, drafter.last], [k, v, last]) < CLOSE
        assert max(world.apart(state, emitted).values()) < CLOSE
    assert emitted == world.text[:40]
    assert generate_mtp(world.model, world.mtp, world.prompt, 40)[0] == emitted


def positions_of(monkeypatch, module, run):
    """The positions that `module` asks RoPE tables for, laid down as a cache keeps them; gaps raise."""
    laid, tables = [], module.rope_tables

    def watched(cfg, positions):
        start = int(positions[0])
        assert start <= len(laid), "a gap"
        laid[start:] = positions.tolist()
        return tables(cfg, positions)

    with monkeypatch.context() as patch:
        patch.setattr(module, "rope_tables", watched)
        run()
    return laid


@pytest.mark.parametrize("module", [chapters.model, chapters.mtp], ids=["trunk", "head"])
@pytest.mark.parametrize("bits, count", SCRIPTS)
def test_positions_run_without_gaps(world, monkeypatch, module, bits, count):
    """Draft positions run 0, 1, 2, … without gaps, in both stacks."""
    laid = positions_of(monkeypatch, module, lambda: list(play(world, bits, count)))
    assert laid == list(range(world.prompt.shape[1] + 39))


def test_control_positions_run_without_gaps(world, monkeypatch):
    laid = positions_of(monkeypatch, chapters.mtp, lambda: list(play(world, RIGHT, 1, drafter=Restarting)))
    assert len(laid) < world.prompt.shape[1] + 39


def test_the_head_reads_the_hidden_after_the_final_norm(world):
    """Hidden before the final norm instead of after it: the text stays right, acceptance falls."""
    model = world.model
    *_, x = model.residual_stream(world.prompt)
    logits, hidden = forward_hidden(model, world.prompt, State(model))
    assert distance([hidden, logits], [rms(x, model.norm.weight), hidden @ model.lm_head.weight.T]) < CLOSE
    next_tokens = model.embed_tokens(world.ids[:, 1:8])
    right, wrong = (world.mtp(next_tokens, h, 0) for h in (hidden, x))
    assert distance([right], [rows(world, world.prompt)[None]]) < CLOSE
    assert distance([wrong], [rows(world, world.prompt)[None]]) > 1e-2                      # the control


def test_with_norm_weights_of_zero_the_two_hiddens_look_the_same(world):
    """Why the fixture's norm weights are random: w = 0 would let the fault pass."""
    plain = copy.deepcopy(world.model)
    plain.norm.weight.zero_()
    *_, x = plain.residual_stream(world.prompt)
    e = plain.embed_tokens(world.prompt)
    assert distance([world.mtp(e, plain.norm(x), 0)], [world.mtp(e, x, 0)]) < 1e-3


def test_the_heads_own_output_is_after_its_norm(world):
    """At depth 2 and more the head takes its own output after `mtp.norm`."""
    mtp, inside = world.mtp, []
    handle = mtp.norm.register_forward_pre_hook(lambda module, args: inside.append(args[0]))
    out = mtp(world.model.embed_tokens(world.ids[:, 1:8]), world.hidden[:, :7], 0)
    handle.remove()
    assert distance([out], [rms(inside[0], mtp.norm.weight)]) < CLOSE
    assert distance([out], inside) > 1e-2


def test_the_embedding_half_comes_first(world):
    """Order of the two halves: with fc = [I | 0] it must return the embedding half, with [0 | I] the hidden's."""
    mtp = copy.deepcopy(world.mtp)
    mtp.layers = mtp.layers[:0]
    e, h = world.model.embed_tokens(world.ids[:, 1:8]), world.hidden[:, :7]
    eye, zero = torch.eye(24, dtype=e.dtype), torch.zeros(24, 24, dtype=e.dtype)
    half = {"e": rms(rms(e, mtp.pre_fc_norm_embedding.weight), mtp.norm.weight),
            "h": rms(rms(h, mtp.pre_fc_norm_hidden.weight), mtp.norm.weight)}
    mtp.fc.weight.data = torch.cat([eye, zero], dim=1)
    assert distance([mtp(e, h, 0)], [half["e"]]) < CLOSE
    mtp.fc.weight.data = torch.cat([zero, eye], dim=1)      # the control: the halves swapped
    assert distance([mtp(e, h, 0)], [half["h"]]) < CLOSE
    assert distance([half["h"]], [half["e"]]) > 1e-2
