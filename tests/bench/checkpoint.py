"""A random checkpoint of the full 0.8B size in the layout and the dtypes of the real one: two shards, an index, vision
tensors, the draft head, the published config.json. It takes as long to load and to run as the real one, and writes
nonsense.

Its tokenizer is the embedded one, filled up to the real size: the special tokens have their real ids, all other ids
from 8,187 on stand for pairs of its tokens. So a text takes more tokens here than in the real model.
"""
import itertools
import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from qwen_helpers.weights import REAL_CONFIG, TINY, expected_shapes, load_config

FOLDER = Path(__file__).resolve().parents[2] / "build" / "random-0.8b"
SPECIAL = {"<|endoftext|>": 248044, "<|im_start|>": 248045, "<|im_end|>": 248046, "<think>": 248068,
           "</think>": 248069}
FP32 = "A_log", "linear_attn.norm.weight"                       # 36 tensors of the published file; the rest is bf16
VISION_LAYERS, VISION_WIDTH, VISION_INNER = 12, 768, 3072       # about 100 million parameters, as in the real file


def full_size(folder=FOLDER):
    """The folder of the checkpoint, 1.7 GB; made on the first call, in well under a minute."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        torch.manual_seed(0)
        part = folder.with_name(f"{folder.name}.{os.getpid()}")
        part.mkdir(parents=True)
        write_weights(part)
        write_tokenizer(part)
        shutil.copy(REAL_CONFIG / "config.json", part)
        part.rename(folder)
    return folder


def vision_shapes():
    """Name -> shape of a vision tower as large as the real one; the course leaves it alone."""
    D, F = VISION_WIDTH, VISION_INNER
    shapes = {"patch_embed.proj.weight": (D, 3, 2, 16, 16), "patch_embed.proj.bias": (D,),
              "pos_embed.weight": (2304, D), "merger.norm.weight": (D,), "merger.norm.bias": (D,),
              "merger.linear_fc1.weight": (4 * D, 4 * D), "merger.linear_fc1.bias": (4 * D,),
              "merger.linear_fc2.weight": (1024, 4 * D), "merger.linear_fc2.bias": (1024,)}
    layer = {"norm1.weight": (D,), "norm1.bias": (D,), "norm2.weight": (D,), "norm2.bias": (D,),
             "attn.qkv.weight": (3 * D, D), "attn.qkv.bias": (3 * D,), "attn.proj.weight": (D, D),
             "attn.proj.bias": (D,), "mlp.linear_fc1.weight": (F, D), "mlp.linear_fc1.bias": (F,),
             "mlp.linear_fc2.weight": (D, F), "mlp.linear_fc2.bias": (D,)}
    for i in range(VISION_LAYERS):
        shapes |= {f"blocks.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def random_tensor(name, shape):
    """Numbers of the size and the dtype that a trained tensor of this name has."""
    if name.endswith("A_log"):
        value = torch.empty(shape).uniform_(0.02, 1).log()
    else:
        value = torch.empty(shape).normal_(std=0.1 if len(shape) == 1 else shape[-1] ** -0.5)
        value += name.endswith("linear_attn.norm.weight")
    return value if name.endswith(FP32) else value.bfloat16()


def write_weights(folder):
    """Two shards and their index: half of the layers in each, text, vision and draft head mixed."""
    cfg = load_config(REAL_CONFIG)
    shapes = {"model.language_model." + name: shape for name, shape in expected_shapes(cfg).items()}
    shapes |= {"model.visual." + name: shape for name, shape in vision_shapes().items()}
    shapes |= {"mtp." + name: shape for name, shape in expected_shapes(cfg, "mtp.").items()}
    names, index = list(shapes), {}
    for i, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model.safetensors-{i:05}-of-00002.safetensors"
        save_file({name: random_tensor(name, shapes[name]) for name in part}, folder / file, {"format": "pt"})
        index |= dict.fromkeys(part, file)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def write_tokenizer(folder):
    """The embedded tokenizer with the real model's number of ids."""
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / name, folder)
    tokenizer = json.loads((TINY / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    pairs = (a + b for a, b in itertools.product(list(vocab), repeat=2))
    unused = (pair for pair in dict.fromkeys(itertools.islice(pairs, 2 ** 19)) if pair not in vocab)
    for i in sorted(set(range(len(vocab), load_config(REAL_CONFIG).vocab_size)) - set(SPECIAL.values())):
        vocab[next(unused)] = i
    for token in tokenizer["added_tokens"]:
        token["id"] = SPECIAL[token["content"]]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    print(full_size())
