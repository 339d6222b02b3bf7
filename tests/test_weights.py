"""qwen_helpers.weights: the layout, the ways a checkpoint may be stored, the faults it may have."""
import json
import math
import struct
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file

from chapters.model import Model
from chapters.mtp import MTP, generate_mtp
from chapters.sample import generate
from checkpoints import PITFALL, REAL, write_checkpoint
from qwen_helpers import find_model, load_config, load_weights, weights
from qwen_helpers.weights import REAL as REAL_NAME
from qwen_helpers.weights import REAL_CONFIG, TINY, CheckpointError, Config, count_vision, expected_shapes, placement

UNTIED = PITFALL | dict(tie_word_embeddings=False)
IDS = torch.tensor([[3, 1, 4, 1, 5]])


def write_config(folder, **content):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def without(text, *keys):
    return {key: value for key, value in text.items() if key not in keys}


def stored(path):
    """Every tensor of a checkpoint, by its full name, read without the course's loader."""
    return {name: value for file in path.glob("*.safetensors") for name, value in load_file(file).items()}


def edit_tensors(path, change):
    """Rewrite model.safetensors after `change(tensors)`."""
    tensors = load_file(path / "model.safetensors")
    tensors = {name: value.clone() for name, value in tensors.items()}
    change(tensors)
    save_file(tensors, path / "model.safetensors")


# ---- config.json

def test_the_layout_of_the_real_model(tmp_path):
    """All 335 names and shapes of Qwen3.5-0.8B, and its parameter counts."""
    cfg = load_config(write_config(tmp_path, model_type="qwen3_5", text_config=REAL, tie_word_embeddings=True))
    lines = (Path(__file__).parent / "qwen3_5_0_8b_tensors.tsv").read_text().splitlines()[1:]
    table = {name: tuple(map(int, shape.split("x"))) for name, shape in (line.split("\t") for line in lines)}
    text, head = expected_shapes(cfg), expected_shapes(cfg, "mtp.")
    assert {"model.language_model." + name: shape for name, shape in text.items()} | \
        {"mtp." + name: shape for name, shape in head.items()} == table and len(table) == 335
    assert sum(map(math.prod, text.values())) == 752_393_024
    assert sum(map(math.prod, head.values())) == 20_452_864
    assert cfg.rotary_dim == 64


