"""JupyterLab on a copy of the course, and a notebook opened in Chromium: what the browser tests drive."""
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

from chapters import NOTEBOOKS
from qwen_helpers.weights import TINY

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--no-first-run", "--force-color-profile=srgb"]
LOCAL = re.compile(r"(https?|wss?)://127\.0\.0\.1[:/]|data:|blob:|about:")
SETTINGS = {"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
            "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"}}      # cells off screen are drawn too

# In the page: messages that the kernel has not finished with, and errors in its answers, shown in a cell or not.
# JupyterLab's own first messages are left out: at times they reach a kernel that is not ready for them.
WATCH = """() => {
  const kernel = jupyterapp.shell.currentWidget.sessionContext.session.kernel;
  const watch = window.watch = {sent: new Set(), open: new Set(), errors: []};
  kernel.anyMessage.connect((_, {msg, direction}) => {
    const {header: {msg_id, msg_type}, parent_header, content} = msg;
    if (direction === 'send') [watch.sent, watch.open].forEach(ids => ids.add(msg_id));
    else if (!watch.sent.has(parent_header.msg_id)) return;
    else if (msg_type === 'status' && content.execution_state === 'idle') watch.open.delete(parent_header.msg_id);
    else if (msg_type === 'stream' && content.name === 'stderr') watch.errors.push(content.text);
    else if (msg_type === 'error') watch.errors.push(`${content.ename}: ${content.evalue}`);
  });
}"""
READY = """() => {
  const context = window.jupyterapp?.shell.currentWidget?.sessionContext;
  return context?.isReady && context.session?.kernel?.status === 'idle';
}"""
RAN = """() => watch.errors.length || watch.open.size === 0 &&
  [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].every(prompt => /\\d/.test(prompt.textContent))"""
# Until nothing was under way for three frames: the page follows a moment after the kernel.
SETTLE = """async () => {
  const end = performance.now() + 60000;
  for (let quiet = 0; quiet < 3; quiet = watch.open.size ? 0 : quiet + 1) {
    if (performance.now() > end) throw Error('the kernel does not answer');
    await new Promise(requestAnimationFrame);
  }
}"""
SHOWN = """async image => {
  const bytes = await (await fetch(image.src)).arrayBuffer();
  return [...new Uint8Array(await crypto.subtle.digest('SHA-1', bytes))].join();
}"""
# From a key press until the browser has loaded the picture that follows and may paint it; null if none follows.
CLOCK = """image => {
  let pressed;
  document.addEventListener('keydown', event => pressed = event.timeStamp, {capture: true, once: true});
  window.clock = new Promise(done => image.addEventListener('load', () =>
    requestAnimationFrame(() => done(performance.now() - pressed)), {once: true}));
}"""
# Each text of the chat page from now on, with the milliseconds since the key or the click that asked for it.
LISTEN = """page => {
  let asked;
  for (const kind of ['keydown', 'click'])
    document.addEventListener(kind, event => asked = event.timeStamp, {capture: true, once: true});
  window.said = [];
  new MutationObserver(() => said.push([performance.now() - asked, page.textContent]))
    .observe(page, {childList: true, subtree: true});
}"""
CLOCKED = "Promise.race([window.clock, new Promise(done => setTimeout(done, 300, null))])"


