"""Bring the source packages of `sources.json` onto this machine and unpack them."""
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = json.loads((HERE / "sources.json").read_text("utf8"))


def sha256(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def by_client(package, folder):
    """Ask the registry's own client for one exact version; True if it delivered."""
    name, version = package["name"], package["version"]
    command = {
        "deb": ["apt-get", "download", f"{name}={version}"],
        "npm": ["npm", "pack", f"{name}@{version}"],
        "pypi": [sys.executable, "-m", "pip", "download", "--no-deps", f"{name}=={version}"],
    }[package["kind"]]
    if shutil.which(command[0]) is None:
        return False
    done = subprocess.run(command, cwd=folder, capture_output=True)
    return done.returncode == 0 and (folder / package["file"]).exists()


def fetch(package, given, cache):
    """Path of the verified package file: from `given`, else the client, else a URL."""
    for folder in filter(None, (given, cache)):
        path = Path(folder) / package["file"]
        if path.exists():
            return verified(path, package)
    path = cache / package["file"]
    if not by_client(package, cache):
        for url in package["urls"]:
            try:
                with urllib.request.urlopen(url, timeout=120) as reply:
                    path.write_bytes(reply.read())
                break
            except OSError as error:
                print(f"{url}: {error}", file=sys.stderr)
    if not path.exists():
        sys.exit(f"{package['file']} could not be fetched: download it by hand and pass "
                 "its folder as --packages.")
    return verified(path, package)


def verified(path, package):
    if sha256(path) != package["sha256"]:
        sys.exit(f"{path} is not the file this recipe was made with: its sha256 differs "
                 "from the one in sources.json.")
    return path


def unpack(given, build):
    """Fetch, verify and unpack every package. Returns {name: folder}."""
    build.mkdir(parents=True, exist_ok=True)
    folders = {}
    for package in SOURCES:
        if package["kind"] == "stdlib":
            continue
        target = build / package["name"]
        folders[package["name"]] = target
        if target.exists():
            continue
        path = fetch(package, given, build)
        if package["kind"] == "deb":
            subprocess.run(["dpkg-deb", "-x", path, target], check=True)
        elif package["kind"] == "npm":
            with tarfile.open(path) as archive:
                archive.extractall(target, filter="data")
        else:
            with zipfile.ZipFile(path) as archive:
                archive.extractall(target)
    return folders
