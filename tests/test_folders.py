"""Model folders as people have them: saved by transformers and by others, tuned, merged, quantised, half there.

Each gives what transformers makes of the same folder, or one sentence that says what it is and what to do.
"""
import itertools
import json
import os
import shutil

import huggingface_hub.constants
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file, save_model

from chapters.model import Model
from chapters.mtp import MTP, generate_mtp
from checkpoints import PITFALL, write_checkpoint
from qwen_helpers import find_model, load_config, load_weights, pack, weights
from qwen_helpers.machine import check_machine
from qwen_helpers.weights import (REAL, TINY, CheckpointError, count_vision, has_head, is_whole, load_tokenizer,
                                  tensor_files)

TEXT = PITFALL | dict(head_dim=16)                          # RoPE turns 4 dimensions: its theta counts
UNTIED = TEXT | dict(tie_word_embeddings=False)
EYE = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=24, patch_size=4,
           temporal_patch_size=2, num_position_embeddings=16, spatial_merge_size=2)
IDS = torch.arange(24)[None] % 29
SINGLE, INDEX, PREFIX = "model.safetensors", "model.safetensors.index.json", "model.language_model."
HEAD, EMBEDDING = "lm_head.weight", PREFIX + "embed_tokens.weight"
KINDS = {"text": transformers.Qwen3_5ForCausalLM, "whole": transformers.Qwen3_5ForConditionalGeneration}
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1746882752\n"


@pytest.fixture
def large(monkeypatch):
    """Models count as large: they run on this CPU in the dtypes of their files."""
    monkeypatch.setattr(weights, "SMALL", 0)
    monkeypatch.setenv("QWEN_DEVICE", "cpu")


def new(folder, text=TEXT, **how):
    """A random checkpoint with a config that transformers reads too."""
    write_checkpoint(folder, text, **{"dtype": torch.float32} | how)
    edit_config(folder, lambda c: c.update(vision_config=EYE) if "text_config" in c else None)
    return folder


def edit_config(folder, change):
    content = json.loads((folder / "config.json").read_text())
    change(content)
    (folder / "config.json").write_text(json.dumps(content))


def edit_tensors(folder, change, file=SINGLE):
    """Rewrite a file of tensors by `change(name, tensor) -> {name: tensor}`."""
    old = load_file(folder / file)
    save_file({name: value.clone().contiguous() for pair in old.items() for name, value in change(*pair).items()},
              folder / file, metadata={"format": "pt"})


def theirs(kind, folder, dtype=torch.float32):
    with torch.no_grad():
        return kind.from_pretrained(folder, dtype=dtype).eval()(input_ids=IDS).logits


def same(folder, kind, dtype=torch.float32):
    """Our logits of a folder and transformers' are equal but for rounding."""
    ours, other = Model.from_pretrained(folder, dtype)(IDS), theirs(kind, folder, dtype)
    assert ours.dtype == other.dtype == dtype
    rounding = 1e-5 if dtype == torch.float32 else 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(ours, other, rtol=0, atol=rounding * float(other.abs().max()))


def sentence(call):
    """The one sentence about a folder."""
    with pytest.raises(CheckpointError) as caught:
        call()
    said = str(caught.value)
    assert said.isprintable() and 20 < len(said) < 500 and ": " in said
    return said


# ---- as transformers saves it

