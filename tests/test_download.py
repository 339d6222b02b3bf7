"""The download, against a server on this machine that plays Hugging Face and ModelScope."""
import hashlib
import http.server
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
from qwen_helpers import find_model, load_weights, weights
from qwen_publish import download
from qwen_helpers.weights import REAL, TINY, is_whole

COMMIT = "0123456789abcdef0123456789abcdef01234567"
UNWANTED = {"README.md": b"# Card", "vocab.json": b"{}", "sub/model.safetensors": b"elsewhere",
            "preprocessor_config.json": b"{}"}
SHARD = "model.safetensors-00001-of-00002.safetensors"
LARGE = bytes(range(256)) * 2 ** 17                                     # 32 MB that no index names
SOURCE = pytest.mark.parametrize("source", ["huggingface", "modelscope"])
posix = pytest.mark.skipif(os.name != "posix", reason="signals and limits of POSIX")
sleep = time.sleep


class Hub(http.server.ThreadingHTTPServer):
    """Both APIs over the same files; `faults` says what goes wrong, `asked` and `sent` what came and went."""

    daemon_threads = True

    def __init__(self, files):
        super().__init__(("127.0.0.1", 0), Answer)
        self.files, self.faults, self.asked, self.sent = files, {}, [], []
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request, client_address):
        """A client that hangs up is part of the play."""

    def starts(self, name):
        """The first byte of each piece of a file that was sent."""
        return [start for sent, start in self.sent if sent == name]


class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        """Nothing is written to the terminal."""

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        url, hub = urlsplit(self.path), self.server
        path, _, name = url.path.partition(f"/{REAL}/resolve/{COMMIT}/")
        hub.asked.append(self.path)
        if "status" in hub.faults:
            self.reply(hub.faults["status"], b"", **hub.faults.get("headers", {}))
        elif path in (f"/api/models/{REAL}", f"/api/models/{REAL}/revision/v1"):
            siblings = [{"rfilename": name, "size": len(content)} for name, content in hub.files.items()]
            self.json({"id": REAL, "sha": COMMIT, "siblings": siblings})
        elif path == f"/api/models/{REAL}/tree/{COMMIT}":
            self.json([{"type": "file", "path": name, "size": len(content)} | self.hashes(name) for name, content in
                       hub.files.items()])
        elif name in hub.faults.get("refused", ()):
            self.reply(403, b"")
        elif name:
            self.resolve(name)
        elif path.startswith("/storage/"):
            self.send(path.removeprefix("/storage/"))
        elif path == f"/api/v1/models/{REAL}/repo/files" and "v2" not in url.query:
            outside = {"Type": "blob", "Path": "../evil.safetensors", "Size": 4, "Sha256": ""}
            listed = [{"Type": "blob", "Path": name, "Size": len(content), "Sha256": sha256(content)}
                      for name, content in hub.files.items()]
            self.json({"Code": 200, "Data": {"Files": [{"Type": "tree", "Path": "sub", "Size": 0}, outside, *listed]}})
        elif path == f"/api/v1/models/{REAL}/repo":
            self.send(parse_qs(url.query)["FilePath"][0])
        else:
            self.reply(404, b"", **{"X-Error-Code": "RevisionNotFound" if "/revision/" in path else "RepoNotFound"})

    def hashes(self, name):
        """A small file has git's SHA-1, a large one its own SHA-256 too."""
        content = self.server.files[name]
        large = {"lfs": {"oid": sha256(content), "size": len(content), "pointerSize": 134}}
        small = {"oid": hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()}
        return small | (large if name.endswith(".safetensors") else {})

    def resolve(self, name):
        """What a file is; a large one lies on another host."""
        hashes, size = self.hashes(name), len(self.server.files[name])
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashes["oid"]}"'}
        if "lfs" in hashes:
            storage = f"http://localhost:{self.server.server_port}/storage/{name}"
            self.reply(302, b"", **headers, **{"Location": storage, "X-Linked-Size": size,
                                               "X-Linked-Etag": f'"{hashes["lfs"]["oid"]}"'})
        elif self.command == "HEAD":
            self.reply(200, b"", **headers, **{"Content-Length": size})
        else:
            self.send(name)

    def json(self, content):
        self.reply(200, json.dumps(content).encode(), **{"Content-Type": "application/json"})

    def reply(self, status, body, **headers):
        self.send_response(status)
        for name, value in ({"Content-Length": len(body)} | headers).items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def send(self, name):
        """The rest of a file from the byte asked for, with the fault that is planned for it."""
        faults = self.server.faults
        content = faults.get("other bytes", {}).get(name, self.server.files[name])
        start = 0 if name in faults.get("no ranges", ()) else int((self.headers.get("Range") or "bytes=0-")[6:-1])
        self.server.sent.append((name, start))
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
            sleep(0.02 if step < len(rest) else 0)


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def model_files(folder):
    """The files of a small checkpoint in the real layout: two shards, an index, vision tensors, a tokenizer."""
    write_checkpoint(folder, shards=2, vision=2, dtype=torch.bfloat16)
    index = folder / "model.safetensors.index.json"
    text = index.read_text()
    for i in (0, 1):
        shard = f"model.safetensors-0000{i + 1}-of-00002.safetensors"
        (folder / f"part-{i}.safetensors").rename(folder / shard)
        text = text.replace(f"part-{i}.safetensors", shard)
    index.write_text(text)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((TINY / name).read_bytes())
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with the model and more; downloads go below tmp_path, and nothing else can be reached."""
    server = Hub(model_files(tmp_path / "origin") | UNWANTED)
    resolve = socket.getaddrinfo

    def only_here(host, *args, **more):
        if host not in ("127.0.0.1", b"127.0.0.1", "localhost", b"localhost"):
            raise AssertionError(f"a request to {host}")
        return resolve(host, *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", only_here)
    for module in (download, weights):
        monkeypatch.setattr(module, "DOWNLOADED", tmp_path / "house" / "Qwen3.5-0.8B")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE",
                        server.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(download, "MODELSCOPE", server.url)
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, 0.05)))       # tries follow soon
    for name in ("QWEN_MODEL", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    yield server
    server.shutdown()
    server.server_close()


def wanted(hub):
    return {name: content for name, content in hub.files.items() if name not in UNWANTED}


def stored(folder):
    """What a download left, without its own record."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "download.json"}


