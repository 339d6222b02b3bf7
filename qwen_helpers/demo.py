"""Chapter 14 without a browser: `python -m qwen_helpers.demo` runs it, prints its table, writes one HTML page."""
import re
import sys
import time
from pathlib import Path

import nbformat
from nbconvert.exporters import HTMLExporter

from .chapters import ChapterError, chapter_file
from .refresh import ROOT, RefreshError, normalise, run
from .weights import CheckpointError, find_model


def tables(nb):
    """The text that cells tagged `table` show."""
    for cell in nb.cells:
        if cell.cell_type == "code" and "table" in cell.metadata.get("tags", []):
            yield from (output.get("text") or output.data["text/plain"] for output in cell.outputs)


def page(nb, folder):
    """The notebook as one HTML page: pictures of `folder` inside, no script, no request to anywhere."""
    exporter = HTMLExporter(embed_images=True, mathjax_url="", exclude_anchor_links=True)
    body, _ = exporter.from_notebook_node(nb, {"metadata": {"name": "Chapter 14", "path": str(folder)}})
    return re.sub(r"<script\b.*?</script>", "", body, flags=re.S)


def main(slug="mtp", out=ROOT / "build" / "demo"):
    start = time.monotonic()
    try:
        path, model = chapter_file(slug), find_model()
        print(f"Running {path.name} on {model} ...", flush=True)
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