@pytest.mark.parametrize("shards", [False, True], ids=["one", "shards"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_what_save_pretrained_writes(tmp_path, kind, dtype, tied, shards):
    """Random models of both classes: the logits of transformers, in the file's dtype and in fp32."""
    torch.manual_seed(0)
    text = {key: value for key, value in TEXT.items() if not key.startswith("mtp")} | dict(tie_word_embeddings=tied)
    cfg = transformers.Qwen3_5TextConfig(**text)
    if kind == "whole":
        cfg = transformers.Qwen3_5Config(text_config=text, vision_config=EYE, tie_word_embeddings=tied)
    model = KINDS[kind](cfg)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.to(dtype).save_pretrained(tmp_path, **({"max_shard_size": "40KB"} if shards else {}))
    assert (tmp_path / INDEX).is_file() == shards and load_config(tmp_path).tie_word_embeddings == tied
    for run in {dtype, torch.float32}:
        same(tmp_path, KINDS[kind], run)
    assert not has_head(tmp_path) and (count_vision(tmp_path) > 0) == (kind == "whole")


@pytest.mark.parametrize("kind", KINDS)
def test_a_save_without_a_head(tmp_path, kind):
    """AutoModel's: names begin with `language_model.` or with nothing, and the head is the embedding."""
    whole = new(tmp_path / "whole", nested=kind == "whole", vision=2, mtp=False,
                prefix=PREFIX if kind == "whole" else "model.")
    bare = shutil.copytree(whole, tmp_path / "bare")
    edit_tensors(bare, lambda name, value: {name.removeprefix("model."): value})
    assert torch.equal(Model.from_pretrained(bare)(IDS), Model.from_pretrained(whole)(IDS))
    assert count_vision(bare) == 2
    for place in (lambda c: c, lambda c: c.get("text_config", c)):
        edit_config(bare, lambda c: place(c).update(tie_word_embeddings=False))
    assert "no tensor lm_head.weight" in (said := sentence(lambda: load_weights(bare)))
    assert "save it again with its head, or set tie_word_embeddings to true" in said


@pytest.mark.parametrize("kind", KINDS)
def test_a_tied_model_saved_under_the_name_of_its_head(tmp_path, kind):
    """safetensors' save_model keeps one of two equal tensors, and that is lm_head.weight."""
    new(tmp_path, nested=kind == "whole", prefix=PREFIX if kind == "whole" else "model.", mtp=False)
    expected = Model.from_pretrained(tmp_path)(IDS)
    save_model(KINDS[kind].from_pretrained(tmp_path), str(tmp_path / SINGLE))
    assert EMBEDDING not in load_file(tmp_path / SINGLE)
    model = Model.from_pretrained(tmp_path)
    assert model.lm_head.weight is model.embed_tokens.weight and torch.equal(model(IDS), expected)


# ---- is the head the embedding?

FLAGS = list(itertools.product((True, False, None), repeat=2))


@pytest.mark.parametrize("top, inner", FLAGS)
@pytest.mark.parametrize("head", ["equal", "different", "absent"])
def test_a_head_is_tied_as_in_transformers(tmp_path, head, top, inner):
    """Whatever config.json says above and in text_config: a head that differs is used, a missing one is not made up."""
    folder = new(tmp_path / "model", UNTIED, mtp=False)
    if head != "different":
        embedding = load_file(folder / SINGLE)[EMBEDDING]
        edit_tensors(folder, lambda name, value: {name: value} if name != HEAD else
                     {} if head == "absent" else {HEAD: embedding})

    def say(c):
        for place, flag in ((c, top), (c["text_config"], inner)):
            place.pop("tie_word_embeddings")
            place.update({} if flag is None else {"tie_word_embeddings": flag})

    edit_config(folder, say)
    tied = head != "different" and bool(top or inner)
    if head == "absent" and not tied:
        assert "no tensor lm_head.weight" in sentence(lambda: Model.from_pretrained(folder))
        return
    model = Model.from_pretrained(folder)
    assert load_config(folder).tie_word_embeddings == model.cfg.tie_word_embeddings == tied
    assert (model.lm_head.weight is model.embed_tokens.weight) == tied
    if head != "absent" or top:
        same(folder, transformers.Qwen3_5ForConditionalGeneration)
    if head != "absent" or inner:
        same(folder, transformers.Qwen3_5ForCausalLM)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_head_in_another_dtype_than_the_embedding_is_compared_by_its_numbers(tmp_path, value):
    folder = new(tmp_path / "model", mtp=False, dtype=torch.bfloat16)
    head = load_file(folder / SINGLE)[EMBEDDING].float()
    head[-1, -1] += value
    edit_tensors(folder, lambda name, value: {name: value} | ({HEAD: head} if name == EMBEDDING else {}))
    assert load_config(folder).tie_word_embeddings == (value == 0)
    same(folder, transformers.Qwen3_5ForConditionalGeneration)


# ---- config.json

YARN = dict(factor=4.0, original_max_position_embeddings=64)
STRETCHED = {       # what is wrong with RoPE: (what text_config says, what the top level says, what must be named)
    "rope_type": (dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e7, **YARN)), {}, "rope_type = 'yarn'"),
    "type": (dict(rope_parameters=dict(type="yarn", rope_theta=1e7, **YARN)), {}, "type = 'yarn' in rope_parameters"),
    "both": (dict(rope_parameters=dict(rope_type="default", type="linear", rope_theta=1e7)), {}, "type = 'linear'"),
    "beside": (dict(rope_scaling=dict(type="yarn", **YARN)), {}, "type = 'yarn' in rope_scaling"),
    "beside theta": (dict(rope_parameters=None, rope_theta=1e7, rope_scaling=dict(rope_type="dynamic", factor=2.0)), {},
                     "rope_type = 'dynamic' in rope_scaling"),
    "plain": (dict(rope_type="longrope"), {}, "rope_type = 'longrope'"),
    "plain type": (dict(type="su"), {}, "type = 'su'"),
    "above": ({}, dict(rope_scaling=dict(rope_type="llama3", factor=8.0)), "rope_type = 'llama3' in rope_scaling"),
    "above, new": ({}, dict(rope_parameters=dict(rope_type="yarn", **YARN)), "rope_type = 'yarn' in rope_parameters"),
    "by layer": (dict(rope_parameters=dict(full_attention=dict(rope_type="yarn", rope_theta=1e7, **YARN))), {},
                 "rope_type = 'yarn' in rope_parameters"),
}


