"""A model folder's own chat template, run in Jinja's sandbox; and what messages may hold, checked in words.

The template stands in chat_template.jinja or, in older folders, in tokenizer_config.json, where there may be several.
"""
import json
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path

from jinja2 import TemplateError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .config import CheckpointError, read_json, shown

ROLES = ("system", "user", "assistant", "tool")
SEEN = ("image", "image_url", "video")                          # what a part for the eye is called


def template_file(path, tools=None):
    """The file that a folder's template stands in, if it has one: for `tools` their own, where there is one."""
    names = ["additional_chat_templates/tool_use.jinja"] * bool(tools) + ["chat_template.jinja"]
    return next((Path(path, name) for name in names if Path(path, name).is_file()), Path(path, "tokenizer_config.json"))


def tokenizer_config(path):
    """tokenizer_config.json of a folder as a dict, empty if there is none."""
    file = Path(path, "tokenizer_config.json")
    return read_json(file) if file.is_file() else {}


def chat_template(path, tools=None):
    """The text of a folder's own chat template, see `template_file`; None if it has none."""
    file = template_file(path, tools)
    try:
        if file.suffix == ".jinja":
            return file.read_text(encoding="utf-8") or None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read ({shown(error)}): fetch it again") from None
    text = tokenizer_config(path).get("chat_template") or None
    if isinstance(text, list):                                  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in text if isinstance(entry, dict)}
        text = named.get("tool_use" if tools and "tool_use" in named else "default", text)
    if not isinstance(text, (str, type(None))):
        raise CheckpointError(f"{file}: chat_template is no text, and no list in which one is the \"default\": "
                              f"fetch the file again")
    return text


def special_tokens(path):
    """bos_token, eos_token and the like of tokenizer_config.json, which a template may write."""
    found = {name: token.get("content") if isinstance(token, dict) else token
             for name, token in tokenizer_config(path).items() if name.endswith("_token")}
    return {name: token for name, token in found.items() if isinstance(token, str)}


class Generation(Extension):
    """{% generation %} … {% endgeneration %}, which matters in training: here it writes what stands in it."""
    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


def refuse(message):
    raise TemplateError(message)


@lru_cache
def compiled(text):
    """A template in Jinja's sandbox, where it builds text and can do nothing else, with all that transformers gives it."""
    box = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                        extensions=["jinja2.ext.loopcontrols", Generation])
    box.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    box.globals["raise_exception"] = refuse
    box.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return box.from_string(text)


def render(path, messages, thinking=False, tools=None):
    """The prompt that a folder's own template makes of messages, ending where the assistant is to write.

    `tools` are JSON schemas, which the template announces. CheckpointError if the folder has no template or a broken
    one, ValueError if the template refuses the messages, or if they hold more than text.
    """
    file, text = template_file(path, tools), chat_template(path, tools)
    if text is None:
        raise CheckpointError(f"{path} has no chat template, and tools need one: add its chat_template.jinja, "
                              f"or leave the tools out")
    try:
        template = compiled(text)
    except Exception as error:                                  # Jinja's own, and Python's on code that it makes
        raise CheckpointError(f"{file} is no template that Jinja can run ({shown(error)}): fetch it again") from None
    messages = list(messages or [])
    for message in messages:
        check_content(message)
    given = [{key: value for key, value in message.items() if value is not None} for message in messages]
    try:
        return template.render(special_tokens(path), messages=given, tools=tools, add_generation_prompt=True,
                               enable_thinking=bool(thinking))
    except Exception as error:                                  # it refuses, or stumbles over what it did not expect
        raise ValueError(f"{file} does not take these messages: {shown(error)}") from None


def check_content(message):
    """Raise unless a message is a dict whose content is a text, a list of parts that are text, or nothing."""
    if not isinstance(message, dict):
        raise ValueError(f"{message!r:.60} is no message: write {{'role': 'user', 'content': …}}")
    content = message.get("content")
    if not isinstance(content, (str, list, tuple, type(None))):
        raise ValueError(f"the content of a message is {content!r:.60}: write a text, or a list of parts that are text")
    for part in content if isinstance(content, (list, tuple)) else ():
        names = [*part, part.get("type")] if isinstance(part, dict) else SEEN
        if any(name in SEEN for name in names) or not isinstance(part.get("text"), str):
            raise ValueError(f"the content of a message holds {part!r:.60}: this course reads text only, "
                             f"{{'type': 'text', 'text': …}}")


def check_call(call):
    """Raise unless a tool call has a name, and arguments by name if any."""
    call = call.get("function", call) if isinstance(call, dict) else call
    name, given = (call.get("name"), call.get("arguments", {})) if isinstance(call, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(given, dict) or not all(isinstance(key, str) for key in given):
        raise ValueError(f"a tool call is {call!r:.60}: write {{'name': …, 'arguments': {{…}}}}")


def check_messages(messages):
    """Raise unless these are messages that the published template of Qwen3.5 takes, all of them text."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise ValueError("there are no messages: write a list such as [{'role': 'user', 'content': 'Hello!'}]")
    for i, message in enumerate(messages):
        check_content(message)
        role, calls = message.get("role"), message.get("tool_calls")
        if role not in ROLES:
            raise ValueError(f"messages[{i}] has the role {role!r:.60}: write one of {', '.join(ROLES)}")
        if role == "system" and i:
            raise ValueError(f"messages[{i}] is a system message: only the first message can be one, so say it there")
        for call in calls if role == "assistant" and isinstance(calls, (list, tuple)) else ():
            check_call(call)
