"""`python -m qwen_publish.refresh`: saved outputs stay true, byte for byte, and a failure changes nothing."""
import base64
import io
import json
import shutil
import subprocess
import sys

import nbformat
import pytest
from PIL import Image

import chapters
from qwen_publish import ROOT, refresh, stamp as stamps
from qwen_publish.refresh import RefreshError, normalise, stale
from qwen_publish.stamp import stamp

DRAWING = """import qwen_helpers, random, sys
from IPython.display import display
import ipywidgets
from qwen_helpers.draw import lines
from qwen_helpers.widgets import demo
print("low", file=sys.stderr)
print("10 %\\r20 %\\r30 %")
display(ipywidgets.IntProgress(3))
lines([0, 1], {"": [0, 1]}, "A straight line")"""


def toy(tmp_path, *sources, name="90_toy", tags=()):
    """A notebook of a heading and code cells, as an editor would save it."""
    cells = [nbformat.v4.new_markdown_cell("# A toy"),
             *(nbformat.v4.new_code_cell(source, metadata={"tags": list(tags), "collapsed": True}) for source in sources)]
    path = tmp_path / f"{name}.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"vscode": 1}), path)
    return path


@pytest.fixture
def course(tmp_path, monkeypatch):
    monkeypatch.setattr(chapters, "NOTEBOOKS", tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def refreshed(tmp_path_factory):
    """A notebook after its first refresh, with pictures, a slider, progress and stderr in it."""
    path = toy(tmp_path_factory.mktemp("toy"), DRAWING, "demo(lambda k: lines([0, k], {'': [0, 1]}, 'Line'), k=(1, 3, 1))",
               "random.random()", "", tags=["timing", "slideshow-none"])
    text = json.loads(path.read_text())
    text["cells"][2]["metadata"]["slideshow"] = {"slide_type": "slide"}
    path.write_text(json.dumps(text))
    refresh.refresh(path)
    return path


def test_one_fixed_form(refreshed):
    notebook = json.loads(refreshed.read_text())
    assert notebook["metadata"].keys() == {"kernelspec", "language_info", "stamp"}
    assert [cell["id"] for cell in notebook["cells"]] == ["c000", "c001", "c002", "c003", "c004"]
    assert [cell["execution_count"] for cell in notebook["cells"][1:]] == [1, 2, 3, None]
    assert all(cell["metadata"].keys() <= {"tags", "slideshow"} for cell in notebook["cells"])
    assert notebook["cells"][0]["metadata"]["slideshow"] == {"slide_type": "slide"}             # a heading
    assert notebook["cells"][2]["metadata"].get("slideshow") != {"slide_type": "slide"}         # set by hand, no heading
    printed, drawn = notebook["cells"][1]["outputs"]                   # no stderr, no progress bar
    assert "".join(printed["text"]) == "30 %\n"
    assert drawn["data"].keys() == {"image/png", "text/plain"} and drawn["execution_count"] == 1
    assert drawn["metadata"]["image/png"]["alt"].startswith("A straight line")
    assert refresh.VIEW not in refreshed.read_text()
    assert notebook["cells"][2]["outputs"][0]["data"].keys() == {"image/png", "text/plain"}    # the slider's still


def test_a_second_run_gives_the_same_bytes(refreshed):
    before = refreshed.read_bytes()
    assert refresh.refresh(refreshed) == "no change"                   # the random number is in a cell tagged `timing`
    assert refreshed.read_bytes() == before


def test_the_same_pixels_keep_their_bytes(refreshed):
    old = nbformat.read(refreshed, as_version=4).cells[1].outputs[1].data["image/png"]
    picture = Image.open(io.BytesIO(base64.b64decode(old))).convert("RGBA")

    def drawn(image, level):
        """The picture that stays when a run gives `image`, written in other bytes."""
        out = io.BytesIO()
        image.save(out, "png", compress_level=level)
        new = nbformat.read(refreshed, as_version=4)
        new.cells[1].outputs[1].data["image/png"] = base64.b64encode(out.getvalue()).decode()
        assert new.cells[1].outputs[1].data["image/png"] != old
        return normalise(new, nbformat.read(refreshed, as_version=4)).cells[1].outputs[1].data["image/png"]

    assert drawn(picture, 1) == old
    picture.putpixel((3, 3), (255, 0, 0, 255))
    assert drawn(picture, 6) != old


def test_only_changed_outputs_change(course):
    path = toy(course, "print(1)", "import random\nprint(random.random())")
    refresh.refresh(path)
    before = json.loads(path.read_text())["cells"]
    refresh.refresh(path)
    after = json.loads(path.read_text())["cells"]
    assert before[:2] == after[:2] and before[2]["outputs"] != after[2]["outputs"]


def test_timings_are_new_when_the_code_is(course):
    def output(*sources):
        refresh.refresh(path := toy(course, *sources, tags=["timing"]))
        return path, nbformat.read(path, as_version=4).cells[1].outputs
    path, first = output("import random\nprint(random.random())")
    refresh.refresh(path)
    assert nbformat.read(path, as_version=4).cells[1].outputs == first
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[1].source += "  # other code"
    nbformat.write(notebook, path)
    refresh.refresh(path)
    assert nbformat.read(path, as_version=4).cells[1].outputs != first


def test_what_makes_a_notebook_stale(course):
    toy(course, "def one(): return 1", "one()", name="88_low")
    toy(course, "from chapters.low import one\ndef two(): return 2 * one()", name="89_high")
    path = toy(course, "import qwen_helpers\nfrom chapters.high import two\ntwo()")
    assert stale(path) == "it was never refreshed"
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata["stamp"] = stamp(path)
    nbformat.write(notebook, path)
    assert stale(path) == ""

    notebook.cells[0].source = "# Another title"                       # prose changes no output
    nbformat.write(notebook, path)
    assert stale(path) == ""
    toy(course, "def one(): return 1", "one() + 1", name="88_low")     # nor does a demo of an imported chapter
    assert stale(path) == ""
    toy(course, "def one(): return 3", "one()", name="88_low")
    assert stale(path) == "a chapter it imports changed"
    notebook.cells[1].source += " + 1"
    nbformat.write(notebook, path)
    assert stale(path) == "its own code and a chapter it imports changed"


def changed(path, before):
    return {part for part, value in stamp(path).items() if value != before[part]}


@pytest.fixture
def copy(course, monkeypatch, tmp_path_factory):
    """A copy of all that a stamp looks at beside the notebook, to change."""
    root = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "qwen_helpers", root / "qwen_helpers", ignore=shutil.ignore_patterns("__pycache__"))
    for name in "constraints.txt", "pyproject.toml":
        shutil.copy(ROOT / name, root)
    (root / "data" / "tiny").mkdir(parents=True)
    (root / "data" / "bench.json").write_text("a table")
    monkeypatch.setattr(stamps, "ROOT", root)
    return root


