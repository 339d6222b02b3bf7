"""`from chapters.x import y`: what an import runs, and what it says when something is wrong."""
import importlib
import inspect
import json
import sys
import traceback

import pytest

import chapters
from chapters import ChapterError, blank_magics, method_of


def code(*lines, tags=()):
    return {"cell_type": "code", "metadata": {"tags": list(tags)}, "execution_count": None, "outputs": [],
            "source": [line + "\n" for line in lines[:-1]] + [lines[-1]]}


def text(*lines):
    return {"cell_type": "markdown", "metadata": {}, "source": "\n".join(lines)}


def forget():
    """What a kernel does when it starts again: no chapter is loaded."""
    for name in [name for name in sys.modules if name.startswith("chapters.")]:
        vars(chapters).pop(name.removeprefix("chapters."), None)
        del sys.modules[name]


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A folder of chapters in the place of notebooks/; `course(name, *cells)` saves one."""
    monkeypatch.setattr(chapters, "NOTEBOOKS", tmp_path)
    before = {name: module for name, module in sys.modules.items() if name.startswith("chapters.")}
    forget()

    def save(name, *cells):
        (tmp_path / f"{name}.ipynb").write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4}))

    yield save
    forget()
    sys.modules.update(before)
    vars(chapters).update((name.removeprefix("chapters."), module) for name, module in before.items())


def test_definitions_come_and_demos_do_not_run(course, capsys):
    course("90_toy", text("# Toy"), code("import math", "LIMIT = 3", "small = 1", "print('demo')", "1 / 0"),
           code("def area(r):", "    return math.pi * r * r", "area(small)"), code("class Box:", "    pass"))
    from chapters import toy
    assert round(toy.area(1), 2) == 3.14 and toy.LIMIT == 3 and toy.Box
    assert not hasattr(toy, "small")
    assert capsys.readouterr() == ("", "")


def test_no_import_cells_are_left_out(course):
    course("90_toy", code("def good(): return 1"), code("def good(): return 2", tags=["no-import"]))
    assert importlib.import_module("chapters.toy").good() == 1


def test_a_chapter_uses_another(course):
    course("90_low", code("def one(): return 1"))
    course("91_high", code("from chapters.low import one"), code("def two(): return 2 * one()"))
    assert importlib.import_module("chapters.high").two() == 2


def test_traceback_names_file_cell_heading_and_line(course):
    course("90_toy", text("# Toy"), text("some text", "", "## A norm without a mean", "more", "```", "#!no heading", "```"),
           code("def bad(x):", "    y = x + 1", "    return y / 0"))
    from chapters.toy import bad
    with pytest.raises(ZeroDivisionError) as caught:
        bad(1)
    shown = "".join(traceback.format_exception(caught.value))
    assert '90_toy.ipynb, cell 3, "A norm without a mean"", line 3, in bad' in shown
    assert "return y / 0" in shown


def test_sources_of_functions_classes_and_methods(course):
    course("90_toy", code("a = 1", "", "def first(x):", '    """Doc."""', "    return x"),
           code("class Box:", "    def get(self):", "        return 1"),
           code("from chapters import method_of", "", "@method_of(Box)", "def put(self, x):", "    self.x = x"),
           code("class Last(Box):", "    size = 3"))
    from chapters import toy
    assert inspect.getsource(toy.first) == 'def first(x):\n    """Doc."""\n    return x\n'
    assert inspect.getsource(toy.Box) == "class Box:\n    def get(self):\n        return 1\n"
    assert inspect.getsource(toy.Box.get) == "    def get(self):\n        return 1\n"
    assert inspect.getsource(toy.Box.put).splitlines()[1:] == ["def put(self, x):", "    self.x = x"]
    assert inspect.getsource(toy.Last) == "class Last(Box):\n    size = 3\n"


def test_method_of_adds_to_the_class():
    class Box:
        pass

    @method_of(Box)
    def size(self):
        return 4
    assert Box().size() == 4 and size(None) == 4


@pytest.mark.parametrize("source, expected", [
    ("%matplotlib inline\nx = 1", "\nx = 1"), ("!ls\nx = 1", "\nx = 1"), ("len?\nx = 1", "\nx = 1"),
    ("x = 1\n  %time f()", "x = 1\n"), ("%%bash\nls\nrm x", "\n\n"), ("%%time\nx = 1\ny = 2", "\nx = 1\ny = 2"),
    ("%%capture out\n%time f()\nx = 1", "\n\nx = 1"), ("# why?\nx = 1", "# why?\nx = 1"),
    ('def f():\n    """Is it so?\n    %d\n    """', None), ("x = (7\n     % 4)", None)])
def test_magics_are_blanked_and_line_numbers_hold(source, expected):
    assert blank_magics(source) == (source if expected is None else expected)


def test_line_numbers_hold_below_magics(course):
    course("90_toy", code("%load_ext autoreload", "%autoreload 2", "def bad():", "    raise KeyError"))
    from chapters.toy import bad
    with pytest.raises(KeyError) as caught:
        bad()
    assert caught.traceback[-1].lineno + 1 == 4


@pytest.mark.parametrize("line, error", [("LIMIT = undefined", "NameError: name 'undefined' is not defined"),
                                         ("def f(:", "SyntaxError"), ("import no_such_package_here", "ModuleNotFoundError")])
def test_a_broken_chapter_says_where_and_the_way_back(course, line, error):
    course("90_toy", text("# Toy"), code("x = 1"), code(line))
    with pytest.raises(ChapterError) as caught:
        importlib.import_module("chapters.toy")
    assert str(caught.value).startswith(f"chapter toy stops at cell 3: {error}")
    assert "git checkout notebooks/90_toy.ipynb" in str(caught.value)


def test_a_broken_chapter_far_below_is_the_one_named(course):
    course("90_low", code("LIMIT = undefined"))
    course("91_high", code("from chapters.low import LIMIT"))
    course("92_top", code("from chapters.high import LIMIT"))
    with pytest.raises(ChapterError, match="^chapter low stops at cell 1: .*checkout notebooks/90_low.ipynb$"):
        importlib.import_module("chapters.top")


def test_a_deleted_chapter(course):
    course("90_toy", code("x = 1"))
    with pytest.raises(ChapterError, match="no chapter 'norm' .* it has toy. .* git checkout notebooks/"):
        importlib.import_module("chapters.norm")


def test_a_copied_chapter(course):
    course("90_toy", code("x = 1"))
    course("91_toy", code("x = 1"))
    with pytest.raises(ChapterError, match="twice, as 90_toy.ipynb and 91_toy.ipynb: remove one"):
        importlib.import_module("chapters.toy")


@pytest.mark.parametrize("damage", ["<<<<<<< HEAD", "{}", "[]", ""])
def test_an_unreadable_notebook(course, tmp_path, damage):
    (tmp_path / "90_toy.ipynb").write_text(damage)
    with pytest.raises(ChapterError, match="toy is not a readable notebook .* git checkout notebooks/90_toy.ipynb"):
        importlib.import_module("chapters.toy")


def test_a_new_cell_is_importable_after_a_reload(course):
    course("90_toy", code("def one(): return 1"))
    toy = importlib.import_module("chapters.toy")
    course("90_toy", code("def one(): return 1"), code("def mine(): return 7"))
    assert importlib.reload(toy).mine() == 7
    assert inspect.getsource(toy.mine) == "def mine(): return 7\n"


def test_notebooks_saved_by_other_editors(course, tmp_path):
    """VS Code keeps sources as lists and its own metadata, Colab its ids in the metadata; a hand-made cell has none."""
    cells = [{"cell_type": "code", "source": ["def one():\n", "    return 1"], "metadata": {"vscode": {"languageId": "python"}}},
             {"cell_type": "code", "source": "def two(): return 2", "metadata": {"id": "xYz", "colab": {"height": 3}}},
             {"cell_type": "code", "source": "def three(): return 3"},
             {"cell_type": "code", "source": [], "metadata": {"tags": None}},
             {"cell_type": "raw", "source": "def four("}]
    (tmp_path / "90_toy.ipynb").write_text(json.dumps({"cells": cells, "nbformat": 4, "nbformat_minor": 0}), encoding="utf-8-sig")
    toy = importlib.import_module("chapters.toy")
    assert (toy.one(), toy.two(), toy.three()) == (1, 2, 3)


# ---- chapters under edits

def saved_by(editor, cells):
    """A notebook as some editor saves it."""
    if editor == "JupyterLab":
        for number, cell in enumerate(cells):
            cell |= {"id": f"a1b2c3d{number}", "metadata": cell["metadata"] | {"jp-MarkdownHeadingCollapsed": True, "editable": True}}
        return {"cells": cells, "metadata": {"kernelspec": {"name": "python3"}, "language_info": {}}, "nbformat": 4, "nbformat_minor": 5}
    if editor == "VS Code":
        for cell in cells:
            cell["metadata"]["vscode"] = {"languageId": "python"}
        return {"cells": cells, "metadata": {"language_info": {"name": "python"}}, "nbformat": 4, "nbformat_minor": 2}
    if editor == "Colab":
        for number, cell in enumerate(cells):
            cell["metadata"] |= {"id": f"xYz{number}", "colab": {"base_uri": "https://localhost/"}, "executionInfo": {"status": "ok"}}
        return {"cells": cells, "metadata": {"colab": {"provenance": []}, "accelerator": "GPU"}, "nbformat": 4, "nbformat_minor": 0}
    for cell in cells:                                                  # a source in one piece, and nothing that can be missing
        cell["source"] = "".join(cell["source"])
        for key in ("metadata", "outputs", "execution_count"):
            cell.pop(key, None)
    return {"cells": cells, "nbformat": 4, "nbformat_minor": 1}


@pytest.mark.parametrize("editor", ["JupyterLab", "VS Code", "Colab", "a script"])
def test_a_chapter_imports_whoever_saved_it(course, tmp_path, editor):
    cells = [text("# Toy"), code("import math", "", "def area(r):", "    return math.pi * r * r"), code("area(1)"),
             code("SIZE = 3", "%matplotlib inline")]
    (tmp_path / "90_toy.ipynb").write_text(json.dumps(saved_by(editor, cells)), encoding="utf-8")
    from chapters import toy
    assert round(toy.area(1), 2) == 3.14 and toy.SIZE == 3
    assert inspect.getsource(toy.area) == "def area(r):\n    return math.pi * r * r\n"


@pytest.mark.parametrize("cells", [5, {}, "text", None, [5], [None], ["code"], [{"cell_type": "code", "source": 5}],
                                   [{"cell_type": "code", "source": [1, 2]}], [{"cell_type": "code", "source": "", "metadata": 5}]])
def test_a_notebook_of_the_wrong_form_is_named(course, tmp_path, cells):
    (tmp_path / "90_toy.ipynb").write_text(json.dumps({"cells": cells}))
    if cells == {}:
        assert importlib.import_module("chapters.toy")                  # nothing in it, as in an empty list
        return
    with pytest.raises(ChapterError, match="toy is not a readable notebook .* git checkout notebooks/90_toy.ipynb"):
        importlib.import_module("chapters.toy")


def test_a_notebook_of_the_old_format_is_named(course, tmp_path):
    """nbformat 3 keeps its cells in worksheets."""
    (tmp_path / "90_toy.ipynb").write_text(json.dumps({"worksheets": [{"cells": []}], "nbformat": 3}))
    with pytest.raises(ChapterError, match="toy is not a readable notebook .*cells.* git checkout"):
        importlib.import_module("chapters.toy")


HALF_EDITS = {      # what a student left in a cell: what the error names
    "a colon forgotten": ("def area(r)", "SyntaxError: expected ':'"),
    "an open bracket": ("SIZES = [1, 2", "SyntaxError: '[' was never closed"),
    "an open string": ('NAME = "toy', "SyntaxError: unterminated string"),
    "indented by a mistake": ("  def area(r):\n    return r", "IndentationError"),
    "tabs and spaces": ("def area(r):\n\tx = 1\n        return x", "TabError"),
    "a merge conflict": ("<<<<<<< HEAD\nSIZE = 1\n=======\nSIZE = 2", "SyntaxError"),
    "a name that is gone": ("from math import no_such_name", "ImportError: cannot import name 'no_such_name'"),
    "a default that fails": ("def area(r, size=1 / 0):\n    return r", "ZeroDivisionError: division by zero"),
    "a method of no class": ("@method_of(Box)\ndef put(self): pass", "NameError: name 'method_of' is not defined"),
    "it imports itself": ("from chapters.toy import area", "ImportError: cannot import name 'area'"),
    "it leaves": ("class Box:\n    raise SystemExit(3)", "SystemExit: 3"),
    "NUL": ("SIZE = 1\0", "source code string cannot contain null bytes"),
    "a hundred brackets": ("SIZES = " + "(" * 300 + ")" * 300, "too many nested parentheses"),
}


@pytest.mark.parametrize("edit", HALF_EDITS)
def test_a_half_edited_chapter_says_where_and_the_way_back(course, edit):
    source, error = HALF_EDITS[edit]
    course("90_toy", text("# Toy"), code("import math"), code(source))
    with pytest.raises(ChapterError) as caught:
        importlib.import_module("chapters.toy")
    said = str(caught.value)
    assert said.startswith("chapter toy stops at cell 3: ") and error in said
    assert said.endswith("mend the cell, or restore it with git checkout notebooks/90_toy.ipynb")
    assert "chapters.toy" not in sys.modules


def test_two_chapters_that_import_each_other(course):
    course("90_low", code("from chapters.high import two"), code("def one(): return 1"))
    course("91_high", code("from chapters.low import one"), code("def two(): return 2"))
    with pytest.raises(ChapterError, match="^chapter (low|high) stops at cell 1: ImportError: .*git checkout"):
        importlib.import_module("chapters.low")


def test_a_renamed_chapter(course, tmp_path):
    """Under another number it is found; under another name, or without a number, it is missed by name."""
    course("90_toy", code("def one(): return 1"))
    (tmp_path / "90_toy.ipynb").rename(tmp_path / "77_toy.ipynb")
    assert importlib.import_module("chapters.toy").one() == 1
    for name in ("77_toy_mine.ipynb", "toy.ipynb", "77_toy-Copy1.ipynb", "77_Toy (1).ipynb"):
        sys.modules.pop("chapters.toy", None)
        next(tmp_path.glob("*.ipynb")).rename(tmp_path / name)
        with pytest.raises(ChapterError, match="no chapter 'toy' .* comes back with git checkout notebooks/"):
            importlib.import_module("chapters.toy")


def test_a_definition_that_is_gone_is_missed_by_name(course):
    """A student renamed a function: who imports it says which chapter lacks what."""
    course("90_low", code("def uno(): return 1"))
    course("91_high", code("from chapters.low import one"))
    with pytest.raises(ChapterError, match="^chapter high stops at cell 1: ImportError: cannot import name 'one' from 'chapters.low'"):
        importlib.import_module("chapters.high")


def restarted(slug):
    forget()
    return importlib.import_module(f"chapters.{slug}")


def test_a_changed_definition_changes_later_chapters_after_a_restart(course):
    """Two chapters further on as well, a method added later too; before the restart all is as it was."""
    low = [code("class Box:", "    size = 1"),
           code("from chapters import method_of", "", "@method_of(Box)", "def area(self): return self.size")]
    course("90_low", *low)
    course("91_middle", code("from chapters.low import Box"), code("def area(): return Box().area()"))
    course("92_high", code("from chapters.middle import area"), code("def twice(): return 2 * area()"))
    high = restarted("high")
    assert high.twice() == 2
    low[1]["source"][-1] = "def area(self): return 10 * self.size"
    course("90_low", *low)
    assert high.twice() == 2
    assert restarted("high").twice() == 20


@pytest.mark.parametrize("slug", ["no-such", "1", "../secret", "a" * 300, "mtp ", "*", "[a-z]*", "norm?"])
def test_strange_chapter_names(course, slug):
    """A name is never a pattern, nor a path."""
    course("90_toy", code("x = 1"))
    with pytest.raises(ChapterError, match="there is no chapter"):
        importlib.import_module(f"chapters.{slug}")
