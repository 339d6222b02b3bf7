import os

import pytest
from hypothesis import settings
from playwright.sync_api import sync_playwright

import qwen_helpers  # noqa: F401  (makes `chapters.*` importable)
from browser import chromium

# How many cases a property gets that does not say so itself: `make test` tries a few, always the same ones,
# `make soak` tries many new ones.
settings.register_profile("short", max_examples=30, derandomize=True, deadline=None)
settings.register_profile("soak", max_examples=int(os.environ.get("CASES", 10_000)), deadline=None, print_blob=True)
settings.load_profile("short")

LINES = []


@pytest.fixture(scope="module")
def browser():
    """Chromium, for all tests of a file."""
    with sync_playwright() as playwright:
        running = chromium(playwright)
        yield running
        running.close()


@pytest.fixture(scope="session")
def tell():
    """Takes lines that are printed at the end of the run."""
    return LINES.append


def pytest_terminal_summary(terminalreporter):
    for line in LINES:
        terminalreporter.write_line(line)