def edit(file, old, new):
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new, 1), encoding="utf-8")


def test_what_a_reader_cannot_see_makes_nothing_stale(course, copy):
    """A comment or a docstring of a helper or a chapter, and code that the notebook does not reach."""
    toy(course, "def one():\n    return 1", name="88_low")
    path = toy(course, "from chapters.low import one\nfrom qwen_helpers import draw\nfrom qwen_helpers.lesson import close")
    first = stamp(path)
    for name in "draw", "lesson", "weights":
        edit(copy / "qwen_helpers" / f"{name}.py", '"""', '"""Other words. ')
    edit(copy / "qwen_helpers" / "draw.py", "import io\n", "import io  # bytes\n\n\n# pictures\n")
    edit(copy / "qwen_helpers" / "cache.py", "return self.length", "return 0")
    toy(course, "def one():\n    \"\"\"The first.\"\"\"\n    # of all\n    return 1", name="88_low")
    assert not changed(path, first)


def test_what_shows_makes_stale_what_shows_it(course, copy):
    toy(course, "1", name="88_plain")
    path, plain = toy(course, "from qwen_helpers.lesson import measured\nmeasured('bfloat16')"), course / "88_plain.ipynb"
    first, other = stamp(path), stamp(plain)
    edit(copy / "qwen_helpers" / "lesson.py", "print(", "print(1, ")
    assert changed(path, first) == {"helpers"} and not changed(plain, other)
    (copy / "data" / "bench.json").write_text("another table")
    assert changed(path, first) == {"helpers", "data"} and not changed(plain, other)
    (copy / "qwen_helpers" / "fonts" / "more.ttf").write_text("a font")
    edit(copy / "constraints.txt", "matplotlib==", "matplotlib==9")
    assert changed(path, first) == {"helpers", "data", "packages"} and changed(plain, other) == {"helpers", "packages"}
    (copy / "data" / "tiny" / "model.safetensors").write_text("other weights")
    assert changed(plain, other) == {"helpers", "packages", "data"}


