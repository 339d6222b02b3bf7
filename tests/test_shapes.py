"""Every notebook runs on a large model in each dtype that files come in, and no shape comment of it lies.

The model is the embedded one, its vocabulary padded as the real one's is, and counts as large: it computes in the
dtypes of its file. Each notebook takes one kind of file, with `# (B, H, T, K)` comments as checks.
"""
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from notebook import PATHS
from chapters import NOTEBOOKS, all_code_cells
from qwen_helpers.weights import TINY
from shapes import sizes

NOTEBOOKS_ALL = [*PATHS, NOTEBOOKS / "show.ipynb"]
ROWS = 9_000                                    # of the embedding; the tokenizer has 8,192
KEPT_IN_FP32 = "A_log", "linear_attn.norm.weight"
KINDS = {"as published": lambda name, value: value.float() if name.endswith(KEPT_IN_FP32) else value,
         "float16": lambda name, value: value.half(),
         "mixed": lambda name, value: value.float() if "q_proj" in name or value.dim() == 1 else value,
         "float32": lambda name, value: value.float(),
         "bfloat16": lambda name, value: value}


def as_stored(kind, folder):
    """The embedded model with more rows of embedding than tokens, its tensors in the dtypes of this kind of file."""
    shutil.copytree(TINY, folder)
    config = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
    config["text_config"]["vocab_size"] = ROWS
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = load_file(TINY / "model.safetensors")
    name = "model.language_model.embed_tokens.weight"
    more = torch.zeros(ROWS - len(tensors[name]), tensors[name].shape[1], dtype=tensors[name].dtype)
    tensors[name] = torch.cat([tensors[name], more])
    save_file({name: KINDS[kind](name, value) for name, value in tensors.items()}, folder / "model.safetensors",
              metadata={"format": "pt"})
    return folder


