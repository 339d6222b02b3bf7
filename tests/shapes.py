"""Run a notebook with its shape comments as checks: `python tests/shapes.py NOTEBOOK` prints what it found as JSON.

With `--large` any model counts as a large one, which computes in the dtypes of its file.

`x = norm(x)  # (B, T, D)` is checked after the line has run, in the chapters that the notebook imports too. A name in
a comment is the int variable of that name if there is one (in the function, or on `self`); else it must mean one
number throughout the call of the function, or throughout the cell; when a loop comes back to a line, names are free
again. Sizes that are expressions of unknown names are skipped.
"""
import ast
import contextlib
import io
import json
import re
import sys
import tokenize
from pathlib import Path

from qwen_helpers import weights
from chapters import ChapterLoader, all_code_cells, blank_magics, definitions

GROUP = re.compile(r"\(([^()]*)\)")
CHECKED = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr)


class Lie(AssertionError):
    """A shape comment that is not true."""


def sizes(comment):
    """The parsed sizes of each group in a comment that is nothing but parenthesised shapes; None for any other."""
    body = comment.lstrip("# ").rstrip()
    groups = GROUP.findall(body)
    if not groups or GROUP.sub("", body).strip(" ,"):
        return None
    try:
        trees = [ast.parse(f"[{group.replace('·', '*').replace('…', '...')}]", mode="eval").body.elts for group in groups]
    except SyntaxError:
        return None
    plain = (ast.Name, ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Load)
    whole = all(isinstance(part, plain) and not isinstance(getattr(part, "value", 0), (str, float))
                for tree in trees for size in tree for part in ast.walk(size))
    word = len(trees) == 1 and len(trees[0]) == 1 and "," not in groups[0] and groups[0].strip().islower()
    return None if not whole or word else trees


def comments(source):
    """line -> sizes of the shape comments of a cell."""
    found = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and sizes(token.string):
            found[token.start[0]] = sizes(token.string)
    return found


class Instrument(ast.NodeTransformer):
    """Add a check behind each statement that ends in a shape comment."""

    def __init__(self, source, where):
        self.comments, self.where, self.checks = comments(source), where, {}

    def call(self, value, line):
        self.checks[f"{self.where}:{line}"] = self.comments[line]
        call = ast.parse(f"check_shape_(0, '{self.where}:{line}', bound_, locals())", mode="eval").body
        call.args[0] = value
        return call

    def visit_FunctionDef(self, node):
        self.generic_visit(node)
        start = bool(ast.get_docstring(node, clean=False))
        node.body.insert(start, ast.parse("bound_ = {}").body[0])
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def generic_visit(self, node):
        super().generic_visit(node)
        if not isinstance(node, CHECKED) or node.end_lineno not in self.comments:
            return node
        if isinstance(node, (ast.Return, ast.Expr)):
            if node.value is not None:
                node.value = self.call(node.value, node.end_lineno)
            return node
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        value = ast.parse(ast.unparse(target), mode="eval").body
        return [node, ast.Expr(self.call(value, node.end_lineno))]


def shape_of(value):
    """The shape of a tensor or array; of nested lists of numbers too."""
    if hasattr(value, "shape"):
        return tuple(value.shape)
    if isinstance(value, (list, tuple)):
        return (len(value), *(shape_of(value[0]) if value and not isinstance(value[0], (int, float)) else ()))
    raise Lie(f"a {type(value).__name__} has no shape")


def compare(shape, tree, bound, names):
    """Raise Lie if `shape` is not what the comment says; binds names that mean nothing yet."""
    said = "(" + ", ".join(map(ast.unparse, tree)) + ")"
    dots = [i for i, size in enumerate(tree) if isinstance(size, ast.Constant) and size.value is ...]
    if dots:
        tail = len(tree) - dots[0] - 1
        shape = shape[:dots[0]] + shape[len(shape) - tail:] if len(shape) >= len(tree) - 1 else shape
        tree = tree[:dots[0]] + tree[dots[0] + 1:]
    if len(shape) != len(tree):
        raise Lie(f"{said} is {shape}")
    itself = names.get("self")
    for size, real in zip(tree, shape):
        known = {name: value for name, value in bound.items() if name}
        for name in {part.id for part in ast.walk(size) if isinstance(part, ast.Name)}:
            for value in (names.get(name), getattr(itself, name, None)):
                if type(value) is int:
                    known[name] = value
                    break
        if isinstance(size, ast.Name) and size.id not in known:
            bound[size.id] = real
        elif all(part.id in known for part in ast.walk(size) if isinstance(part, ast.Name)):
            if eval(ast.unparse(size), {}, known) != real:
                raise Lie(f"{said} is {shape}" + (f" with {known}" if known else ""))


class Checks:
    """What the checks of one run found: all of them, those that ran, those that failed."""

    def __init__(self):
        self.found, self.ran, self.lies = {}, set(), {}

    def check(self, value, where, bound, names):
        self.ran.add(where)
        if where in bound.setdefault("", set()):                # a loop came back to this line
            bound.clear()
        bound.setdefault("", set()).add(where)
        trees, values = self.found[where], [value]
        if isinstance(value, tuple) and value and all(hasattr(part, "shape") for part in value):
            values, trees = value, trees * len(value) if len(trees) == 1 else trees
        try:
            if len(values) != len(trees):
                raise Lie(f"{len(trees)} shapes for {len(values)} values")
            for part, tree in zip(values, trees):
                compare(shape_of(part), tree, bound, names)
        except Lie as lie:
            self.lies.setdefault(where, str(lie))
        return value

    def prepared(self, source, stem, number, names):
        """The tree of a cell with its checks, ready to run with `names` as globals."""
        change = Instrument(source, f"{stem}, cell {number}")
        tree = ast.fix_missing_locations(change.visit(ast.parse(source)))
        self.found.update(change.checks)
        names |= {"check_shape_": self.check, "bound_": {}}
        return tree


def run(path):
    """(checks, what stopped the notebook) of one notebook."""
    checks, names = Checks(), {"__name__": "notebook", "display": lambda *shown: None}

    def run_import(loader, source, name, module, offset):
        number = re.search(r"cell (\d+)", name)[1]
        for node in definitions(checks.prepared(source, loader.path.stem, number, module.__dict__)):
            exec(compile(ast.Module([node], []), name, "exec"), module.__dict__)

    ChapterLoader.run = run_import
    for number, heading, source, _ in all_code_cells(path):
        try:
            tree = checks.prepared(blank_magics(source), path.stem, number, names)
            exec(compile(tree, f'{path.name}, cell {number}, "{heading}"', "exec"), names)
        except Exception as error:
            return checks, f"cell {number}, \"{heading}\": {type(error).__name__}: {error}"
    return checks, ""


if __name__ == "__main__":
    if "--large" in sys.argv:
        weights.SMALL = 0
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()):
        checks, stopped = run(Path(sys.argv[1]))
    print(json.dumps({"lies": checks.lies, "found": sorted(checks.found), "ran": sorted(checks.ran), "stopped": stopped,
                      "printed": printed.getvalue()}))