FORMS = {
    "nested": dict(model_type="qwen3_5", text_config=PITFALL, vision_config=dict(hidden_size=7),
                   tie_word_embeddings=True),
    "flat": dict(model_type="qwen3_5_text", **PITFALL),
    "flat, text_config null": dict(PITFALL, text_config=None),
    "tied above only": dict(text_config=without(PITFALL, "tie_word_embeddings"), tie_word_embeddings=True),
    "no layer_types": without(PITFALL, "layer_types") | dict(full_attention_interval=4),
    "neither": without(PITFALL, "layer_types"),
    "old rope": without(PITFALL, "rope_parameters") | dict(rope_theta=1e7, partial_rotary_factor=0.25),
    "rope in both": PITFALL | dict(rope_theta=1.0, partial_rotary_factor=1.0),
    "rope split": PITFALL | dict(rope_parameters=dict(rope_theta=1e7), partial_rotary_factor=0.25),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_config_gives_the_same(tmp_path, form):
    cfg = load_config(write_config(tmp_path, **FORMS[form]))
    assert isinstance(cfg, Config)
    assert cfg == load_config(write_config(tmp_path / "plain", **PITFALL))
    assert cfg.layer_types == ("linear_attention",) * 3 + ("full_attention",)
    assert (cfg.rope_theta, cfg.partial_rotary_factor, cfg.rotary_dim) == (1e7, 0.25, 2)
    with pytest.raises(AttributeError):
        cfg.hidden_size = 1


def test_full_attention_interval_of_another_size(tmp_path):
    text = without(PITFALL, "layer_types") | dict(full_attention_interval=2, num_hidden_layers=5)
    assert [kind[0] for kind in load_config(write_config(tmp_path, **text)).layer_types] == list("lflfl")


# ---- find_model

def test_find_model_order(tmp_path, monkeypatch):
    """$QWEN_MODEL, else a downloaded real model, else the embedded one; a broken download does not count."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(weights, "DOWNLOADED", tmp_path / "none")
    monkeypatch.delenv("QWEN_MODEL", raising=False)
    assert find_model() == TINY
    repo = tmp_path / "hub" / ("models--" + REAL_NAME.replace("/", "--"))
    snapshot = write_config(repo / "snapshots" / "abc", **PITFALL)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    assert find_model() == TINY                                         # the config came, the weights did not
    write_checkpoint(snapshot, shards=2)
    assert find_model() == TINY                                         # there is no tokenizer yet
    (snapshot / "tokenizer.json").write_text("{}")
    assert find_model() == snapshot
    (snapshot / "part-1.safetensors").rename(tmp_path / "part-1.safetensors")
    assert find_model() == TINY                                         # one shard of two
    (tmp_path / "part-1.safetensors").rename(snapshot / "part-1.safetensors")
    monkeypatch.setenv("QWEN_MODEL", "")
    assert find_model() == snapshot
    own = write_checkpoint(tmp_path / "own")
    (own / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(weights, "DOWNLOADED", own)
    assert find_model() == own                                          # the course's own download comes first
    monkeypatch.setenv("QWEN_MODEL", str(write_config(tmp_path / "mine", **PITFALL)))
    assert find_model() == tmp_path / "mine"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setenv("QWEN_MODEL", "~/mine")
    assert find_model() == tmp_path / "mine"
    monkeypatch.setenv("QWEN_MODEL", str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match="QWEN_MODEL=.*nowhere has no config.json: set it .* or unset it"):
        find_model()


# ---- where and how a model runs

@pytest.mark.parametrize("there, place", [((), "cpu"), (("cuda",), "cuda"), (("mps",), "mps"), (("cuda", "mps"), "cuda")])
def test_a_large_model_runs_as_its_file_is_and_on_a_gpu(monkeypatch, there, place):
    """fp32 on the CPU for a small model, the file's own bf16 for a large one; a GPU, only if there is one."""
    monkeypatch.delenv("QWEN_DEVICE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in there)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: "mps" in there)
    monkeypatch.setattr(torch, "set_default_device", None)          # choosing sets nothing
    monkeypatch.setattr(torch, "set_num_threads", None)
    assert placement(TINY) == (torch.float32, "cpu")
    assert placement(REAL_CONFIG) == (None, place)
    assert placement(REAL_CONFIG, torch.float32, "cpu") == (torch.float32, "cpu")
    monkeypatch.setenv("QWEN_DEVICE", "cpu")
    assert placement(REAL_CONFIG) == (None, "cpu")
    monkeypatch.setenv("QWEN_DEVICE", "cuda:1")
    assert placement(TINY) == (torch.float32, "cuda:1")


# ---- loading

@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("prefix", ["model.language_model.", "model."])
@pytest.mark.parametrize("text", [PITFALL, UNTIED], ids=["tied", "untied"])
def test_each_tensor_is_loaded_once_and_none_left_over(tmp_path, text, prefix, shards):
    """Prefixes and shards: files with vision tensors; each text and mtp tensor loaded once, none left over."""
    path = write_checkpoint(tmp_path / "model", text, nested=shards == 2, prefix=prefix, shards=shards, vision=3)
    loaded, head, held = load_weights(path), load_weights(path, "mtp."), stored(path)
    full = {name if name == "lm_head.weight" else prefix + name: value for name, value in loaded.items()} \
        | {"mtp." + name: value for name, value in head.items()}
    vision = {name for name in held if name.startswith("model.visual.")}
    assert set(full) == set(held) - vision and count_vision(path) == len(vision) == 3
    assert all(torch.equal(value, held[name]) for name, value in full.items())
    model, mtp = Model.from_pretrained(path, torch.float64), MTP.from_pretrained(load_config(path), path, torch.float64)
    assert sum(p.numel() for p in model.parameters()) == sum(value.numel() for value in loaded.values())
    assert sum(p.numel() for p in mtp.parameters()) == sum(value.numel() for value in head.values())


def test_control_a_tensor_left_over(tmp_path):
    """A file with one tensor more than the config asks for is of another model: it is refused."""
    for name, part in [("model.language_model.layers.4.mlp.up_proj.weight", "model."),
                       ("model.language_model.layers.0.mlp.up_proj.bias", "model."), ("lm_head.bias", "model."),
                       ("mtp.layers.1.mlp.up_proj.weight", "mtp."), ("mtp.embed_tokens.weight", "mtp.")]:
        path = write_checkpoint(tmp_path / name)
        edit_tensors(path, lambda tensors: tensors.update({name: torch.zeros(2)}))
        with pytest.raises(CheckpointError, match=f"model.safetensors holds {name}, .*of different models"):
            load_weights(path, part)


def perplexity(model, ids):
    log_p = model(ids).log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])
    return math.exp(-float(log_p.detach().mean()))


