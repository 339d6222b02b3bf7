"""Find a checkpoint folder, read its config.json, load its tensors: each checked by name and shape.

A folder holds config.json and model.safetensors, or shards named by model.safetensors.index.json.
Text tensors begin with `model.language_model.` (or `model.` in a text-only export), the draft head's
with `mtp.`, vision tensors with `model.visual.` (counted and left alone).
"""
import json
import os
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

TINY = Path(__file__).resolve().parents[1] / "data" / "tiny"
REAL = "Qwen/Qwen3.5-0.8B"
REAL_CONFIG = TINY.parent / "published" / "Qwen3.5-0.8B"        # its config.json alone: sizes without weights
PREFIXES, VISION = ("model.language_model.", "model."), "model.visual."
LAYER_TYPES = ("linear_attention", "full_attention")


class CheckpointError(ValueError):
    """What is wrong with a model folder, and what to do about it, in one sentence."""


@dataclass(frozen=True)
class Config:
    """The part of config.json that the model needs, under the names it has there."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    layer_types: tuple
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    rope_theta: float
    partial_rotary_factor: float
    mtp_num_hidden_layers: int = 0

    @property
    def rotary_dim(self):
        """How many dimensions of each attention head RoPE turns."""
        return int(self.head_dim * self.partial_rotary_factor)


def find_model():
    """The model folder to run: $QWEN_MODEL, else a downloaded Qwen3.5-0.8B, else the embedded data/tiny."""
    chosen = os.environ.get("QWEN_MODEL")
    if chosen:
        folder = Path(chosen).expanduser()
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"QWEN_MODEL={chosen} has no config.json: set it to a model folder, or unset it")
        return folder
    from huggingface_hub import try_to_load_from_cache
    cached = try_to_load_from_cache(REAL, "config.json")
    complete = isinstance(cached, str) and any(Path(cached).parent.glob("model*.safetensors"))
    return Path(cached).parent if complete else TINY


def read_json(path):
    """A JSON file of a model folder as a dict; CheckpointError if it is missing or broken."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it is not an object")
        return content
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: give the folder of a Qwen3.5 checkpoint") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}): fetch the file again") from None


def load_config(path):
    """Read `path`/config.json, nested (`text_config`) or flat, into a Config."""
    file = Path(path) / "config.json"
    top = read_json(file)
    text = {**top, **(top.get("text_config") or {})}
    text |= {"rope_theta": text.get("rope_theta"), "partial_rotary_factor": text.get("partial_rotary_factor")} | \
        (text.get("rope_parameters") or {})
    if not text.get("layer_types"):
        every, count = text.get("full_attention_interval", 4), text.get("num_hidden_layers", 0)
        text["layer_types"] = [LAYER_TYPES[(i + 1) % every == 0] for i in range(count)]
    found = {f.name: text[f.name] for f in fields(Config) if text.get(f.name) is not None}
    missing = [f.name for f in fields(Config) if f.name not in found and f.name != "mtp_num_hidden_layers"]
    if missing:
        raise CheckpointError(f"{file} does not say {', '.join(missing)}: is this a Qwen3.5 checkpoint?")
    cfg = Config(**found | {"layer_types": tuple(found["layer_types"])})
    for kind in cfg.layer_types:
        if kind not in LAYER_TYPES:
            raise CheckpointError(f"{file} has a layer of unknown type {kind!r}: this course builds "
                                  f"{' and '.join(LAYER_TYPES)}")
    if len(cfg.layer_types) != cfg.num_hidden_layers:
        raise CheckpointError(f"{file} names {len(cfg.layer_types)} layer_types for {cfg.num_hidden_layers} layers")
    for key, wanted in (("hidden_act", "silu"), ("attn_output_gate", True), ("attention_bias", False),
                        ("rope_type", "default")):
        if text.get(key, wanted) != wanted:
            raise CheckpointError(f"{file} says {key} = {text[key]!r}: this course builds only {wanted!r}")
    return cfg


def layer_shapes(cfg, kind):
    """Name -> shape of the tensors of one decoder layer."""
    D, F = cfg.hidden_size, cfg.intermediate_size
    shapes = {"input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,),
              "mlp.gate_proj.weight": (F, D), "mlp.up_proj.weight": (F, D), "mlp.down_proj.weight": (D, F)}
    if kind == "full_attention":
        H, G, K = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim
        part = {"q_proj.weight": (2 * H * K, D), "k_proj.weight": (G * K, D), "v_proj.weight": (G * K, D),
                "o_proj.weight": (D, H * K), "q_norm.weight": (K,), "k_norm.weight": (K,)}
        return shapes | {f"self_attn.{name}": shape for name, shape in part.items()}
    H, V = cfg.linear_num_value_heads, cfg.linear_value_head_dim
    qkv = 2 * cfg.linear_num_key_heads * cfg.linear_key_head_dim + H * V
    part = {"in_proj_qkv.weight": (qkv, D), "in_proj_z.weight": (H * V, D), "in_proj_b.weight": (H, D),
            "in_proj_a.weight": (H, D), "conv1d.weight": (qkv, 1, cfg.linear_conv_kernel_dim),
            "A_log": (H,), "dt_bias": (H,), "norm.weight": (V,), "out_proj.weight": (D, H * V)}
    return shapes | {f"linear_attn.{name}": shape for name, shape in part.items()}