@pytest.mark.parametrize("name", STRETCHED)
def test_stretched_rope_is_refused_wherever_it_stands(tmp_path, name):
    inner, top, words = STRETCHED[name]
    folder = new(tmp_path / "model", mtp=False)
    load_config(folder)
    edit_config(folder, lambda c: (c["text_config"].update(inner), c.update(top)))
    said = sentence(lambda: load_config(folder))
    assert str(folder / "config.json") in said and words in said and "only 'default'; take the entry out" in said


PLAIN = {           # what text_config says instead of rope_parameters
    "nothing": {},
    "theta alone": dict(rope_theta=1e7),
    "factor alone": dict(partial_rotary_factor=0.5),
    "parameters without a factor": dict(rope_parameters=dict(rope_theta=1e7, rope_type="default")),
    "parameters without a theta": dict(rope_parameters=dict(partial_rotary_factor=0.5)),
    "split": dict(rope_theta=1e6, rope_parameters=dict(partial_rotary_factor=0.5)),
    "said twice": dict(rope_theta=10.0, partial_rotary_factor=0.5, rope_parameters=dict(rope_theta=1e6)),
    "scaling null": dict(rope_theta=1e7, rope_scaling=None),
    "scaling default": dict(rope_theta=1e7, rope_scaling=dict(type="default")),
    "scaling with sections": dict(rope_theta=1e7, rope_scaling=dict(rope_type="default", mrope_section=[1, 1, 0])),
    "scaling says all": dict(rope_scaling=dict(rope_type="default", rope_theta=1e6, partial_rotary_factor=0.5)),
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_rope_in_every_form_is_that_of_transformers(tmp_path, name):
    folder = new(tmp_path / "model", mtp=False)
    edit_config(folder, lambda c: (c["text_config"].pop("rope_parameters"), c["text_config"].update(PLAIN[name])))
    same(folder, transformers.Qwen3_5ForConditionalGeneration)


@pytest.mark.parametrize("said", [dict(rope_scaling=dict(type="default")), dict(rope_scaling=dict(type="mrope")),
                                  dict(rope_parameters=dict(full_attention=TEXT["rope_parameters"]))])
def test_plain_rope_in_forms_that_transformers_does_not_read(tmp_path, said):
    """A scaling that scales nothing beside rope_parameters, the old name of sections, and one entry a type of layer."""
    folder = new(tmp_path / "model", mtp=False)
    plain = load_config(folder)
    edit_config(folder, lambda c: c["text_config"].update(said))
    assert load_config(folder) == plain


def test_rope_that_stands_where_transformers_does_not_look(tmp_path):
    folder = new(tmp_path / "model", mtp=False)
    edit_config(folder, lambda c: c.update(rope_theta=1e7, rope_parameters=c["text_config"].pop("rope_parameters")))
    said = sentence(lambda: load_config(folder))
    assert "not in text_config, where other programs look for it: move it there" in said


def test_a_config_that_does_not_speak_of_a_draft_head_may_have_one(tmp_path):
    """transformers' own config does not, and a head may be put beside what it saves."""
    folder = new(tmp_path / "model")
    expected = load_weights(folder, "mtp.")
    edit_config(folder, lambda c: c["text_config"].pop("mtp_num_hidden_layers"))
    assert load_weights(folder, "mtp.").keys() == expected.keys()


@pytest.mark.parametrize("key, value, kept", [
    ("quantization_config", dict(quant_method="fp8", weight_block_size=[128, 128]), "'quant_method': 'fp8'"),
    ("quantization_config", dict(quant_method="compressed-tensors"), "compressed-tensors"),
    ("quantization", dict(group_size=64, bits=4), "'bits': 4")])
@pytest.mark.parametrize("nested", [True, False])
def test_a_config_that_says_quantised(tmp_path, key, value, kept, nested):
    folder = new(tmp_path / "model")
    edit_config(folder, lambda c: (c["text_config"] if nested else c).update({key: value}))
    said = sentence(lambda: load_config(folder))
    assert f"config.json says {key} = " in said and kept in said and "take a version without, or the entry out" in said


@pytest.mark.parametrize("name", ["config.json", INDEX, "tokenizer.json"])
def test_a_byte_order_mark_is_read_past(tmp_path, name):
    folder = new(tmp_path / "model", shards=2)
    shutil.copy(TINY / "tokenizer.json", folder)
    (folder / name).write_bytes(b"\xef\xbb\xbf" + (folder / name).read_bytes())
    load_weights(folder)
    assert load_tokenizer(folder).encode("Hi").ids == load_tokenizer(TINY).encode("Hi").ids


def test_a_tokenizer_cuts_and_pads_nothing(tmp_path):
    """Training leaves its truncation and padding in tokenizer.json."""
    trained = load_tokenizer(TINY)
    trained.enable_truncation(4)
    trained.enable_padding(length=4, pad_id=7)
    trained.save(str(tmp_path / "tokenizer.json"))
    tokenizer, whole = load_tokenizer(tmp_path), load_tokenizer(TINY)
    for text in ("Hi", "Which is larger, 12 or 45? " * 30):
        assert tokenizer.encode(text).ids == whole.encode(text).ids
    assert [len(row.ids) for row in tokenizer.encode_batch(["Hi", "Hi there, you"])] == \
        [len(row.ids) for row in whole.encode_batch(["Hi", "Hi there, you"])]


# ---- which files hold the model

@pytest.mark.parametrize("shards", ["gone", "there"])
def test_an_old_index_beside_the_one_file(tmp_path, shards):
    """Saved in shards, then whole into the same folder: transformers reads the one file, and so do we."""
    folder = new(tmp_path / "model", shards=3, mtp=False)
    old = load_weights(folder)
    fresh = new(tmp_path / "fresh", seed=1, mtp=False)
    for file in folder.glob("part-*") if shards == "gone" else ():
        file.unlink()
    shutil.copy(fresh / SINGLE, folder)
    assert set(tensor_files(folder).values()) == {folder / SINGLE}
    found, expected = load_weights(folder), load_weights(fresh)
    assert all(torch.equal(found[name], expected[name]) for name in expected) and old.keys() == found.keys()
    same(folder, transformers.Qwen3_5ForConditionalGeneration)


NAMES = ["mtp.safetensors", "model-mtp.safetensors", "model-mtp-of-00002.safetensors", "draft.safetensors"]


def move_head(folder, name, index=False):
    """Put the mtp.* tensors of a folder into a file of their own, and the others into one that an index names."""
    save_file({n: v for n, v in load_file(folder / SINGLE).items() if n.startswith("mtp.")}, folder / name)
    edit_tensors(folder, lambda n, v: {} if n.startswith("mtp.") else {n: v})
    if index:
        rest = "model-00001-of-00002.safetensors"
        (folder / SINGLE).rename(folder / rest)
        (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(load_file(folder / rest), rest)}))


