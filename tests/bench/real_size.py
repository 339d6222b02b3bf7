"""Run chapters on a random model of the full 0.8B size: `python tests/bench/real_size.py [slug ...]`.

Prints the time and the peak memory of each kernel. Pages of the weight file that were read count as memory each time
that the file is mapped, though all mappings and all kernels of a machine share them. Random weights write nonsense and
draft worse than chance: a chapter must not stop on that.
"""
import argparse
import os
import sys
import time

import nbformat

from checkpoint import full_size
from qwen_helpers.chapters import chapter_file
from qwen_helpers.refresh import RefreshError, run

CHAPTERS = ["weights", "model", "cache", "mtp"]
PEAK = """import resource, sys
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024))"""


def run_chapter(slug, model):
    """(seconds, peak bytes) of a chapter run on this model; RefreshError names the cell that stops it."""
    path, start = chapter_file(slug), time.monotonic()
    nb = nbformat.read(path, as_version=4)
    nb.cells.append(nbformat.v4.new_code_cell(PEAK))
    run(nb, path, timeout=900, model=model)
    return time.monotonic() - start, int(nb.cells[-1].outputs[0].text)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("chapters", nargs="*", default=CHAPTERS, metavar="slug")
    parser.add_argument("--model", help="another model folder")
    args = parser.parse_args()
    model, failed, total = args.model or full_size(), 0, 0.0
    print(f"{model}, {os.cpu_count()} cores, load before {os.getloadavg()[0]:.1f}")
    for slug in args.chapters:
        try:
            seconds, peak = run_chapter(slug, model)
        except RefreshError as error:
            failed += 1
            print(f"{slug:12} {error}", flush=True)
            continue
        total += seconds
        print(f"{slug:12} {seconds:6.0f} s {peak / 1e9:6.1f} GB", flush=True)
    print(f"{'together':12} {total:6.0f} s, load after {os.getloadavg()[0]:.1f}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
