"""Run the chapters on a random model of the full 0.8B size: `python tests/bench/real_size.py [slug ...]`.

All of them and `show.ipynb`, where none is named. Prints the time and the peak memory of each kernel, as the table of
README. Pages of the weight file that were read count as memory each time that the file is mapped, though all mappings
and all kernels of a machine share them. Random weights write nonsense and draft worse than chance: a chapter must not
stop on that.
"""
import argparse
import os
import sys
import time

import nbformat

from checkpoint import full_size
from chapters import NOTEBOOKS, chapter_file
from qwen_publish.refresh import RefreshError, run

PEAK = """import resource, sys
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024))"""


def run_notebook(path, model):
    """(seconds, peak bytes) of a notebook run on this model; RefreshError names the cell that stops it."""
    start = time.monotonic()
    nb = nbformat.read(path, as_version=4)
    nb.cells.append(nbformat.v4.new_code_cell(PEAK))
    run(nb, path, timeout=900, model=model)
    return time.monotonic() - start, int(nb.cells[-1].outputs[0].text)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("chapters", nargs="*", metavar="slug")
    parser.add_argument("--model", help="another model folder")
    args = parser.parse_args()
    paths = ([chapter_file(slug) for slug in args.chapters]
             or [*sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb")), NOTEBOOKS / "show.ipynb"])
    model, failed, total = args.model or full_size(), 0, 0.0
    print(f"{model}, {os.cpu_count()} cores, load before {os.getloadavg()[0]:.1f}\n")
    print("| notebook | seconds | peak memory, GB |\n|---|---|---|")
    for path in paths:
        try:
            seconds, peak = run_notebook(path, model)
        except RefreshError as error:
            failed += 1
            print(f"| {path.stem} | {error} | |", flush=True)
            continue
        total += seconds
        print(f"| {path.stem} | {seconds:.0f} | {peak / 1e9:.1f} |", flush=True)
    print(f"| together | {total:.0f} | |\n\nload after {os.getloadavg()[0]:.1f}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
