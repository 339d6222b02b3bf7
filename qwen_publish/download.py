"""Fetch Qwen3.5-0.8B (1.7 GB) from Hugging Face, a mirror of it that HF_ENDPOINT=https://… names, or ModelScope.

The files come into a folder `….part`, are checked there by their hashes and by the loader, and only then does it get
its name: nothing half-written is taken for whole, and weights that came whole before a stop are kept.
"""
import argparse
import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

from filelock import FileLock, Timeout
from huggingface_hub import HfApi
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.utils import get_session, hf_raise_for_status, tqdm

from qwen_helpers.weights import DOWNLOADED, REAL, CheckpointError, downloaded, is_whole, load_tokenizer, load_weights, shown

WANTED = "config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors.index.json"
MODELSCOPE = os.environ.get("MODELSCOPE_ENDPOINT", "https://modelscope.cn")


def from_hugging_face(part, revision):
    """Fetch from Hugging Face, or the mirror in $HF_ENDPOINT; returns the commit and the names of damaged files."""
    hub = HfApi()
    info = hub.model_info(REAL, revision=revision, files_metadata=True, timeout=30)
    for name in announce(part, info.sha, {file.rfilename: file.size for file in info.siblings}):
        hub.hf_hub_download(REAL, name, revision=info.sha, local_dir=part)  # snapshot_download's threads ignore Ctrl-C
    found = hub.verify_repo_checksums(REAL, revision=info.sha, local_dir=part)
    return info.sha, [file["path"] for file in found.mismatches]


def from_modelscope(part, revision):
    """The same from ModelScope, which has no commits to name; a file goes on where it was cut off."""
    http, url, query = get_session(), f"{MODELSCOPE}/api/v1/models/{REAL}/repo", {"Revision": revision or "master"}
    answer = http.get(f"{url}/files", params=query, timeout=30)
    hf_raise_for_status(answer)
    files, damaged = {file["Path"]: file for file in answer.json()["Data"]["Files"]}, []
    for name, size in announce(part, query["Revision"], {name: files[name]["Size"] for name in files}).items():
        with open(part / name, "ab+") as raw, tqdm.wrapattr(raw, "write", size, desc=name, initial=raw.tell()) as out:
            if raw.tell() < size:
                rest = {"Range": f"bytes={raw.tell()}-", "Accept-Encoding": "identity"}
                with http.stream("GET", url, params=query | {"FilePath": name}, headers=rest, timeout=30) as answer:
                    hf_raise_for_status(answer)
                    if answer.status_code != 206:           # all of it comes, not the rest
                        raw.truncate(0)
                    for block in answer.iter_bytes():
                        out.write(block)
            raw.seek(0)
            if hashlib.file_digest(raw, "sha256").hexdigest() != files[name]["Sha256"]:
                damaged.append(name)
                raw.truncate(0)
    return query["Revision"], damaged


def announce(part, commit, sizes):
    """Say what comes, clear the folder of all else, see that the disk has room; returns the sizes of what is wanted."""
    sizes = {name: size for name, size in sizes.items()
             if name in WANTED or name.endswith(".safetensors") and Path(name).name == name}
    for other in part.iterdir():
        if other.name not in sizes:
            shutil.rmtree(other) if other.is_dir() else other.unlink()
    total, here = sum(sizes.values()), sum(file.stat().st_size for file in part.iterdir())
    print(f"{REAL}, revision {commit}: {len(sizes)} files, {total / 1e9:.2f} GB ({here / 1e9:.2f} here)", flush=True)
    if total - here > (free := shutil.disk_usage(part).free):
        raise CheckpointError(f"the disk has {free / 1e9:.2f} GB free: make room, or name a folder elsewhere with --to")
    return sizes


def download(folder, source, revision):
    """Fetch the model into the folder, whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock"), timeout=0):
        if folder.exists():
            folder.rmdir()                                  # fails unless it is empty
        part = folder.with_name(f"{folder.name}.part")
        part.mkdir(exist_ok=True)
        commit, damaged = (from_modelscope if source == "modelscope" else from_hugging_face)(part, revision)
        if damaged:
            raise CheckpointError(f"{', '.join(damaged)} came damaged: run this again, it is fetched anew")
        for kind in ("model.", "mtp."):
            load_weights(part, kind)
        load_tokenizer(part)
        shutil.rmtree(part / ".cache", ignore_errors=True)  # the hub's own notes
        record = {"repository": REAL, "source": source, "revision": commit}
        (part / "download.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        part.rename(folder)


def reason(error, host, folder, revision):
    """What went wrong, in one sentence."""
    cause = error.__cause__ or error                        # the hub wraps what happened in words about its cache
    code, words = getattr(getattr(cause, "response", None), "status_code", None), shown(str(cause).partition("\n")[0])
    cases = [
        (isinstance(error, (CheckpointError, OfflineModeIsEnabled)), str(error)),
        (isinstance(error, Timeout), f"another download into {folder} is under way: wait for it"),
        (getattr(error, "errno", None), f"{folder} cannot be written ({words}): make room, or name another with --to"),
        (revision and code == 404, f"{host} has no revision {revision} of {REAL}: leave --revision out for the newest"),
        (code in (401, 403, 404), f"{host} has no {REAL} or keeps it back (HTTP {code}): unset HF_TOKEN or try another "
                                  f"--source"),
        (True, f"{host} cannot be reached or breaks off ({type(cause).__name__}: {words}): is this machine online? If "
               f"so, try again, or another --source")]
    return next(sentence for fits, sentence in cases if fits)


def main(argv=None):
    parser = argparse.ArgumentParser(f"python -m {__spec__.name}", description=__doc__.partition("\n")[0])
    parser.add_argument("--source", choices=("huggingface", "modelscope"), default="huggingface", help="where from")
    parser.add_argument("--revision", help="a commit, tag or branch; the newest without it")
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="where to (build/Qwen3.5-0.8B)")
    args = parser.parse_args(argv)
    folder = (args.to or downloaded() or DOWNLOADED).expanduser().absolute()
    host = MODELSCOPE if args.source == "modelscope" else HfApi().endpoint
    try:
        if not is_whole(folder):
            download(folder, args.source, args.revision)
        elif args.revision:
            raise CheckpointError(f"{folder} holds a model already: name another folder with --to for a revision")
    except KeyboardInterrupt:
        sys.exit("\nStopped: the same command goes on with what is missing.")
    except Exception as error:                              # nothing narrower holds what httpx and hf_xet raise
        sys.exit(reason(error, host, folder, args.revision))
    print(f"{REAL} is in {folder}. Next: " + ("open or restart any chapter, it now runs on this model."
          if folder == downloaded() else f"set QWEN_MODEL={folder} and start Jupyter."))


if __name__ == "__main__":
    main()
