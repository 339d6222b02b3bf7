"""Find a checkpoint folder and load its tensors: each checked by name and shape against its config.json.

A folder holds config.json and model.safetensors, or shards named by model.safetensors.index.json.
Text tensors begin with `model.language_model.` (or `model.` in a text-only export), the draft head's
with `mtp.`, vision tensors with `model.visual.` (counted and left alone).
"""
import math
import os
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from .config import (DATA, INDEX, LARGEST, SINGLE, CheckpointError, Config, expected_shapes, inside, parse_json, read_config,
                     read_json, shown)
from .foreign import what_folder, what_tensors

TINY = DATA / "tiny"
REAL = "Qwen/Qwen3.5-0.8B"
REAL_CONFIG = DATA / "published" / "Qwen3.5-0.8B"        # its config.json alone: sizes without weights
DOWNLOADED = DATA.parent / "build" / "Qwen3.5-0.8B"         # where `python -m qwen_publish.download` puts it
THREADS = torch.get_num_threads()
SMALL = 2 ** 28                                                 # parameters: at most 1 GB in fp32
PREFIXES = ("model.language_model.", "model.", "language_model.", "")       # the last two in saves without a head
VISION = ("model.visual.", "visual.")
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
TEXT = ("model.", "language_model.", "embed_tokens.", "layers.", "norm.", "lm_head.")


def find_model(part="model."):
    """The model folder to run: $QWEN_MODEL, else a downloaded Qwen3.5-0.8B, else the embedded data/tiny.

    For a lesson that drafts, `part="mtp."` passes over a folder without a draft head, and says so.
    """
    chosen = os.environ.get("QWEN_MODEL")
    if chosen:
        folder = Path(chosen).expanduser()
        if not (folder / "config.json").is_file():
            raise CheckpointError(what_folder(folder) or f"QWEN_MODEL={chosen} has no config.json: "
                                  f"set it to a model folder, or unset it")
    else:
        folder = downloaded() or TINY
    if part == "mtp." and not has_head(folder):
        print(f"{folder.absolute().name} has no draft head (mtp.* tensors): this chapter runs on the embedded model, "
              f"data/tiny")
        return TINY
    return folder


def downloaded():
    """A whole Qwen3.5-0.8B on this machine, by `qwen_publish.download` or in the Hugging Face cache; else None.

    If the newest revision that the cache knows of is not whole there, an older one serves, and one line says so.
    """
    from huggingface_hub import constants
    if is_whole(DOWNLOADED):
        return DOWNLOADED
    cache = Path(constants.HF_HUB_CACHE) / f"models--{REAL.replace('/', '--')}"
    main = cache / "refs" / "main"
    newest = main.read_text(encoding="utf-8").strip() if main.is_file() else ""
    found = sorted(cache.glob("snapshots/*"), key=lambda folder: (folder.name == newest, folder.stat().st_mtime))
    folder = next(filter(is_whole, reversed(found)), None)
    if folder and newest not in ("", folder.name):
        print(f"the Hugging Face cache has no whole revision {newest[:8]} of {REAL}: this is {folder.name[:8]}")
    for part in (DOWNLOADED, *reversed(found)) if not folder else ():
        if any(part.glob("*.safetensors")):
            print(f"{part} does not hold the whole {REAL}, and is passed over")
            break
    return folder


def is_whole(folder):
    """Whether a folder has config.json, tokenizer.json and every file of weights."""
    try:
        there = all((folder / name).is_file() for name in ("config.json", "tokenizer.json"))
        return there and bool(tensor_files(folder))
    except CheckpointError:
        return False


def small(cfg):
    """Whether a model of this config is small: at most SMALL parameters."""
    return sum(math.prod(shape) for shape in expected_shapes(cfg).values()) <= SMALL


def placement(path, dtype=None, device=None):
    """(dtype, device) that a model runs with, where the caller names none.

    A small model runs in fp32 on the CPU. A large one keeps the file's dtype, so that nothing is copied, and runs on
    a GPU, CUDA's or Apple's, if there is one; $QWEN_DEVICE names another place.
    """
    tiny = small(load_config(path))
    gpu = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    device = device or os.environ.get("QWEN_DEVICE") or ("cpu" if tiny else gpu)
    return dtype or (torch.float32 if tiny else None), device