def test_a_tied_head_is_the_embedding(tmp_path):
    """Tied head missing: perplexity equal to the vocabulary size gives it away."""
    model = Model.from_pretrained(write_checkpoint(tmp_path / "model"), torch.float64)
    ids = torch.cat([IDS, torch.tensor([generate(model, IDS, 30)])], dim=1)[:, 4:]
    assert model.lm_head.weight is model.embed_tokens.weight
    assert perplexity(model, ids) < 29 / 2
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(29, 24, dtype=torch.float64))     # the control
    assert perplexity(model, ids) == pytest.approx(29)


def test_an_untied_head_is_read(tmp_path):
    """An untied head ignored: its logits are the final hidden times the file's own lm_head.weight."""
    path = write_checkpoint(tmp_path / "model", UNTIED)
    model, held = Model.from_pretrained(path, torch.float64), stored(path)
    hidden = model.hidden(IDS)
    assert torch.equal(model.embed_tokens.weight, held["model.language_model.embed_tokens.weight"])
    torch.testing.assert_close(model(IDS), hidden @ held["lm_head.weight"].T)
    tied = hidden @ held["model.language_model.embed_tokens.weight"].T                      # the control
    assert float((model(IDS) - tied).abs().max()) > 0.1


def test_no_draft_head_in_the_file(tmp_path):
    """Config says one MTP layer and the file has none: a named error when it is asked for; plain decoding works."""
    path = write_checkpoint(tmp_path / "model", mtp=False)
    model = Model.from_pretrained(path)
    assert len(generate(model, IDS, 5)) == 5
    with pytest.raises(CheckpointError, match=r"has no mtp\.\* tensors.*plain decoding works.*needs a checkpoint with"):
        MTP.from_pretrained(model.cfg, path)


@pytest.mark.parametrize("layers", [0, 2])
def test_control_a_head_that_the_config_does_not_describe(tmp_path, layers):
    """The file has a head and the config says none, or two layers: no head of some other size is built."""
    path = write_checkpoint(tmp_path / "model", PITFALL | dict(mtp_num_hidden_layers=layers))
    assert len(generate(Model.from_pretrained(path), IDS, 5)) == 5
    with pytest.raises(CheckpointError, match=f"{layers} layers.*mtp_num_hidden_layers.*plain decoding works"):
        load_weights(path, "mtp.")


def header_of(file):
    """The header of a safetensors file, read by hand: name -> dtype, shape, data_offsets."""
    with open(file, "rb") as raw:
        return json.loads(raw.read(struct.unpack("<Q", raw.read(8))[0]))


def lie_as_in_the_file(tensors, file):
    """True if the tensors lie in memory at the distances that they have in the file: mapped, not copied."""
    header = header_of(file)
    starts = {tensor.data_ptr() - header[name]["data_offsets"][0] for name, tensor in tensors.items()}
    return len(starts) == 1


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_files_own_dtype_stays_mapped(tmp_path, monkeypatch, dtype):
    """bf16 weights asked for as they are, or of a large model: nothing is copied, by the loader, Model or MTP."""
    monkeypatch.setattr(weights, "SMALL", 0)
    monkeypatch.setenv("QWEN_DEVICE", "cpu")
    path = write_checkpoint(tmp_path / "model", dtype=torch.bfloat16)
    file, prefix = path / "model.safetensors", "model.language_model."
    loaded = load_weights(path, dtype=dtype)
    assert lie_as_in_the_file({prefix + name: value for name, value in loaded.items()}, file)
    model, mtp = Model.from_pretrained(path, dtype), MTP.from_pretrained(load_config(path), path, dtype)
    assert {p.dtype for p in [*model.parameters(), *mtp.parameters()]} == {torch.bfloat16}
    assert lie_as_in_the_file({prefix + name: value for name, value in model.named_parameters()}, file)
    assert lie_as_in_the_file({"mtp." + name: value for name, value in mtp.named_parameters()}, file)
    copied = {name: value.clone() for name, value in loaded.items()}                        # the control
    assert not lie_as_in_the_file({prefix + name: value for name, value in copied.items()}, file)


