"""Train the embedded model: next-token loss, plus the draft head's loss as the auxiliary task that MTP is.

The model is the one of the notebooks, in its chunked form. A run writes checkpoints (safetensors) into
`--out` and resumes from them; when its tokens are used up it writes the model folder `--model`.

    python data/recipe/train.py --corpus build/corpus --out build/train --model data/tiny --tokens 16e6
"""
import argparse
import json
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from chapters.chunk import chunk_rule
from chapters.model import Model
from chapters.mtp import MTP
from chapters.training import MTP_WEIGHT, learning_rate, mtp_loss
from qwen_helpers.weights import load_config, open_tensors

CONFIG = Path(__file__).with_name("config.json")
BATCH, T, CHUNK = 16, 256, 32
MUON_LR, ADAM_LR, WARMUP = 0.02, 3e-3, 100                    # warm-up in steps


class Trainee(torch.nn.Module):
    """Model and draft head together: a window of ids (B, T + 2) -> the two losses."""

    def __init__(self, cfg):
        super().__init__()
        self.model, self.mtp = Model(cfg), MTP(cfg)
        for module in self.modules():
            if isinstance(module, torch.nn.Linear):
                torch.nn.init.normal_(module.weight, std=0.02)
        for layer in self.model.layers:
            if layer.layer_type == "linear_attention":
                layer.linear_attn.rule = partial(in_fp32, CHUNK)
                torch.nn.init.uniform_(layer.linear_attn.dt_bias, -7, -2)        # memories from short to long

    def forward(self, ids):
        hidden = self.model.hidden(ids[:, :-2])
        logits = self.model.lm_head(hidden).float()
        main_loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:-1].flatten())
        return main_loss, mtp_loss(self.model, self.mtp, ids, hidden)


def in_fp32(C, *tensors):
    """The chunked rule outside of autocast: exponentials of sums of logarithms need fp32."""
    with torch.autocast("cpu", enabled=False):
        return chunk_rule(*tensors, C=C)


def optimizers(trainee):
    """Muon for the matrices of the layers, AdamW for the rest."""
    named = dict(trainee.named_parameters())
    matrices = [p for name, p in named.items() if p.ndim == 2 and "embed_tokens" not in name]
    rest = [p for name, p in named.items() if p.ndim != 2 or "embed_tokens" in name]
    return [torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=0.01, adjust_lr_fn="original"),
            torch.optim.AdamW(rest, lr=ADAM_LR, betas=(0.9, 0.95), weight_decay=0.0)]


def batches(tokens, start):
    """Endless windows of T + 2 tokens, (BATCH, T + 2): each pass over the stream in its own seeded order."""
    windows = (len(tokens) - 2) // T
    per_pass = windows // BATCH
    for step in range(start, 10**9):
        epoch, i = divmod(step, per_pass)
        order = np.random.default_rng(epoch).permutation(windows)[i * BATCH:(i + 1) * BATCH]
        yield torch.from_numpy(np.stack([tokens[w * T + epoch % 2 * (T // 2):][:T + 2] for w in order]).astype("int64"))


def save(out, step, trainee, optims):
    """Write a checkpoint under a temporary name first, so that a cut-off run leaves the last one whole."""
    tensors = {f"model/{name}": p.detach() for name, p in trainee.named_parameters()}
    for number, optim in enumerate(optims):
        for index, entry in optim.state_dict()["state"].items():
            tensors |= {f"optim/{number}/{index}/{key}": value for key, value in entry.items()}
    save_file({k: v.contiguous() for k, v in tensors.items()}, out / "new.safetensors", {"step": str(step)})
    (out / "new.safetensors").replace(out / "last.safetensors")


def resume(out, trainee, optims):
    """Load the last checkpoint, if there is one; returns the step to go on with."""
    file = out / "last.safetensors"
    if not file.exists():
        return 0
    tensors = load_file(file)
    for name, p in trainee.named_parameters():
        p.data.copy_(tensors[f"model/{name}"])
    for number, optim in enumerate(optims):
        state = optim.state_dict()
        for name, value in tensors.items():
            if name.startswith(f"optim/{number}/"):
                _, _, index, key = name.split("/")
                state["state"].setdefault(int(index), {})[key] = value
        optim.load_state_dict(state)
    with open_tensors(file) as opened:
        return int(opened.metadata()["step"])


def export(trainee, folder):
    """Write the model folder's tensors in bf16, under the names of the real checkpoint."""
    tensors = {"model.language_model." + name: p for name, p in trainee.model.named_parameters()}
    tensors |= {"mtp." + name: p for name, p in trainee.mtp.named_parameters()}
    save_file({name: p.detach().bfloat16().contiguous() for name, p in tensors.items()},
              folder / "new.safetensors", {"format": "pt"})
    (folder / "new.safetensors").replace(folder / "model.safetensors")
    (folder / "config.json").write_text(CONFIG.read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, default=Path("build/corpus"))
    parser.add_argument("--out", type=Path, default=Path("build/train"))
    parser.add_argument("--model", type=Path, default=Path("data/tiny"))
    parser.add_argument("--tokens", type=float, default=16e6, help="how many tokens to train on")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    trainee = Trainee(load_config(CONFIG.parent))
    optims = optimizers(trainee)
    start, steps = resume(args.out, trainee, optims), int(args.tokens / BATCH / T)
    losses = torch.compile(trainee) if args.compile else trainee
    tokens, began = np.load(args.corpus / "train.npy", mmap_mode="r"), time.time()
    for step, ids in zip(range(start, steps), batches(tokens, start)):
        for optim, full in zip(optims, (MUON_LR, ADAM_LR)):
            optim.param_groups[0]["lr"] = full * learning_rate(step, steps, WARMUP)
        with torch.autocast("cpu", torch.bfloat16):
            main_loss, mtp_loss = losses(ids)
        (main_loss + MTP_WEIGHT * mtp_loss).backward()
        torch.nn.utils.clip_grad_norm_(trainee.parameters(), 1.0)
        for optim in optims:
            optim.step()
            optim.zero_grad()
        if step % 10 == 9:
            seconds = (time.time() - began) / (step + 1 - start)
            entry = dict(step=step + 1, tokens=(step + 1) * BATCH * T, loss=round(main_loss.item(), 4),
                         mtp_loss=round(mtp_loss.item(), 4), seconds_a_step=round(seconds, 2))
            print(json.dumps(entry), flush=True)
            with open(args.out / "log.jsonl", "a") as log:
                log.write(json.dumps(entry) + "\n")
        if step % 100 == 99 or step == steps - 1:
            save(args.out, step + 1, trainee, optims)
    args.model.mkdir(parents=True, exist_ok=True)
    export(trainee, args.model)


if __name__ == "__main__":
    main()