def set_defaults(cfg, device):
    """Set torch's default device and number of threads for a model of this config that lies on `device`.

    What is made later lies beside the model: a GPU becomes the default device, and after a model on the CPU there is
    none any more. A small model gets one thread, for it would only wait for others, and a large one all;
    $OMP_NUM_THREADS, if set, decides instead.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1 if small(cfg) else THREADS)
    torch.set_default_device(None if torch.device(device).type == "cpu" else device)


def load_config(path) -> Config:
    """The Config of a model folder; its config.json alone is enough.

    `tie_word_embeddings` is what holds, as in transformers: a head in the file that differs from the embedding is used,
    whatever config.json says; one that is equal to it, or none, is tied if config.json says so, at its top level or in
    text_config.
    """
    path = Path(path)
    if not os.path.isfile(path / "config.json") and (said := what_folder(path)):
        raise CheckpointError(said)
    cfg = read_config(path)
    if cfg.tie_word_embeddings and any(os.path.isfile(path / name) for name in (SINGLE, INDEX)):
        files = main_files(path)
        embedding = text_prefix(files) + EMBEDDING
        if HEAD in files and embedding in files:
            stored = [(files[name], files[name].stat().st_mtime_ns, name) for name in (HEAD, embedding)]
            return replace(cfg, tie_word_embeddings=equal(*stored))
    return cfg


@lru_cache
def equal(*stored):
    """Whether two stored tensors, each (file, its time of change, name), hold the same numbers."""
    a, b = mapped({name: file for file, _, name in stored}).values()
    wide = a.dtype if a.dtype == b.dtype else torch.float64
    return a.shape == b.shape and all(torch.equal(*(rows.to(wide) for rows in pair))
                                      for pair in zip(a.split(4096), b.split(4096)))


def tensor_files(path):
    """Full tensor name -> file that holds it; the files of the model are those that come up here.

    A draft head may lie beside the model in a file that no index names, which holds nothing but mtp.* tensors.
    """
    files = main_files(path)
    if any(name.startswith("mtp.") for name in files):
        return files
    heads = {}
    for file in filter(os.path.isfile, sorted(Path(path).glob("*.safetensors"))):
        try:
            names = names_in(file)
        except CheckpointError:
            if "mtp" in file.name:
                raise
            continue
        drafts = {name: file for name in names if name.startswith("mtp.")}
        if len(drafts) == len(names) or file in files.values():
            for name in drafts.keys() & heads.keys():
                raise CheckpointError(f"{file} and {heads[name]} both hold {shown(name)}: keep one of them")
            heads |= drafts
    return files | heads


def main_files(path):
    """Full tensor name -> file, by model.safetensors, else by the index. Saving anew may leave an old index behind."""
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"there is no model folder {path}: download the model, or unset QWEN_MODEL to run "
                              f"data/tiny")
    if os.path.isfile(path / SINGLE):
        return dict.fromkeys(names_in(path / SINGLE), path / SINGLE)
    if not os.path.isfile(path / INDEX):
        raise CheckpointError(what_folder(path) or f"{path} has neither {SINGLE} nor {INDEX}: download the model again")
    names = read_json(path / INDEX).get("weight_map", {})
    if not isinstance(names, dict):
        raise CheckpointError(f"{path / INDEX} has no map of names to files: fetch the file again")
    return {name: shard_file(path / INDEX, name, file) for name, file in names.items()}


def shard_file(index, name, file):
    """The shard that the index names for a tensor: a file that is there, and in the index's own folder."""
    if not isinstance(file, str) or Path(file).name != file:
        raise CheckpointError(f"{index} looks for {shown(name)} in {file!r:.100}, which is no file name inside the "
                              f"model folder: download the model again, from a source you trust")
    if not os.path.isfile(index.parent / file):
        raise CheckpointError(f"{index.parent}: {shown(file)} is missing (it holds {shown(name)}): "
                              f"download the model again")
    return index.parent / file


def names_in(file):
    """The names of the tensors in a safetensors file."""
    with open_tensors(file) as tensors:
        return tensors.keys()


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


def mapped(files):
    """Full name -> tensor, mapped from its file, for the names and files of a dict."""
    opened = {file: open_tensors(file) for file in set(files.values())}
    tensors = {}
    for name, file in files.items():
        try:
            tensors[name] = opened[file].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{file} does not give {name} ({shown(error)}): download it again") from None
    return tensors


def count_vision(path):
    """How many vision tensors the checkpoint holds; the course leaves them alone."""
    return sum(name.startswith(VISION) for name in main_files(path))


def has_head(path):
    """Whether a model folder holds a draft head: mtp.* tensors."""
    return any(name.startswith("mtp.") for name in tensor_files(path))


def text_prefix(files):
    """What the names of the text model's tensors begin with."""
    found = (prefix for prefix in PREFIXES if any(name.startswith(prefix + "layers.") for name in files))
    return next(found, PREFIXES[0])