def test_a_dtype_converts(tmp_path):
    path = write_checkpoint(tmp_path / "model", dtype=torch.bfloat16)
    held = stored(path)
    for name, value in load_weights(path, dtype=torch.float32).items():
        assert value.dtype == torch.float32
        assert torch.equal(value, held["model.language_model." + name].float())


def test_the_whole_model_in_bf16(tmp_path):
    """A smoke test: fp32's logits roughly, S and window in fp32, and every way to generate runs."""
    path = write_checkpoint(tmp_path / "model", dtype=torch.bfloat16)
    wide, model = Model.from_pretrained(path), Model.from_pretrained(path, torch.bfloat16)
    mtp = MTP.from_pretrained(model.cfg, path, torch.bfloat16)
    ids = torch.randint(29, (1, 70), generator=torch.Generator().manual_seed(0))
    logits = model(ids)
    assert logits.dtype == torch.bfloat16 and bool(logits.isfinite().all())
    agree = (logits.argmax(-1) == wide(ids).argmax(-1)).float().mean()
    assert float((logits - wide(ids)).abs().mean()) < 0.15 and agree > 0.8
    assert len(generate(model, ids, 10)) == len(generate_mtp(model, mtp, ids, 10)[0]) == 10
    assert len(generate(model, ids, 10, temperature=1.0)) == 10


# ---- what may be wrong with a folder, and the one sentence about it

def cut_file(path, keep):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])


def edit_index(path, change):
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index["weight_map"])
    file.write_text(json.dumps(index))


def edit_config(path, **changes):
    write_config(path, **{key: value for key, value in (PITFALL | changes).items() if value is not None})


NORM, FIRST = "model.language_model.norm.weight", "model.language_model.embed_tokens.weight"
FAULTS = {      # name: (shards, what happens to the folder, what the sentence must name)
    "no config": (1, lambda p: (p / "config.json").unlink(), ["config.json is missing", "give the folder"]),
    "broken config": (1, lambda p: (p / "config.json").write_text("{"), ["config.json is not valid JSON", "again"]),
    "config a list": (1, lambda p: (p / "config.json").write_text("[]"), ["config.json is not valid JSON", "again"]),
    "config not text": (1, lambda p: (p / "config.json").write_bytes(b"\xff\xfe\x00"), ["not valid JSON", "again"]),
    "other model": (1, lambda p: write_config(p, model_type="llama", vocab_size=9),
                    ["config.json does not say hidden_size", "Qwen3.5"]),
    "unknown layer": (1, lambda p: edit_config(p, layer_types=["linear_attention"] * 3 + ["sliding_attention"]),
                      ["config.json", "unknown type 'sliding_attention'", "full_attention"]),
    "layer count": (1, lambda p: edit_config(p, num_hidden_layers=5), ["config.json", "4 layer_types", "5 layers"]),
    "more layers than the file": (1, lambda p: edit_config(p, num_hidden_layers=5, layer_types=None),
                                  ["no tensor model.language_model.layers.4.", "config.json asks for", "again"]),
    "fewer layers than the file": (1, lambda p: edit_config(p, num_hidden_layers=3, layer_types=None),
                                   ["model.safetensors holds model.language_model.layers.3.", "different models"]),
    "another activation": (1, lambda p: edit_config(p, hidden_act="gelu"), ["config.json", "hidden_act = 'gelu'"]),
    "another rope": (1, lambda p: edit_config(p, rope_parameters=PITFALL["rope_parameters"] | dict(rope_type="yarn")),
                     ["config.json", "rope_type = 'yarn'", "'default'"]),
    "no weights": (1, lambda p: (p / "model.safetensors").unlink(),
                   ["neither model.safetensors nor model.safetensors.index.json", "download"]),
    "truncated": (1, lambda p: cut_file(p, -1000), ["model.safetensors is damaged or cut short", "download it again"]),
    "empty file": (1, lambda p: cut_file(p, 0), ["model.safetensors is damaged or cut short", "download it again"]),
    "cut in the header": (1, lambda p: cut_file(p, 500), ["model.safetensors is damaged or cut short", "again"]),
    "absurd header": (1, lambda p: (p / "model.safetensors").write_bytes(b"\xff" * 8 + b"{}" * 50),
                      ["model.safetensors is damaged or cut short", "download it again"]),
    "a web page": (1, lambda p: (p / "model.safetensors").write_text("<!DOCTYPE html>" * 20),
                   ["model.safetensors is damaged or cut short", "download it again"]),
    "missing tensor": (1, lambda p: edit_tensors(p, lambda t: t.pop(NORM)), [f"no tensor {NORM}", "download"]),
    "wrong shape": (1, lambda p: edit_tensors(p, lambda t: t.update({NORM: torch.zeros(23)})),
                    ["model.safetensors", f"{NORM} has shape (23,)", "asks for (24,)", "different models"]),
    "missing shard": (2, lambda p: (p / "part-1.safetensors").unlink(),
                      ["part-1.safetensors is missing", "it holds model.", "download the model again"]),
    "broken index": (2, lambda p: (p / "model.safetensors.index.json").write_text("{,"),
                     ["model.safetensors.index.json is not valid JSON", "again"]),
    "index without map": (2, lambda p: (p / "model.safetensors.index.json").write_text("{}"),
                          ["no tensor model.", "again"]),
    "index lacks a tensor": (2, lambda p: edit_index(p, lambda m: m.pop(NORM)), [f"no tensor {NORM}", "again"]),
    "index names what its file lacks": (2, lambda p: edit_index(p, lambda m: m.update({FIRST: "part-1.safetensors"})),
                                        [f"part-1.safetensors does not give {FIRST}", "download it again"]),
    "truncated shard": (2, lambda p: (p / "part-1.safetensors").write_bytes(b"short"),
                        ["part-1.safetensors is damaged or cut short", "again"]),
}


