"""Damaged checkpoints, over a thousand of them: one sentence each, no file opened outside, no memory, no pickle."""
import ast
import json
import os
import random
import re
import shutil
import struct
import sys
from pathlib import Path

import pytest
import torch

from chapters.model import Model
from chapters.mtp import MTP
from checkpoints import PITFALL, write_checkpoint
from notebook import PATHS, cells
from qwen_helpers import load_config, load_weights, weights
from chapters import blank_magics
from qwen_helpers.weights import CheckpointError

ROOT = Path(__file__).resolve().parents[1]
CASES = 100                 # of each kind of damage
ABSURD = [-1, 0, 1.5, float("nan"), float("inf"), 1e18, 10**18, 10**400, "8", "", [], [8], {}, {"8": 8}, True]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Two whole checkpoints, in one file and in three, and a file outside of both that nobody may open."""
    folder = tmp_path_factory.mktemp("fuzz")
    write_checkpoint(folder / "one", dtype=torch.bfloat16, vision=2)
    write_checkpoint(folder / "three", dtype=torch.bfloat16, shards=3, nested=False)
    shutil.copy(folder / "one" / SINGLE, folder / "secret.safetensors")
    shutil.copy(folder / "one" / "config.json", folder / "secret.json")
    return folder


# ---- how a checkpoint is damaged: each takes (a folder to spoil, dice)

def header_of(file):
    """The header of a safetensors file as a dict, and the bytes behind it."""
    raw = file.read_bytes()
    size, = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8:8 + size]), raw[8 + size:]


def write_header(file, header, data):
    """A safetensors file with this header, whatever it says: a dict, or text that need not be JSON."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode("utf-8", "surrogatepass")
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def some_tensor(file, dice):
    """(header, data, the name of one of its tensors that the text model or the head needs)."""
    header, data = header_of(file)
    return header, data, dice.choice([name for name in header if name.startswith(("model.language_model.", "mtp."))])


def truncated(folder, dice):
    file = dice.choice([folder / SINGLE] * 3 + [folder / "config.json"])
    file.write_bytes(file.read_bytes()[:dice.randrange(file.stat().st_size)])


def header_length(folder, dice):
    raw = (folder / SINGLE).read_bytes()
    right, = struct.unpack("<Q", raw[:8])
    claims = [0, 1, 7, right - 1, right + 1, len(raw), len(raw) - 7, 10**8, 10**8 + 1, 2**31, 2**63, 2**64 - 1]
    claim = dice.choice([*claims, dice.getrandbits(dice.randrange(1, 65))])
    (folder / SINGLE).write_bytes(struct.pack("<Q", claim + (claim == right)) + raw[8:])


def offsets(folder, dice):
    header, data, name = some_tensor(folder / SINGLE, dice)
    start, end = header[name]["data_offsets"]
    other = dice.choice([value["data_offsets"] for key, value in header.items() if key not in (name, "__metadata__")])
    step = dice.choice([-2, 1, 2, 2**20, 2**63])
    header[name]["data_offsets"] = dice.choice([
        other, [start + step, end + step], [start, end + step], [end, start], [-2, end], [start, 2**64], [start],
        [float(start), float(end)], [str(start), str(end)], None, 5, [start, end, end],
        [len(data), len(data) + end - start]])
    write_header(folder / SINGLE, header, data)


def dtype(folder, dice):
    header, data, name = some_tensor(folder / SINGLE, dice)
    header[name]["dtype"] = dice.choice(["I16", "U16", "F32", "F64", "F8_E4M3", "BOOL", "C64", "Q4_K", "bf16", "", None,
                                         5, []])
    write_header(folder / SINGLE, header, data)


def shape(folder, dice):
    header, data, name = some_tensor(folder / SINGLE, dice)
    old = header[name]["shape"]
    header[name]["shape"] = dice.choice([
        [], [1, *old], [*old, 1], [-1, *old[1:]], [2**32, 2**32], [2**63], [*old[:-1], old[-1] + 1], None, "24", [old],
        [str(n) for n in old], [float(n) for n in old], old[::-1] if old != old[::-1] else [7]])
    write_header(folder / SINGLE, header, data)


