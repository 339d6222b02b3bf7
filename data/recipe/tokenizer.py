"""Train the tokenizer on the corpus and encode it: the stream that training reads.

    python data/recipe/tokenizer.py --corpus build/corpus --out data/tiny

Writes `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` to --out, and
`train.npy` (one uint16 stream, documents shuffled, each ended by <|endoftext|>) and
`heldout.npz` (one such array for each text type) beside the corpus."""
import argparse
import json
import random
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers, trainers

VOCABULARY = 8192
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]      # hidden when decoded
SHOWN = ["<think>", "</think>"]                                # whole tokens, but text
STREAM = 11_000_000                                            # tokens of one epoch
MIXTURE = {"poem_zh": 0.14, "tech_zh": 0.16, "tech_en": 0.16, "prose_en": 0.18,
           "code": 0.14, "json": 0.06, "chat": 0.16}
SAMPLE = {"poem_zh": 2.5, "tech_zh": 2.5, "tech_en": 2.5, "prose_en": 2.5, "code": 2.5,
          "json": 0.8, "chat": 1.0}                            # MB each, for the merges

# Qwen's rule, but only ASCII marks may lead a word: with few entries, "，" and the first bytes
# of the character behind it would else become tokens of their own.
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[ -/:-@\[-`{-~]?[\p{L}\p{M}]+|\p{N}|"
         r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")

TEMPLATE = (Path(__file__).parents[1] / "tiny" / "chat_template.jinja").read_text("utf8")    # written by hand


def read_documents(path):
    """{type: texts} of one corpus file."""
    documents = {type: [] for type in MIXTURE}
    with open(path, encoding="utf8") as file:
        for line in file:
            record = json.loads(line)
            documents[record["type"]].append(record["text"])
    return documents


def balanced_sample(documents):
    """Texts of every type up to its megabytes in SAMPLE, ChatML marks taken out."""
    random_ = random.Random(5)
    for type, megabytes in SAMPLE.items():
        left = megabytes * 1e6
        for text in random_.sample(documents[type], len(documents[type])):
            if left <= 0:
                break
            for mark in SPECIAL + SHOWN:
                text = text.replace(mark, "")
            left -= len(text.encode())
            yield text


def train_tokenizer(texts):
    """Byte-level BPE of VOCABULARY entries, special ones last; any text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - len(SHOWN), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in SHOWN])
    assert tokenizer.get_vocab_size() == VOCABULARY
    return tokenizer


def save(tokenizer, folder):
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        "unk_token": None, "add_bos_token": False, "add_prefix_space": False,
        "clean_up_tokenization_spaces": False, "model_max_length": 262144}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, "utf8")


def encode(tokenizer, texts):
    """One uint16 array for each text, ended by <|endoftext|>."""
    end = tokenizer.token_to_id("<|endoftext|>")
    return [np.array(e.ids + [end], np.uint16) for e in tokenizer.encode_batch(texts)]


def draw(arrays, quota, random_):
    """Arrays of about `quota` tokens; all are used before any is used again."""
    drawn, total = [], 0
    while total < quota:
        for array in random_.sample(arrays, len(arrays)):
            if total >= quota:
                break
            drawn.append(array)
            total += len(array)
    return drawn


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", type=Path, default=Path("build/corpus"))
    parser.add_argument("--out", type=Path, default=Path("data/tiny"))
    options = parser.parse_args()
    train = read_documents(options.corpus / "train.jsonl")
    tokenizer = train_tokenizer(balanced_sample(train))
    save(tokenizer, options.out)

    held = {type: np.concatenate(encode(tokenizer, texts)) for type, texts in
            read_documents(options.corpus / "heldout.jsonl").items()}
    np.savez(options.corpus / "heldout.npz", **held)
    random_, stream = random.Random(11), []
    print(f"{'type':9}{'unique':>10}{'in stream':>11}{'held out':>10}{'bytes/token':>13}")
    for type, share in MIXTURE.items():
        arrays = encode(tokenizer, train[type])
        drawn = draw(arrays, share * STREAM, random_)
        unique, size = sum(map(len, arrays)), sum(len(t.encode()) for t in train[type])
        stream += drawn
        print(f"{type:9}{unique:10}{sum(map(len, drawn)):11}{len(held[type]):10}"
              f"{size / unique:13.2f}")
    random_.shuffle(stream)
    stream = np.concatenate(stream)
    np.save(options.corpus / "train.npy", stream)
    print(f"{len(stream)} tokens in {options.corpus / 'train.npy'}")


if __name__ == "__main__":
    main()