def stored_names(path, part, cfg, files):
    """Name (without prefix) -> name in the files, of each tensor of the part; none may be missing or left over."""
    prefix = "mtp." if part == "mtp." else text_prefix(files)
    names = {name: name if name == HEAD else prefix + name for name in expected_shapes(cfg, part)}
    if names.get(EMBEDDING, HEAD) not in files and HEAD in files and HEAD not in names:
        names[EMBEDDING] = HEAD                                         # tied, and saved under the head's name
    missing = [full for full in names.values() if full not in files]
    there = {full for full in files if full.startswith("mtp.") == (part == "mtp.") and not full.startswith(VISION)}
    surplus = sorted(full for full in there - {*names.values(), HEAD} if full.startswith(("mtp.", *TEXT)))
    if missing or surplus:
        if said := what_tensors(files, there):
            raise CheckpointError(said)
        if missing == [HEAD]:
            raise CheckpointError(f"{path} has no tensor {HEAD}, and its config.json does not say that the embedding "
                                  f"is the head: save it again with its head, or set tie_word_embeddings to true")
        if missing:
            raise CheckpointError(f"{path} has no tensor {missing[0]}, which its config.json asks for: "
                                  f"download the model again, or save it again, whole")
        raise CheckpointError(f"{files[surplus[0]]} holds {shown(surplus[0])}, which config.json has no place for: "
                              f"weights and config are of different models")
    return names


def matrix_dtype(tensors):
    """The dtype of most numbers in the matrices among these tensors; None without a matrix."""
    sizes = Counter()
    for tensor in tensors.values():
        if tensor.dim() == 2 and tensor.dtype in FLOATS:
            sizes[tensor.dtype] += tensor.numel()
    return max(sizes, key=sizes.get, default=None)


def fitting(tensor, common):
    """The dtype of a tensor among matrices of dtype `common`: its own if it is no matrix, but fp64 mixes badly."""
    if tensor.dim() == 2 or common == torch.float64:
        return common
    return torch.float32 if tensor.dtype == torch.float64 else tensor.dtype


def load_weights(path, part="model.", dtype=None, device=None, cfg=None):
    """Name (without prefix) -> tensor of the text model (`part="model."`) or of the draft head (`"mtp."`).

    Each tensor is checked by name and shape against config.json, or against the `cfg` of a model. They go to torch's
    default device, where none is named. The tied head is not repeated.
    A dtype converts all tensors. With `dtype=None` they keep the file's and, on the CPU, stay mapped from disk; but
    matrices are multiplied, so one that differs from most of the text model's takes their dtype.
    """
    own, files = load_config(path), tensor_files(path) if part == "mtp." else main_files(path)
    if part == "mtp." and not any(name.startswith(part) for name in files):
        raise CheckpointError(f"{path} has no mtp.* tensors, so there is no draft head to load: "
                              f"plain decoding works, drafting needs a checkpoint with them")
    if part == "mtp." and own.mtp_num_hidden_layers != 1:
        raise CheckpointError(f"{path} has a draft head of {own.mtp_num_hidden_layers} layers by its config.json "
                              f"(mtp_num_hidden_layers): this course builds one of 1 layer; plain decoding works")
    names = stored_names(path, part, cfg or own, files)
    tensors = mapped({full: files[full] for full in names.values()})
    for name, shape in expected_shapes(cfg or own, part).items():
        full, tensor = names[name], tensors[names[name]]
        if not tensor.numel():
            raise CheckpointError(f"{files[full]}: {full} is empty, as DeepSpeed and FSDP leave it when one process saves "
                                  f"its part: gather the weights, and save them whole")
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{files[full]}: {full} has shape {tuple(tensor.shape)}, "
                                  f"{'the model' if cfg else 'config.json'} asks for {shape}: "
                                  f"{'these' if cfg else 'weights and config'} are of different models")
        if tensor.dtype not in FLOATS:
            raise CheckpointError(f"{files[full]}: {full} is stored as {str(tensor.dtype).removeprefix('torch.')}: "
                                  f"this course runs {', '.join(str(kind).removeprefix('torch.') for kind in FLOATS)}; "
                                  f"download a version that is not quantised")
    text = mapped({full: file for full, file in files.items() if full.startswith(TEXT) and not full.startswith(VISION)})
    common = matrix_dtype(tensors if part == "model." else text) or matrix_dtype(tensors)
    device = device or torch.get_default_device()
    return {name: tensors[full].to(device, dtype or fitting(tensors[full], common)) for name, full in names.items()}


def load_tokenizer(path):
    """The tokenizer of a model folder, which cuts and pads nothing; CheckpointError if it is missing or broken."""
    file = Path(path) / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_str(inside(file).read_text(encoding="utf-8-sig"))
    except CheckpointError:
        raise
    except Exception as error:          # tokenizers raises nothing narrower
        raise CheckpointError(f"{file} is missing or broken ({shown(error)}): download it again, or copy it from the "
                              f"model that this one was made from") from None
    tokenizer.no_truncation()           # training saves its own
    tokenizer.no_padding()
    return tokenizer
