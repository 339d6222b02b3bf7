"""What the tests read from a notebook: its cells, code lines, words, definitions."""
import ast
import json
import re
from functools import lru_cache

import pytest

from chapters import NOTEBOOKS, blank_magics, definitions

PATHS = sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
each_notebook = pytest.mark.parametrize("path", PATHS, ids=[path.stem for path in PATHS])


@lru_cache
def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def cells(path, kind):
    """(number from 1, source, cell) of the cells of one kind that are not empty."""
    for number, cell in enumerate(read(path)["cells"], 1):
        source = "".join(cell["source"])
        if cell["cell_type"] == kind and source.strip():
            yield number, source, cell


def tags(cell):
    return cell["metadata"].get("tags", [])


def lines(source):
    """Lines that are not blank."""
    return [line for line in source.splitlines() if line.strip()]


def words(source):
    """Words of prose that a reader sees: no markup, no link targets."""
    return len(re.sub(r"<[^>]+>|\]\([^)]*\)|^#+ ", " ", source, flags=re.M).split())


def shown_text(output):
    """The text of an output, as a reader without pictures sees it."""
    if output["output_type"] == "stream":
        return "".join(output["text"])
    return "\n".join("".join(value) for mime, value in output.get("data", {}).items() if mime.startswith("text/"))


def defined(source, where="<cell>"):
    """Names that a cell gives to those who import it: functions, classes, methods added later, CAPITALS."""
    for node in definitions(ast.parse(blank_magics(source), where)):
        if isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            owners = [call.args[0].id for call in node.decorator_list
                      if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "method_of"]
            yield f"{owners[0]}.{node.name}" if owners else node.name
