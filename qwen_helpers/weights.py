"""Find a checkpoint folder, read its config.json, load its tensors: each checked by name and shape.

A folder holds config.json and model.safetensors, or shards named by model.safetensors.index.json.
Text tensors begin with `model.language_model.` (or `model.` in a text-only export), the draft head's
with `mtp.`, vision tensors with `model.visual.` (counted and left alone).
"""
import json
import math
import os
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

TINY = Path(__file__).resolve().parents[1] / "data" / "tiny"
REAL = "Qwen/Qwen3.5-0.8B"
REAL_CONFIG = TINY.parent / "published" / "Qwen3.5-0.8B"        # its config.json alone: sizes without weights
DOWNLOADED = TINY.parents[1] / "build" / "Qwen3.5-0.8B"         # where `python -m qwen_helpers.download` puts it
THREADS = torch.get_num_threads()
SMALL = 2 ** 28                                                 # parameters: at most 1 GB in fp32
PREFIXES, VISION = ("model.language_model.", "model."), "model.visual."
LAYER_TYPES = ("linear_attention", "full_attention")
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
LARGEST = {"JSON": 2 ** 22, "layers": 1000, "number": 2 ** 40, "parameters": 2 ** 43}     # nothing real comes near


class CheckpointError(ValueError):
    """What is wrong with a model folder, and what to do about it, in one sentence."""


def shown(words):
    """Words out of a file, short and on one line that any screen can show."""
    words = str(words)[:200]
    return words if words.isprintable() else ascii(words)[1:-1]


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
    return downloaded() or TINY


def downloaded():
    """A whole Qwen3.5-0.8B on this machine, by `qwen_helpers.download` or in the Hugging Face cache; else None."""
    from huggingface_hub import try_to_load_from_cache
    cached = try_to_load_from_cache(REAL, "config.json")
    folders = [DOWNLOADED, *([Path(cached).parent] if isinstance(cached, str) else [])]
    return next((folder for folder in folders if is_whole(folder)), None)


def is_whole(folder):
    """Whether a folder has config.json, tokenizer.json and every file of weights."""
    try:
        return bool(tensor_files(folder)) and all((folder / name).is_file() for name in ("config.json", "tokenizer.json"))
    except CheckpointError:
        return False


def placement(path, dtype=None, device=None):
    """(dtype, device) that a model runs with, where the caller names none.

    A small model runs in fp32 on the CPU. A large one keeps the file's dtype, so that nothing is copied, and runs on
    a GPU, CUDA's or Apple's, if there is one; $QWEN_DEVICE names another place. What is made later lies beside it: a
    GPU becomes torch's default device. A small model gets one thread, for it would only wait for others, and a large
    one all; $OMP_NUM_THREADS, if set, decides instead.
    """
    cfg = load_config(path)
    small = sum(math.prod(shape) for shape in expected_shapes(cfg).values()) <= SMALL
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1 if small else THREADS)
    gpu = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    device = device or os.environ.get("QWEN_DEVICE") or ("cpu" if small else gpu)
    if torch.device(device).type != "cpu":
        torch.set_default_device(device)
    return dtype or (torch.float32 if small else None), device


def read_json(path):
    """A JSON file of a model folder as a dict; CheckpointError if it is missing or broken."""
    try:
        if not os.path.isfile(path):
            raise CheckpointError(f"{path} is missing: give the folder of a Qwen3.5 checkpoint")
        size = inside(path).stat().st_size
        if size > LARGEST["JSON"]:
            raise ValueError(f"it has {size:,} bytes")
        return parse_json(path.read_bytes())
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): make it readable, or fetch it again") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({shown(error)}): fetch the file again") from None


def parse_json(raw):
    """A JSON object in UTF-8 as a dict; ValueError or RecursionError if it is none, or names something twice."""
    def once(pairs):
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError(f"it says {Counter(name for name, _ in pairs).most_common(1)[0][0]!r:.100} twice")
        return found

    content = json.loads(raw.decode("utf-8"), object_pairs_hook=once)
    if not isinstance(content, dict):
        raise ValueError("it is not an object")
    return content