@contextmanager
def jupyterlab(home):
    """A private JupyterLab over a copy of the course in the folder `home`; gives its address. No password: loopback."""
    course = home / "course"
    shutil.copytree(NOTEBOOKS, course / "notebooks", ignore=shutil.ignore_patterns(".*"))
    (course / "data").symlink_to(NOTEBOOKS.parent / "data")
    config = home / "config" / "labconfig"
    config.mkdir(parents=True)
    (config / "default_setting_overrides.json").write_text(json.dumps(SETTINGS))
    folders = dict(JUPYTER_CONFIG_DIR="config", JUPYTER_DATA_DIR="data", JUPYTER_RUNTIME_DIR="runtime",
                   JUPYTERLAB_SETTINGS_DIR="settings", JUPYTERLAB_WORKSPACES_DIR="workspaces", IPYTHONDIR="ipython")
    env = os.environ | {name: str(home / folder) for name, folder in folders.items()}
    env |= {"QWEN_MODEL": str(TINY), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = home / "lab.log"
    server = subprocess.Popen(
        [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--ip=127.0.0.1", f"--port={port}",
         "--ServerApp.port_retries=0", "--IdentityProvider.token=", "--ServerApp.allow_root=True",
         f"--ServerApp.root_dir={course}", "--LabApp.expose_app_in_browser=True"],
        env=env, stdout=log.open("wb"), stderr=subprocess.STDOUT, start_new_session=True)
    try:
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + 60
        while not answers(f"{url}/api/status"):
            assert server.poll() is None and time.monotonic() < end, f"JupyterLab did not start: {log.read_text()}"
            time.sleep(0.1)
        yield url
    finally:
        server.send_signal(signal.SIGTERM)      # it stops its kernels
        server.wait(60)


def answers(url):
    try:
        return urllib.request.urlopen(url, timeout=2).status == 200
    except (urllib.error.URLError, OSError):
        return False


class Chapter:
    """One notebook, open in JupyterLab."""

    def __init__(self, browser, url, name):
        self.name, self.page = name, browser.new_page(viewport={"width": 1280, "height": 720})
        self.page.set_default_timeout(60_000)
        self.problems = []
        self.page.on("pageerror", lambda error: self.problems.append(f"JavaScript: {error}"))
        self.page.context.route("**/*", self.guard)
        self.page.context.route_web_socket(lambda url: not LOCAL.match(url), self.refuse)
        self.page.goto(f"{url}/lab/tree/notebooks/{name}.ipynb?reset")
        self.page.locator("#jupyterlab-splash").wait_for(state="detached")
        self.page.wait_for_function(READY)

    def guard(self, route):
        if LOCAL.match(route.request.url):
            return route.continue_()
        self.refuse(route.request)
        route.abort()

    def refuse(self, request):
        """An outside request; a web socket is not connected unless it is asked to be."""
        self.problems.append(f"outside request: {request.url}")

    def run_all(self):
        self.page.evaluate(WATCH)
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        self.page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        self.page.wait_for_function(RAN, timeout=600_000)

    def settle(self):
        """Wait until the kernel has answered everything and the page has followed."""
        self.page.evaluate(SETTLE)

    def trouble(self):
        """All that went wrong so far: errors and stderr of the kernel, of the page, under sliders; blocked requests."""
        broken = self.page.locator(".jp-Notebook img").evaluate_all(
            "all => all.filter(image => image.complete && !image.naturalWidth).map(image => image.alt || image.src)")
        under = filter(str.strip, self.page.locator(".demo-trouble").all_text_contents())
        return [*self.problems, *self.page.evaluate("watch.errors"), *under, *(f"not drawn: {name}" for name in broken)]

    def ask(self, question, send):
        """Type a question, `send` it, and get pairs (milliseconds, text of the page) as the answer grows."""
        self.page.locator(".chat-line input").fill(question)
        self.page.locator(".chat-page").evaluate(LISTEN)
        send()
        self.settle()
        return self.page.evaluate("said")

    def demos(self):
        """All demos, in reading order."""
        return [Demo(self, f"{self.name}, demo {number}", picture)
                for number, picture in enumerate(self.page.locator("img.demo-picture").all(), 1)]

    def close(self):
        self.page.evaluate("() => jupyterapp.shell.currentWidget.sessionContext.shutdown()")
        self.page.context.close()


class Demo:
    """A picture under its sliders."""

    def __init__(self, chapter, name, picture):
        self.chapter, self.name, self.picture = chapter, name, picture
        self.area = picture.locator("xpath=ancestor::*[contains(@class, 'jp-OutputArea-output')]")
        self.play = self.area.locator(".widget-play button:has(.fa-play, .fa-pause)")
        self.stop = self.area.locator(".widget-play button:has(.fa-stop)")

    def sliders(self):
        return [Slider(self, row) for row in self.area.locator(".widget-slider").all()]

    def shown(self):
        """A digest of the picture, once nothing more is under way."""
        self.chapter.settle()
        return self.picture.evaluate(SHOWN)


class Slider:
    def __init__(self, demo, row):
        self.demo, self.page = demo, row.page
        self.handle, self.track = row.locator(".noUi-handle"), row.locator(".noUi-target")
        self.readout = row.locator(".widget-readout")
        self.name = f"{demo.name}, {row.locator('.widget-label').text_content()}"

    def value(self):
        return self.readout.text_content()

    def press(self, key):
        """Press a key; milliseconds until the new picture, None if there is none."""
        self.demo.chapter.settle()
        self.handle.focus()
        self.demo.picture.evaluate(CLOCK)
        self.page.keyboard.press(key)
        self.demo.chapter.settle()
        return self.page.evaluate(CLOCKED)

    def share(self):
        """Where on its track the handle stands, from 0 to 1."""
        handle, track = self.handle.bounding_box(), self.track.bounding_box()
        return (handle["x"] + handle["width"] / 2 - track["x"]) / track["width"]

    def drag(self, share):
        """Take the handle with the mouse and let it go at this share of the track."""
        self.handle.scroll_into_view_if_needed()
        track = self.track.bounding_box()
        middle = track["y"] + track["height"] / 2
        self.page.mouse.move(track["x"] + self.share() * track["width"], middle)
        self.page.mouse.down()
        self.page.mouse.move(track["x"] + share * track["width"], middle, steps=5)
        self.page.mouse.up()

    def bring_back(self, value, share):
        """Drag the handle to where `value` was, and step to it if a pixel holds several values."""
        self.drag(share)
        for _ in range(20):
            if self.value() != value:
                self.handle.press("ArrowLeft" if self.share() > share else "ArrowRight")