@pytest.mark.parametrize("index", [False, True], ids=["one file", "index"])
@pytest.mark.parametrize("name", NAMES)
def test_a_draft_head_in_a_file_that_no_index_names(tmp_path, name, index):
    folder = new(tmp_path / "model")
    expected = load_weights(folder, "mtp.")
    move_head(folder, name, index)
    found = load_weights(folder, "mtp.")
    assert has_head(folder) and all(torch.equal(found[n], expected[n]) for n in expected)
    assert folder / name in tensor_files(folder).values() and len(load_weights(folder)) == 55


def test_a_draft_head_that_the_index_leaves_out_of_its_shards(tmp_path):
    folder = new(tmp_path / "model", shards=2)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = {n: file for n, file in index["weight_map"].items() if not n.startswith("mtp.")}
    (folder / INDEX).write_text(json.dumps(index))
    assert has_head(folder) and len(load_weights(folder, "mtp.")) == 15


def test_a_head_in_the_models_own_files_is_the_one_that_counts(tmp_path):
    """Old shards that mix it with an old model, or a second head beside the first, are left alone."""
    folder, other = new(tmp_path / "model"), new(tmp_path / "other", seed=1)
    expected = load_weights(folder, "mtp.")
    move_head(other, "mtp.safetensors")
    shutil.copy(other / "mtp.safetensors", folder)
    assert all(torch.equal(value, expected[n]) for n, value in load_weights(folder, "mtp.").items())
    bare = new(tmp_path / "bare", mtp=False)
    shutil.copy(new(tmp_path / "old", seed=2) / SINGLE, bare / "model-00001-of-00001.safetensors")
    assert not has_head(bare)