def sentence(path, part="model."):
    """What the loader says about a folder: one line, and no second traceback behind it."""
    with pytest.raises(CheckpointError) as caught:
        load_weights(path, part)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    return str(caught.value)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_clear_sentence(tmp_path, fault):
    """It names the file, the tensor where there is one, and what to do."""
    shards, spoil, phrases = FAULTS[fault]
    path = write_checkpoint(tmp_path / "model", shards=shards)
    load_weights(path)
    spoil(path)
    said = sentence(path)
    assert str(path) in said
    for phrase in phrases:
        assert phrase in said


def test_a_missing_folder(tmp_path):
    assert "config.json is missing: give the folder of a Qwen3.5 checkpoint" in sentence(tmp_path / "nowhere")


@pytest.mark.parametrize("outside", ["{0}/secret.safetensors", "../secret.safetensors", "sub/../../secret.safetensors",
                                     "sub/secret.safetensors", "", "..", None, 5])
def test_an_index_must_not_lead_outside_the_folder(tmp_path, outside):
    """Absolute paths, `..` and folders in the index of a checkpoint from elsewhere are refused, not read."""
    path = write_checkpoint(tmp_path / "model", shards=2)
    (path / "sub").mkdir()
    for secret in (tmp_path, path / "sub"):
        save_file({NORM: torch.zeros(24)}, secret / "secret.safetensors")
    named = outside.format(tmp_path) if isinstance(outside, str) else outside
    edit_index(path, lambda names: names.update({NORM: named}))
    assert NORM in sentence(path)
    if outside and outside != "..":
        assert f"index.json looks for {NORM} in {named!r}" in sentence(path)


def linked(folder, blob):
    """A sharded checkpoint of which one shard lies at `blob`, with a link in its place."""
    path = write_checkpoint(folder, shards=2)
    blob.parent.mkdir(exist_ok=True)
    (path / "part-1.safetensors").rename(blob)
    try:
        (path / "part-1.safetensors").symlink_to(blob)
    except OSError:
        pytest.skip("this system makes no links")
    return path


def test_the_hugging_face_cache_may_link_to_its_blobs(tmp_path):
    repo = tmp_path / "models--Qwen--Qwen3.5-0.8B"
    path = linked(repo / "snapshots" / "abc", repo / "blobs" / "1f2e3d")
    assert set(load_weights(path)) == set(expected_shapes(load_config(path)))


def test_a_link_out_of_the_folder_is_not_followed(tmp_path):
    """A folder from elsewhere can bring links along; what they lead to is not read."""
    path = linked(tmp_path / "model", tmp_path / "blob")
    assert "part-1.safetensors is a link out of the model folder, to" in sentence(path)
    (path / "config.json").rename(tmp_path / "config.json")
    (path / "config.json").symlink_to(tmp_path / "config.json")
    assert "config.json is a link out of the model folder, to" in sentence(path)