def test_tags_and_pictures_count_too(course, copy):
    (course / "pictures").mkdir()
    (course / "pictures" / "toy.svg").write_text("<svg/>")
    path = toy(course, "1")
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[0].source += "\n\n![A toy](pictures/toy.svg)"
    nbformat.write(notebook, path)
    first = stamp(path)
    (course / "pictures" / "toy.svg").write_text("<svg></svg>")
    assert changed(path, first) == {"pictures"}
    toy(course, "1", tags=["timing"])
    assert "code" in changed(path, first)


@pytest.mark.parametrize("source, message", [
    ("x = 1\nundefined", 'chapter 90_toy stops at cell 3, "A toy": NameError: name \'undefined\' is not defined'),
    ("import os\nos._exit(1)", 'chapter 90_toy stops at cell 3, "A toy": its kernel died')])
def test_a_failure_leaves_the_file_alone(course, source, message):
    path = toy(course, "print(1)", source)
    before = path.read_bytes()
    with pytest.raises(RefreshError) as caught:
        refresh.refresh(path)
    assert str(caught.value) == f"{message}; the file is left as it was"
    assert path.read_bytes() == before
    assert list(course.iterdir()) == [path]


def test_a_cell_that_never_ends(course):
    path = toy(course, "while True: pass")
    with pytest.raises(RefreshError, match="stops at cell 2, .*: it took more than 2 s"):
        refresh.refresh(path, timeout=2)


def test_an_edit_during_the_run_is_kept(course):
    path = toy(course, "import pathlib\npathlib.Path('90_toy.ipynb').write_text('{}')")
    with pytest.raises(RefreshError, match="edited while it ran"):
        refresh.refresh(path)
    assert path.read_text() == "{}"


def test_new_cells_get_free_ids(course):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1", id=name) for name in ("c001", "abc", "c000")])
    assert [cell["id"] for cell in normalise(notebook).cells] == ["c001", "c002", "c000"]


def command(*arguments, capsys, course=None):
    with pytest.raises(SystemExit) as caught:
        refresh.main(list(arguments))
    return caught.value.code, capsys.readouterr().out


def test_the_command(course, capsys, monkeypatch):
    monkeypatch.delenv("QWEN_MODEL", raising=False)
    path = toy(course, "print(1)")
    toy(course, "1 / 0", name="91_bad")
    assert command("--check", "toy", capsys=capsys) == (1, "90_toy: stale, it was never refreshed\n")
    code, out = command("90_toy", capsys=capsys)
    assert code == 0 and out.startswith("90_toy: saved, 1 outputs changed")
    assert command(str(path), capsys=capsys) == (0, "90_toy: fresh\n")
    code, out = command(capsys=capsys)
    assert code == 1 and "chapter 91_bad stops at cell 2" in out and "90_toy: fresh" in out
    code, out = command("nothing", capsys=capsys)
    assert code == 1 and out.startswith("there is no chapter 'nothing'")


def test_another_model_is_refused(course, capsys, monkeypatch):
    monkeypatch.setenv("QWEN_MODEL", "/elsewhere")
    code, out = command(capsys=capsys)
    assert code == "Saved outputs come from data/tiny: unset QWEN_MODEL before you refresh."


def test_check_needs_no_kernel():
    done = subprocess.run([sys.executable, "-c", "import sys; from qwen_publish import refresh; refresh.run = None\n"
                           "sys.argv = ['refresh', '--check']; refresh.main()"], cwd=ROOT, text=True, stdout=subprocess.PIPE)
    assert len(done.stdout.splitlines()) == len(list(chapters.NOTEBOOKS.glob("[0-9][0-9]_*.ipynb")))