def test_two_heads_beside_a_model_are_one_too_many(tmp_path):
    folder = new(tmp_path / "model")
    move_head(folder, "mtp.safetensors")
    shutil.copy(folder / "mtp.safetensors", folder / "draft.safetensors")
    assert "both hold mtp." in (said := sentence(lambda: load_weights(folder, "mtp."))) and "keep one" in said
    assert len(load_weights(folder)) == 55                              # plain decoding works


def test_a_damaged_head_beside_a_model(tmp_path):
    folder = new(tmp_path / "model")
    move_head(folder, "mtp.safetensors")
    (folder / "mtp.safetensors").write_bytes(b"short")
    assert "mtp.safetensors is damaged or cut short" in sentence(lambda: load_weights(folder, "mtp."))
    assert len(load_weights(folder)) == 55


def adapter(folder, config=True):
    save_file({"base_model.model.x.lora_A.weight": torch.ones(2, 2)}, folder / "adapter_model.safetensors")
    if config:
        (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("mtp", [True, False])
def test_an_adapter_beside_a_whole_model_is_left_alone(tmp_path, shards, mtp):
    folder = new(tmp_path / "model", shards=shards, mtp=mtp)
    before = tensor_files(folder)
    adapter(folder)
    assert tensor_files(folder) == before and has_head(folder) == mtp and len(load_weights(folder)) == 55


# ---- one dtype for matrices

PARTS = ["A_log", "dt_bias", "linear_attn.norm.weight", "conv1d.weight", "q_norm.weight", "input_layernorm.weight",
         "mtp.norm.weight", "in_proj_a.weight", "q_proj.weight", "mtp.fc.weight", "embed_tokens.weight"]


def recast(folder, dtype, *ends):
    edit_tensors(folder, lambda name, value: {name: value.to(dtype) if name.endswith(ends) else value})


@pytest.mark.parametrize("most, other", [
    (torch.bfloat16, torch.float32), (torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16),
    (torch.float16, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float64),
    (torch.float64, torch.float32)], ids=str)
def test_any_part_may_have_another_dtype(tmp_path, large, most, other):
    """A merged adapter, a head trained apart, norms kept fine: all runs, and matrices have the dtype of most."""
    for part in PARTS:
        folder = new(tmp_path / part, dtype=most)
        recast(folder, other, part)
        model = Model.from_pretrained(folder)
        mtp = MTP.from_pretrained(model.cfg, folder)
        named = dict(model.named_parameters()) | {"mtp." + name: value for name, value in mtp.named_parameters()}
        assert {value.dtype for value in named.values() if value.dim() == 2} == {most}, part
        assert model(IDS).dtype == most and bool(model(IDS).isfinite().all()), part
        assert len(generate_mtp(model, mtp, IDS, 6)[0]) == 6 and bool(pack(model)(IDS).isfinite().all()), part
        kept = {value.dtype for name, value in named.items() if name.endswith(part) and value.dim() != 2}
        assert kept <= {other} or torch.float64 in (most, other), part


def test_the_dtype_of_a_head_is_that_of_the_model_beside_it(tmp_path):
    folder = new(tmp_path / "model", dtype=torch.bfloat16)
    edit_tensors(folder, lambda name, value: {name: value.float() if name.startswith("mtp.") else value})
    dtypes = {value.dtype for value in load_weights(folder, "mtp.").values() if value.dim() == 2}
    assert dtypes == {torch.bfloat16}


def test_what_needs_no_other_dtype_is_not_copied(tmp_path):
    """Matrices of most, and vectors of any dtype, stay mapped; so does the published file with its fp32 vectors."""
    folder = new(tmp_path / "model", dtype=torch.bfloat16)
    recast(folder, torch.float32, "A_log", "linear_attn.norm.weight", "q_proj.weight")
    with open(folder / SINGLE, "rb") as raw:
        header = json.loads(raw.read(int.from_bytes(raw.read(8), "little")))
    loaded = load_weights(folder)
    starts = {name: value.data_ptr() - header[PREFIX + name]["data_offsets"][0] for name, value in loaded.items()}
    copied = [name for name in starts if name.endswith("q_proj.weight")]
    mapped = {start for name, start in starts.items() if name not in copied}
    assert len(mapped) == 1 and len(copied) == 1 and not mapped & {starts[name] for name in copied}
    assert sum(value.dtype == torch.float32 for value in loaded.values()) == 6


# ---- the Hugging Face cache

@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(weights, "DOWNLOADED", tmp_path / "none")
    monkeypatch.delenv("QWEN_MODEL", raising=False)
    repo = tmp_path / "hub" / ("models--" + REAL.replace("/", "--"))
    old = new(repo / "snapshots" / "0ld", shards=2)
    (old / "tokenizer.json").write_text("{}")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("n3w")
    return repo / "snapshots"


@pytest.mark.parametrize("there", ["nothing", "config.json", "a shard of two", "all but the tokenizer"])
def test_an_older_whole_revision_serves_where_the_newest_is_not_whole(cache, capsys, there):
    if there == "config.json":
        (cache / "n3w").mkdir()
        shutil.copy(cache / "0ld" / "config.json", cache / "n3w")
    elif there != "nothing":
        new(cache / "n3w", shards=2)
        if "shard" in there:
            (cache / "n3w" / "part-1.safetensors").unlink()
    assert find_model() == cache / "0ld"
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "no whole revision n3w" in said and said.endswith("this is 0ld\n")


def test_a_whole_newest_revision_is_taken_and_nothing_said(cache, capsys):
    (new(cache / "n3w") / "tokenizer.json").write_text("{}")
    os.utime(cache / "n3w", (0, 0))                                     # older by its files
    assert find_model() == cache / "n3w" and capsys.readouterr().out == ""


def test_weights_that_are_not_whole_are_not_passed_over_in_silence(cache, capsys):
    (cache / "0ld" / "part-1.safetensors").unlink()
    assert find_model() == TINY
    assert capsys.readouterr().out == f"{cache / '0ld'} does not hold the whole {REAL}, and is passed over\n"


# ---- what is no model as this course reads it

def quantised(*ends, dtype=None):
    """A change that gives each projection more tensors, or others in the place of its weight."""
    def change(name, value):
        if value.dim() != 2 or "proj" not in name or name.startswith("mtp."):
            return {name: value}
        more = {name.removesuffix(".weight") + end: torch.ones(2) for end in ends}
        return more | ({name: value.to(dtype)} if dtype else {})
    return change


def renamed(old, fresh):
    return lambda name, value: {name.replace(old, fresh, 1) if old else fresh + name: value}


def fused(name, value):
    return {} if "in_proj_z" in name else {name.replace("in_proj_qkv.", "in_proj_qkvz."): value}


QUANTISED = ["its weights are quantised", "take the version of this model that is not"]
MERGE = ["merge_and_unload()", "save that"]
WRAPPED = ["the wrapper of torch.compile, DDP or FSDP", "save the model inside of that by save_pretrained"]
OTHERS = ["names in Qwen3.5 begin in another way", "as save_pretrained of transformers writes it"]
FOREIGN = {         # what the tensors are: (how each changes, what must be named)
    "fp8": (quantised(".weight_scale_inv", dtype=torch.float8_e4m3fn), [".weight_scale_inv", *QUANTISED]),
    "fp8 by tensor": (quantised(".weight_scale", ".input_scale", dtype=torch.float8_e4m3fn), QUANTISED),
    "int8": (quantised(".SCB", dtype=torch.int8), [".SCB", *QUANTISED]),
    "nf4": (quantised(".weight.absmax", ".weight.quant_state.bitsandbytes__nf4", dtype=torch.uint8), QUANTISED),
    "gptq": (quantised(".qweight", ".qzeros", ".scales", ".g_idx"), QUANTISED),
    "awq": (quantised(".qweight", ".qzeros", ".scales"), QUANTISED),
    "mlx": (lambda name, value: renamed(PREFIX, "language_model.model.")(name, value) |
            quantised(".scales", ".biases")(name, value), QUANTISED),
    "compressed": (quantised(".weight_packed", ".weight_scale", ".weight_shape"), QUANTISED),
    "mlx in bf16": (renamed(PREFIX, "language_model.model."), ["language_model.model.", "named as MLX names a model",
                                                                    *OTHERS[1:]]),
    "fused": (fused, ["in_proj_qkvz", "joins matrices that lie apart in Qwen3.5", "save_pretrained"]),
    "fused by vLLM": (renamed("gate_proj", "gate_up_proj"), ["gate_up_proj", "joins matrices"]),
    "experts": (renamed("mlp.up_proj", "mlp.experts.0.up_proj"), ["mixture of experts", "take a dense model"]),
    "peft": (renamed("", "base_model.model."), ["base_model.model.", "LoRA adapter", *MERGE]),
    "peft in it": (renamed("q_proj.weight", "q_proj.base_layer.weight"), [".base_layer.", "LoRA adapter", *MERGE]),
    "lora beside": (lambda name, value: {name: value} | ({name.replace("weight", "lora_A.default.weight"): value}
                    if "q_proj" in name else {}), ["lora_A", *MERGE]),
    "compiled": (renamed("", "_orig_mod."), ["_orig_mod.", *WRAPPED]),
    "compiled by layer": (renamed("layers.0.", "layers.0._orig_mod."), WRAPPED),
    "ddp": (renamed("", "module."), ["module.", *WRAPPED]),
    "fsdp": (renamed("", "_fsdp_wrapped_module."), WRAPPED),
    "doubled": (renamed(PREFIX, PREFIX + "language_model."), ["language_model.language_model.", *OTHERS]),
    "another prefix": (renamed(PREFIX, "transformer."), ["transformer.layers.0.", *OTHERS]),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_tensors_are_named_for_what_they_are(tmp_path, name):
    """The file, one of the tensors, and a way out that is not to fetch the same again."""
    change, phrases = FOREIGN[name]
    folder = new(tmp_path / "model")
    edit_tensors(folder, change)
    said = sentence(lambda: load_weights(folder))
    assert str(folder / SINGLE) + " holds " in said and "again" not in said
    for phrase in phrases:
        assert phrase in said


def test_a_save_of_one_process_among_many(tmp_path):
    """DeepSpeed's ZeRO-3 leaves empty tensors behind."""
    folder = new(tmp_path / "model")
    edit_tensors(folder, lambda name, value: {name: torch.zeros(0) if "q_proj" in name else value})
    said = sentence(lambda: load_weights(folder))
    assert "q_proj.weight is empty, as DeepSpeed and FSDP leave it" in said and "gather the weights" in said


@pytest.mark.parametrize("name", ["fp8", "compiled by layer"])
def test_foreign_tensors_in_shards(tmp_path, name):
    folder = new(tmp_path / "model")
    edit_tensors(folder, FOREIGN[name][0])
    (folder / SINGLE).rename(folder / "part.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(load_file(folder / "part.safetensors"),
                                                                        "part.safetensors")}))
    said = sentence(lambda: load_weights(folder))
    assert "part.safetensors holds" in said and all(phrase in said for phrase in FOREIGN[name][1])


