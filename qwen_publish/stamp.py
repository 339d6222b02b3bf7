"""What a notebook's saved outputs depend on, as a few hashes: equal hashes, true outputs.

Only what can show counts: comments and docstrings of imported code do not, nor does code that the notebook does not
reach; a font, a picture or the pinned version of a package that lessons use does.
"""
import ast
import hashlib
import io
import re
import tokenize
import tomllib
from functools import lru_cache

import chapters
from . import ROOT

MEANING = {"code": "its own code", "chapters": "a chapter it imports", "helpers": "a helper it uses",
           "data": "data/ (the embedded model, the prompts or the bench)", "pictures": "a picture",
           "packages": "constraints.txt"}


@lru_cache
def file_hash(file, _changed):
    return hashlib.sha256(file.read_bytes()).hexdigest()


def hash_of(parts):
    """One hash of texts, or of files and their names."""
    parts = [part if isinstance(part, str) else f"{part.name} {file_hash(part, part.stat().st_mtime_ns)}"
             for part in parts]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def meaning(source):
    """Python source without its comments, docstrings and empty lines."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node, clean=False):
            text = node.body[0]
            for row in range(text.lineno - 1, text.end_lineno):
                lines[row] = ""
            if len(node.body) == 1:
                lines[text.lineno - 1] = " " * text.col_offset + "..."
    for token in tokenize.generate_tokens(io.StringIO("\n".join(lines) + "\n").readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return "\n".join(line.rstrip() for line in lines if line.strip())


def definition_text(path):
    """The meaning of what importing a chapter runs, and nothing else of it."""
    for number, _, source in chapters.code_cells(path):
        source = chapters.blank_magics(source)
        try:
            for node in chapters.definitions(ast.parse(source)):
                first = min(part.lineno for part in [node, *getattr(node, "decorator_list", [])])
                yield meaning("\n".join(source.splitlines()[first - 1:node.end_lineno]))
        except SyntaxError as error:
            raise chapters.broken(path, number, error) from None


def imports(source):
    """(module, name) of each import in a source, also those inside functions; name is None for a whole module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((part.name, None) for part in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((module, part.name) for part in node.names)


def helper_files(module, name):
    """The files of qwen_helpers that an import reaches first."""
    inside = module.removeprefix("qwen_helpers").strip(".")
    folder = ROOT / "qwen_helpers"
    for stem in filter(None, [inside, name if not inside else None]):
        if (folder / f"{stem}.py").is_file():
            return [folder / f"{stem}.py"]
    exported = imports((folder / "__init__.py").read_text(encoding="utf-8"))
    return [folder / f"{module.strip('.')}.py" for module, known in exported if name in (known, None) and module.strip(".")]


def reach(source, found):
    """`found`, file -> meaning, with the chapters and helpers that a source imports, and those that they import."""
    for module, name in imports(source):
        slug = module.removeprefix("chapters.") if module.startswith("chapters.") else None
        files = ([chapters.chapter_file(slug)] if slug else
                 helper_files(module, name) if module.startswith(("qwen_helpers", ".")) else [])
        for file in files:
            if file not in found:
                text = "\n".join(definition_text(file)) if slug else file.read_text(encoding="utf-8")
                found[file] = meaning(text)
                reach(text, found)
    return found


def packages():
    """The pinned versions of the packages that lessons use."""
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    names = {re.split(r"[<>=!~ ]", need)[0] for need in needs}
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [pin for pin in pins if pin.split("==")[0] in names]


def stamp(path):
    """Hashes of all that a notebook's outputs depend on: its code, chapters, helpers, data, pictures, packages."""
    cells = list(chapters.all_code_cells(path))
    text = "\n".join(chapters.blank_magics(source) for _, _, source, _ in cells)
    found = reach(text, {})
    lessons, helpers = ([file for file in sorted(found) if (file.suffix == ".ipynb") is lesson] for lesson in (True, False))
    drawn = [file for file in sorted((ROOT / "qwen_helpers").rglob("*")) if file.is_file() and file.suffix in (".ttf", ".js")]
    data = [file for part in ("tiny", "prompts", "published") for file in (ROOT / "data" / part).rglob("*") if file.is_file()]
    data += [file for file in (ROOT / "data" / "recipe").glob("*") if f'"{file.name}"' in text]
    data += [ROOT / "data" / "bench.json"] * any(name == "measured" for _, name in imports(text))
    shown = set(re.findall(r"\bpictures/[\w.-]+", path.read_text(encoding="utf-8-sig")))
    return {"code": hash_of(f"{sorted(tags)} {source}" for _, _, source, tags in cells),
            "chapters": hash_of(f"{file.name} {found[file]}" for file in lessons),
            "helpers": hash_of([*(f"{file.name} {found[file]}" for file in helpers), *drawn]),
            "data": hash_of(sorted(data)),
            "pictures": hash_of(sorted(file for name in shown if (file := path.parent / name).is_file())),
            "packages": hash_of(packages())}