def expected_shapes(cfg, part="model."):
    """Name (without prefix) -> shape of each tensor of the text model (`model.`) or the draft head (`mtp.`)."""
    D = cfg.hidden_size
    if part == "mtp.":
        names = {"fc.weight": (D, 2 * D), "norm.weight": (D,), "pre_fc_norm_embedding.weight": (D,),
                 "pre_fc_norm_hidden.weight": (D,)}
        kinds = ["full_attention"] * cfg.mtp_num_hidden_layers
    else:
        names = {"embed_tokens.weight": (cfg.vocab_size, D), "norm.weight": (D,)}
        if not cfg.tie_word_embeddings:
            names["lm_head.weight"] = (cfg.vocab_size, D)
        kinds = cfg.layer_types
    for i, kind in enumerate(kinds):
        names |= {f"layers.{i}.{name}": shape for name, shape in layer_shapes(cfg, kind).items()}
    return names


def tensor_files(path):
    """Full tensor name -> file that holds it, from the index or from the one file's own header."""
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"there is no model folder {path}: download the model, or unset QWEN_MODEL to run data/tiny")
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    if index.is_file():
        return {name: shard_file(index, name, file) for name, file in read_json(index).get("weight_map", {}).items()}
    if not single.is_file():
        raise CheckpointError(f"{path} has neither model.safetensors nor model.safetensors.index.json: "
                              f"download the model again")
    with open_tensors(single) as tensors:
        return dict.fromkeys(tensors.keys(), single)


def shard_file(index, name, file):
    """The shard that the index names for a tensor: a file that is there, and in the index's own folder."""
    if not isinstance(file, str) or Path(file).name != file:
        raise CheckpointError(f"{index} looks for {name} in {file!r}, which is no file name inside the model folder: "
                              f"download the model again, from a source you trust")
    if not (index.parent / file).is_file():
        raise CheckpointError(f"{index.parent / file} is missing (it holds {name}): download the model again")
    return index.parent / file


def open_tensors(file):
    """An open safetensors file; CheckpointError if it is cut short or not of this format."""
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is damaged or cut short ({error}): download it again") from None


def count_vision(path):
    """How many vision tensors the checkpoint holds; the course leaves them alone."""
    return sum(name.startswith(VISION) for name in tensor_files(path))


def load_weights(path, part="model.", dtype=None):
    """Name (without prefix) -> tensor of the text model (`part="model."`) or of the draft head (`"mtp."`).

    Each tensor is checked by name and shape against config.json. With `dtype=None` tensors keep the file's
    dtype and stay mapped from disk; a dtype converts them. The tied head is not repeated.
    """
    cfg, files = load_config(path), tensor_files(path)
    if part == "mtp." and not any(name.startswith(part) for name in files):
        raise CheckpointError(f"{path} has no mtp.* tensors, so there is no draft head to load: "
                              f"plain decoding works, drafting needs a checkpoint with them")
    if part == "mtp." and cfg.mtp_num_hidden_layers != 1:
        raise CheckpointError(f"{path} has a draft head of {cfg.mtp_num_hidden_layers} layers by its config.json "
                              f"(mtp_num_hidden_layers): this course builds one of 1 layer; plain decoding works")
    names = {name: full_name(name, part, files, path) for name in expected_shapes(cfg, part)}
    for full in sorted(set(files) - set(names.values())):
        if full.startswith(part) and not full.startswith(VISION):
            raise CheckpointError(f"{files[full]} holds {full}, which config.json has no place for: "
                                  f"weights and config are of different models")
    opened = {file: open_tensors(file) for file in {files[full] for full in names.values()}}
    loaded = {}
    for name, shape in expected_shapes(cfg, part).items():
        full, file = names[name], files[names[name]]
        try:
            tensor = opened[file].get_tensor(full)
        except SafetensorError as error:
            raise CheckpointError(f"{file} does not give {full} ({error}): download it again") from None
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{file}: {full} has shape {tuple(tensor.shape)}, config.json asks for {shape}: "
                                  f"weights and config are of different models")
        loaded[name] = tensor.to(dtype or tensor.dtype)
    return loaded


def full_name(name, part, files, path):
    """The tensor's name in the file, whichever prefix the checkpoint uses."""
    candidates = [part + name] if part == "mtp." else [prefix + name for prefix in PREFIXES]
    if name == "lm_head.weight":
        candidates = ["lm_head.weight"]
    for full in candidates:
        if full in files:
            return full
    raise CheckpointError(f"{path} has no tensor {candidates[0]}, which its config.json asks for: "
                          f"download the model again")