def refusal(*args):
    """The one sentence with which a download ends; it leaves no model."""
    with pytest.raises(SystemExit) as caught:
        download.main(args)
    assert isinstance(caught.value.code, str) and "\n" not in caught.value.code and len(caught.value.code) < 400
    assert find_model() == TINY
    return caught.value.code


@SOURCE
def test_the_model_comes_whole_and_is_found(hub, capsys, source):
    """Only the files needed; size and revision said beforehand; the loader accepts it; what to do next is said."""
    assert find_model() == TINY
    download.main(["--source", source])
    said, folder = capsys.readouterr(), download.DOWNLOADED
    revision = {"huggingface": COMMIT, "modelscope": "master"}[source]
    size = sum(map(len, wanted(hub).values()))
    assert said.out.startswith(f"{REAL}, revision {revision}: {len(wanted(hub))} files, {size / 1e9:.2f} GB")
    assert f"is in {folder}" in said.out and "Next: open or restart any chapter" in said.out
    assert stored(folder) == wanted(hub) and find_model() == folder
    assert set(load_weights(folder)) and set(load_weights(folder, "mtp."))
    record = json.loads((folder / "download.json").read_text())
    assert record == {"repository": REAL, "source": source, "revision": revision}
    assert not list(folder.parent.glob("*.part"))
    hub.asked.clear()
    download.main(["--source", source])                                # the second time nothing is asked
    assert not hub.asked and f"is in {folder}" in capsys.readouterr().out


def test_a_connection_that_breaks_is_taken_up_where_it_stopped(hub):
    """But for what the hub had in its buffer of 10 MB."""
    hub.files["zz.safetensors"] = LARGE
    hub.faults["cut"] = {"zz.safetensors", "tokenizer.json"}
    download.main([])
    first, second = hub.starts("zz.safetensors")
    assert first == 0 and 10e6 < second <= len(LARGE) / 2 and len(hub.starts("tokenizer.json")) == 2
    assert not hub.faults["cut"] and stored(download.DOWNLOADED) == wanted(hub)


