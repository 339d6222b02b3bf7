"""What each student costs a server: kernels that run the same lesson at once, their memory, start and speed.

python tests/bench/kernels.py            the model that the notebooks would run
python tests/bench/kernels.py --full     random weights of the full 0.8B size
Linux only. `own` is memory that every kernel takes again. `shared` are pages of files, of weights and libraries, which
are in memory once for all kernels that read them. PSS counts such a page in equal parts to the processes that map it, so
its sum is what the kernels take together.
"""
import argparse
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

from jupyter_client import KernelManager

from checkpoint import full_size
import chapters
from qwen_helpers import find_model

TOKENS = 32
START = """
from qwen_helpers import find_model
from qwen_helpers.widgets import demo
from chapters.chat import Chat
from chapters.model import Model
from chapters.mtp import MTP, generate_mtp
path = find_model()
model = Model.from_pretrained(path)
mtp = MTP.from_pretrained(model.cfg, path)
chat = Chat(model, path)
generate_mtp(model, mtp, chat.encode("The river"), 1)
"""
WRITE = f"assert len(generate_mtp(model, mtp, chat.encode('The river'), {TOKENS})[0]) == {TOKENS}"


def memory(pid):
    """What is the process's own, what it shares, and its PSS: in MB."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    kb = {name: int(value) for name, value in re.findall(r"(\w+): +(\d+) kB", text)}
    return [kb["Anonymous"] / 1e3, (kb["Rss"] - kb["Anonymous"]) / 1e3, kb["Pss"] / 1e3]


class Kernel:
    """One student's kernel."""

    def __init__(self, env):
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(env=env, cwd=str(chapters.NOTEBOOKS), extra_arguments=["--log-level=ERROR"])
        self.client = self.manager.client()
        self.client.start_channels()

    def run(self, *sources):
        """Seconds until all of them are done."""
        start = time.perf_counter()
        self.client.wait_for_ready(timeout=300)
        for source in sources:
            reply = self.client.execute_interactive(source, timeout=1200, output_hook=lambda message: None)
            assert reply["content"]["status"] == "ok", reply["content"]
        return time.perf_counter() - start

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


def lesson(slug):
    """The code of a whole chapter."""
    return [source for _, _, source, _ in chapters.all_code_cells(chapters.chapter_file(slug))]


def measure(count, env, sources):
    """(seconds until the first token, tokens a second of each, memory of each) with `count` kernels at once."""
    with ThreadPoolExecutor(count) as pool:
        kernels = []
        try:
            kernels += [Kernel(env) for _ in range(count)]
            ready = list(pool.map(lambda kernel: kernel.run(START), kernels))
            list(pool.map(lambda kernel: kernel.run(*sources), kernels))
            writing = list(pool.map(lambda kernel: kernel.run(WRITE), kernels))
            return ready, [TOKENS / seconds for seconds in writing], [memory(k.manager.provisioner.pid) for k in kernels]
        finally:
            for kernel in kernels:
                kernel.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="random weights of the full size instead of find_model()")
    parser.add_argument("--kernels", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS of each kernel")
    parser.add_argument("--chapter", help="run all cells of this chapter (mtp) as well before memory is read")
    args = parser.parse_args()
    model = full_size() if args.full else find_model()
    env = os.environ | {"QWEN_MODEL": str(model), "OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(chapters.NOTEBOOKS.parent), os.environ.get("PYTHONPATH")]))
    print(f"{model.name}, {args.threads} thread(s) a kernel, {os.cpu_count()} cores, memory in MB\n"
          f"kernels  ready in s  tokens/s each  own, each  shared, once  PSS, all")
    for count in args.kernels:
        ready, speed, sizes = measure(count, env, lesson(args.chapter) if args.chapter else [])
        own, shared, pss = zip(*sizes)
        print(f"{count:7}{max(ready):12.1f}{median(speed):15.1f}{median(own):11.0f}{median(shared):14.0f}{sum(pss):10.0f}",
              flush=True)


if __name__ == "__main__":
    main()
