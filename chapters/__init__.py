"""Notebooks as modules: `from chapters.norm import RMSNorm` reads notebooks/03_norm.ipynb.

The notebooks lie beside this package, and inside it where it was installed from a wheel.

Only the `import`, `def`, `class` and `CAPITAL = ...` statements (two letters or more) of its code cells are run, so
importing a chapter gives its definitions and runs none of its demos. A cell tagged `no-import`
(exercise stubs, deliberate mistakes) is left out. Tracebacks name the cell; `??` shows the source.
"""
import ast
import glob
import importlib.abc
import importlib.machinery
import json
import linecache
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
NOTEBOOKS = next((folder for folder in (HERE / "notebooks", HERE.parent / "notebooks") if folder.is_dir()), HERE)
KEEP = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class ChapterError(ImportError):
    """A chapter that cannot be imported, with the way back."""


def chapter_file(slug):
    """The notebook `NN_slug.ipynb` that defines chapter `slug`; ChapterError if there is not exactly one."""
    found = sorted(NOTEBOOKS.glob(f"[0-9][0-9]_{glob.escape(slug)}.ipynb"))
    if len(found) == 1:
        return found[0]
    if found:
        names = " and ".join(path.name for path in found)
        raise ChapterError(f"chapter {slug} is there twice, as {names}: remove one of them")
    known = ", ".join(path.stem[3:] for path in sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb")))
    raise ChapterError(f"there is no chapter {slug!r} in {NOTEBOOKS}; it has {known or 'none'}. "
                       f"A deleted one comes back with git checkout notebooks/")


def all_code_cells(path):
    """(cell number from 1, nearest heading, source, tags) of each code cell of a notebook."""
    try:
        cells = [(cell.get("cell_type"), "".join(cell.get("source", "")), (cell.get("metadata") or {}).get("tags") or [])
                 for cell in json.loads(path.read_text(encoding="utf-8-sig"))["cells"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ChapterError(f"chapter {path.stem[3:]} is not a readable notebook ({error}); "
                           f"restore it with git checkout notebooks/{path.name}") from None
    heading = ""
    for number, (kind, source, tags) in enumerate(cells, 1):
        if kind == "markdown":
            heading = next(iter(re.findall(r"(?m)^#{1,6} +(.+?)\s*$", source)), heading)
        elif kind == "code":
            yield number, heading, source, tags


def code_cells(path):
    """(cell number from 1, nearest heading, source) of each importable code cell of a notebook."""
    return ((number, heading, source) for number, heading, source, tags in all_code_cells(path)
            if "no-import" not in tags)


def blank_magics(source):
    """The source with lines for IPython (%, !, ?) emptied, so that line numbers hold."""
    first, _, rest = source.partition("\n")
    if first.startswith("%%"):
        python = first[2:].split() and first[2:].split()[0] in ("time", "timeit", "capture")
        return "\n" + blank_magics(rest) if python else "\n" * source.count("\n")
    try:
        ast.parse(source)
        return source                   # plain Python: a `?` or `%` in it belongs to it
    except SyntaxError:
        return re.sub(r"(?m)^\s*[%!].*$|^(?!\s*#).*\?\s*$", "", source)


def definitions(tree):
    """The statements of a cell that importing it runs."""
    for node in tree.body:
        targets = (node.targets if isinstance(node, ast.Assign) else
                   [node.target] if isinstance(node, ast.AnnAssign) and node.value else [])
        if isinstance(node, KEEP) or any(isinstance(t, ast.Name) and len(t.id) > 1 and t.id.isupper() for t in targets):
            yield node


def broken(path, number, error):
    """The error that says which cell stops a chapter, and the way back."""
    return ChapterError(f"chapter {path.stem[3:]} stops at cell {number}: {type(error).__name__}: {error}; "
                        f"mend the cell, or restore it with git checkout notebooks/{path.name}")


def owner(node):
    """The class that a `@method_of(Class)` puts a function into; None for any other statement."""
    calls = [part for part in getattr(node, "decorator_list", []) if isinstance(part, ast.Call)]
    return next((call.args[0].id for call in calls if getattr(call.func, "id", "") == "method_of"), None)


class ChapterLoader(importlib.abc.Loader):
    """Runs the definitions of one notebook, cell by cell."""

    def __init__(self, path):
        self.path = path

    def exec_module(self, module):
        module.__file__ = str(self.path)
        joined = []                     # all cells in one text: what inspect reads for a class
        for number, heading, source in code_cells(self.path):
            source = blank_magics(source) + "\n"
            name = f'{self.path.name}, cell {number}, "{heading}"'
            linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
            offset = sum(text.count("\n") for text in joined)
            joined.append(source)
            try:
                self.run(source, name, module, offset)
            except ChapterError:        # of a chapter that this one imports: it already says which
                raise
            except (Exception, SystemExit) as error:
                raise broken(self.path, number, error) from error
        text = "".join(joined)
        linecache.cache[module.__file__] = (len(text), None, text.splitlines(keepends=True), module.__file__)

    def run(self, source, name, module, offset):
        for node in definitions(ast.parse(source, name)):
            before = dict(module.__dict__)
            exec(compile(ast.Module([node], []), name, "exec"), module.__dict__)
            if owner(node):                     # a method belongs to its class alone
                del module.__dict__[node.name]
                if node.name in before:
                    module.__dict__[node.name] = before[node.name]
                continue
            made = module.__dict__.get(getattr(node, "name", None))
            if "__firstlineno__" in getattr(made, "__dict__", {}):      # Python 3.13: inspect trusts this line
                made.__firstlineno__ += offset


class ChapterFinder(importlib.abc.MetaPathFinder):
    """Answers `import chapters.<slug>`."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.startswith("chapters."):
            file = chapter_file(fullname.removeprefix("chapters."))
            return importlib.machinery.ModuleSpec(fullname, ChapterLoader(file), origin=str(file))


def method_of(cls):
    """Add the decorated function to a class defined in an earlier cell."""
    def add(function):
        setattr(cls, function.__name__, function)
        return function
    return add


sys.meta_path.insert(0, ChapterFinder())