def inside(file):
    """The file, if it leads to no place outside of its folder; the Hugging Face cache links to its own blobs."""
    folder = file.parent.resolve()
    home = folder.parents[1] if folder.parent.name == "snapshots" else folder
    if not file.resolve().is_relative_to(home):
        raise CheckpointError(f"{file} is a link out of the model folder, to {file.resolve()}: "
                              f"put the file itself into the folder, if you trust it")
    return file


def load_config(path):
    """Read `path`/config.json, nested (`text_config`) or flat, into a Config; each number in it must be possible."""
    file = Path(path) / "config.json"
    top = read_json(file)
    text = {**top, **section(file, top, "text_config")}
    text |= {key: text.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    text |= section(file, text, "rope_parameters")
    found = {f.name: text[f.name] for f in fields(Config) if text.get(f.name) is not None}
    missing = [f.name for f in fields(Config)
               if f.name not in found and f.name not in ("mtp_num_hidden_layers", "layer_types")]
    if missing:
        raise CheckpointError(f"{file} does not say {', '.join(missing)}: is this a Qwen3.5 checkpoint?")
    for f in fields(Config):
        require(file, f.name not in found or possible(f.name, f.type, found[f.name]), text, f.name)
    if not found.get("layer_types"):
        every, count = text.get("full_attention_interval", 4), found["num_hidden_layers"]
        require(file, possible("full_attention_interval", int, every), text, "full_attention_interval")
        found["layer_types"] = [LAYER_TYPES[(i + 1) % every == 0] for i in range(count)]
    cfg = Config(**found | {"layer_types": tuple(found["layer_types"])})
    for kind in cfg.layer_types:
        if kind not in LAYER_TYPES:
            raise CheckpointError(f"{file} has a layer of unknown type {kind!r:.60}: this course builds "
                                  f"{' and '.join(LAYER_TYPES)}")
    if len(cfg.layer_types) != cfg.num_hidden_layers:
        raise CheckpointError(f"{file} names {len(cfg.layer_types)} layer_types for {cfg.num_hidden_layers} layers: "
                              f"fetch the file again")
    require(file, cfg.num_attention_heads % cfg.num_key_value_heads == 0, text,
            "num_attention_heads", "num_key_value_heads")
    require(file, cfg.linear_num_value_heads % cfg.linear_num_key_heads == 0, text,
            "linear_num_value_heads", "linear_num_key_heads")
    require(file, cfg.partial_rotary_factor <= 1 and cfg.rotary_dim > 0 and cfg.rotary_dim % 2 == 0, text,
            "head_dim", "partial_rotary_factor")
    count = sum(math.prod(shape) for part in ("model.", "mtp.") for shape in expected_shapes(cfg, part).values())
    require(file, count <= LARGEST["parameters"], text, "vocab_size", "hidden_size", "intermediate_size", "head_dim",
            "num_attention_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    for key, wanted in (("hidden_act", "silu"), ("attn_output_gate", True), ("attention_bias", False),
                        ("rope_type", "default")):
        if text.get(key, wanted) != wanted:
            raise CheckpointError(f"{file} says {key} = {text[key]!r:.60}: this course builds only {wanted!r}")
    return cfg


def section(file, text, key):
    """The dict under a key of config.json; empty if there is none."""
    require(file, isinstance(text.get(key) or {}, dict), text, key)
    return text.get(key) or {}


def possible(name, kind, value):
    """Whether a value of config.json can be what the field `name` of this kind is."""
    if kind is tuple:
        return isinstance(value, list)
    if kind is bool:
        return isinstance(value, bool)
    least = 0 if name == "mtp_num_hidden_layers" else 1
    if kind is int:
        return type(value) is int and least <= value <= LARGEST["layers" if "hidden_layers" in name else "number"]
    return type(value) in (int, float) and 0 < value <= LARGEST["number"]


def require(file, fits, text, *names):
    """CheckpointError about values of config.json that cannot be, or cannot be together."""
    if not fits:
        said = " and ".join(f"{name} = {text[name]!r:.60}" for name in names if name in text)
        raise CheckpointError(f"{file} says {said}, which no Qwen3.5 can have: fetch the file again")


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
    if os.path.isfile(index):
        names = read_json(index).get("weight_map", {})
        if not isinstance(names, dict):
            raise CheckpointError(f"{index} has no map of names to files: fetch the file again")
        return {name: shard_file(index, name, file) for name, file in names.items()}
    if not os.path.isfile(single):
        raise CheckpointError(f"{path} has neither model.safetensors nor model.safetensors.index.json: "
                              f"download the model again")
    with open_tensors(single) as tensors:
        return dict.fromkeys(tensors.keys(), single)


def shard_file(index, name, file):
    """The shard that the index names for a tensor: a file that is there, and in the index's own folder."""
    if not isinstance(file, str) or Path(file).name != file:
        raise CheckpointError(f"{index} looks for {shown(name)} in {file!r:.100}, which is no file name inside the model "
                              f"folder: download the model again, from a source you trust")
    if not os.path.isfile(index.parent / file):
        raise CheckpointError(f"{index.parent}: {shown(file)} is missing (it holds {shown(name)}): "
                              f"download the model again")
    return index.parent / file


def open_tensors(file):
    """An open safetensors file; CheckpointError if it is cut short or not of this format."""
    try:
        with open(inside(file), "rb") as raw:
            header = int.from_bytes(raw.read(8), "little")
            if not 0 < header <= min(LARGEST["JSON"], file.stat().st_size - 8):
                raise ValueError(f"a header of {header:,} bytes")
            parse_json(raw.read(header))
        return safe_open(file, framework="pt")
    except CheckpointError:
        raise
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged or cut short ({shown(error)}): download it again") from None


def count_vision(path):
    """How many vision tensors the checkpoint holds; the course leaves them alone."""
    return sum(name.startswith(VISION) for name in tensor_files(path))


def load_weights(path, part="model.", dtype=None, device=None, cfg=None):
    """Name (without prefix) -> tensor of the text model (`part="model."`) or of the draft head (`"mtp."`).

    Each tensor is checked by name and shape against config.json, or against the `cfg` of a model. With `dtype=None`
    tensors keep the file's dtype and, on the CPU, stay mapped from disk; a dtype converts them. They go to torch's
    default device, where none is named. The tied head is not repeated.
    """
    own, files = load_config(path), tensor_files(path)
    if part == "mtp." and not any(name.startswith(part) for name in files):
        raise CheckpointError(f"{path} has no mtp.* tensors, so there is no draft head to load: "
                              f"plain decoding works, drafting needs a checkpoint with them")
    if part == "mtp." and own.mtp_num_hidden_layers != 1:
        raise CheckpointError(f"{path} has a draft head of {own.mtp_num_hidden_layers} layers by its config.json "
                              f"(mtp_num_hidden_layers): this course builds one of 1 layer; plain decoding works")
    wanted = expected_shapes(cfg or own, part)
    names = {name: full_name(name, part, files, path) for name in wanted}
    for full in sorted(set(files) - set(names.values())):
        if full.startswith(part) and not full.startswith(VISION):
            raise CheckpointError(f"{files[full]} holds {shown(full)}, which config.json has no place for: "
                                  f"weights and config are of different models")
    opened = {file: open_tensors(file) for file in {files[full] for full in names.values()}}
    loaded = {}
    for name, shape in wanted.items():
        full, file = names[name], files[names[name]]
        try:
            tensor = opened[file].get_tensor(full)
        except SafetensorError as error:
            raise CheckpointError(f"{file} does not give {full} ({shown(error)}): download it again") from None
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{file}: {full} has shape {tuple(tensor.shape)}, "
                                  f"{'the model' if cfg else 'config.json'} asks for {shape}: "
                                  f"{'these' if cfg else 'weights and config'} are of different models")
        if tensor.dtype not in FLOATS:
            raise CheckpointError(f"{file}: {full} is stored as {str(tensor.dtype).removeprefix('torch.')}: this course "
                                  f"runs {', '.join(str(kind).removeprefix('torch.') for kind in FLOATS)}; "
                                  f"download a version that is not quantised")
        loaded[name] = tensor.to(device or torch.get_default_device(), dtype or tensor.dtype)
    return loaded


def load_tokenizer(path):
    """The tokenizer of a model folder; CheckpointError if its tokenizer.json is missing or broken."""
    file = Path(path) / "tokenizer.json"
    try:
        return Tokenizer.from_str(inside(file).read_text(encoding="utf-8"))
    except CheckpointError:
        raise
    except Exception as error:          # tokenizers raises nothing narrower
        raise CheckpointError(f"{file} is missing or broken ({shown(error)}): download it again") from None


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
