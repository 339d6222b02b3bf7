"""Fetch the real model: `python -m qwen_helpers.download`, from Hugging Face, a mirror of it, or ModelScope.

The files come into a folder `….part`. Each is checked by size and hash, all of them by the loader, and only then does
the folder get its name: an interrupted download goes on where it stopped, and nothing half-written is taken for whole.
"""
import argparse
import errno
import hashlib
import json
import os
import shutil
import sys
import time
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from urllib.parse import quote, urlencode, urlsplit

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import WeakFileLock, build_hf_headers, get_session, hf_raise_for_status, tqdm

from .weights import DOWNLOADED, REAL, TINY, CheckpointError, downloaded, is_whole, load_weights

WANTED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
          "model*.safetensors", "model.safetensors.index.json")
MODELSCOPE = os.environ.get("MODELSCOPE_ENDPOINT", "https://modelscope.cn")
RECORD = "download.json"
BLOCK, TIMEOUT, TRIES, PAUSE = 2 ** 20, 30, 5, 1.0            # bytes, seconds, tries without progress, seconds
HTTPError = HfHubHTTPError.__bases__[0]                       # of httpx or httpx2, whichever huggingface_hub is built on


class DownloadError(Exception):
    """Why the download stops, and what to do about it, in one sentence."""


@dataclass(frozen=True)
class File:
    """A file that a source offers; the hash is its SHA-256, or git's SHA-1 of a small file on Hugging Face."""
    name: str
    size: int
    hash: str
    url: str


def from_hugging_face(revision):
    """(commit, files, headers) of the repository on Hugging Face, or on the mirror that $HF_ENDPOINT names."""
    info = HfApi(endpoint=constants.ENDPOINT).model_info(REAL, revision=revision, files_metadata=True)
    files = [File(s.rfilename, s.size, s.lfs.sha256 if s.lfs else s.blob_id,
                  f"{constants.ENDPOINT}/{REAL}/resolve/{info.sha}/{quote(s.rfilename)}") for s in info.siblings]
    return info.sha, files, build_hf_headers()


def from_modelscope(revision):
    """(revision, files, headers) of the same repository on ModelScope, which hashes every file and names no commit."""
    headers, revision = {"User-Agent": "qwen-helpers"}, revision or "master"
    repository = f"{MODELSCOPE}/api/v1/models/{REAL}/repo"
    listing = f"{repository}/files?{urlencode({'Revision': revision, 'Recursive': 'true'})}"
    answer = get_session().get(listing, headers=headers, follow_redirects=True, timeout=TIMEOUT)
    hf_raise_for_status(answer)
    return revision, [File(f["Path"], f["Size"], f["Sha256"],
                           f"{repository}?{urlencode({'Revision': revision, 'FilePath': f['Path']})}")
                      for f in answer.json()["Data"]["Files"] if f["Type"] == "blob"], headers


SOURCES = {"huggingface": from_hugging_face, "modelscope": from_modelscope}


def needed(files):
    """The files that the course reads; DownloadError if the source lacks some, or does not say what they should be."""
    found = [f for f in files if Path(f.name).name == f.name and any(fnmatch(f.name, like) for like in WANTED)]
    names = {f.name for f in found}
    missing = [name for name in ("config.json", "tokenizer.json") if name not in names]
    if missing or not any(name.endswith(".safetensors") for name in names):
        raise DownloadError(f"the source has no {' and no '.join(missing) or 'weights'}: try another source")
    if not all(f.size and f.hash for f in found):
        raise DownloadError("the source does not tell size and hash of each file, so nothing could be checked: "
                            "try another source")
    return found


def is_right(path, file):
    """Whether the bytes at path are those that the source promises."""
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    if len(file.hash) == 40:                                  # git's: a header first
        return hashlib.sha1(f"blob {file.size}\0".encode() + path.read_bytes()).hexdigest() == file.hash
    with open(path, "rb") as raw:
        return hashlib.file_digest(raw, "sha256").hexdigest() == file.hash


def receive(file, path, headers):
    """Append to path what is still missing of the file; a connection that breaks is taken up again."""
    with open(path, "ab") as out, tqdm(total=file.size, initial=out.tell(), unit="B", unit_scale=True,
                                       desc=file.name) as bar:
        failures = 0
        while out.tell() < file.size:
            before = out.tell()
            ask = headers | {"Range": f"bytes={before}-", "Accept-Encoding": "identity"}
            try:
                with get_session().stream("GET", file.url, headers=ask, follow_redirects=True,
                                          timeout=TIMEOUT) as answer:
                    hf_raise_for_status(answer)
                    if answer.status_code != 206:             # the whole file comes, not its rest
                        out.truncate(0)
                        bar.update(-before)
                    for block in answer.iter_bytes(BLOCK):
                        out.write(block)
                        bar.update(len(block))
                        if out.tell() > file.size:
                            return
            except HTTPError as error:
                problem, answer = error, getattr(error, "response", None)
                if answer is not None and answer.status_code < 500 and answer.status_code not in (408, 429):
                    raise
            else:
                problem = DownloadError(f"{file.name} ends early each time: try another source")
            failures = 0 if out.tell() > before else failures + 1
            if failures == TRIES:
                raise problem
            if out.tell() < file.size:
                time.sleep(PAUSE * failures)