STRAY = {           # what lies there instead of model.safetensors: what must be said
    "adapter_model.safetensors": ["a LoRA adapter without its model", *MERGE],
    "adapter_model.bin": ["a LoRA adapter without its model", *MERGE],
    "pytorch_model.bin": ["which is not safetensors", "as save_pretrained of transformers writes it"],
    "pytorch_model-00001-of-00002.bin": ["which is not safetensors", "save_pretrained"],
    "consolidated.00.pth": ["which is not safetensors", "save_pretrained"],
    "Qwen3.5-0.8B-Q4_K_M.gguf": ["a file for llama.cpp", "save_pretrained"],
    "model-00001-of-00001.safetensors": ["a single shard without an index", "rename it to model.safetensors"],
    "model-00001-of-00004.safetensors": ["shards without an index", "fetch model.safetensors.index.json"],
    "model.fp16.safetensors": ["a file of another name", "rename it to model.safetensors"],
}


@pytest.mark.parametrize("config", [True, False], ids=["config", "no config"])
@pytest.mark.parametrize("name", STRAY)
def test_a_folder_without_its_weights_says_what_lies_there(tmp_path, monkeypatch, name, config):
    folder = new(tmp_path / "model")
    (folder / SINGLE).rename(folder / name)
    if not config:
        (folder / "config.json").unlink()
    monkeypatch.setenv("QWEN_MODEL", str(folder))
    said = sentence(lambda: load_weights(find_model()))
    assert f"{folder} has no model.safetensors, only {name}, " in said and "again" not in said
    for phrase in STRAY[name]:
        assert phrase in said
    assert not is_whole(folder)


