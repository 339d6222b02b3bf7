"""`python -m qwen_helpers.download` against a server on this machine that plays Hugging Face and ModelScope."""
import errno
import hashlib
import http.server
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from urllib.parse import parse_qs, urlsplit

import huggingface_hub.constants
import pytest
import torch

from checkpoints import write_checkpoint
from qwen_helpers import download, find_model, load_weights, weights
from qwen_helpers.weights import REAL, TINY, is_whole

COMMIT = "0123456789abcdef0123456789abcdef01234567"
UNWANTED = {"README.md": b"# Card", "vocab.json": b"{}", "sub/model.safetensors": b"elsewhere",
            "preprocessor_config.json": b"{}"}


def git_hash(content):
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


class Hub(http.server.ThreadingHTTPServer):
    """Both APIs over the same files; `faults` says what goes wrong, `asked` is (path, first byte wanted)."""

    daemon_threads = True

    def __init__(self, files):
        super().__init__(("127.0.0.1", 0), Answer)
        self.files, self.asked, self.faults = files, [], {}
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request, client_address):
        """A client that hangs up is part of the play."""


class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        """Nothing is written to the terminal."""

    def do_GET(self):
        url, hub = urlsplit(self.path), self.server
        start = int((self.headers.get("Range") or "bytes=0-")[6:-1])
        hub.asked.append((url.path + ("?" + url.query if url.query else ""), start))
        if "status" in hub.faults:
            self.reply(hub.faults["status"], b"", **hub.faults.get("headers", {}))
        elif url.path in (f"/api/models/{REAL}", f"/api/models/{REAL}/revision/v1"):
            self.json({"id": REAL, "sha": COMMIT, "siblings": [self.sibling(*file) for file in hub.files.items()]})
        elif url.path == f"/api/v1/models/{REAL}/repo/files" and "v2" not in url.query:
            listed = [{"Type": "tree", "Path": "sub", "Size": 0, "Sha256": ""}]
            listed += [{"Type": "blob", "Path": name, "Size": len(content), "Sha256": self.sha256(name)}
                       for name, content in hub.files.items()]
            self.json({"Code": 200, "Data": {"Files": listed}})
        elif url.path == f"/api/v1/models/{REAL}/repo":
            self.send(parse_qs(url.query)["FilePath"][0], start)
        elif url.path.startswith(f"/{REAL}/resolve/{COMMIT}/"):         # large files lie behind a redirect
            name = url.path.removeprefix(f"/{REAL}/resolve/{COMMIT}/")
            if name.endswith(".safetensors"):
                self.reply(302, b"", Location=f"{hub.url}/storage/{name}", **{"X-Linked-Size": len(hub.files[name])})
            else:
                self.send(name, start)
        elif url.path.startswith("/storage/"):
            self.send(url.path.removeprefix("/storage/"), start)
        else:
            self.reply(404, b"", **{"X-Error-Code": "RevisionNotFound" if "/revision/" in url.path else "RepoNotFound"})

    def sha256(self, name):
        return hashlib.sha256(self.server.files[name]).hexdigest()

    def sibling(self, name, content):
        small = {"rfilename": name, "size": len(content), "blobId": git_hash(content)}
        large = {"lfs": {"sha256": self.sha256(name), "size": len(content), "pointerSize": 134}}
        return small | (large if name.endswith(".safetensors") else {})

    def json(self, content):
        self.reply(200, json.dumps(content).encode(), **{"Content-Type": "application/json"})

    def reply(self, status, body, **headers):
        self.send_response(status)
        for name, value in ({"Content-Length": len(body)} | headers).items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def send(self, name, start):
        """The rest of a file from `start` on, with the fault that is planned for it."""
        faults, content = self.server.faults, self.server.files[name]
        if name in faults.get("refused", ()):
            return self.reply(403, b"")
        content = faults.get("other bytes", {}).get(name, content)
        start = 0 if name in faults.get("no ranges", ()) else start
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if name in faults.get("hangs", ()):
            faults["hangs"][name].wait(30)
        rest = content[start:]
        if name in faults.get("cut", ()):
            faults["cut"].remove(name)
            rest = rest[:len(rest) // 2]
            self.close_connection = True
        step = faults.get("slow", {}).get(name, len(rest) or 1)
        for at in range(0, len(rest), step):
            self.wfile.write(rest[at:at + step])
            time.sleep(0.02 if step < len(rest) else 0)


def model_files(folder, padding=0):
    """The files of a small checkpoint in the real layout: two shards, an index, vision tensors, a tokenizer."""
    write_checkpoint(folder, shards=2, vision=2, dtype=torch.bfloat16)
    for i in (0, 1):
        (folder / f"part-{i}.safetensors").rename(folder / f"model.safetensors-0000{i + 1}-of-00002.safetensors")
    index = folder / "model.safetensors.index.json"
    text = index.read_text()
    for i in (0, 1):
        text = text.replace(f"part-{i}.safetensors", f"model.safetensors-0000{i + 1}-of-00002.safetensors")
    index.write_text(text)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((TINY / name).read_bytes())
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


SHARD = "model.safetensors-00001-of-00002.safetensors"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with the model and more; downloads go below tmp_path, and nothing else can be reached."""
    files = model_files(tmp_path / "origin")
    server = Hub(files | UNWANTED)
    resolve = socket.getaddrinfo

    def only_here(host, *args, **more):
        if host not in ("127.0.0.1", b"127.0.0.1", "localhost"):
            raise AssertionError(f"a request to {host}")
        return resolve(host, *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", only_here)
    for module in (download, weights):
        monkeypatch.setattr(module, "DOWNLOADED", tmp_path / "house" / "Qwen3.5-0.8B")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
    monkeypatch.setattr(download, "MODELSCOPE", server.url)
    monkeypatch.setattr(download, "PAUSE", 0.0)
    for name in ("QWEN_MODEL", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    yield server
    server.shutdown()
    server.server_close()


def wanted(hub):
    return {name: content for name, content in hub.files.items() if name not in UNWANTED}


def stored(folder):
    """What a download left, without its own record."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != download.RECORD}


def refusal(*args):
    """The one sentence with which a download ends; it leaves no model."""
    with pytest.raises(SystemExit) as caught:
        download.main(args)
    assert isinstance(caught.value.code, str) and "\n" not in caught.value.code and len(caught.value.code) < 300
    assert find_model() == TINY
    return caught.value.code


SOURCE = pytest.mark.parametrize("source", ["huggingface", "modelscope"])


@SOURCE
def test_the_model_comes_whole_and_is_found(hub, capsys, source):
    """Only the files needed; size and revision said beforehand; the loader accepts it; what to do next is said."""
    assert find_model() == TINY
    download.main(["--source", source])
    said, folder = capsys.readouterr(), download.DOWNLOADED
    revision = {"huggingface": COMMIT, "modelscope": "master"}[source]
    size = sum(map(len, wanted(hub).values()))
    assert said.out.startswith(f"{REAL}, revision {revision}: {len(wanted(hub))} files, {size / 1e9:.2f} GB\n")
    assert f"is in {folder}" in said.out and "Next: open or restart any chapter" in said.out
    assert "100%" in said.err                                          # the progress bar
    assert stored(folder) == wanted(hub) and find_model() == folder
    assert set(load_weights(folder)) and set(load_weights(folder, "mtp."))
    record = json.loads((folder / download.RECORD).read_text())
    assert (record["source"], record["revision"], record["repository"]) == (source, revision, REAL)
    assert set(record["files"]) == set(wanted(hub))
    assert not list(folder.parent.glob("*.part"))
    hub.asked.clear()
    download.main(["--source", source])                                # the second time nothing is asked
    assert not hub.asked and f"is in {folder}" in capsys.readouterr().out


@SOURCE
def test_a_connection_that_breaks_is_taken_up_where_it_stopped(hub, monkeypatch, source):
    monkeypatch.setattr(download, "BLOCK", 100)
    hub.faults["cut"] = {SHARD, "tokenizer.json"}
    download.main(["--source", source])
    half = len(hub.files[SHARD]) // 2
    starts = [start for path, start in hub.asked if SHARD in path and "resolve" not in path]
    assert starts[0] == 0 and half - 100 < starts[1] <= half and len(starts) == 2
    assert not hub.faults["cut"] and stored(download.DOWNLOADED) == wanted(hub)


@SOURCE
def test_a_server_without_ranges_sends_all_again(hub, monkeypatch, source):
    monkeypatch.setattr(download, "BLOCK", 100)
    hub.faults |= {"cut": {SHARD}, "no ranges": {SHARD}}
    download.main(["--source", source])
    assert stored(download.DOWNLOADED) == wanted(hub)


def test_a_revision_is_asked_for_and_its_commit_recorded(hub, capsys):
    download.main(["--revision", "v1"])
    assert any("/revision/v1" in path for path, _ in hub.asked) and download.said(download.DOWNLOADED) == COMMIT
    capsys.readouterr()
    with pytest.raises(SystemExit, match=f"holds {COMMIT} already: name another folder with --to"):
        download.main(["--revision", "v3"])


def test_another_folder(hub, capsys, tmp_path):
    (tmp_path / "mine").mkdir()                                        # an empty folder is as good as none
    download.main(["--to", str(tmp_path / "mine")])
    assert f"Next: set QWEN_MODEL={tmp_path / 'mine'} and start Jupyter" in capsys.readouterr().out
    assert find_model() == TINY and stored(tmp_path / "mine") == wanted(hub)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("all of it")
    assert "is there and holds no whole model: remove it" in refusal("--to", str(tmp_path / "full"))
    assert (tmp_path / "full" / "thesis.txt").read_text() == "all of it"


def test_a_model_in_the_hugging_face_cache_is_not_fetched_again(hub, capsys, tmp_path):
    repo = tmp_path / "cache" / ("models--" + REAL.replace("/", "--"))
    model_files(repo / "snapshots" / COMMIT)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    download.main([])
    assert not hub.asked and find_model() == repo / "snapshots" / COMMIT
    assert f"revision {COMMIT} is in {find_model()}" in capsys.readouterr().out


def changed(content):
    return content[:-1] + bytes([content[-1] ^ 1])


@SOURCE
@pytest.mark.parametrize("name", [SHARD, "config.json"])
@pytest.mark.parametrize("damage", [changed, lambda c: c[:-1], lambda c: c + b"\0"], ids=["bit", "short", "long"])
def test_wrong_bytes_are_never_taken(hub, source, name, damage):
    """One bit, too short, too long: nothing is kept, and a second run with right bytes succeeds."""
    hub.faults["other bytes"] = {name: damage(hub.files[name])}
    assert name in refusal("--source", source)
    assert not download.DOWNLOADED.exists()
    hub.faults.clear()
    download.main(["--source", source])
    assert stored(download.DOWNLOADED) == wanted(hub)


def test_what_is_left_of_an_interrupted_download_is_checked_too(hub, capsys):
    """A part that rotted on the disk, and one of another version, do not get into the model."""
    part = download.DOWNLOADED.with_name("Qwen3.5-0.8B.part")
    part.mkdir(parents=True)
    (part / SHARD).write_bytes(changed(hub.files[SHARD]))
    (part / "config.json.0badc0de.incomplete").write_text("{")
    download.main([])
    assert "of it here already" in capsys.readouterr().out
    assert stored(download.DOWNLOADED) == wanted(hub)


def test_weights_that_do_not_fit_their_config_are_refused(hub):
    config = json.loads(hub.files["config.json"])
    config["text_config"]["vocab_size"] += 1
    hub.files["config.json"] = json.dumps(config).encode()
    assert "different models" in refusal()


def without(hub, name):
    del hub.files[name]


WRONG = {       # name: (what goes wrong, arguments, what the sentence must say)
    "no repository": (lambda hub: hub.faults.update(status=401, headers={"X-Error-Code": "RepoNotFound"}), [],
                      [REAL, "or hides it", "--source modelscope"]),
    "no repository there": (lambda hub: hub.faults.update(status=404), ["--source", "modelscope"],
                            [REAL, "or hides it", "--source huggingface"]),
    "no revision": (None, ["--revision", "v2"], ["has no revision v2", "leave --revision out"]),
    "no revision there": (None, ["--source", "modelscope", "--revision", "v2"],
                          ["has no revision v2", "leave --revision out"]),
    "forbidden": (lambda hub: hub.faults.update(status=403), [], ["forbids", "HTTP 403", "--source modelscope"]),
    "forbidden file": (lambda hub: hub.faults.update(refused={SHARD}), [], ["forbids", "HTTP 403"]),
    "server down": (lambda hub: hub.faults.update(status=503), ["--source", "modelscope"], ["HTTP 503", "try later"]),
    "offline": (lambda hub: hub.server_close(), [], ["127.0.0.1", "cannot be reached", "online?"]),
    "offline there": (lambda hub: hub.server_close(), ["--source", "modelscope"], ["cannot be reached", "online?"]),
    "no tokenizer": (lambda hub: without(hub, "tokenizer.json"), [], ["has no tokenizer.json"]),
    "no weights": (lambda hub: [without(hub, n) for n in list(hub.files) if n.startswith("model.safe")], [],
                   ["has no weights"]),
    "a shard less": (lambda hub: without(hub, SHARD), [], [SHARD, "is missing"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_goes_wrong_is_said_in_one_sentence(hub, name):
    spoil, args, phrases = WRONG[name]
    if spoil:
        if name.startswith("offline"):
            hub.shutdown()
        spoil(hub)
    said = refusal(*args)
    for phrase in phrases:
        assert phrase in said


def test_offline_by_choice(hub, monkeypatch):
    from huggingface_hub.errors import OfflineModeIsEnabled

    def forbidden(*args, **more):
        raise OfflineModeIsEnabled("offline")

    monkeypatch.setattr(download.HfApi, "model_info", forbidden)
    assert refusal() == "HF_HUB_OFFLINE is set, which forbids every request: unset it"


def test_no_room_on_the_disk(hub, monkeypatch):
    usage = download.shutil.disk_usage
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: usage(path)._replace(free=1000))
    assert "the disk has 0.00 GB free" in refusal()
    monkeypatch.undo()


class FullDisk(io.FileIO):
    def write(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_the_disk_fills_up_on_the_way(hub, monkeypatch):
    monkeypatch.setattr(download, "open", lambda file, mode: FullDisk(file, mode) if mode == "ab" else open(file, mode),
                        raising=False)
    assert "the disk is full: make room" in refusal()
    monkeypatch.undo()


def test_a_place_where_nothing_can_be_written(hub, tmp_path):
    (tmp_path / "file").write_text("no folder")
    assert "cannot be written" in refusal("--to", str(tmp_path / "file" / "model"))


def test_two_downloads_at_once(hub):
    """The second one says so and touches nothing; the first one ends well."""
    gate = threading.Event()
    hub.faults["hangs"] = {SHARD: gate}
    first = threading.Thread(target=download.main, args=([],))
    first.start()
    while not any(SHARD in path for path, _ in hub.asked):
        time.sleep(0.01)
    assert "another download into" in refusal()
    gate.set()
    first.join()
    assert stored(download.DOWNLOADED) == wanted(hub)


@pytest.mark.skipif(os.name == "nt", reason="signals are sent as on Linux and macOS")
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_a_killed_download_goes_on_where_it_stopped(hub, tmp_path, end):
    """A process of its own, by the command that the README names; HF_ENDPOINT leads it to the server."""
    large = bytes(range(256)) * 2 ** 15                                # 8 MB that no index names
    hub.files["model-extra.safetensors"] = large
    hub.faults["slow"] = {"model-extra.safetensors": 2 ** 17}
    folder = tmp_path / "mine"
    env = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "cache"), "QWEN_MODEL": ""}
    env.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-m", "qwen_helpers.download", "--to", str(folder)]
    running = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not [p for p in tmp_path.glob("mine.part/model-extra*") if p.stat().st_size > 2 ** 21]:
        assert running.poll() is None
        time.sleep(0.01)
    running.send_signal(end)
    out, err = running.communicate(timeout=30)
    assert not folder.exists() and not is_whole(folder) and "Traceback" not in err
    if end == signal.SIGINT:
        assert running.returncode == 130
        assert err.endswith("\nStopped. What came so far is kept; the same command goes on from there.\n")
    kept = next(tmp_path.glob("mine.part/model-extra*")).stat().st_size
    hub.faults.clear()
    hub.asked.clear()
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    starts = [start for path, start in hub.asked if path == "/storage/model-extra.safetensors"]
    assert starts == [kept] and 2 ** 21 < kept < len(large)
    assert stored(folder) == wanted(hub) and f"QWEN_MODEL={folder}" in done.stdout