def names(folder, dice):
    header, data, name = some_tensor(folder / SINGLE, dice)
    entry = header.pop(name)
    way = dice.randrange(4)
    if way == 1:
        other = dice.choice([name + "x", name[1:], name.upper(), "", "../" + name, name + "\n", "\ud800", "长江"])
        header[other] = entry
    elif way == 2:                                                      # two names change places
        other = dice.choice([n for n in header if n != "__metadata__" and header[n]["shape"] != entry["shape"]])
        header[name], header[other] = header[other], entry
    elif way == 3:                                                      # a name is there twice
        again = json.dumps({name: dice.choice([entry, entry | {"data_offsets": [0, 2]}])})[1:-1]
        header = json.dumps(header | {name: entry})[:-1] + "," + again + "}"
    write_header(folder / SINGLE, header, data)


def surplus(folder, dice):
    header, data, _ = some_tensor(folder / SINGLE, dice)
    name = dice.choice(["mtp.layers.1.norm.weight", "model.language_model.layers.9.x", "model.language_model.x\ny"])
    header[name] = {"dtype": "BF16", "shape": [3], "data_offsets": [len(data), len(data) + 6]}
    write_header(folder / SINGLE, header, data + bytes(6))


def index(folder, dice):
    content = json.loads((folder / INDEX).read_text())
    listed = content["weight_map"]
    name, secret = dice.choice(list(listed)), folder.parent / "secret.safetensors"
    others = [file for file in sorted(set(listed.values())) if file != listed[name]]
    way = dice.randrange(5)
    if way == 0:
        listed[name] = dice.choice([
            str(secret), "../secret.safetensors", "./../secret.safetensors", "a/../../secret.safetensors", "/dev/zero",
            "/etc/passwd", "", ".", "..", "/", "\0", "x" * 5000, "..\\secret", "no.safetensors", None, 5, 1.5, True, [],
            {}, [listed[name]], "\ud800", "a\nb", others[0], others[1]])
    elif way == 1:
        del listed[name]
    elif way == 2:
        content["weight_map"] = dice.choice([None, [], list(listed), "model.safetensors", 5, {}, {"": ""}])
    elif way == 3:
        (folder / dice.choice([listed[name], *others])).unlink()
    text = json.dumps(content)
    if way == 4:                                                        # a name is there twice
        text = text.replace('"weight_map": {', f'"weight_map": {{"{name}": "{dice.choice(others)}", ')
    (folder / INDEX).write_text(text)


def links(folder, dice):
    """A file of the folder is a link to somewhere else: to a file that would do, to one without end, to itself."""
    file = dice.choice([*folder.glob("part-*"), folder / "config.json", folder / INDEX])
    target = dice.choice([folder.parent / ("secret.json" if file.suffix == ".json" else "secret.safetensors"),
                          "/dev/zero", "/dev/urandom", "/etc/passwd", "/proc/self/mem", "/", file])
    file.unlink()
    file.symlink_to(target)


def other_things(folder, dice):
    """Something else under the file's name: a folder, a pipe, a pickle, a page, much of nothing."""
    file = folder / dice.choice([SINGLE, "config.json"])
    file.unlink()
    way = dice.randrange(6)
    if way == 0:
        file.mkdir()
    elif way == 1:
        os.mkfifo(file)
    elif way == 2:
        torch.save({"model.norm.weight": torch.zeros(24)}, file)
    elif way == 3:
        pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:1"
        file.write_text(dice.choice(["<!DOCTYPE html>" * 20, pointer, "{}", ""]))
    else:
        with open(file, "wb") as out:
            out.write(struct.pack("<Q", dice.choice([2**29, 2**20])) + b"{" if way == 4 else b"")
            out.truncate(2**30)                                         # a gigabyte of zeros that takes no room


def broken_json(folder, dice):
    """JSON that is none, or too deep, too long, of another kind."""
    text = dice.choice([
        "{", "[]", "null", "5", '"x"', '{"a": }', "{'a': 1}", '{"a": 1,}', "[" * 100_000, '{"a":' * 100_000,
        '{"a": [' + "[],[]," * 2_000_000 + "[]]}", '{"a": ' + "9" * 10_000 + "}", '{"a": "\ud800', "\0" * 99, "NaN",
        '{"a": 1}{"a": 1}', '{"__metadata__": 1}', '{"vocab_size": 1, "vocab_size": 1}'])
    plain, wide = (text.encode(code, "surrogatepass") for code in ("utf-8", "utf-16"))
    raw = dice.choice([plain, plain, wide, b"\xff\xfe" + plain])
    if dice.randrange(2):
        (folder / "config.json").write_bytes(raw)
    else:
        (folder / SINGLE).write_bytes(struct.pack("<Q", len(raw)) + raw + header_of(folder / SINGLE)[1])


