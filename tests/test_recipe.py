"""The way to the embedded model: training runs, resumes, and writes a folder that loads; no prompt is in its text."""
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from chapters.model import Model
from chapters.mtp import MTP
from qwen_helpers.weights import TINY

RECIPE = TINY.parent / "recipe"
sys.path.insert(0, str(RECIPE))


def train(folder, steps):
    """Run the training script on a random stream, as `make tiny` does; returns the steps that it logged."""
    np.save(folder / "train.npy", np.random.default_rng(0).integers(0, 8192, 40_000).astype("uint16"))
    subprocess.run([sys.executable, RECIPE / "train.py", "--no-compile", "--corpus", folder, "--out", folder / "run",
                    "--model", folder / "tiny", "--tokens", str(steps * 16 * 256)], check=True, capture_output=True)


def test_training_writes_a_model_and_resumes(tmp_path):
    train(tmp_path, 1)
    first = (tmp_path / "run" / "last.safetensors").read_bytes()
    model = Model.from_pretrained(tmp_path / "tiny")
    assert MTP.from_pretrained(model.cfg, tmp_path / "tiny").fc.weight.std() > 0
    train(tmp_path, 2)                                  # one more step, from the checkpoint
    second = (tmp_path / "run" / "last.safetensors").read_bytes()
    assert len(first) == len(second) and first != second
    train(tmp_path, 2)                                  # nothing left to do
    assert (tmp_path / "run" / "last.safetensors").read_bytes() == second


def test_prompts_are_checked_against_the_training_text():
    from check_prompts import faults
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    prompt = {"id": "x-1", "type": "prose_en", "lang": "en", "chat": False,
              "prompt": "The old lighthouse keeper counted the ships that passed before the storm came in"}
    assert faults([prompt], ["Nothing of it stands here."], tokenizer) == []
    assert faults([prompt], ["It is told: " + prompt["prompt"] + ", and so on."], tokenizer)


@pytest.mark.parametrize("name", ["completions", "chat"])
def test_prompt_files_are_whole(name):
    rows = [json.loads(line) for line in (TINY.parent / "prompts" / f"{name}.jsonl").read_text("utf-8").splitlines()]
    assert all(set(row) == {"id", "type", "lang", "prompt", "chat"} for row in rows)
    assert len({row["id"] for row in rows}) == len(rows)
    kinds = [row["type"] for row in rows]
    assert name == "chat" or {kinds.count(kind) for kind in kinds} == {8} and len(set(kinds)) == 7


def test_sources_name_version_licence_and_checksum():
    sources = json.loads((Path(RECIPE) / "sources.json").read_text("utf-8"))
    entries = sources if isinstance(sources, list) else sources["packages"]
    assert len(entries) > 10
    assert all(entry["version"] and entry["licence"] for entry in entries)
