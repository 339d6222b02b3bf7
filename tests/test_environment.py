"""pyproject.toml, environment.yml and constraints.txt name the same packages; the notebooks import no others."""
import ast
import importlib.metadata
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from chapters import NOTEBOOKS, all_code_cells, blank_magics

ROOT = Path(__file__).resolve().parents[1]
PYPI_NAME = {"pytorch": "torch", "matplotlib-base": "matplotlib"}       # conda-forge name -> PyPI name
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NEEDED = {canonicalize_name(r.name): r.specifier for r in map(Requirement, PROJECT["dependencies"])}
FOR_TESTS = {canonicalize_name(r.name): r.specifier
             for r in map(Requirement, PROJECT["optional-dependencies"]["test"])}
IMPORT_NAME = {"PIL": "pillow", "IPython": "ipython"}


def conda():
    """(name on PyPI -> bounds, list of pip lines) of environment.yml."""
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["channels"] == ["conda-forge", "nodefaults"]
    packages, pip = {}, []
    for line in environment["dependencies"]:
        if isinstance(line, dict):
            pip += line["pip"]
            continue
        name, bounds = re.fullmatch(r"([\w.-]+)\s*(.*)", line).groups()
        bounds = re.sub(r"^=([^=].*)$", r"==\1.*", bounds)              # conda's "=3.11" means 3.11.*
        packages[canonicalize_name(PYPI_NAME.get(name, name))] = SpecifierSet(bounds)
    return packages, pip


def constraints():
    """Package -> exact version."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {canonicalize_name(name): version for name, _, version in
            (line.partition("==") for line in lines if line and not line.startswith("#"))}


def test_the_oldest_versions_are_the_ones_that_are_tested():
    """`make test-oldest` installs the lower bound of each package, so that no bound is only claimed."""
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    pins = {canonicalize_name(name): version for name, _, version in
            (line.partition("==") for line in lines if not line.startswith("#"))}
    bounds = {canonicalize_name(r.name): r.specifier for r in map(Requirement, [
        *PROJECT["dependencies"], *(line for extra in PROJECT["optional-dependencies"].values() for line in extra)])}
    assert pins.keys() == bounds.keys()
    for name, version in pins.items():
        least, = (bound.version for bound in bounds[name] if bound.operator in (">=", "=="))
        assert Version(least) == Version(version), name


def test_conda_and_pip_ask_for_the_same():
    packages, pip = conda()
    python = packages.pop("python")
    packages.pop("pip")                                                 # conda warns when `pip:` comes without it
    assert packages == NEEDED
    assert pip == ["-e ."]
    assert SpecifierSet(PROJECT["requires-python"]).contains(str(python).removeprefix("==").removesuffix(".*"))


@pytest.mark.parametrize("name", sorted(NEEDED | FOR_TESTS))
def test_pinned_and_installed_versions_are_in_the_range(name):
    bounds = (NEEDED | FOR_TESTS)[name]
    assert bounds.contains(constraints()[name])
    assert bounds.contains(importlib.metadata.version(name), prereleases=True)


@pytest.mark.skipif(sys.version_info[:2] != (3, 11) or not importlib.metadata.version("torch").endswith("+cpu"),
                    reason="the pins were written on Python 3.11 with the CPU build of torch; others need more packages")
def test_everything_installed_for_the_course_is_pinned():
    pins, seen, waiting = constraints(), set(), list(NEEDED | FOR_TESTS)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in seen or name == "setuptools":
            continue
        seen.add(name)
        assert importlib.metadata.version(name).partition("+")[0] == pins.get(name), name
        for line in importlib.metadata.requires(name) or []:
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                waiting.append(needed.name)


def imports_of(node):
    """Packages that a tree imports; what it can do without (`try: import x`, `except ImportError`) is left out."""
    caught = [name.id for handler in getattr(node, "handlers", []) for name in ast.walk(handler.type or node)
              if isinstance(name, ast.Name)]
    if {"ImportError", "ModuleNotFoundError"} & set(caught):
        return
    if isinstance(node, ast.Import):
        yield from (alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and not node.level:
        yield node.module.partition(".")[0]
    for child in ast.iter_child_nodes(node):
        yield from imports_of(child)


def trees(path):
    """The syntax trees of a Python file, or of a notebook's code cells."""
    sources = [path.read_text(encoding="utf-8")] if path.suffix == ".py" else \
        [blank_magics(source) for _, _, source, _ in all_code_cells(path)]
    return [ast.parse(source) for source in sources]


FILES = sorted(NOTEBOOKS.glob("*.ipynb")) + [file for house in ("chapters", "qwen_helpers", "qwen_publish")
                                              for file in sorted((ROOT / house).glob("*.py"))]


@pytest.mark.parametrize("path", FILES, ids=[path.name for path in FILES])
def test_only_declared_packages_are_imported(path):
    found = {name for tree in trees(path) for name in imports_of(tree)} - sys.stdlib_module_names
    found = {canonicalize_name(IMPORT_NAME.get(name, name)) for name in found - {"qwen_helpers", "chapters"}}
    assert found <= NEEDED.keys() | {"ipython"}


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.name)
def test_lessons_use_no_magics(path):
    """Shell lines and magics differ between Windows, macOS and Colab, and are no Python."""
    for _, _, source, _ in all_code_cells(path):
        ast.parse(source)


def opened_without_encoding(tree):
    """Calls that read or write text in whatever encoding the system prefers; on Windows that is not UTF-8."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or any(word.arg == "encoding" for word in node.keywords):
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        mode = [a.value for a in [*node.args[1:2], *(w.value for w in node.keywords if w.arg == "mode")]
                if isinstance(a, ast.Constant)]
        if name == "read_text" and not node.args or name == "write_text" and len(node.args) < 2 \
                or isinstance(node.func, ast.Name) and name == "open" and "b" not in "".join(map(str, mode)):
            yield ast.unparse(node)


@pytest.mark.parametrize("path", FILES, ids=[path.name for path in FILES])
def test_text_files_are_opened_as_utf8(path):
    assert not [call for tree in trees(path) for call in opened_without_encoding(tree)]


def test_control_an_encoding_left_out_is_found():
    calls = "open(p); open(p, 'rb'); open(p, 'w'); p.read_text(); p.read_text('utf-8'); p.write_text(s); " \
            "open(p, encoding='utf-8'); p.write_text(s, 'utf-8'); open(p, mode='ab')"
    assert list(opened_without_encoding(ast.parse(calls))) == ["open(p)", "open(p, 'w')", "p.read_text()", "p.write_text(s)"]


def test_the_docs_show_the_committed_table_of_make_bench():
    bench = json.loads((ROOT / "data" / "bench.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    assert f"torch {bench['torch']}, {bench['date']}" in page
    for figure in bench["figures"]:
        assert "\n| {figure} | {ratio:.2f} ({lowest:.2f} to {highest:.2f}) | ".format(**figure) in page
