"""Wrong prompts, ids, budgets, knobs, heads and tokenizers: a defined result, or one sentence that says what to do.

And interruptions: after a KeyboardInterrupt in any layer the next call is right.
"""
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from chapters.batch import generate_batch, left_pad
from chapters.chat import Chat
from chapters.model import Model
from chapters.mtp import MTP, Drafter, generate_mtp, mtp_rounds
from chapters.sample import generate, pick, probabilities, stream
from checkpoints import PITFALL, write_checkpoint
from qwen_helpers import load_config
from qwen_helpers.cache import State, rollback, snapshot
from qwen_helpers.lesson import pieces
from qwen_helpers.weights import TINY, CheckpointError
from qwen_helpers.widgets import chat_box, demo
from scripted import CLOSE, World, apart, remembered

NAN, INF = float("nan"), float("inf")
LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0])


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("input"), PITFALL | dict(max_position_embeddings=50), length=42)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A head of another model: its folder, and the head."""
    path = write_checkpoint(tmp_path_factory.mktemp("other"), PITFALL | dict(hidden_size=32))
    return path, MTP.from_pretrained(load_config(path), path, torch.float64)


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    path = write_checkpoint(tmp_path_factory.mktemp("chat"), PITFALL | dict(vocab_size=8192))
    return Chat(Model.from_pretrained(path, torch.float64), TINY)


def sentence(kind, call):
    """What the course's own check says: an error of this kind raised in qwen_helpers or a chapter, in one line."""
    with pytest.raises(kind) as caught:
        call()
    where = str(caught.traceback[-1].path)
    assert "qwen_helpers" in where or ".ipynb" in where, f"raised in {where}: {caught.value}"
    assert str(caught.value).isprintable() and 20 < len(str(caught.value)) < 300
    return str(caught.value)


# ---- token ids

