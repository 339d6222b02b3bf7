"""Chapter 14 without a browser: `python -m qwen_helpers.demo` runs it, prints its table, writes one HTML page."""
import base64
import html
import io
import re
import sys
import time
from pathlib import Path

import nbformat
from matplotlib.font_manager import FontProperties
from matplotlib.mathtext import math_to_image
from nbconvert.exporters import HTMLExporter

from .chapters import ChapterError, chapter_file
from .machine import model_name
from .refresh import ROOT, RefreshError, normalise, run
from .weights import CheckpointError, find_model


def tables(nb):
    """The text that cells tagged `table` show."""
    for cell in nb.cells:
        if cell.cell_type == "code" and "table" in cell.metadata.get("tags", []):
            yield from (output.get("text") or output.data["text/plain"] for output in cell.outputs)


def formula(found):
    """A formula of a text cell as a picture; code, and what matplotlib cannot set, stays as it is."""
    tex = found["block"] or found["inline"]
    if not tex:
        return found[0]
    out = io.BytesIO()
    try:
        depth = math_to_image(f"${' '.join(tex.split())}$", out, dpi=72, format="svg", prop=FontProperties(size=11))
    except ValueError:
        return found[0]
    image = (f'<img alt="{html.escape(tex)}" style="vertical-align:-{depth:.1f}pt" '
             f'src="data:image/svg+xml;base64,{base64.b64encode(out.getvalue()).decode()}">')
    return f"<p>{image}</p>" if found["block"] else image


def page(nb, folder):
    """The notebook as one HTML page: formulas and pictures of `folder` inside, no script, no request to anywhere."""
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"```.*?```|`[^`]*`|\$\$(?P<block>.+?)\$\$|\$(?P<inline>[^$\n]+)\$", formula,
                                 cell.source, flags=re.S)
    exporter = HTMLExporter(embed_images=True, mathjax_url="", exclude_anchor_links=True)
    body, _ = exporter.from_notebook_node(nb, {"metadata": {"name": "Chapter 14", "path": str(folder)}})
    return re.sub(r"<script\b.*?</script>", "", body, flags=re.S)


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
