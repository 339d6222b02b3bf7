import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings
from playwright.sync_api import sync_playwright

from browser import FLAGS
from chromium import HOW, chromium

# How many cases a property gets that does not say so itself: `make test` tries a few, always the same ones,
# `make soak` tries many new ones.
settings.register_profile("short", max_examples=30, derandomize=True, deadline=None)
settings.register_profile("soak", max_examples=int(os.environ.get("CASES", 10_000)), deadline=None, print_blob=True)
settings.load_profile("short")

LINES = []

# What a test may lack here, by the fixture that needs it: its name, how to find it, how to get it.
PIECES = {"browser": ("Chromium", chromium, HOW),
          "show": ("Voilà", lambda: importlib.util.find_spec("voila"), f"{sys.executable} -m pip install voila")}


# What takes long: `make quick` leaves these files out, but for what was changed since the last commit.
SLOW = {f"test_{name}" for name in ("browser", "demo", "download", "exact", "fuzz", "house", "interruption", "recipe", "refresh",
                                    "rejection", "setup", "shapes", "site", "training")}


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="leave out what takes long and was not changed")


def changed():
    """The names, without ending, of the files that differ from the last commit."""
    told = [subprocess.run(["git", *command], cwd=Path(__file__).parents[1], capture_output=True, text=True).stdout.split()
            for command in (["diff", "--name-only", "HEAD"], ["ls-files", "--others", "--exclude-standard"])]
    return {Path(name).stem for names in told for name in names}


def quick(item, stems):
    """Whether `make quick` runs a test: it is fast, or its file or its chapter was changed."""
    file = item.path.stem
    return file not in SLOW or file in stems or any(f"[{stem}" in item.name for stem in stems)


@pytest.hookimpl(trylast=True)          # after -k has chosen
def pytest_collection_modifyitems(config, items):
    """Skip the tests that lack a piece, and say so in one line; with ALL_TESTS=1 they run, and fail."""
    if config.getoption("--quick"):
        stems = changed()
        config.hook.pytest_deselected(items=[item for item in items if not quick(item, stems)])
        items[:] = [item for item in items if quick(item, stems)]
    if os.environ.get("ALL_TESTS"):
        return
    for fixture, (piece, find, how) in PIECES.items():
        tests = [item for item in items if fixture in item.fixturenames and not item.get_closest_marker("skip")]
        if tests and not find():
            for test in tests:
                test.add_marker(pytest.mark.skip(reason=f"there is no {piece} here"))
            count = f"{len(tests)} test" + "s" * (len(tests) > 1)
            LINES.append(f"{count} skipped: there is no {piece} here. To get it: {how}")


@pytest.fixture(scope="module")
def browser():
    """Chromium, for all tests of a file."""
    path = chromium()
    if not path:
        pytest.fail(f"there is no Chromium here. To get it: {HOW}", pytrace=False)
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield running
        running.close()


@pytest.fixture(scope="session")
def tell():
    """Takes lines that are printed at the end of the run."""
    return LINES.append


def pytest_terminal_summary(terminalreporter):
    for line in LINES:
        terminalreporter.write_line(line)