def fetch(file, folder, headers):
    """The file in the folder, whole and checked; bytes that came wrong are thrown away and fetched once more."""
    path, part = folder / file.name, folder / f"{file.name}.{file.hash[:8]}.incomplete"
    for _ in range(2):
        if is_right(path, file):
            return
        receive(file, part, headers)
        if is_right(part, file):
            os.replace(part, path)
        else:
            part.unlink()
    raise DownloadError(f"{file.name} came with other bytes than the source promises, twice, and was thrown away: "
                        f"try again, or another source")


def download(folder, source, revision):
    """Fetch the model into the folder, unless it is there; returns its commit, or the revision's name on ModelScope."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.with_name(f"{folder.name}.part")
    try:
        with WeakFileLock(folder.with_name(f".{folder.name}.lock"), timeout=0.5):
            if is_whole(folder):                              # another download was quicker
                return said(folder)
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
            if folder.exists():
                raise DownloadError(f"{folder} is there and holds no whole model: remove it, or name another with --to")
            commit, files, headers = SOURCES[source](revision)
            files = needed(files)
            part.mkdir(exist_ok=True)
            announce(files, part, commit)
            for file in files:
                fetch(file, part, headers)
            for other in part.iterdir():
                if other.name not in {file.name for file in files}:
                    other.unlink()
            for kind in ("model.", "mtp."):
                load_weights(part, kind)
            record = {"repository": REAL, "source": source, "revision": commit, "files": {f.name: f.hash for f in files}}
            (part / RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")
            os.replace(part, folder)
            return commit
    except TimeoutError:
        raise DownloadError(f"another download into {folder} is under way: wait for it") from None


def announce(files, part, commit):
    """Say what comes and how large it is; DownloadError if the disk has no room for it."""
    total = sum(file.size for file in files)
    here = sum(path.stat().st_size for path in part.iterdir())
    there = f", {min(here / total, 1):.0%} of it here already" if here else ""
    print(f"{REAL}, revision {commit}: {len(files)} files, {total / 1e9:.2f} GB{there}", flush=True)
    missing, free = total - here, shutil.disk_usage(part).free
    if missing > free:
        raise DownloadError(f"the disk has {free / 1e9:.2f} GB free where {missing / 1e9:.2f} GB more must go: "
                            f"make room, or name a folder on another disk with --to")


def said(folder):
    """The revision of a whole model, by the record of its download or by its place in the Hugging Face cache."""
    file = folder / RECORD
    if file.is_file():
        return json.loads(file.read_text(encoding="utf-8"))["revision"]
    return folder.name if folder.parent.name == "snapshots" else ""


def reason(error, source, revision):
    """What went wrong, in one sentence."""
    host = urlsplit(constants.ENDPOINT if source == "huggingface" else MODELSCOPE).netloc
    other = "--source modelscope" if source == "huggingface" else "--source huggingface"
    code = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, (DownloadError, CheckpointError)):
        return str(error)
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, which forbids every request: unset it"
    if isinstance(error, RevisionNotFoundError) or revision and code == 404:
        return f"{host} has no revision {revision} of {REAL}: leave --revision out for the newest"
    if isinstance(error, RepositoryNotFoundError) or code == 404:
        return f"{host} has no {REAL}, or hides it: try {other}"
    if code in (401, 403):
        return f"{host} forbids this download (HTTP {code}): try {other}"
    if code:
        return f"{host} answers HTTP {code}: try later, or {other}"
    if isinstance(error, HTTPError):
        return (f"{host} cannot be reached ({type(error).__name__}): is this machine online? If so, try {other}. "
                "What came so far is kept")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full: make room and run this again, what came so far is kept"
    return f"{error.filename or 'a file'} cannot be written ({error.strerror}): name another folder with --to"


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m qwen_helpers.download", description=f"Fetch {REAL}, 1.7 GB.")
    parser.add_argument("--source", choices=SOURCES, default="huggingface",
                        help="where from; HF_ENDPOINT=https://… names a mirror of Hugging Face")
    parser.add_argument("--revision", help="a commit, tag or branch; the newest without it")
    parser.add_argument("--to", type=Path, default=DOWNLOADED, metavar="FOLDER", help="where to (build/Qwen3.5-0.8B)")
    args = parser.parse_args(argv)
    folder = args.to.expanduser().absolute()
    here = downloaded() if folder == DOWNLOADED else folder if is_whole(folder) else None
    try:
        if here and args.revision and args.revision != said(here):
            raise DownloadError(f"{here} holds {said(here) or 'an unknown revision'} already: name another folder with --to")
        commit = said(here) if here else download(folder, args.source, args.revision)
    except KeyboardInterrupt:
        print("\nStopped. What came so far is kept; the same command goes on from there.", file=sys.stderr)
        sys.exit(130)
    except (DownloadError, CheckpointError, HTTPError, OSError) as error:
        sys.exit(reason(error, args.source, args.revision))
    print(f"{REAL}{commit and ', revision ' + commit} is in {here or folder}.")
    if (here or folder) == downloaded():
        print(f"Next: open or restart any chapter, it now runs on this model. QWEN_MODEL={TINY}, set before Jupyter is "
              "started, goes back to the small one.")
    else:
        print(f"Next: set QWEN_MODEL={here or folder} and start Jupyter; every chapter then runs on this model.")


if __name__ == "__main__":
    main()
