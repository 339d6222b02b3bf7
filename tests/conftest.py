import importlib.util
import os
import sys

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


@pytest.hookimpl(trylast=True)          # after -k has chosen
def pytest_collection_modifyitems(items):
    """Skip the tests that lack a piece, and say so in one line; with ALL_TESTS=1 they run, and fail."""
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
