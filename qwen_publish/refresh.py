"""Run notebooks in fresh kernels and save their outputs in one fixed form: `python -m qwen_publish.refresh`.

Saved outputs come from data/tiny. Each notebook carries a stamp, hashes of what its outputs depend on, so that
`--check` says in milliseconds, without a kernel, which notebooks are stale.
"""
import argparse
import base64
import io
import os
import re
import sys
import time
from pathlib import Path
from queue import Empty

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from PIL import Image

import chapters
from qwen_helpers import weights
from . import ROOT, slides
from .stamp import MEANING, stamp

VIEW = "application/vnd.jupyter.widget-view+json"
METADATA = {"kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
            "language_info": {"name": "python"}}


class RefreshError(Exception):
    """Why a notebook was not refreshed, in one sentence."""


class FixedClient(NotebookClient):
    """An nbclient that looks for replies every half second: widgets can eat the wake-up that it waits for.

    Its handler of Ctrl-C stops the kernel and is silent; then `interrupted` is true, and stopping again does nothing.
    """

    @property
    def interrupted(self):
        return hasattr(self, "_async_cleanup_kernel_future")

    async def _async_cleanup_kernel(self):
        if self.km is not None:
            await super()._async_cleanup_kernel()

    async def async_start_new_kernel_client(self):
        client = await super().async_start_new_kernel_client()
        get = client.shell_channel.get_msg

        async def get_msg(timeout=None):
            end = time.monotonic() + (float("inf") if timeout is None else timeout)
            while True:
                left = end - time.monotonic()
                try:
                    return await get(timeout=max(0, min(0.5, left)))
                except Empty:
                    if left <= 0:
                        raise

        client.shell_channel.get_msg = get_msg
        return client


def run(nb, path, timeout=300, model=weights.TINY):
    """Execute the notebook `nb` of file `path` in place; RefreshError names the cell that stops it."""
    at = []
    client = FixedClient(nb, timeout=timeout, kernel_name="python3", store_widget_state=False,
                         extra_arguments=["--log-level=ERROR"], resources={"metadata": {"path": str(path.parent)}},
                         on_cell_start=lambda cell, cell_index: at.append(cell_index + 1))
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"QWEN_MODEL": str(model), "HF_HUB_OFFLINE": "1", "PYTHONPATH": python_path}
    if Path(model) == weights.TINY:
        env["OMP_NUM_THREADS"] = "1"            # so small a model only waits for a second thread
    try:
        client.execute(env=env)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        if client.interrupted:
            raise KeyboardInterrupt from None
        what = (f"{error.ename}: {error.evalue}" if isinstance(error, CellExecutionError) else
                f"it took more than {timeout} s" if isinstance(error, CellTimeoutError) else "its kernel died")
        heading = next(h for number, h, *_ in chapters.all_code_cells(path) if number == at[-1])
        raise RefreshError(f'chapter {path.stem} stops at cell {at[-1]}, "{heading}": {what}; '
                           f"the file is left as it was") from None
    return nb


def stale(path):
    """What changed since the notebook's outputs were saved, in words; empty if they are fresh."""
    now = stamp(path)
    saved = nbformat.read(path, as_version=4).metadata.get("stamp")
    changed = [MEANING[part] for part in now if saved and saved.get(part) != now[part]]
    return f"{' and '.join(changed)} changed" if changed else "" if saved else "it was never refreshed"


def look(output):
    """What a reader sees of an output: its text, the pixels of its picture, its alt text."""
    seen = {key: value for key, value in output.items() if key != "execution_count"}
    if "image/png" in output.get("data", {}):
        image = Image.open(io.BytesIO(base64.b64decode(output.data["image/png"]))).convert("RGBA")
        seen["data"] = output.data | {"image/png": (image.size, image.tobytes())}
    return seen


def clean(outputs):
    """Outputs without stderr, progress bars and widget views; the text of a stream in one piece."""
    kept = []
    for output in outputs:
        view = output.get("data", {}).pop(VIEW, None)
        if view and not any(mime.startswith("image/") or mime == "text/html" for mime in output.data):
            continue
        if output.output_type == "stream":
            if output.name == "stderr":
                continue
            output.text = re.sub(r"[^\n]*\r(?!\n)", "", output.text)
            if kept and kept[-1].output_type == "stream":
                kept[-1].text += output.text
                continue
        kept.append(output)
    return kept


