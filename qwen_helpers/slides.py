"""Slide marks: which cells of a chapter stand on one screen of a talk. One rule for all, set by `refresh.normalise`.

A heading begins a slide, every other text a step below it, and code stays with its text while both fit into
1280 x 720. A result that the text asks to predict waits for one more key. Bare imports are left out, and so are the
blanks and checks of "Your turn": the class does those on machines of its own.
"""
import ast
import base64
import re
import struct

from .chapters import blank_magics

ROOM = 620                                      # pixels of height for cells
WIDE, LINE, GAP = 92, 36, 20                    # text: letters a line, pixels a line, pixels between paragraphs
CODE_LINE, PICTURE, ZOOM = 26, 400, 1.25        # pixels a line of code, of the tallest picture; how much larger


def prose(source):
    """The text of a cell without its code blocks."""
    return re.sub(r"```.*?```", "", source, flags=re.S)


def text_height(source):
    """Pixels that a text cell takes, about; what is folded away counts for its summary."""
    source = re.sub(r"(?s)</summary>.*?</details>", "", source)
    height = GAP
    for block in re.split(r"\n\s*\n", source.strip()):
        if block.startswith("#"):
            height += 60
        elif block.startswith(("|", "```")):
            height += LINE * (block.count("\n") + 1)
        elif "![" in block:
            height += PICTURE
        else:
            height += GAP + LINE * (1 + sum(2 if ord(c) > 0x2E80 else 1 for c in block) // WIDE)
    return height


def output_height(output):
    """Pixels that an output takes, about."""
    data = output.get("data", {})
    if "image/png" in data:
        high, = struct.unpack(">I", base64.b64decode(data["image/png"])[20:24])     # where a PNG keeps its height
        return GAP + min(PICTURE, ZOOM * high)
    text = output.get("text") or data.get("text/markdown") or data.get("text/plain", "")
    return GAP + CODE_LINE * len("".join(text).splitlines())


def height(cell):
    """Pixels that a cell takes on a slide, about."""
    if cell.cell_type == "markdown":
        return text_height(cell.source)
    return GAP + CODE_LINE * len(cell.source.splitlines()) + sum(map(output_height, cell.outputs))


def only_imports(source):
    """Does a cell do nothing but import?"""
    try:
        return all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in ast.parse(blank_magics(source)).body)
    except SyntaxError:
        return False


def mark(nb):
    """Set `slideshow.slide_type` of each cell by the rule above."""
    room, before, exercise, asked = 0, "", False, False
    for cell in nb.cells:
        need, kind = height(cell), ""
        if cell.cell_type == "markdown":
            headings = re.findall(r"(?m)^#+ +(.+)", prose(cell.source))
            exercise = headings[-1].startswith("Your turn") if headings else exercise
            kind = "slide" if headings else "" if before == "markdown" and need <= room else "subslide"
            asked = bool(re.search(r"(?i)\bpredict\b", prose(cell.source))) and not exercise
        elif only_imports(cell.source) or exercise and "no-import" in cell.metadata.get("tags", []):
            kind = "skip"
        elif need > room:
            kind = "subslide"
        elif asked and cell.outputs:
            kind = "fragment"
        if kind == "skip":
            need = 0
        else:
            before, asked = cell.cell_type, asked and not cell.get("outputs")
        room = (ROOM if kind in ("slide", "subslide") else room) - need
        cell.metadata.pop("slideshow", None)
        if kind:
            cell.metadata["slideshow"] = {"slide_type": kind}
    return nb
