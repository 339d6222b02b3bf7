"""Read the config.json of a model folder, and say which tensors a model of this config has."""
import json
import math
import os
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path

HERE = Path(__file__).resolve().parent
DATA = next((folder for folder in (HERE / "data", HERE.parent / "data") if folder.is_dir()), HERE)   # a wheel's, or ours
LAYER_TYPES = ("linear_attention", "full_attention")
LARGEST = {"JSON": 2 ** 22, "layers": 1000, "number": 2 ** 40, "parameters": 2 ** 43}     # nothing real comes near
ONLY = {"hidden_act": "silu", "attn_output_gate": True, "attention_bias": False}          # what the lessons build
ROPE = {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}                             # what transformers assumes

POINTER = b"version https://git-lfs"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


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
    mtp_num_hidden_layers: int = 1                  # what every Qwen3.5 has, if config.json does not say

    @property
    def rotary_dim(self):
        """How many dimensions of each attention head RoPE turns."""
        return int(self.head_dim * self.partial_rotary_factor)


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
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): make it readable, or fetch it "
                              f"again") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({shown(error)}): fetch the file again") from None


def parse_json(raw):
    """A JSON object in UTF-8 as a dict; ValueError or RecursionError if it is none, or names something twice."""
    def once(pairs):
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError(f"it says {Counter(name for name, _ in pairs).most_common(1)[0][0]!r:.100} twice")
        return found

    content = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=once)
    if not isinstance(content, dict):
        raise ValueError("it is not an object")
    return content


def inside(file):
    """The file, unless it is a link out of its folder (the Hugging Face cache has its own) or Git's pointer to it."""
    folder = file.parent.resolve()
    home = folder.parents[1] if folder.parent.name == "snapshots" else folder
    if not file.resolve().is_relative_to(home):
        raise CheckpointError(f"{file} is a link out of the model folder, to {file.resolve()}: "
                              f"put the file itself into the folder, if you trust it")
    with open(file, "rb") as raw:
        if raw.read(len(POINTER)) == POINTER:
            raise CheckpointError(f"{file} is only Git LFS's pointer to the file: run git lfs pull in its folder, or "
                                  f"download the file itself")
    return file


def read_config(path):
    """`path`/config.json, nested (`text_config`) or flat, as a Config; each number in it must be possible.

    A head is tied if it says so in either place; whether it is, the tensors decide, and `load_config` asks them too.
    """
    file = Path(path) / "config.json"
    top = read_json(file)
    inner = section(file, top, "text_config")
    text = {**top, **inner}
    for place in (top, inner):
        for key in ("quantization_config", "quantization"):
            if place.get(key):
                raise CheckpointError(f"{file} says {key} = {place[key]!r:.60}: this course reads no quantised "
                                      f"weights; take a version without, or the entry out, if its weights are plain")
        require(file, isinstance(place.get("tie_word_embeddings"), (bool, type(None))), place, "tie_word_embeddings")
    tied = any(place.get("tie_word_embeddings") for place in (top, inner))
    above, within, both = (rope(file, place) for place in (top, inner, text))
    if inner and both != within:
        raise CheckpointError(f"{file} says {above}, but not in text_config, where other programs look for it: "
                              f"move it there")
    text |= both | {"tie_word_embeddings": tied}
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
    for key, wanted in ONLY.items():
        if text.get(key, wanted) != wanted:
            raise CheckpointError(f"{file} says {key} = {text[key]!r:.60}: this course builds only {wanted!r}")
    return cfg


def rope(file, text):
    """The entries of ROPE, from wherever a config has them; CheckpointError if RoPE is stretched (yarn and others).

    What a newer config says in `rope_parameters` an older one says in `rope_scaling` and beside it.
    """
    found = dict(ROPE)
    for part in (None, "rope_parameters", "rope_scaling"):
        said = section(file, text, part) if part else text
        said = said | section(file, said, "full_attention")             # some say it for each type of layer
        for key in ("rope_type", "type"):
            if said.get(key) not in (None, "default", "mrope"):         # mrope differs from it only on pictures
                raise CheckpointError(f"{file} says {key} = {said[key]!r:.60}{part and f' in {part}' or ''}: this "
                                      f"course builds only 'default'; take the entry out to run the model without it")
        found |= {key: said[key] for key in ROPE if key in said}
    return found


def section(file, text, key):
    """The dict under a key of config.json; empty if there is none."""
    require(file, isinstance(text.get(key), (dict, type(None))), text, key)
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
