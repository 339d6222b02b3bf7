"""Chapter 14 without a browser: `python -m qwen_publish.demo` runs it, prints its table, writes one HTML page."""
import sys
import time
from pathlib import Path

import nbformat

from chapters import ChapterError, chapter_file
from qwen_helpers.machine import model_name
from qwen_helpers.weights import CheckpointError, find_model
from . import ROOT
from .refresh import RefreshError, normalise, run
from .site import page


def tables(nb):
    """The text that cells tagged `table` show."""
    for cell in nb.cells:
        if cell.cell_type == "code" and "table" in cell.metadata.get("tags", []):
            yield from (output.get("text") or output.data["text/plain"] for output in cell.outputs)


def main(slug="mtp", out=ROOT / "build" / "demo"):
    start = time.monotonic()
    try:
        path, model = chapter_file(slug), find_model()
        print(f"Running {path.name} on {model_name(model)} ...", flush=True)
        nb = normalise(run(nbformat.read(path, as_version=4), path, model=model))
    except (ChapterError, CheckpointError, RefreshError) as error:
        sys.exit(str(error))
    print(*tables(nb), sep="\n")
    file = Path(out) / f"{path.stem}.html"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(page(nb, path.parent), encoding="utf-8")
    print(f"{file}: the whole chapter as run now, {time.monotonic() - start:.0f} s. Open it in a browser.")
    return file


if __name__ == "__main__":
    main()
