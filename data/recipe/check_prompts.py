"""Check that the prompts are new to the model, and of a useful length.

    python data/recipe/check_prompts.py

A prompt must have 6 to 30 tokens. If it is 8 tokens or longer it may not stand in a training
document, and neither may such a line of it (in code and JSON single lines may)."""
import argparse
import json
from pathlib import Path

from tokenizers import Tokenizer

DATA = Path(__file__).resolve().parent.parent


def squeeze(text):
    return " ".join(text.split())


def faults(prompts, training_texts, tokenizer):
    """Sentences, one for each fault; none when all prompts are good."""
    found, wanted = [], []
    for prompt in prompts:
        count = len(tokenizer.encode(prompt["prompt"]).ids)
        if not 6 <= count <= 30:
            found.append(f"{prompt['id']} has {count} tokens, not 6 to 30.")
        lines = [] if prompt["type"] in ("code", "json") else prompt["prompt"].split("\n")
        pieces = {squeeze(p) for p in [prompt["prompt"], *lines]}
        wanted += [(prompt["id"], p) for p in sorted(pieces)
                   if len(tokenizer.encode(p).ids) >= 8]
    for text in training_texts:
        text = squeeze(text)
        found += [f"{id}: “{p}” is in the training text." for id, p in wanted if p in text]
    return sorted(set(found))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompts", type=Path, default=DATA / "prompts/completions.jsonl")
    parser.add_argument("--train", type=Path, default=Path("build/corpus/train.jsonl"))
    parser.add_argument("--tokenizer", type=Path, default=DATA / "tiny/tokenizer.json")
    options = parser.parse_args()
    lines = options.prompts.read_text("utf8").splitlines()
    with open(options.train, encoding="utf8") as file:
        found = faults([json.loads(line) for line in lines],
                       (json.loads(line)["text"] for line in file),
                       Tokenizer.from_file(str(options.tokenizer)))
    print("\n".join(found) or f"{len(lines)} prompts, all new to the model.")
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
