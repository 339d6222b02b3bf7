"""Measure the embedded model on held-out text and write the table into its model card.

    python data/recipe/evaluate.py --corpus build/corpus --model data/tiny

By text type, over windows of 256 held-out tokens: the loss (nats a token), how often the likeliest token was the
true one, and the agreement of the draft head with the model on that text. Then the model writes by itself, 60
greedy tokens after each of data/prompts: the acceptance of its drafts, loops left out, and how many texts loop.
"""
import argparse
import re
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from chapters.chat import Chat
from chapters.model import Model
from chapters.mtp import MTP, load_prompts, loop_start, measure, tally

T = 256


@torch.no_grad()
def on_text(model, mtp, tokens, windows):
    """(loss, share of true tokens guessed, agreement of the head, tokens) over the first windows of a type."""
    count = min(windows, (len(tokens) - 1) // T)
    ids = torch.from_numpy(np.stack([tokens[i * T:i * T + T + 1] for i in range(count)]).astype("int64"))
    sums = torch.zeros(3, dtype=torch.float64)
    for rows in ids.split(8):
        hidden = model.hidden(rows[:, :-1])
        logits = model.lm_head(hidden)
        guess = model.lm_head(mtp(model.embed_tokens(rows[:, 1:-1]), hidden[:, :-1], 0)).argmax(-1)
        sums += torch.tensor([F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum"),
                              (logits.argmax(-1) == rows[:, 1:]).sum(),
                              (guess == logits[:, 1:].argmax(-1)).sum() * T / (T - 1)])
    return *(sums / (count * T)).tolist(), count * T


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, default=Path("build/corpus"))
    parser.add_argument("--model", type=Path, default=Path("data/tiny"))
    parser.add_argument("--windows", type=int, default=64, help="at most so many windows of each type")
    args = parser.parse_args()
    model = Model.from_pretrained(args.model)
    mtp = MTP.from_pretrained(model.cfg, args.model)
    chat, prompts = Chat(model, args.model), load_prompts(args.model)
    rows = ["| type | held-out tokens | loss | true token guessed | head agrees | accepted while writing | texts that loop |",
            "|---|---|---|---|---|---|---|"]
    for kind, tokens in np.load(args.corpus / "heldout.npz").items():
        loss, right, agree, count = on_text(model, mtp, tokens, args.windows)
        runs = [measure(model, mtp, chat, entry, 60) for entry in prompts if entry["type"] == kind]
        rounds, hits = tally(runs)
        loops = sum(loop_start(run.plain) < len(run.plain) for run in runs)
        rows.append(f"| `{kind}` | {count:,} | {loss:.2f} | {right:.0%} | {agree:.0%} "
                    f"| {hits} of {rounds} ({hits / max(1, rounds):.0%}) | {loops} of {len(runs)} |")
    print("\n".join(rows))
    card = args.model / "README.md"
    table = "<!-- evaluate.py -->\n" + "\n".join(rows) + "\n<!-- end -->"
    card.write_text(re.sub(r"(?s)<!-- evaluate.py -->.*<!-- end -->", lambda _: table, card.read_text()))


if __name__ == "__main__":
    main()