def normalise(nb, old=None, keep_timings=False):
    """Bring a notebook to its one fixed form, slide marks included; outputs that look as in `old` keep its bytes."""
    nb.nbformat, nb.nbformat_minor = 4, 5
    nb.metadata = nbformat.from_dict(METADATA | {k: v for k, v in nb.metadata.items() if k == "stamp"})
    taken, count = {cell.get("id") for cell in nb.cells}, 0
    free = (f"c{i:03d}" for i in range(9999) if f"c{i:03d}" not in taken)
    for i, cell in enumerate(nb.cells):
        if not re.fullmatch(r"c\d{3,4}", cell.get("id", "")):
            cell["id"] = next(free)
        cell.metadata = nbformat.from_dict({k: v for k, v in cell.metadata.items() if k == "tags"})
        if cell.cell_type != "code":
            continue
        count += bool(cell.source.strip())
        cell.execution_count, cell.outputs = count if cell.source.strip() else None, clean(cell.outputs)
        before = old.cells[i].outputs if old else []
        kinds, new_kinds = ([(o.output_type, set(o.get("data", {}))) for o in outs] for outs in (before, cell.outputs))
        if kinds == new_kinds:
            timed = keep_timings and "timing" in cell.metadata.get("tags", [])
            cell.outputs = [a if timed or look(a) == look(b) else b for a, b in zip(before, cell.outputs)]
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = cell.execution_count
    return slides.mark(nb)


def write_whole(path, text):
    """Save a text under another name first: whatever happens, `path` is the old file or the new one, never a part."""
    spare = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        spare.write_text(text, encoding="utf-8", newline="\n")
        os.replace(spare, path)
    finally:
        spare.unlink(missing_ok=True)


def refresh(path, timeout=300):
    """Run one notebook and save it. Returns what happened; on RefreshError the file is as it was."""
    text = path.read_text(encoding="utf-8-sig")
    old, nb, now = nbformat.reads(text, as_version=4), nbformat.reads(text, as_version=4), stamp(path)
    run(nb, path, timeout)
    saved = old.metadata.get("stamp", {})
    # Timings stay while what they measure is the same: else each refresh would rewrite them.
    normalise(nb, old, keep_timings=all(saved.get(part) == now[part] for part in ("code", "chapters", "data")))
    nb.metadata["stamp"] = now
    if path.read_text(encoding="utf-8-sig") != text:
        raise RefreshError(f"{path.name} was edited while it ran and is left as it is: refresh it again")
    written = nbformat.writes(nb) + "\n"
    if written == text:
        return "no change"
    write_whole(path, written)
    return f"saved, {sum(a.get('outputs') != b.get('outputs') for a, b in zip(old.cells, nb.cells))} outputs changed"


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m qwen_publish.refresh", description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="*", help="slugs (mtp), names (14_mtp) or paths; all when none is given")
    parser.add_argument("--check", action="store_true", help="only say which saved outputs are stale; runs nothing")
    parser.add_argument("--force", action="store_true", help="run fresh notebooks too")
    args = parser.parse_args(argv)
    if os.environ.get("QWEN_MODEL") and not args.check:
        sys.exit("Saved outputs come from data/tiny: unset QWEN_MODEL before you refresh.")
    bad = 0
    for name in args.notebooks or sorted(map(str, chapters.NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))):
        start = time.monotonic()
        try:
            path = Path(name).resolve() if name.endswith(".ipynb") else chapters.chapter_file(name.lstrip("0123456789_"))
            why = stale(path)
            if args.check or not (why or args.force):
                bad += bool(why)
                print(f"{path.stem}: stale, {why}" if why else f"{path.stem}: fresh")
            else:
                print(f"{path.stem}: {refresh(path)} ({time.monotonic() - start:.1f} s)", flush=True)
        except (RefreshError, chapters.ChapterError) as error:
            bad += 1
            print(error, flush=True)
        except OSError as error:
            bad += 1
            print(f"{name} cannot be read or saved ({error.strerror or error}): the file is as it was", flush=True)
        except KeyboardInterrupt:
            sys.exit(f"Interrupted: {name} is as it was.")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
