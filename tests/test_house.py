"""Two houses and a border: what lessons import, what prints and ships them; and both in an installed wheel."""
import ast
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from chapters import NOTEBOOKS, all_code_cells, blank_magics
from qwen_publish import ROOT
from qwen_publish.stamp import imports

LESSONS = sorted(NOTEBOOKS.glob("*.ipynb"))
LOOP = """
import chapters, qwen_helpers
from chapters.norm import RMSNorm
from chapters.chat import Chat
from chapters.model import Model
from chapters.mtp import MTP, generate_mtp
from chapters.sample import generate
from qwen_helpers import find_model
model = Model.from_pretrained(path := find_model())
ids = Chat(model, path).encode("It is a truth universally acknowledged, that")
text, rounds, hits = generate_mtp(model, MTP.from_pretrained(model.cfg, path), ids, 20)
assert text == generate(model, ids, 20) and rounds and hits
print(chapters.__file__, qwen_helpers.__file__, path)
"""


def modules(source):
    return {module for module, _ in imports(source)}


def code(path):
    return "\n".join(blank_magics(source) for _, _, source, _ in all_code_cells(path))


@pytest.mark.parametrize("path", LESSONS, ids=[path.stem for path in LESSONS])
def test_no_lesson_imports_the_press(path):
    assert not [module for module in modules(code(path)) if module.startswith("qwen_publish")]


@pytest.mark.parametrize("house", ["chapters", "qwen_helpers"])
def test_what_lessons_import_does_not_import_the_press(house):
    for file in (ROOT / house).glob("*.py"):
        assert not [module for module in modules(file.read_text(encoding="utf-8")) if module.startswith("qwen_publish")]


def test_helpers_import_no_lesson():
    for file in (ROOT / "qwen_helpers").glob("*.py"):
        assert not [module for module in modules(file.read_text(encoding="utf-8")) if module.startswith("chapters")]


def test_the_press_reaches_into_no_lesson():
    """It runs notebooks and reads what they say; of helpers it takes what they offer, nothing with an underscore."""
    for file in (ROOT / "qwen_publish").glob("*.py"):
        source = file.read_text(encoding="utf-8")
        assert not [module for module in modules(source) if module.startswith("chapters.")], file.name
        assert not [name for module, name in imports(source) if module.startswith(("qwen_helpers", "chapters"))
                    and (name or "").startswith("_")], file.name


def test_every_helper_is_used_by_a_lesson():
    """By an import of its own or through another helper."""
    houses = {file.stem: modules(file.read_text(encoding="utf-8")) for file in (ROOT / "qwen_helpers").glob("*.py")}
    exported = houses.pop("__init__")
    used = {name for path in LESSONS for module, name in imports(code(path)) if module == "qwen_helpers"}
    used |= {module.split(".")[1] for path in LESSONS for module in modules(code(path)) if module.startswith("qwen_helpers.")}
    used |= {module.strip(".") for module in exported}
    while more := {module.strip(".") for name in used & houses.keys() for module in houses[name]} & houses.keys() - used:
        used |= more
    assert houses.keys() <= used


def lines(house):
    return sum(bool(line.strip()) for file in (ROOT / house).glob("*.py")
               for line in file.read_text(encoding="utf-8").splitlines())


def test_the_press_stays_small():
    assert lines("qwen_publish") <= 600


def test_a_method_leaves_no_function_behind():
    """`@method_of(Model)` puts `forward` into the class, not into the chapter's module."""
    import chapters.depth
    import chapters.model
    assert callable(chapters.model.Model.forward) and not hasattr(chapters.model, "forward")
    for module in chapters.model, chapters.depth:
        for node in ast.walk(ast.parse(code(Path(module.__file__)))):
            if chapters.owner(node):
                assert not hasattr(module, node.name), node.name


def test_chapters_work_from_any_folder_without_another_import_before(tmp_path):
    subprocess.run([sys.executable, "-c", "from chapters.norm import RMSNorm; RMSNorm(3, 1e-6)"], cwd=tmp_path, check=True)


def test_the_wheel_holds_the_course_and_chapter_14_runs_from_it(tmp_path):
    """Installed into an environment that has the packages and no course."""
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
                    "--wheel-dir", tmp_path, ROOT], check=True, env=os.environ | {"TMPDIR": str(tmp_path)})
    wheel, = tmp_path.glob("*.whl")
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    home = subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], check=True,
                          capture_output=True, text=True).stdout.strip()
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", home, wheel], check=True)
    (Path(home) / "packages.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")       # torch and the like
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "QWEN_MODEL")}
    done = subprocess.run([python, "-c", LOOP], cwd=tmp_path, env=env | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(path.startswith(home) for path in done.stdout.split()), done.stdout