@pytest.mark.parametrize("ranges", [True, False])
def test_what_breaks_off_on_modelscope_is_taken_up_by_the_next_run(hub, ranges):
    """Where it stopped, or from the start if the server sends no ranges."""
    hub.faults |= {"cut": {SHARD}, "no ranges": () if ranges else {SHARD}}
    assert "breaks off" in refusal("--source", "modelscope")
    download.main(["--source", "modelscope"])
    assert hub.starts(SHARD) == [0, len(hub.files[SHARD]) // 2 if ranges else 0]
    assert stored(download.DOWNLOADED) == wanted(hub)


def test_a_revision_is_asked_for_and_its_commit_recorded(hub):
    download.main(["--revision", "v1"])
    assert hub.asked[0].startswith(f"/api/models/{REAL}/revision/v1")
    assert json.loads((download.DOWNLOADED / "download.json").read_text())["revision"] == COMMIT
    with pytest.raises(SystemExit, match="holds a model already: name another folder with --to"):
        download.main(["--revision", "v3"])


def test_another_folder(hub, capsys, tmp_path):
    (tmp_path / "mine").mkdir()                                        # an empty folder is as good as none
    download.main(["--to", str(tmp_path / "mine")])
    assert f"Next: set QWEN_MODEL={tmp_path / 'mine'} and start Jupyter" in capsys.readouterr().out
    assert find_model() == TINY and stored(tmp_path / "mine") == wanted(hub)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("all of it")
    assert f"{tmp_path / 'full'} cannot be written" in refusal("--to", str(tmp_path / "full"))
    assert (tmp_path / "full" / "thesis.txt").read_text() == "all of it"


def test_a_model_in_the_hugging_face_cache_is_not_fetched_again(hub, capsys, tmp_path):
    repo = tmp_path / "cache" / ("models--" + REAL.replace("/", "--"))
    model_files(repo / "snapshots" / COMMIT)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    download.main([])
    assert not hub.asked and find_model() == repo / "snapshots" / COMMIT
    assert f"is in {find_model()}. Next: open or restart any chapter" in capsys.readouterr().out


def changed(content):
    return content[:-1] + bytes([content[-1] ^ 1])


@SOURCE
@pytest.mark.parametrize("name", [SHARD, "config.json"])
@pytest.mark.parametrize("damage", [changed, lambda c: c[:-1], lambda c: c + b"\0"], ids=["bit", "short", "long"])
def test_wrong_bytes_are_never_taken(hub, source, name, damage):
    """One bit, too short, too long: nothing is kept, and a second run with right bytes succeeds."""
    hub.faults["other bytes"] = {name: damage(hub.files[name])}
    assert name[-20:] in refusal("--source", source)
    assert not download.DOWNLOADED.exists()
    hub.faults.clear()
    download.main(["--source", source])
    assert stored(download.DOWNLOADED) == wanted(hub)


@SOURCE
def test_what_is_left_of_an_interrupted_download_is_checked_too(hub, source):
    """Files that rotted on the disk, and those of another version or another program, do not get into the model."""
    part = download.DOWNLOADED.with_name("Qwen3.5-0.8B.part")
    (part / ".cache").mkdir(parents=True)
    (part / SHARD).write_bytes(changed(hub.files[SHARD]))
    (part / "model-of-old.safetensors").write_bytes(b"old")
    try:
        download.main(["--source", source])
    except SystemExit as refused:
        assert f"{SHARD} came damaged" in refused.code
        download.main(["--source", source])
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
                      [f"has no {REAL} or keeps it back", "HTTP 401", "unset HF_TOKEN or try another --source"]),
    "no repository there": (lambda hub: hub.faults.update(status=404), ["--source", "modelscope"],
                            [f"has no {REAL} or keeps it back", "another --source"]),
    "no revision": (None, ["--revision", "v2"], ["has no revision v2", "leave --revision out"]),
    "no revision there": (None, ["--source", "modelscope", "--revision", "v2"],
                          ["has no revision v2", "leave --revision out"]),
    "gated": (lambda hub: hub.faults.update(status=403, headers={"X-Error-Code": "GatedRepo"}), [],
              ["keeps it back", "HTTP 403", "another --source"]),
    "forbidden file": (lambda hub: hub.faults.update(refused={SHARD}), [], ["keeps it back", "HTTP 403"]),
    "server down": (lambda hub: hub.faults.update(status=503), [], ["breaks off", "503", "try again"]),
    "server down there": (lambda hub: hub.faults.update(status=503), ["--source", "modelscope"], ["503", "try again"]),
    "no hub at all": (lambda hub: hub.faults.update(status=200), [], ["127.0.0.1", "JSON", "another --source"]),
    "offline": (lambda hub: hub.server_close(), [], ["127.0.0.1", "cannot be reached", "online?"]),
    "offline there": (lambda hub: hub.server_close(), ["--source", "modelscope"], ["cannot be reached", "online?"]),
    "no tokenizer": (lambda hub: without(hub, "tokenizer.json"), [], ["tokenizer.json is missing"]),
    "no weights": (lambda hub: [without(hub, n) for n in list(hub.files) if n.startswith("model.safe")], [],
                   ["neither model.safetensors nor"]),
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


