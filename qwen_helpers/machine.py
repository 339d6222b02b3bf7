"""Is this machine ready for the course? Each need is checked and answered in words."""
import os
import platform
import re
from importlib import metadata

from .weights import REAL, TINY, CheckpointError, has_head, load_tokenizer, load_weights


def model_name(path):
    """What to call a model folder, without its place on the disk."""
    if path == TINY:
        return "the embedded model, data/tiny"
    return REAL if REAL.split("/")[1] in str(path) else f"a model of your own, {path.name}"


def needs(path):
    """(what, found, trouble) for Python, the packages that lessons use, the model, and memory for it in fp32."""
    wanted = [need.split(">=") for need in metadata.requires("qwen-helpers") if "extra" not in need]
    for name, least in [["Python", "3.11"], *(w for w in wanted if not w[0].startswith(("jupyter", "nb")))]:
        least = "7.7" if name == "ipywidgets" else least    # JupyterLab needs a newer one, Colab comes with this
        try:
            found = platform.python_version() if name == "Python" else metadata.version(name)
            old, new = ([int(part) for part in re.findall(r"\d+", version)[:2]] for version in (found, least))
            yield name, found, f"the course needs {least} or newer" if old < new else ""
        except metadata.PackageNotFoundError:
            yield name, "missing", f"run pip install '{name}>={least}', then restart the kernel"
    count, head, trouble = 0, True, ""
    try:
        load_tokenizer(path)
        head = has_head(path)
        parts = ("model.", "mtp.") if head else ("model.",)
        count = sum(t.numel() for part in parts for t in load_weights(path, part).values())
    except CheckpointError as error:
        trouble = str(error)
    yield "model", model_name(path), trouble
    if not head:
        yield "draft head", "none (no mtp.* tensors): chapters on drafting run on the embedded model, data/tiny", ""
    if hasattr(os, "sysconf"):                              # Windows has none
        there, need = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1 + 4 * count / 1e9
        yield "memory", f"{there:.1f} GB", f"this model wants about {need:.1f}" if there < need else ""


def check_machine(path):
    """Print one line for each need: ✓ and what is there, or ✗ and what is wrong."""
    try:
        found = list(needs(path))
    except metadata.PackageNotFoundError:
        return print("✗ the course is not installed: run pip install -e . in its folder, then restart the kernel")
    for what, there, trouble in found:
        print("✗" if trouble else "✓", f"{what:15} {there}" + (f": {trouble}" if trouble else ""))
    bad = sum(bool(trouble) for *_, trouble in found)
    print(f"\n{bad} of {len(found)} need mending." if bad else "\nAll is well: begin.")
