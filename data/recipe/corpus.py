"""From the packages to documents: `train.jsonl` and `heldout.jsonl`.

    python data/recipe/corpus.py --out build/corpus --packages FOLDER_WITH_DEBS

Each line is {"type", "text"}. A document is held out by a hash of its key, whole; what
repeats a held-out line is kept out of the other side. Nothing here draws on the clock."""
import argparse
import hashlib
import json
import platform
import re
import sys
from pathlib import Path

import chat
import sources
import texts


def all_documents(folders):
    """[(type, text, is held out)] of every text type."""
    poems = texts.all_poems(folders)
    found = [("poem_zh", texts.poem_text(p), texts.held_out(texts.poem_key(p))) for p in poems]
    for make in (texts.tech_zh, texts.tech_en, texts.prose_en, texts.code):
        found += [(d.type, d.text, texts.held_out(d.key)) for d in make(folders)]
    found += [(d.type, d.text, held) for d, held in texts.json_records(folders)]
    found += [("chat", text, held) for text, held in chat.conversations(folders, poems)]
    return found


def without_repeats(documents):
    """Drop exact repeats, and held-out documents whose lines training also has."""
    seen, unique = set(), []
    for type, text, held in documents:
        squeezed = re.sub(r"\s+", "", text)
        if type == "chat" or squeezed not in seen:
            seen.add(squeezed)
            unique.append((type, text, held))
    lines = {line.strip() for type, text, held in unique if not held
             for line in text.split("\n") if len(line.strip()) >= 12}
    whole = {text for _, text, held in unique if not held}
    kept = []
    for type, text, held in unique:
        if held and type in ("chat", "json"):
            if text in whole:
                continue
        elif held:
            mine = [l.strip() for l in text.split("\n") if len(l.strip()) >= 12]
            if sum(l in lines for l in mine) > 0.2 * len(mine):
                continue
        kept.append((type, text, held))
    return kept


def check_stdlib():
    """One sentence when the code part will differ from the one of the recipe."""
    digest = hashlib.sha256()
    for path in texts.stdlib_files():
        digest.update(path.read_bytes())
    expected = next(p for p in sources.SOURCES if p["kind"] == "stdlib")
    if digest.hexdigest() != expected["sha256"]:
        print(f"The code part comes from Python {platform.python_version()}, not from "
              f"{expected['version']}, and will differ a little ({digest.hexdigest()}).",
              file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/corpus"))
    parser.add_argument("--packages", type=Path, help="folder of already fetched packages")
    options = parser.parse_args()
    check_stdlib()
    folders = sources.unpack(options.packages, options.out / "packages")
    documents = without_repeats(all_documents(folders))
    counts = {}
    for name, side in (("train.jsonl", False), ("heldout.jsonl", True)):
        with open(options.out / name, "w", encoding="utf8") as file:
            for type, text, held in documents:
                if held == side:
                    print(json.dumps({"type": type, "text": text}, ensure_ascii=False), file=file)
                    count = counts.setdefault(type, [0, 0, 0])
                    count[held] += 1
                    count[2] += len(text)
    print(f"{'type':9}{'train':>8}{'held out':>10}{'characters':>12}")
    for type, (train, held, characters) in counts.items():
        print(f"{type:9}{train:8}{held:10}{characters:12}")


if __name__ == "__main__":
    main()