@SOURCE
def test_offline_by_choice(hub, monkeypatch, source):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "offline mode is enabled" in refusal("--source", source) and not hub.asked


@SOURCE
def test_a_network_that_goes_away_on_the_way(hub, source):
    """The server hangs up again and again; the files that came before stay, the place of the model stays empty."""
    hub.faults["cut"] = type("Always", (set,), {"remove": lambda self, name: None})({SHARD})
    assert "breaks off" in refusal("--source", source) and not download.DOWNLOADED.exists()


def test_no_room_on_the_disk(hub, monkeypatch):
    """It is seen before anything is fetched."""
    usage = download.shutil.disk_usage
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: usage(path)._replace(free=1000))
    assert "the disk has 0.00 GB free: make room" in refusal() and not hub.sent


def test_a_place_where_nothing_can_be_written(hub, tmp_path):
    (tmp_path / "file").write_text("no folder")
    assert "cannot be written" in refusal("--to", str(tmp_path / "file" / "model"))


def test_two_downloads_at_once(hub):
    """The second one says so and touches nothing; the first one ends well."""
    gate = threading.Event()
    hub.faults["hangs"] = {SHARD: gate}
    first = threading.Thread(target=download.main, args=([],))
    first.start()
    while not hub.starts(SHARD):
        sleep(0.01)
    assert "another download into" in refusal()
    gate.set()
    first.join()
    assert stored(download.DOWNLOADED) == wanted(hub)


# ---- in a process of its own, by the command that the README names; HF_ENDPOINT leads it to the server

@pytest.fixture
def command(hub, tmp_path):
    """What starts a download into `mine`."""
    env = os.environ | {"HF_ENDPOINT": hub.url, "MODELSCOPE_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "cache"),
                        "HF_HUB_DISABLE_XET": "1", "QWEN_MODEL": ""}
    env.pop("HF_HUB_OFFLINE", None)
    line = [sys.executable, "-m", download.__name__, "--to", str(tmp_path / "mine")]
    return lambda *args, **how: subprocess.Popen([*line, *args], env=env, stdout=subprocess.PIPE,
                                                 stderr=subprocess.PIPE, text=True, **how)


@posix
@SOURCE
def test_a_disk_that_fills_up_on_the_way(hub, command, tmp_path, source):
    """A real limit of the system: no file of the process may have more than 2,000 bytes."""
    import resource
    running = command("--source", source, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000)))
    _, err = running.communicate(timeout=60)
    assert running.returncode == 1 and "Traceback" not in err
    assert err.splitlines()[-1] == (f"{tmp_path / 'mine'} cannot be written ([Errno 27] File too large): make room, "
                                    "or name another with --to")
    assert not (tmp_path / "mine").exists()


@posix
@SOURCE
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_a_download_that_is_stopped_and_the_next_one(hub, command, tmp_path, end, source):
    """It stops at once, leaves no model, and the next run keeps the weights that came whole; ModelScope's parts too."""
    hub.files["zz.safetensors"] = LARGE
    hub.faults["slow"] = {"zz.safetensors": 2 ** 17}                   # 5 s on the way
    running, folder = command("--source", source), tmp_path / "mine"
    while not [file for file in tmp_path.glob("mine.part/**/*") if file.is_file() and file.stat().st_size > 2 ** 21]:
        assert running.poll() is None
        sleep(0.01)
    running.send_signal(end)
    out, err = running.communicate(timeout=30)
    assert running.returncode != 0 and not folder.exists() and not is_whole(folder) and "Traceback" not in err
    assert (tmp_path / "mine.part" / "zz.safetensors").exists() == (source == "modelscope")     # it did not run on
    if end == signal.SIGINT:
        assert err.endswith("\nStopped: the same command goes on with what is missing.\n")
    hub.faults.clear()
    hub.sent.clear()
    done = command("--source", source)
    out, err = done.communicate(timeout=60)
    assert done.returncode == 0, err
    assert not hub.starts(SHARD) and (hub.starts("zz.safetensors")[0] > 2 ** 20) == (source == "modelscope")
    assert stored(folder) == wanted(hub) and f"QWEN_MODEL={folder}" in out