@pytest.mark.parametrize("below", ["checkpoint-500", "snapshots/1f2e3d"])
def test_a_folder_that_holds_the_model_folder(tmp_path, monkeypatch, below):
    folder = new(tmp_path / below)
    monkeypatch.setenv("QWEN_MODEL", str(tmp_path))
    assert f"{tmp_path} is no model folder itself: give one that lies in it, {folder}" == sentence(find_model)


@pytest.mark.parametrize("name", ["config.json", SINGLE, "tokenizer.json", "part-1.safetensors", INDEX])
def test_what_git_leaves_without_lfs(tmp_path, name):
    folder = new(tmp_path / "model", shards=1 if name == SINGLE else 2)
    (folder / name).write_text(POINTER)
    said = sentence(lambda: load_tokenizer(folder) if "token" in name else load_weights(folder))
    assert said.startswith(f"{folder / name} is only Git LFS's pointer to the file: run git lfs pull")


# ---- without a draft head

@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """A fine-tune that its user chose: it has no draft head."""
    folder = new(tmp_path / "my-tune", mtp=False)
    shutil.copy(TINY / "tokenizer.json", folder)
    monkeypatch.setenv("QWEN_MODEL", str(folder))
    return folder


def test_a_chapter_that_drafts_passes_over_a_model_without_a_head(tuned, monkeypatch, capsys):
    assert find_model() == tuned and not has_head(tuned) and capsys.readouterr().out == ""
    assert find_model("mtp.") == TINY
    assert capsys.readouterr().out == ("my-tune has no draft head (mtp.* tensors): this chapter runs on the embedded "
                                       "model, data/tiny\n")
    monkeypatch.chdir(tuned)
    monkeypatch.setenv("QWEN_MODEL", ".")
    assert find_model("mtp.") == TINY and capsys.readouterr().out.startswith("my-tune has")


def test_a_model_with_a_head_is_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("QWEN_MODEL", str(new(tmp_path / "model")))
    assert find_model("mtp.") == find_model() == tmp_path / "model" and has_head(TINY)
    assert capsys.readouterr().out == ""


def test_a_downloaded_model_without_a_head_is_passed_over_too(tuned, monkeypatch, capsys):
    monkeypatch.delenv("QWEN_MODEL")
    monkeypatch.setattr(weights, "DOWNLOADED", tuned)
    assert find_model() == tuned and find_model("mtp.") == TINY
    assert "my-tune has no draft head" in capsys.readouterr().out


def test_the_machine_is_fit_for_a_model_without_a_head(tuned, capsys):
    check_machine(tuned)
    lines = capsys.readouterr().out.splitlines()
    about = [line for line in lines if "draft" in line]
    assert len(about) == 1 and about[0].startswith("✓ draft head") and "data/tiny" in about[0]
    assert any(line.startswith("✓ model") for line in lines)


def test_the_machine_names_a_tokenizer_that_is_a_pointer(tuned, capsys):
    (tuned / "tokenizer.json").write_text(POINTER)
    check_machine(tuned)
    assert "tokenizer.json is only Git LFS's pointer" in capsys.readouterr().out
