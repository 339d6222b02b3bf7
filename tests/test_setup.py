"""`make test` brings Chromium where it can; where it cannot, browser tests are skipped and one line says so."""
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from playwright.sync_api import sync_playwright

from chromium import HOW, NAMES, bring, chromium
from conftest import quick

ROOT = Path(__file__).resolve().parents[1]
TOY = """
import sys, pytest
sys.modules["voila"] = {voila}      # None: it cannot be found

@pytest.fixture
def show(): pass

def test_that_needs_a_browser(browser): browser.close()
def test_left_out(browser): pass
def test_that_needs_the_show(show): pass
def test_that_needs_nothing(): pass
"""


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A machine with no program on its PATH and no browser of Playwright's; `bare(name, line)` puts a program there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path / "browsers"))
    monkeypatch.delenv("ALL_TESTS", raising=False)

    def put(name, line="exit 0"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)
        return str(path)
    return put


def test_nothing_is_found_where_there_is_nothing(bare):
    assert chromium() is None


@pytest.mark.parametrize("name", NAMES)
def test_a_browser_on_the_path_is_found(bare, name):
    assert chromium() is None
    assert bare(name) == chromium()


def test_a_browser_that_does_not_start_is_passed_over(bare):
    bare("chromium", "exit 127")
    assert bare("google-chrome") == chromium()


def test_a_browser_of_playwright_is_found(bare):
    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
    assert bare(own) == chromium()
    assert bare("chromium") == chromium()


@pytest.mark.parametrize("there, downloads, root, installs, asked", [
    ("yes", "yes", True, "yes", []),
    ("no", "yes", True, "yes", ["playwright"]),
    ("no", "no", True, "yes", ["playwright", "update", "install"]),
    ("no", "no", True, "no", ["playwright", "update", "install"]),
    ("no", "no", True, None, ["playwright"]),
    ("no", "no", False, "yes", ["playwright"])])
def test_a_browser_is_brought_where_it_can(there, downloads, root, installs, asked, bare, tmp_path, monkeypatch, capfd):
    log, browser = tmp_path / "log", tmp_path / "bin" / "chromium"
    log.touch()
    works = {"yes": f'echo "#!/bin/sh" > {browser}; /bin/chmod +x {browser}', "no": "exit 1"}
    monkeypatch.setattr(sys, "executable", bare("python", f'echo noise; echo $2 >> {log}; {works[downloads]}'))
    monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 1000)
    if there == "yes":
        bare("chromium")
    if installs:
        bare("apt-get", f'echo noise >&2; echo $1 >> {log}; [ $1 = update ] && exit; {works[installs]}')
    bring()
    assert log.read_text().split() == asked
    lines, errors = capfd.readouterr()
    brought = there == "yes" or downloads == "yes" or root and installs == "yes"
    assert lines.count("\n") == bool(asked) + (not brought) and errors == ""
    assert (HOW in lines) == (not brought) and (chromium() is not None) == brought


def test_without_a_network_the_set_up_goes_on_quietly(bare, monkeypatch):
    monkeypatch.setenv("PLAYWRIGHT_DOWNLOAD_HOST", "http://127.0.0.1:9")
    done = subprocess.run([sys.executable, ROOT / "tests" / "chromium.py"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 2) and HOW in done.stdout


def pytest_says(tmp_path, voila):
    """(exit status, output) of three chosen tests under this folder's conftest.py."""
    toy = tmp_path / "test_toy.py"
    toy.write_text(TOY.format(voila=voila))
    done = subprocess.run([sys.executable, "-m", "pytest", "-p", "conftest", "--rootdir", tmp_path, toy, "-v",
                           "-k", "not left_out"],
                          cwd=tmp_path, env=os.environ | {"PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}"},
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


def test_what_lacks_a_piece_is_skipped_by_name_and_one_line_says_so(bare, tmp_path):
    status, output = pytest_says(tmp_path, "None")
    assert status == 0 and "1 passed, 2 skipped" in output
    assert "test_that_needs_a_browser SKIPPED" in output and "test_that_needs_the_show SKIPPED" in output
    assert [line for line in output.splitlines() if "To get it" in line] == [
        f"1 test skipped: there is no Chromium here. To get it: {HOW}",
        f"1 test skipped: there is no Voilà here. To get it: {sys.executable} -m pip install voila"]


def test_nothing_is_skipped_where_all_tests_are_asked_for(bare, tmp_path, monkeypatch):
    monkeypatch.setenv("ALL_TESTS", "1")
    status, output = pytest_says(tmp_path, "sys")
    assert status == 1 and "2 passed" in output and "1 error" in output
    assert f"there is no Chromium here. To get it: {HOW}" in output


@pytest.mark.parametrize("target", ["test", "quick", "lab", "demo", "html", "show"])
def test_only_make_test_brings_a_browser(tmp_path, target):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/log\n')
    python.chmod(0o755)
    command = ["make", "-o", ".venv/ready", target, f"PY={python}"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    called = (tmp_path / "log").read_text().splitlines()
    assert called[:-1] == ["tests/chromium.py"] * (target == "test") and called[-1].startswith("-m ")


def test_the_whole_run_asks_for_all_tests(bare, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    bare("make", f'echo "$* ALL_TESTS=$ALL_TESTS" > {tmp_path}/log')
    for name in "git", "python3":
        bare(name)
    subprocess.run([ROOT / ".ci" / "run"], check=True)
    assert (tmp_path / "log").read_text() == "test ALL_TESTS=1\n"


@pytest.mark.parametrize("file, name, stems, runs", [
    ("test_cache", "test_it", set(), True), ("test_browser", "test_opened_and_run[03_norm]", set(), False),
    ("test_browser", "test_opened_and_run[03_norm]", {"03_norm"}, True), ("test_browser", "test_it", {"test_browser"}, True),
    ("test_browser", "test_opened_and_run[04_mlp]", {"03_norm"}, False)])
def test_make_quick_takes_what_is_fast_and_what_was_changed(file, name, stems, runs):
    assert quick(SimpleNamespace(path=Path(f"{file}.py"), name=name), stems) is runs