def run(path, model=TINY, *options):
    """What tests/shapes.py says about a notebook, run in a process of its own as a kernel would."""
    done = subprocess.run([sys.executable, Path(__file__).with_name("shapes.py"), path, *options], cwd=NOTEBOOKS,
                          env=os.environ | {"QWEN_MODEL": str(model), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
                          text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    home = tmp_path_factory.mktemp("models")
    folders = cycle([as_stored(kind, home / kind / "my-tune") for kind in KINDS])
    with ThreadPoolExecutor(2) as pool:
        done = pool.map(lambda path, folder: run(path, folder, "--large"), NOTEBOOKS_ALL, folders)
        return dict(zip(NOTEBOOKS_ALL, done))


@pytest.mark.parametrize("path", NOTEBOOKS_ALL, ids=[path.stem for path in NOTEBOOKS_ALL])
def test_runs_on_a_large_model_and_shape_comments_are_true(path, reports):
    assert reports[path]["stopped"] == ""
    assert reports[path]["lies"] == {}


def test_every_shape_comment_was_checked(reports):
    found, ran = (set().union(*(report[part] for report in reports.values())) for part in ("found", "ran"))
    assert sorted(found - ran) == []


def test_most_chapters_have_some(reports):
    assert sum(bool(report["found"]) for report in reports.values()) >= 0.7 * len(reports)


def without_head(folder):
    tensors = {name: value for name, value in load_file(folder / "model.safetensors").items() if not name.startswith("mtp.")}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def without_template(folder):
    (folder / "chat_template.jinja").unlink()


@pytest.mark.parametrize("slug, take_away, said", [
    ("00_start", without_head, "my-tune has no draft head"), ("01_weights", without_head, "no draft head"),
    ("12_chat", without_template, "my-tune has no chat template")])
def test_what_a_folder_lacks_is_said_once_and_the_rest_runs(tmp_path, slug, take_away, said):
    shutil.copytree(TINY, tmp_path / "my-tune")
    take_away(tmp_path / "my-tune")
    report = run(NOTEBOOKS / f"{slug}.ipynb", tmp_path / "my-tune")
    assert report["stopped"] == "" and report["printed"].count(said) == 1


@pytest.mark.parametrize("path", NOTEBOOKS_ALL, ids=[path.stem for path in NOTEBOOKS_ALL])
def test_whoever_drafts_asks_for_a_model_with_a_head(path):
    """A folder without one is passed over there, and not met in the middle of the chapter."""
    text = "\n".join(source for _, _, source, _ in all_code_cells(path))
    assert ("MTP.from_pretrained(" in text) <= ('find_model("mtp.")' in text)


@pytest.mark.parametrize("comment, groups", [
    ("# (B, T, D)", 1), ("#   (T,)", 1), ("# (T)", 1), ("# (4, 3)", 1), ("# (B, 2*H*K)", 1), ("# (B, T), (B, T, D)", 2),
    ("# (..., D)", 1), ("# (T, H·K)", 1), ("# (H, channels)", 1),
    ("# (B, T, D) of the first row", 0), ("# (why not?)", 0), ("# (unused)", 0), ("# equation (3)", 0), ("# f(x)", 0)])
def test_what_counts_as_a_shape_comment(comment, groups):
    assert len(sizes(comment) or []) == groups


TRUE = '''
import torch
x = torch.zeros(2, 5, 8)                      # (B, T, D)
y = x.mT                                      # (B, D, T)
a, b = x[0], x[1]                             # (T, D)
a, b = x[0], x[1, :, 0]                       # (T, D), (T)
for i in range(3):
    row = torch.zeros(i)                      # (N,)
class Layer:
    def __init__(self):
        self.K = 4
        self.weight = torch.zeros(8, 4)       # (8, K)
    def heads(self, x):
        """Split."""
        B, T, D = x.shape
        x = x.view(B, T, D // self.K, self.K)     # (B, T, H, K)
        return x.flatten(2)                   # (B, T, H*K)
Layer().heads(x)                              # (2, 5, 8)
for T in (3, 4):
    Layer().heads(torch.zeros(1, T, 12))      # (..., T, 12)
'''
LIES = ["x = torch.zeros(2, 5)                # (B, T, D)", "x = torch.zeros(2, 5)    # (2, 4)",
        "x = torch.zeros(2, 5)                # (T, T)", "x = 3                    # (T,)",
        "x = torch.zeros(2, 5)  # (A, B)\ny = x.mT  # (A, B)", "a, b = torch.zeros(2), torch.zeros(3)  # (T)",
        "T = 3\nx = torch.zeros(4)  # (T)", "x = torch.zeros(2, 5)  # (A, B)\ny = x.flatten()  # (A * B + 1)",
        "def f(x):\n    T = len(x)\n    x = x[1:]  # (T)\n    return x\nf(torch.zeros(3))",
        "def f(x):\n    '''Doc.'''\n    return x.mT  # (4, 3)\nf(torch.zeros(4, 3))",
        "class A:\n    def f(self, x):\n        self.K = 3\n        self.x = x  # (K)\nA().f(torch.zeros(2))"]


def notebook(folder, *sources):
    """A notebook file of code cells."""
    cells = [{"cell_type": "code", "metadata": {}, "source": source, "outputs": []} for source in sources]
    path = folder / "99_toy.ipynb"
    path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    return path


def test_lies_are_caught(tmp_path):
    report = run(notebook(tmp_path, "import torch", *LIES))
    assert report["stopped"] == ""
    cells = [int(where.split("cell ")[1].split(":")[0]) for where in report["lies"]]
    assert sorted(cells) == list(range(2, 2 + len(LIES)))


def test_true_comments_pass_and_idle_ones_are_known(tmp_path):
    report = run(notebook(tmp_path, TRUE, "def never():\n    x = torch.zeros(3)  # (T)"))
    assert report["lies"] == {} and report["stopped"] == ""
    assert [where for where in report["found"] if where not in report["ran"]] == ["99_toy, cell 2:2"]


def test_the_cell_that_stops_a_notebook_is_named(tmp_path):
    assert run(notebook(tmp_path, "x = 1", "x / 0"))["stopped"] == 'cell 2, "": ZeroDivisionError: division by zero'