def numbers(folder, dice):
    """A number in config.json that cannot be, or does not go with the others."""
    content = json.loads((folder / "config.json").read_text())
    text = content["text_config"]
    key = dice.choice([key for key, value in text.items() if type(value) in (int, float)])
    text[key] = dice.choice([value for value in ABSURD if not (key.startswith("mtp_") and value == 0)])
    (folder / "config.json").write_text(json.dumps(content))


def relations(folder, dice):
    content = json.loads((folder / "config.json").read_text())
    text = content["text_config"]
    kinds, rope = text["layer_types"], text["rope_parameters"]
    last, first = kinds[:-1], kinds[0]
    change = dice.choice([
        {"num_key_value_heads": 3}, {"linear_num_key_heads": 3}, {"num_attention_heads": 5},
        {"linear_num_value_heads": 1},
        {"layer_types": last}, {"layer_types": [*kinds, first]}, {"layer_types": kinds[::-1]}, {"layer_types": {}},
        {"layer_types": "full_attention"}, {"layer_types": 4}, {"layer_types": [*last, "mamba"]},
        {"layer_types": [*last, None]}, {"layer_types": [*last, [first]]}, {"layer_types": [*last, "x" * 10_000]},
        {"layer_types": None, "full_attention_interval": dice.choice([-4, 0, 2, 1.0, "4", 10**18])},
        {"num_hidden_layers": 1000, "layer_types": [first] * 1000}, {"num_hidden_layers": 10**9, "layer_types": None},
        {"vocab_size": 2**40, "hidden_size": 2**40}, {"head_dim": 2**39, "num_attention_heads": 2**39},
        {"rope_parameters": []}, {"rope_parameters": "default"}, {"tie_word_embeddings": False},
        {"tie_word_embeddings": dice.choice([0, 1, "true", []])}, {"hidden_act": []}, {"rms_norm_eps": "1e-6"},
        *({"rope_parameters": rope | {"rope_theta": theta}} for theta in (0, -1, "1e7", float("inf"), [])),
        *({"rope_parameters": rope | {"partial_rotary_factor": factor}}
          for factor in (0, 1.01, 2, -0.25, 0.2, 0.4, float("nan")))])
    content["text_config"] = dice.choice([text | change] * 19 + [dice.choice([[], "text", 5, [text]])])
    content["tie_word_embeddings"] = content["tie_word_embeddings"] and "tie_word_embeddings" not in change
    (folder / "config.json").write_text(json.dumps(content))


DAMAGES = [truncated, header_length, offsets, dtype, shape, names, surplus, index, links, other_things, broken_json,
           numbers, relations]
SHARDED = [index, links]


# ---- what the loader may do

class Watch:
    """While it is on: every file that is opened, by Python or by safetensors, and every object out of a pickle."""
    opened, unpickled = None, None

    @classmethod
    def hear(cls, event, args):
        if cls.opened is None:
            return
        if event == "open" and isinstance(args[0], (str, bytes)):
            cls.opened.append(os.fsdecode(args[0]))
        elif event == "pickle.find_class":
            cls.unpickled.append(args)


@pytest.fixture
def watch(monkeypatch):
    if Watch.unpickled is None:
        sys.addaudithook(Watch.hear)                                    # a hook stays for good; it looks away when off
    safe_open = weights.safe_open

    def watched(file, **how):
        Watch.opened.append(str(file))
        return safe_open(file, **how)

    monkeypatch.setattr(weights, "safe_open", watched)
    Watch.opened, Watch.unpickled = [], []
    yield Watch
    Watch.opened = None


def load(folder):
    """Everything that a lesson loads of a folder."""
    model = Model.from_pretrained(folder)
    return model, MTP.from_pretrained(model.cfg, folder)


def said_of(folder, expected=CheckpointError):
    """The sentence about a damaged folder; fails on any other exception, or on none."""
    with pytest.raises(BaseException) as caught:
        load(folder)
    assert type(caught.value) is expected, repr(caught.value)
    return caught.value


