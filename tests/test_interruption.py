"""Killed, interrupted, out of disk, twice at once: refresh and training leave whole files, and say what happened."""
import errno
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import jupyter_client
import nbformat
import pytest
import torch
from safetensors.torch import load_file, save_file

from qwen_publish import ROOT, refresh
from qwen_helpers.weights import TINY
from test_refresh import toy

RECIPE = TINY.parent / "recipe"
sys.path.insert(0, str(RECIPE))
import train  # noqa: E402  (a script of the recipe)

posix = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")


def start(path, change="", **how):
    """A refresh of one notebook in a process of its own, with a line of Python run before it."""
    code = f"import os, sys, signal, time\nfrom qwen_publish import refresh\n{change}\nrefresh.main(sys.argv[1:])"
    environment = {key: value for key, value in os.environ.items() if key != "QWEN_MODEL"}
    return subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            text=True, env=environment, **how)


def wait_for(file, seconds=60):
    end = time.monotonic() + seconds
    while not file.exists():
        assert time.monotonic() < end, f"no {file.name}"
        time.sleep(0.05)


def gone(pid, seconds=20):
    """Whether a process ends within some seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.1)
    return False


SLOW = "import os, pathlib, time\npathlib.Path('kernel.pid').write_text(str(os.getpid()))\ntime.sleep({})\n1 + 1"


@posix
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_a_refresh_cut_off_while_it_runs_changes_nothing(tmp_path, sign):
    """No kernel goes on without it either."""
    path = toy(tmp_path, SLOW.format(600))
    before = path.read_bytes()
    process = start(path)
    wait_for(tmp_path / "kernel.pid")
    process.send_signal(sign)
    said, _ = process.communicate(timeout=60)
    assert process.returncode != 0 and path.read_bytes() == before
    assert gone(int((tmp_path / "kernel.pid").read_text()))
    assert {file.name for file in tmp_path.iterdir()} == {path.name, "kernel.pid"}
    if sign == signal.SIGINT:
        assert f"Interrupted: {path} is as it was.\n" in said              # the kernel may say something too


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def dies(work):
    """Do some work in a child of this process, which is to be killed in it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)             # Python 3.12 dislikes a fork among threads
        child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def half_a_text(path, text, **how):
    with open(path, "w") as file:
        file.write(text[:len(text) // 2])
    killed()


CUTS = {
    "before it writes": (refresh, "write_whole", lambda *_: killed()),
    "half-way through writing": (Path, "write_text", half_a_text),
    "before it replaces": (os, "replace", lambda *_: killed()),
}


@posix
@pytest.mark.parametrize("cut", CUTS)
def test_a_refresh_killed_while_it_saves_leaves_the_old_notebook(tmp_path, monkeypatch, cut):
    """What is left under another name is no chapter, and git does not see it; the next refresh goes through."""
    path = toy(tmp_path, "print(1)")
    before = path.read_bytes()
    monkeypatch.setattr(refresh, "run", lambda nb, path, timeout: nb)
    with monkeypatch.context() as patch:
        patch.setattr(*CUTS[cut])
        dies(lambda: refresh.refresh(path))
    assert path.read_bytes() == before
    for left in set(tmp_path.iterdir()) - {path}:
        assert left.name.startswith(f".{path.name}.") and left.suffix == ".tmp"
        ignored = ["git", "check-ignore", "-q", "--no-index", f"notebooks/{left.name}"]
        assert subprocess.run(ignored, cwd=ROOT).returncode == 0
    assert list(tmp_path.glob("[0-9][0-9]_*.ipynb")) == [path]
    assert refresh.refresh(path).startswith("saved") and "stamp" in nbformat.read(path, as_version=4).metadata


@posix
def test_two_refreshes_at_once_do_no_harm(tmp_path):
    """Each saves a whole notebook, or says that it was edited meanwhile."""
    path = toy(tmp_path, SLOW.format(1))
    both = [start(path), start(path)]
    said = [process.communicate(timeout=120)[0] for process in both]
    assert nbformat.read(path, as_version=4).cells[1].outputs[0].data["text/plain"] == "2"
    assert 0 in [process.returncode for process in both]
    assert all("saved" in text or "no change" in text or "edited while it ran" in text for text in said), said
    assert not list(tmp_path.glob(".*.tmp"))


FULL = {
    "a full disk": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "a read-only folder": PermissionError(errno.EACCES, os.strerror(errno.EACCES)),
    "a read-only disk": OSError(errno.EROFS, os.strerror(errno.EROFS)),
}


@pytest.mark.parametrize("trouble", FULL)
def test_what_cannot_be_written_is_said_in_one_sentence(tmp_path, monkeypatch, capsys, trouble):
    path = toy(tmp_path, "print(1)")
    before = path.read_bytes()
    monkeypatch.delenv("QWEN_MODEL", raising=False)
    monkeypatch.setattr(refresh, "run", lambda nb, path, timeout: nb)

    def full(self, *args, **how):
        self.touch()
        raise FULL[trouble]

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(SystemExit) as caught:
        refresh.main([str(path)])
    said = capsys.readouterr().out
    assert caught.value.code == 1 and said.count("\n") == 1
    assert f"{path} cannot be read or saved ({FULL[trouble].strerror}): the file is as it was" in said
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@posix
def test_a_file_that_may_not_grow(tmp_path):
    """The same with a real limit of the system: no file of this process may have more than 100 bytes."""
    path = toy(tmp_path, "print(1)")
    before = path.read_bytes()
    process = start(path, "import resource\nrefresh.run = lambda nb, path, timeout: resource.setrlimit("
                          "resource.RLIMIT_FSIZE, (100, 100))")
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "(File too large): the file is as it was" in said
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["90_nowhere.ipynb", "."])
def test_a_notebook_that_is_not_there(tmp_path, monkeypatch, capsys, name):
    monkeypatch.delenv("QWEN_MODEL", raising=False)
    with pytest.raises(SystemExit) as caught:
        refresh.main([str(tmp_path / name)])
    assert caught.value.code == 1 and capsys.readouterr().out.count("\n") == 1


# ---- training

def small():
    """A stand-in for the model in training, with an optimizer that remembers something."""
    trainee = torch.nn.Linear(3, 2)
    optim = torch.optim.AdamW(trainee.parameters())
    trainee(torch.ones(3)).sum().backward()
    optim.step()
    return trainee, [optim]


def half_a_checkpoint(tensors, file, metadata):
    save_file(tensors, file, metadata)
    os.truncate(file, os.path.getsize(file) // 2)
    killed()


TRAINING_CUTS = {
    "half-way through writing": (train, "save_file", half_a_checkpoint),
    "before it replaces": (Path, "replace", lambda *_: killed()),
}


@posix
@pytest.mark.parametrize("cut", TRAINING_CUTS)
def test_a_killed_training_leaves_its_last_checkpoint_whole(tmp_path, monkeypatch, cut):
    trainee, optims = small()
    train.save(tmp_path, 1, trainee, optims)
    before = (tmp_path / "last.safetensors").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(*TRAINING_CUTS[cut])
        dies(lambda: train.save(tmp_path, 2, *small()))
    assert (tmp_path / "last.safetensors").read_bytes() == before
    other, its = small()
    assert train.resume(tmp_path, other, its) == 1 and torch.equal(other.weight, trainee.weight)
    train.save(tmp_path, 3, other, its)                                 # goes on, over what was left behind
    assert train.resume(tmp_path, other, its) == 3 and [file.name for file in tmp_path.iterdir()] == ["last.safetensors"]


def test_a_model_is_exported_whole_or_not_at_all(tmp_path, monkeypatch):
    """The folder keeps its old model if the new one cannot be written to the end."""
    trainee = SimpleNamespace(model=torch.nn.Linear(3, 2), mtp=torch.nn.Linear(3, 2))
    train.export(trainee, tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()

    def full(tensors, file, metadata):
        Path(file).write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(train, "save_file", full)
    with pytest.raises(OSError):
        train.export(trainee, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert load_file(tmp_path / "model.safetensors").keys() == {
        f"{prefix}{name}" for prefix in ("model.language_model.", "mtp.") for name in ("weight", "bias")}


# ---- a kernel, as in JupyterLab

@pytest.fixture
def kernel(tmp_path):
    """A running kernel: `ask(code)` returns what it printed, or the error."""
    manager, client = jupyter_client.manager.start_new_kernel(cwd=str(tmp_path), extra_arguments=["--log-level=ERROR"],
                                                              env=os.environ | {"PYTHONPATH": str(ROOT)})
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def ask(client, code, timeout=60):
    said = []
    client.execute_interactive(code, timeout=timeout, output_hook=lambda message: said.append(message["content"]))
    return "".join(content.get("text", content.get("ename", "")) for content in said)


START = """
import qwen_helpers, torch
from chapters.model import Model
from chapters.sample import generate
from qwen_helpers.weights import TINY
model, ids = Model.from_pretrained(TINY), torch.tensor([[5, 6, 7]])
"""


def test_an_interrupted_cell_and_the_next_one(kernel):
    """The kernel is interrupted in the middle of a generation; the next cell gives what a fresh one gives."""
    manager, client = kernel
    right = ask(client, START + "print(generate(model, ids, 12))")
    client.execute("print('begun', flush=True)\nfor _ in range(10_000): generate(model, ids, 60)")
    while client.get_iopub_msg(timeout=60)["content"].get("text") != "begun\n":
        pass
    time.sleep(0.3)
    manager.interrupt_kernel()
    assert client.get_shell_msg(timeout=60)["content"]["ename"] == "KeyboardInterrupt"
    assert ask(client, "print(generate(model, ids, 12))") == right and right.startswith("[")


SLIDER = """
import qwen_helpers, time
from qwen_helpers.draw import bars
from qwen_helpers.widgets import demo
seen = []
box = demo(lambda k: (seen.append(k), bars(["k"], [1 / k], "One bar"))[1], k=(0, 5, 2))
slider = next(part for part in box.children if "knob-k" in part._dom_classes)
trouble = next(part for part in box.children if "demo-trouble" in part._dom_classes)
print(slider.model_id)
"""


def test_a_slider_moved_while_a_cell_runs(kernel):
    """The moves wait for the cell, then the picture is drawn for them; an error stands under the sliders."""
    _, client = kernel
    model = ask(client, SLIDER).split()[-1]
    client.execute("time.sleep(1)\nprint('slept', seen)")
    for value in (3, 0, 5):
        content = {"comm_id": model, "data": {"method": "update", "state": {"value": value}, "buffer_paths": []}}
        client.shell_channel.send(client.session.msg("comm_msg", content))
    assert ask(client, "print(seen, repr(trouble.value), slider.value)").splitlines()[-1] == "[2, 3, 0, 5] '' 5"
    content = {"comm_id": model, "data": {"method": "update", "state": {"value": 0}, "buffer_paths": []}}
    client.shell_channel.send(client.session.msg("comm_msg", content))
    assert "ZeroDivisionError: division by zero" in ask(client, "print(trouble.value)")