IDS = {     # what is given as ids: (kind of error, what it must say)
    "empty": (torch.zeros(1, 0, dtype=torch.long), ValueError, "nothing to read: a text needs at least one token"),
    "empty of floats": (torch.tensor([[]]), ValueError, "at least one token"),
    "no row": (torch.zeros(0, 3, dtype=torch.long), ValueError, "at least one"),
    "floats": (torch.tensor([[1.0, 2.0]]), TypeError, "whole numbers, not a tensor of torch.float32: write torch.tensor("),
    "bools": (torch.tensor([[True]]), TypeError, "whole numbers, not a tensor of torch.bool"),
    "a list": ([[1, 2]], TypeError, "whole numbers, not a list: write torch.tensor("),
    "text": ("hello", TypeError, "whole numbers, not a str"),
    "one row without a batch": (torch.tensor([1, 2, 3]), ValueError, "(B, T), one row a text, not (3,): one text alone is ids[None]"),
    "a number": (torch.tensor(3), ValueError, "(B, T), one row a text, not ()"),
    "three dimensions": (torch.zeros(1, 2, 3, dtype=torch.long), ValueError, "not (1, 2, 3)"),
    "negative": (torch.tensor([[3, -1]]), ValueError, "no token -1, this model has 0 to 28: take the tokenizer"),
    "one too high": (torch.tensor([[29, 3]]), ValueError, "no token 29, this model has 0 to 28"),
    "far too high": (torch.tensor([[2**62]]), ValueError, f"no token {2**62}"),
    "too long": (torch.zeros(1, 51, dtype=torch.long), ValueError, "has 51 tokens, this model reads at most 50: shorten"),
}
WAYS = {
    "forward": lambda world, ids: world.model(ids),
    "forward with a state": lambda world, ids: world.model(ids, State(world.model)),
    "stream": lambda world, ids: next(stream(world.model, ids, 5)),
    "generate": lambda world, ids: generate(world.model, ids, 5),
    "mtp": lambda world, ids: generate_mtp(world.model, world.mtp, ids, 5),
    "rounds": lambda world, ids: next(mtp_rounds(world.model, world.mtp, ids, 5)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", IDS)
def test_wrong_ids(world, name, way):
    ids, kind, words = IDS[name]
    assert words in sentence(kind, lambda: WAYS[way](world, ids))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("ids", [[[3]], [[0, 28]]])
def test_ids_that_are_right(world, ids, dtype):
    """The control: one token, the first and the last of the vocabulary, both kinds of whole numbers."""
    ids = torch.tensor(ids, dtype=dtype)
    assert world.model(ids).shape == (*ids.shape, 29)
    assert len(generate(world.model, ids, 5)) == len(generate_mtp(world.model, world.mtp, ids, 5)[0]) == 5


def test_the_longest_text_is_exactly_the_models_maximum(world):
    """7 tokens of prompt and 43 read after it: the 44th new token is the last that can be had."""
    model, mtp, prompt = world.model, world.mtp, world.prompt
    assert len(generate(model, prompt, 44)) == len(generate_mtp(model, mtp, prompt, 44)[0]) == 44
    for run, most in ((stream(model, prompt, 45), 44), (mtp_rounds(model, mtp, prompt, 90), 43)):
        got = []
        assert "has 51 tokens, this model reads at most 50" in sentence(ValueError, lambda: got.extend(run))
        assert len(got) <= most


def test_an_error_leaves_the_state_as_it_was(world):
    state = State(world.model)
    world.model(world.prompt, state)
    before = remembered(state)
    for name in ("floats", "negative", "too long", "one row without a batch"):
        sentence((TypeError, ValueError), lambda: world.model(IDS[name][0], state))
    assert set(apart(remembered(state), before).values()) == {0.0}
    world.model(world.ids[:, 7:8], state)


@pytest.mark.parametrize("rows", [[], [[]], [[1, 2], []]])
def test_empty_rows(world, rows):
    for call in (lambda: left_pad(rows), lambda: generate_batch(world.model, rows, 3)):
        assert "each prompt needs at least one token" in sentence(ValueError, call)


@pytest.mark.parametrize("rows, words", [([[1.0, 2.0]], "whole numbers"), ([[1], [29]], "no token 29"),
                                         ([[-1]], "no token -1"), ([[1] * 51, [2]], "51 tokens")])
def test_wrong_rows(world, rows, words):
    assert words in sentence((TypeError, ValueError), lambda: generate_batch(world.model, rows, 3))


@pytest.mark.parametrize("run", [generate, lambda model, ids, n: list(mtp_rounds(model, None, ids, n))])
def test_a_batch_where_one_text_is_expected(world, run):
    said = sentence(ValueError, lambda: run(world.model, torch.tensor([[1, 2], [3, 4]]), 5))
    assert "one text at a time, not 2: chapter 13 takes several" in said


# ---- budgets and stops

RUNS = {
    "generate": lambda world, n, stop=(): generate(world.model, world.prompt, n, stop),
    "mtp": lambda world, n, stop=(): generate_mtp(world.model, world.mtp, world.prompt, n, stop)[0],
    "batch": lambda world, n, stop=(): generate_batch(world.model, world.prompt.tolist(), n, stop)[0],
}


@pytest.mark.parametrize("run", RUNS)
def test_a_budget_of_nothing_is_nothing(world, run):
    assert RUNS[run](world, 0) == []


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("budget", [-1, -(2**70), 2.0, NAN, INF, "5", None, [5], torch.tensor(5)])
def test_a_budget_that_cannot_be(world, run, budget):
    said = sentence(ValueError, lambda: RUNS[run](world, budget))
    assert said.startswith("max_new_tokens = ") and "a whole number, 0 or more" in said


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("stop", [{29}, {-1}, {10**9}, {None}, {"x"}, [], {29: 1}.keys(), frozenset({31})])
def test_stop_tokens_that_never_come_do_no_harm(world, run, stop):
    assert RUNS[run](world, 12, stop) == world.text[:12]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("stop", [5, None, "<|im_end|>", b"x", 1.5])
def test_a_stop_that_is_no_set(world, run, stop):
    assert "a set of token ids" in sentence(TypeError, lambda: RUNS[run](world, 5, stop))


# ---- the knobs of sampling

@pytest.mark.parametrize("temperature", [-1, -1e-9, 1e-300, 1e300, NAN, INF, -INF, "hot", None])
def test_a_temperature_that_cannot_be(world, temperature):
    for call in (lambda: probabilities(LOGITS, temperature), lambda: pick(LOGITS, temperature),
                 lambda: generate(world.model, world.prompt, 3, temperature=temperature)):
        assert sentence(ValueError, call).startswith("temperature = ")


def test_temperature_zero_is_greedy_and_has_no_distribution(world):
    assert generate(world.model, world.prompt, 5, temperature=0.0) == world.text[:5]
    assert "0 in `pick`, for greedy" in sentence(ValueError, lambda: probabilities(LOGITS, 0))


@pytest.mark.parametrize("knobs", [
    dict(top_p=1.01), dict(top_p=-0.1), dict(top_p=NAN), dict(top_p=INF), dict(top_p=None),
    dict(top_k=-1), dict(top_k=2.5), dict(top_k=NAN), dict(top_k="5")])
def test_cuts_that_cannot_be(world, knobs):
    name = next(iter(knobs))
    for call in (lambda: probabilities(LOGITS, 1.0, **knobs),
                 lambda: generate(world.model, world.prompt, 3, temperature=1.0, **knobs)):
        assert sentence(ValueError, call).startswith(f"{name} = ")


@pytest.mark.parametrize("knobs, kept", [(dict(top_p=0), 1), (dict(top_p=1), 5), (dict(top_k=0), 5), (dict(top_k=6), 5),
                                         (dict(top_k=10**9), 5), (dict(top_k=1, top_p=0.0), 1)])
def test_cuts_at_their_ends(knobs, kept):
    p = probabilities(LOGITS, 1.0, **knobs)
    assert int((p > 0).sum()) == kept and float(p.sum()) == pytest.approx(1)


@pytest.mark.parametrize("temperature", [1e-6, 1e-4, 1e4, 1e6])
def test_extreme_temperatures_still_draw(temperature):
    draws = {pick(LOGITS, temperature, draw=torch.Generator().manual_seed(i)) for i in range(40)}
    assert draws == {1} if temperature < 1 else draws > {1}


# ---- another model's head and tokenizer

def test_a_draft_head_of_another_width(world, other):
    path, mtp = other
    said = sentence(CheckpointError, lambda: MTP.from_pretrained(world.model.cfg, path))
    assert str(path) in said and "the model asks for" in said and "of different models" in said
    for call in (lambda: generate_mtp(world.model, mtp, world.prompt, 5), lambda: Drafter(world.model, mtp)):
        assert "reads 32 numbers a token, the model gives 24: load both from one folder" in sentence(ValueError, call)


def test_a_draft_head_of_a_sister_model_drafts_badly_and_changes_nothing(world, tmp_path):
    path = write_checkpoint(tmp_path / "sister", seed=9)
    mtp = MTP.from_pretrained(world.model.cfg, path, torch.float64)
    assert generate_mtp(world.model, mtp, world.prompt, 40)[0] == world.text[:40]


def test_a_tokenizer_with_more_tokens_than_the_model(world):
    chat = Chat(world.model, TINY)
    said = sentence(ValueError, lambda: list(chat.stream([{"role": "user", "content": "长江"}], 5)))
    assert "this model has 0 to 28: take the tokenizer of the same folder" in said


@pytest.mark.parametrize("content", [None, "", "{", "[]", "\0", '{"model": 5}'])
def test_a_missing_or_broken_tokenizer(world, tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    said = sentence(CheckpointError, lambda: Chat(world.model, tmp_path))
    assert f"{tmp_path / 'tokenizer.json'} is missing or broken" in said and "again" in said


# ---- text

@pytest.mark.parametrize("text, read", [
    ("\ud800", "?"), ("a\udc00b", "a?b"), ("🙂\ud83d", "🙂?"), ("👩‍👩‍👧‍👦🏳️‍🌈", None), ("\0\x07\ufffd", None), ("\u202e\u200b", None)])
def test_strange_text(chat, text, read):
    """Half a surrogate pair, which no UTF-8 can hold, becomes a question mark; all else comes back as it was."""
    ids = chat.encode(text)
    assert chat.decode(ids[0].tolist()) == (read or text)
    assert len(generate(chat.model, ids, 3)) == 3


def test_empty_text(chat):
    assert "at least one token" in sentence(ValueError, lambda: generate(chat.model, chat.encode(""), 3))
    assert len(list(chat.stream([{"role": "user", "content": ""}], 3))) <= 3


@pytest.mark.parametrize("text", ["a" * 100_000, "长" * 100_000, "🙂" * 25_000, "ab1" * 33_334, "=" * 100_000])
def test_a_hundred_thousand_characters_without_a_space(chat, text):
    """Cut into tokens and back within seconds; the model says that it is too long."""
    start = time.process_time()
    ids = chat.encode(text)
    assert chat.decode(ids[0].tolist()) == text
    assert "".join(pieces(chat.tk, ids[0].tolist())) == text
    assert time.process_time() - start < 20
    assert "reads at most 4,096: shorten the prompt" in sentence(ValueError, lambda: generate(chat.model, ids, 3))


TK = Tokenizer.from_file(str(TINY / "tokenizer.json"))


@given(st.lists(st.integers(0, TK.get_vocab_size() - 1), max_size=12))
def test_pieces_are_what_decoding_every_prefix_gives(ids):
    """The slow way: decode the text up to each token, hold back what ends in half a character."""
    slow, shown = [], ""
    for end in range(1, len(ids) + 1):
        whole = TK.decode(ids[:end], skip_special_tokens=False).rstrip("\ufffd")
        slow.append(whole[len(shown):])
        shown = max(shown, whole, key=len)
    assert pieces(TK, ids) == slow


# ---- sliders

def part(box, name):
    """The widget of a demo that carries a class."""
    return next(child for child in box.children if name in child._dom_classes)


class Still:
    """A picture that is a text: what a demo needs of one."""

    def __init__(self, text):
        self.text = text

    def png(self, **_):
        return self.text.encode()

    def _repr_mimebundle_(self, **_):
        return {"text/plain": self.text}, {}


def inverse(number, scale):
    return Still(f"{scale / number:.3f}")


def test_sliders_at_their_ends():
    """An error is written under the sliders, the last picture stays, and the next move clears it."""
    box = demo(inverse, number=(0, 8, 4), scale=(0.0, 2.0, 1.0))
    number, scale, trouble, image = (
        part(box, name) for name in ("knob-number", "knob-scale", "demo-trouble", "demo-picture"))
    assert image.value == b"0.250" and trouble.value == ""
    number.value = number.max
    scale.value = scale.max
    assert image.value == b"0.250" and trouble.value == ""
    scale.value = scale.min
    assert image.value == b"0.000"
    number.value = number.min
    assert "ZeroDivisionError: float division by zero" in trouble.value and image.value == b"0.000"
    number.value = 1
    assert trouble.value == ""
    number.value = 10**6                                                # beyond the end: held at the end
    assert number.value == 8


def test_a_slider_shows_markup_in_an_error_as_text():
    def angry(k):
        if k:
            raise ValueError("<script>alert(1)</script>")
        return Still("fine")
    box = demo(angry, k=(0, 1, 0))
    part(box, "knob-k").value = 1
    assert "&lt;script&gt;" in part(box, "demo-trouble").value and "<script>" not in part(box, "demo-trouble").value


def test_a_chat_box_shows_an_error_and_goes_on():
    class Moody:
        def stream(self, messages, **how):
            yield "Half an"
            if "wrong" in messages[-1]["content"]:
                raise ValueError("the text has 51 tokens")
            yield "Half an answer"
    box = chat_box(Moody(), "what is wrong?", "and now?")
    assert [m["content"] for m in box.still] == ["and now?", "Half an answer"]


# ---- interruptions

class Interrupt:
    """Raises KeyboardInterrupt when a model's layers are called for the nth time."""

    def __init__(self, parts, nth):
        self.calls, self.nth = 0, nth
        self.hooks = [layer.register_forward_pre_hook(self.count) for part in parts for layer in part.layers]

    def count(self, *_):
        self.calls += 1
        if self.calls == self.nth:
            raise KeyboardInterrupt

    def remove(self):
        for hook in self.hooks:
            hook.remove()


@contextmanager
def interrupted(world, nth):
    interrupt = Interrupt((world.model, world.mtp), nth)
    try:
        yield interrupt
    finally:
        interrupt.remove()


GENERATORS = {
    "stream": lambda world: list(stream(world.model, world.prompt, 8)),
    "generate": lambda world: generate(world.model, world.prompt, 8),
    "rounds": lambda world: [t for done in mtp_rounds(world.model, world.mtp, world.prompt, 8) for t in done.kept],
    "batch": lambda world: generate_batch(world.model, [world.prompt[0].tolist(), [1, 2]], 8)[0],
}


@pytest.mark.parametrize("way", GENERATORS)
def test_after_an_interruption_in_any_layer_the_next_call_is_right(world, way):
    run = GENERATORS[way]
    with interrupted(world, 0) as counter:
        run(world)
    for nth in range(1, counter.calls + 1, 3):
        with pytest.raises(KeyboardInterrupt), interrupted(world, nth):
            run(world)
        if nth % 5 == 1 or nth + 3 > counter.calls:
            assert run(world) == world.text[:8]
    assert counter.calls >= 4 * 8


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_a_state_that_an_interruption_left_half_way_is_not_used(world, nth):
    """Some layers have read the tokens and some have not: going on would be wrong without a sign. A rollback mends it."""
    state = State(world.model)
    world.model(world.prompt, state)
    saved, later = snapshot(state), world.ids[:, 7:9]
    with pytest.raises(KeyboardInterrupt), interrupted(world, nth):
        world.model(later, state)
    for call in (lambda: world.model(later, state), lambda: snapshot(state)):
        assert "interrupted and left this state half-way: make a new State" in sentence(ValueError, call)
    rollback(state, saved)
    assert max(apart(remembered(state), world.plain[0]).values()) == 0
    world.model(later, state)
    assert max(apart(remembered(state), world.plain[2]).values()) < CLOSE


def test_an_interrupted_chat_answers_the_next_question(chat):
    messages = [{"role": "user", "content": "Well?"}]
    right = list(chat.stream(messages, 6))
    both = SimpleNamespace(model=chat.model, mtp=SimpleNamespace(layers=[]))
    with pytest.raises(KeyboardInterrupt), interrupted(both, 11):
        list(chat.stream(messages, 6))
    assert list(chat.stream(messages, 6)) == right
