"""Slide marks: which cells of a chapter stand on one screen of a talk. One rule for all, set by `refresh.normalise`.

A heading begins a slide, text below code a step of it, and code stays with its text; what has no room on one screen,
the page itself moves to the next. A result that the text asks to predict waits for one more key. Bare imports are left
out, and so are the blanks and checks of "Your turn": the class does those on machines of its own.
"""
import ast
import re

from chapters import blank_magics


def prose(source):
    """The text of a cell without its code blocks."""
    return re.sub(r"```.*?```", "", source, flags=re.S)


def only_imports(source):
    """Does a cell do nothing but import?"""
    try:
        return all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in ast.parse(blank_magics(source)).body)
    except SyntaxError:
        return False


def mark(nb):
    """Set `slideshow.slide_type` of each cell by the rule above."""
    before, exercise, asked = "", False, False
    for cell in nb.cells:
        kind = ""
        if cell.cell_type == "markdown":
            headings = re.findall(r"(?m)^#+ +(.+)", prose(cell.source))
            exercise = headings[-1].startswith("Your turn") if headings else exercise
            kind = "slide" if headings else "" if before == "markdown" else "subslide"
            asked = bool(re.search(r"(?i)\bpredict\b", prose(cell.source))) and not exercise
        elif only_imports(cell.source) or exercise and "no-import" in cell.metadata.get("tags", []):
            kind = "skip"
        elif asked and cell.outputs:
            kind = "fragment"
        if kind != "skip":
            before, asked = cell.cell_type, asked and not cell.get("outputs")
        cell.metadata.pop("slideshow", None)
        if kind:
            cell.metadata["slideshow"] = {"slide_type": kind}
    return nb