def highest_memory():
    """The most memory that this process had since the last call, in bytes; None where Linux's /proc is missing."""
    try:
        status = Path("/proc/self/status").read_text()
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) * 1024


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_one_sentence(whole, tmp_path, watch, damage):
    good, said = whole / ("three" if damage in SHARDED else "one"), set()
    load(good)                                                          # whatever is imported late comes now
    assert {Path(file).parent for file in watch.opened} >= {good}
    folder = whole / "damaged"
    for case in range(CASES):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(good, folder)
        damage(folder, random.Random(f"{damage.__name__} {case}"))
        highest_memory()
        before = highest_memory()
        watch.opened.clear()
        error = said_of(folder)
        opened, text = list(watch.opened), str(error)
        after = highest_memory()
        assert error.__suppress_context__ or error.__context__ is None, case
        assert str(folder) in text and text.isprintable() and len(text) < 700, (case, text)
        assert re.search(r"(: | again|unset)", text.replace(str(folder), "")), (case, text)
        for file in opened:
            assert os.path.realpath(file).startswith(os.path.realpath(folder) + os.sep), (case, file)
        assert watch.unpickled == [], case
        if before:
            assert after - before < 200e6, (case, text, after - before)
        said.add(re.sub(r"\d+", "0", text.replace(str(folder), "")))
    assert len(said) > 1


def test_over_a_thousand_are_tried():
    assert CASES * len(DAMAGES) >= 1000


def test_a_byte_changed_anywhere_never_crashes(whole, tmp_path, watch):
    """One byte of a header or a JSON file is another: a sentence, or a model of the shapes that its config says."""
    folder, sentences = tmp_path / "damaged", 0
    shutil.copytree(whole / "one", folder)
    load(folder)
    for case in range(2 * CASES):
        dice = random.Random(f"byte {case}")
        file = dice.choice([folder / SINGLE, folder / "config.json"])
        raw = bytearray(file.read_bytes())
        kept = bytes(raw)
        end = 8 + struct.unpack("<Q", kept[:8])[0] if file.name == SINGLE else len(kept)
        raw[dice.randrange(end)] = dice.choice([dice.randrange(256), ord(dice.choice('{}[]",:0129-e'))])
        file.write_bytes(raw)
        watch.opened.clear()
        try:
            model, mtp = load(folder)
            assert all(bool(p.isfinite().all()) for p in [*model.parameters(), *mtp.parameters()])
        except CheckpointError as error:
            sentences += 1
            assert str(folder) in str(error) and str(error).isprintable(), case
        assert all(Path(opened).parent == folder for opened in watch.opened), case
        file.write_bytes(kept)
    assert sentences > CASES


def test_the_undamaged_ones_load(whole):
    """The control: all that was damaged above was whole before."""
    for name in ("one", "three"):
        model, mtp = load(whole / name)
        assert model.cfg == load_config(whole / "one")
        assert len(load_weights(whole / name, "mtp.")) == len(mtp.state_dict())
    assert json.loads((whole / "one" / "config.json").read_text())["text_config"] == PITFALL


# ---- no pickle

PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def pickles(source):
    """What in a source could read or write a pickle: imports, torch.load and torch.save, numpy's allow_pickle."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in PICKLES)
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").partition(".")[0] in PICKLES:
                yield node.module
            taken = PICKLES | ({"load", "save"} if node.module == "torch" else set())
            yield from (alias.name for alias in node.names if alias.name in taken)
        elif isinstance(node, ast.Attribute) and node.attr in ("load", "save") and ast.unparse(node.value) == "torch":
            yield ast.unparse(node)
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            yield "allow_pickle"


@pytest.mark.parametrize("source", [
    "import pickle", "from pickle import loads", "import torch\ntorch.load('x')", "torch.save",
    "np.load(f, allow_pickle=True)", "import joblib.numpy_pickle", "from torch import load as read"])
def test_pickles_are_found(source):
    assert list(pickles(source))


def test_nothing_reads_a_pickle():
    """In no notebook, no helper, no script of the recipe."""
    sources = {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8")
               for folder in ("chapters", "qwen_helpers", "qwen_publish", "data/recipe") for file in (ROOT / folder).glob("*.py")}
    sources |= {f"{path.name}, cell {number}": blank_magics(source)
                for path in PATHS for number, source, _ in cells(path, "code")}
    assert {where: found for where, source in sources.items() if (found := list(pickles(source)))} == {}
