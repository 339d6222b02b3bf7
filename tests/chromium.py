"""Chromium for the browser tests: found where it is, and, when this is run as a program, brought where it is not."""
import os
import shutil
import subprocess
import sys

from playwright.sync_api import sync_playwright

NAMES = "chromium", "chromium-browser", "google-chrome", "google-chrome-stable"
HOW = f"{sys.executable} -m playwright install chromium (on Debian also: apt-get install chromium)"
NO_DIALOGUE = {"DEBIAN_FRONTEND": "noninteractive", "PLAYWRIGHT_DOWNLOAD_CONNECTION_TIMEOUT": "5000"}   # in ms


def quietly(*command):
    """Whether a command succeeds; what it prints is not shown."""
    try:
        return subprocess.run(command, env=os.environ | NO_DIALOGUE, stdin=subprocess.DEVNULL,
                              capture_output=True).returncode == 0
    except OSError:
        return False


def chromium():
    """The path of a Chromium that starts: one on the PATH, else Playwright's own; None if there is none."""
    for path in filter(None, map(shutil.which, NAMES)):
        if quietly(path, "--version"):                  # some packages hold only a script that names another one
            return path
    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
    return own if quietly(own, "--version") else None


def bring():
    """Get a Chromium if there is none: Playwright's own, else, for root, Debian's. Says so where neither can be had."""
    if chromium():
        return
    print("The browser tests need Chromium, so it is fetched (a few minutes at most).", flush=True)
    quietly(sys.executable, "-m", "playwright", "install", "chromium")
    if not chromium() and hasattr(os, "geteuid") and os.geteuid() == 0:
        quietly("apt-get", "update")
        quietly("apt-get", "install", "--yes", "--no-install-recommends", "chromium")
    if not chromium():
        print(f"It could not be had, so they will be skipped. To get it: {HOW}", flush=True)


if __name__ == "__main__":
    bring()
