"""Chapter 12: the prompt is the model's own template, and an answer comes in whole characters and stops; kind 37."""
from types import SimpleNamespace

import pytest
import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import AutoTokenizer

from chapters.chat import Chat, build_prompt
from chapters.model import Model
from chapters.sample import generate
from checkpoints import PITFALL, write_checkpoint
from qwen_helpers.weights import TINY


def turns(*contents, system=None):
    """Messages from contents that alternate between user and assistant."""
    said = [dict(role=("user", "assistant")[i % 2], content=content) for i, content in enumerate(contents)]
    return ([dict(role="system", content=system)] if system else []) + said


CONVERSATIONS = {
    "one question": turns("What is the capital of Japan?"),
    "Chinese": turns("日本的首都是哪里？"),
    "lines and code": turns("Explain:\n\n```python\nprint('hi')\n```\n"),
    "spaces around": turns("  Hello \n\n"),
    "system": turns("你好！", system="You answer in Chinese."),
    "three turns": turns("Hi", "Hello!", "How are you?", "很好。", "Bye 🙂"),
    "system and turns": turns("Hi", "Hello!", "2 + 2?", system="Be short."),
    "an earlier thought": turns("2 + 2?", "<think>\nTwo and two.\n</think>\n\n4", "And 3 + 3?"),
    "an earlier empty thought": turns("2 + 2?", "<think>\n\n</think>\n\n4", "And 3 + 3?"),
}


@pytest.fixture(scope="module")
def template():
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string((TINY / "chat_template.jinja").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """A random model as small as may be, with the embedded model's tokenizer."""
    path = write_checkpoint(tmp_path_factory.mktemp("chat"), PITFALL | dict(vocab_size=8192))
    return Chat(Model.from_pretrained(path, torch.float64), TINY)


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_kind_37_build_prompt_is_the_models_own_template(template, chat, name, thinking):
    """One extra newline has cut acceptance from 98 % to 44 %: ids equal those of the template, several turns too."""
    messages = CONVERSATIONS[name]
    expected = template.render(messages=messages, add_generation_prompt=True, enable_thinking=thinking)
    assert build_prompt(messages, thinking) == expected
    theirs = AutoTokenizer.from_pretrained(TINY).apply_chat_template(
        messages, add_generation_prompt=True, enable_thinking=thinking, return_dict=False)
    assert chat.encode(build_prompt(messages, thinking)).tolist() == [theirs]


def test_kind_37_control_one_newline(template, chat):
    messages = CONVERSATIONS["one question"]
    expected = template.render(messages=messages, add_generation_prompt=True, enable_thinking=False)
    assert chat.encode(build_prompt(messages) + "\n").tolist() != chat.encode(expected).tolist()


def test_build_prompt_leaves_the_messages_alone():
    messages = turns("2 + 2?", "<think>\nhm\n</think>\n\n4", "And?")
    before = [dict(message) for message in messages]
    build_prompt(messages)
    assert messages == before


def test_special_tokens_are_one_id_each(chat):
    for name in ("<|im_start|>", "<|im_end|>", "<|endoftext|>"):
        assert chat.encode(name).tolist() == [[chat.tk.token_to_id(name)]]
    assert chat.stop == {chat.tk.token_to_id("<|im_end|>"), chat.tk.token_to_id("<|endoftext|>")}
    assert len(chat.stop) == 2 and None not in chat.stop


@pytest.mark.parametrize("text", ["Hello, world!\n", "长江是中国第一长河。", "🙂👩‍🚀 naïve", "  def f(x):\n\treturn x  "])
def test_encode_and_decode_are_inverse(chat, text):
    assert chat.decode(chat.encode(text)[0].tolist()) == text


def parrot(ids):
    """Stands in for a model: says a fixed run of ids, whatever it reads; `.heard` is what it read first."""
    head, rows, heard = torch.nn.Identity(), iter(torch.eye(8192)[ids]), []
    head.weight = torch.zeros(1)

    def hidden(ids, state):
        heard.append(ids[0].tolist())
        return next(rows)[None, None]

    return SimpleNamespace(layers=[], lm_head=head, hidden=hidden, heard=heard)


@pytest.mark.parametrize("answer", ["Tokyo.", "长江🙂是河。", "🙂", "naïve 한국어"])
def test_a_chat_streams_whole_characters_and_stops(chat, answer):
    """Each text is the answer so far, never half a character; nothing after the stop token, which is not shown."""
    ids = chat.encode(answer)[0].tolist()
    said = parrot([*ids, chat.tk.token_to_id("<|im_end|>"), *ids])
    texts = list(Chat(said, TINY).stream(turns("Well?")))
    assert texts[-1] == answer and len(said.heard) == len(ids) + 1
    assert all(answer.startswith(text) and "\ufffd" not in text for text in texts)
    assert sorted(texts, key=len) == texts


@pytest.mark.parametrize("thinking", [False, True])
def test_a_chat_reads_the_built_prompt(chat, thinking):
    said = parrot([chat.tk.token_to_id("<|im_end|>")])
    list(Chat(said, TINY).stream(turns("Well?"), thinking=thinking))
    assert said.heard[0] == chat.encode(build_prompt(turns("Well?"), thinking))[0].tolist()


def test_the_budget_counts_tokens(chat):
    ids = chat.encode("One two three four five six seven eight")[0].tolist()
    texts = list(Chat(parrot(ids), TINY).stream(turns("Well?"), 3))
    assert texts[-1] == chat.decode(ids[:3])


def test_kind_34_a_chat_keeps_nothing_between_answers(chat):
    """A, B, A: the first and third answers are equal, and are what generate gives."""
    answer = {name: list(chat.stream(CONVERSATIONS[name], 12)) for name in ("one question", "Chinese")}
    assert list(chat.stream(CONVERSATIONS["one question"], 12)) == answer["one question"] != answer["Chinese"]
    ids = generate(chat.model, chat.encode(build_prompt(CONVERSATIONS["one question"])), 12, chat.stop)
    assert chat.decode(ids).startswith(answer["one question"][-1])
    sampled = [list(chat.stream(CONVERSATIONS["Chinese"], 12, temperature=1.0, seed=seed)) for seed in (4, 4, 5)]
    assert sampled[0] == sampled[1] != sampled[2]
