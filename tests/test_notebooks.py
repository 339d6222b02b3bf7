"""The form of every chapter: short cells, enough prose, saved as run, its stamp fresh, importable in silence."""
import json
import os
import re
import statistics
import subprocess
import sys
import unicodedata
from collections import defaultdict

import pytest

from notebook import PATHS, cells, defined, each_notebook, lines, read, shown_text, tags, words
from chapters import NOTEBOOKS
from qwen_publish.refresh import VIEW, stale

PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)\s]*)[^)]*\)")
IMG = re.compile(r"<img\b[^>]*>")
PLACE = re.compile(r"(?<![\w./])/(home|root|tmp|work|usr|opt|var|mnt|Users)/|\b0x[0-9a-f]{8,}|[A-Z]:\\Users")


@each_notebook
def test_cells_are_short(path):
    sizes = {number: len(lines(source)) for number, source, _ in cells(path, "code")}
    assert {number: size for number, size in sizes.items() if size > 20} == {}
    assert statistics.median(sizes.values()) <= 6


@each_notebook
def test_code_fits_a_projector(path):
    def columns(line):
        return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in line)
    assert [(number, line) for number, source, _ in cells(path, "code")
            for line in source.splitlines() if columns(line) > 79] == []


@each_notebook
def test_five_words_of_prose_for_a_line_of_code(path):
    prose = sum(words(source) for _, source, _ in cells(path, "markdown"))
    assert prose >= 5 * sum(len(lines(source)) for _, source, _ in cells(path, "code"))


@each_notebook
def test_a_result_within_ten_lines(path):
    count = 0
    for _, source, cell in cells(path, "code"):
        count += len(lines(source))
        if cell["outputs"]:
            break
    assert count <= 10


@each_notebook
def test_set_up_cell_is_short(path):
    assert len(lines(next(cells(path, "code"))[1])) <= 3


@each_notebook
def test_at_most_two_code_cells_in_a_row(path):
    kinds = "".join(cell["cell_type"][0] for cell in read(path)["cells"] if "".join(cell["source"]).strip())
    assert "ccc" not in kinds


@each_notebook
def test_first_screen(path):
    first = [source for _, source, _ in cells(path, "markdown")][:2]
    assert re.match(r"# [^\n]*[?？]\s*$", first[0].splitlines()[0])
    assert any(target == f"pictures/{path.stem}.svg" for source in first for _, target in PICTURE.findall(source))


@each_notebook
def test_pictures_are_local_and_have_alt_text(path):
    for number, source, cell in cells(path, "markdown"):
        found = PICTURE.findall(source)
        for tag in IMG.findall(source):
            found.append(tuple("".join(re.findall(rf'\b{name}="([^"]*)"', tag)) for name in ("alt", "src")))
        for alt, target in found:
            assert len(alt) >= 10, (number, target)
            assert (NOTEBOOKS / target).is_file() and not cell.get("attachments"), (number, target)
    for number, _, cell in cells(path, "code"):
        for output in cell["outputs"]:
            if any(mime.startswith("image/") for mime in output.get("data", {})):
                alt = "".join(output["data"].get("text/plain", ""))
                assert len(alt) >= 10 and not alt.startswith("<"), (number, alt)


@each_notebook
def test_saved_as_run(path):
    notebook = read(path)
    assert "widgets" not in notebook["metadata"]
    counts = [cell["execution_count"] for _, _, cell in cells(path, "code")]
    assert counts == list(range(1, len(counts) + 1))
    for number, _, cell in cells(path, "code"):
        for output in cell["outputs"]:
            assert output["output_type"] != "error", number
            assert output.get("name") != "stderr", number
            assert VIEW not in output.get("data", {}), number
            text = shown_text(output)
            assert len(text.splitlines()) <= 40, number
            assert not PLACE.search(text), (number, text)
    assert path.stat().st_size < 300_000


@each_notebook
def test_outputs_are_fresh(path):
    why = stale(path)
    assert not why, f"{path.name}: {why}; run python -m qwen_publish.refresh {path.stem}"


def test_nothing_is_defined_in_two_notebooks():
    places = defaultdict(list)
    for path in PATHS:
        names = {name for number, source, cell in cells(path, "code") if "no-import" not in tags(cell)
                 for name in defined(source, f"{path.name}, cell {number}")}
        for name in names:
            places[name].append(path.stem)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


IMPORT_EACH = """
import json, os, socket, sys, time
import chapters, qwen_helpers.draw, qwen_helpers.widgets
def refuse(*args, **kwargs):
    asked.append(repr(args[1:] or args))
    raise OSError("no network in this test")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
report = {}
for slug in sys.argv[1:]:
    for name in [name for name in sys.modules if name.startswith("chapters.")]:
        del sys.modules[name]
    asked, start = [], time.process_time()
    saved = os.dup(1)
    with open(os.environ["SAID"], "w") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        try:
            __import__(f"chapters.{slug}")
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(saved, 1)
    report[slug] = time.process_time() - start, open(os.environ["SAID"]).read(), asked
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def imports(tmp_path_factory):
    """slug -> (seconds of computing, what it printed, what it asked of the network), each chapter imported afresh."""
    said = tmp_path_factory.mktemp("import") / "said.txt"
    done = subprocess.run([sys.executable, "-c", IMPORT_EACH, *(path.stem[3:] for path in PATHS)],
                          env=os.environ | {"SAID": str(said)}, cwd=NOTEBOOKS.parent, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, said.read_text()
    return json.loads(done.stdout)


@each_notebook
def test_import_is_silent_quick_and_offline(path, imports):
    seconds, said, asked = imports[path.stem[3:]]
    assert said == ""
    assert asked == []
    assert seconds < 2          # of computing, not of waiting: a busy machine does not fail it


SVGS = sorted((NOTEBOOKS / "pictures").glob("*.svg"))


@pytest.mark.parametrize("path", SVGS, ids=[path.stem for path in SVGS])
def test_drawings(path):
    text = path.read_text(encoding="utf-8")
    assert re.search(r"<title[^>]*>[^<]{10,}</title>", text)
    assert 'viewBox="0 0 760 ' in text
    assert "<script" not in text and "href=" not in text
    assert not re.search(r"(?:url\(|src=)[\"']?\w+:", text)
    assert min(map(float, re.findall(r"font-size[:=]\"?([\d.]+)", text))) >= 16


def test_readme_lists_every_chapter_with_its_question():
    readme = (NOTEBOOKS.parent / "README.md").read_text(encoding="utf-8")
    for path in PATHS:
        title = next(cells(path, "markdown"))[1].splitlines()[0].removeprefix("# ").strip()
        assert f"| {path.stem[:2]} | [{path.stem[3:]}](notebooks/{path.name}) | {title} |" in readme
    for _, target in re.findall(r"\[([^\]]*)\]\(([^):]+)\)", readme):
        assert (NOTEBOOKS.parent / target).exists(), target
