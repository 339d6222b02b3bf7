"""How fast the model of the notebooks is at the real size: `make bench` prints one table and writes data/bench.json.

Random weights of the full 0.8B shape: they take exactly as long as the real ones, and write nonsense. Contenders take
turns in one process; a figure is the median of at least 7 turns, a ratio is that of two medians, with the lowest and
the highest ratio of a single turn behind it. What a draft is worth cannot be had from random weights, so the draft
head really runs, and what it proposes is then replaced by the right or by a wrong token in the wanted proportion.
"""
import argparse
import json
import os
import platform
import subprocess
import sys
from datetime import date
from pathlib import Path
from statistics import median

import torch

from chapters.attention import attend
from chapters.chat import Chat
from chapters.chunk import gated_delta_rule
from chapters.deltanet import some_tokens
from chapters.depth import CopyFirstDrafter, DeepDrafter, depth_rounds, keep_each, select_kept
from chapters.model import PIECE, Model
from chapters.mtp import MTP, likeliest, load_prompts, loop_start, mtp_rounds, prompt_ids, stopwatch
from chapters.sample import generate, stream
from checkpoint import FOLDER, full_size
from qwen_helpers.cache import State
from qwen_helpers.linear import Linear, pack
from qwen_helpers.weights import TINY, load_config

ROOT = Path(__file__).resolve().parents[2]
TURNS, CONTEXT = 25, 64
LOAD = """
import resource, sys, time
import torch, qwen_helpers
from chapters.model import Model
from qwen_helpers.linear import pack
before, found, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, [], time.perf_counter()
model = Model.from_pretrained(sys.argv[1], torch.bfloat16)
for step in lambda: None, lambda: pack(model):
    step()
    seconds = time.perf_counter() - start
    model(torch.zeros(1, 1, dtype=torch.long))
    found += [seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024]
    start = time.perf_counter()
print(*found)
"""


def turns(steps, count=TURNS, begin=None):
    """Name -> seconds of `count` runs; the steps take turns, after one run of each that does not count.

    What `begin[name]()` returns is made before the clock starts, and handed to the step.
    """
    seconds = {name: [] for name in steps}
    for turn in range(count + 1):
        for name, step in steps.items():
            given = [begin[name]()] if begin else []
            lap = stopwatch()
            step(*given)
            if turn:
                seconds[name].append(lap())
    return seconds


def ratio(slow, fast):
    """How many times faster `fast` is: (of the medians, lowest and highest of a single turn)."""
    each = sorted(a / b for a, b in zip(slow, fast))
    return median(slow) / median(fast), each[0], each[-1]


def decode(model, rows, batch=1, context=CONTEXT):
    """A forward of `rows` new tokens on a filled state, which grows by as many each time."""
    state, ids = State(model, batch), torch.zeros(batch, rows, dtype=torch.long)
    model.hidden(torch.zeros(batch, context, dtype=torch.long), state)
    return lambda: model(ids, state)


def theirs(path, dtype):
    """The same checkpoint in transformers, and a step that decodes one token."""
    import transformers
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    cache = model(torch.zeros(1, CONTEXT, dtype=torch.long), use_cache=True).past_key_values
    one = torch.zeros(1, 1, dtype=torch.long)
    return model, lambda: model(one, past_key_values=cache, use_cache=True)


class Replaced(DeepDrafter):
    """The draft head runs for each draft; then the right or a wrong token takes the place of what it proposed."""

    def __init__(self, model, mtp, text, average, **options):
        """`text` is what the model says; `average` drafts of each round shall be right."""
        super().__init__(model, mtp, **options)
        self.text, self.counts = text, spread(average)

    def written(self):
        """How many tokens of the text are written."""
        return max(0, self.state.length - CONTEXT + 1)

    def propose(self):
        drafted, right = super().propose(), next(self.counts)
        coming = self.text[self.written():][:len(drafted)]
        return [token if i < right else token ^ 1 for i, token in enumerate(coming)]

    def choose(self, logits, drafted):
        """The text, where greedy choice stands: with random weights the last bits of bf16 decide between two tokens."""
        return self.text[self.written():][:len(likeliest(logits))]


def spread(average):
    """Endless whole numbers with this average, as even as can be: 1.738 -> 1, 2, 2, 1, ..."""
    total = 0.0
    while True:
        yield int(total + average + 1e-9) - int(total + 1e-9)
        total += average


def started(run):
    """A run of the loop that has read the prompt and written the first token."""
    next(run)
    return run


def speculative(model, mtp, average, N, count):
    """Seconds of plain decoding and of `count` rounds with `average` of N drafts accepted, the prompt read before.

    The head drafts over 8,192 words, as in chapter 15. Also, of each run, what drafting took of its rounds.
    """
    prompt, words = torch.zeros(1, CONTEXT, dtype=torch.long), torch.arange(8192)
    tokens = 1 + round(count * (1 + average))
    text, drafts = list(stream(model, prompt, tokens + N + 1)), []

    def rounds():
        drafter = Replaced(model, mtp, text, average, N=N, words=words)
        return mtp_rounds(model, mtp, prompt, tokens, drafter=drafter, choose=drafter.choose, save=keep_each,
                          back=select_kept)

    def drafting(run):
        done = list(run)
        assert len(done) == count and [token for r in done for token in r.kept] == text[1:tokens]
        drafts.append(sum(r.seconds["draft"] for r in done))
    begin = {"plain": lambda: started(stream(model, prompt, tokens)), "drafting": lambda: started(rounds())}
    return turns({"plain": list, "drafting": drafting}, 9, begin) | {"drafts": drafts[1:]}


def reading_speed(model):
    """Bytes a second at which this machine adds up the model's largest matrix: what decoding can reach at best."""
    big = model.embed_tokens.weight
    words = big.view(torch.float32) if big.dtype != torch.float32 else big
    return lambda: words.sum()


def delta_growth(model):
    """Seconds of one DeltaNet layer that reads 1,024 to 16,384 tokens, in pieces as the model does."""
    layer = model.layers[0].linear_attn
    x = torch.randn(1, 16384, model.cfg.hidden_size, dtype=model.lm_head.weight.dtype)

    def read(T):
        state = layer.new_state(1)
        for piece in x[:, :T].split(PIECE, dim=1):
            layer(piece, state=state)
    return turns({T: lambda T=T: read(T) for T in (1024, 2048, 4096, 8192, 16384)}, 7)


def matrices(part, rows, times=1):
    """A step that does nothing but multiply `rows` tokens with all matrices of a part of the model, some times."""
    layers = [module for module in part.modules() if isinstance(module, Linear)]
    inputs = {n: torch.randn(rows, n, dtype=layers[0].weight.dtype) for n in {x.in_features for x in layers}}

    def multiply():
        for _ in range(times):
            for layer in layers:
                layer(inputs[layer.in_features])
    return multiply


def readings(model, rows, *totals):
    """A step that does nothing but read back: attention and the delta rule of all layers, for some tokens at a time.

    `totals` counts the tokens of the text after each time.
    """
    cfg, dtype = model.cfg, model.lm_head.weight.dtype
    q = torch.randn(1, cfg.num_attention_heads, rows, cfg.head_dim, dtype=dtype)
    k, v = torch.randn(2, 1, cfg.num_key_value_heads, totals[-1], cfg.head_dim, dtype=dtype)
    sizes = 1, cfg.linear_num_value_heads, rows, cfg.linear_key_head_dim, cfg.linear_value_head_dim
    layers = [some_tokens(*sizes) if kind == "linear_attention" else None for kind in cfg.layer_types]

    def read():
        for total in totals:
            for parts in layers:
                if parts:
                    gated_delta_rule(*parts)
                else:
                    attend(q, k[:, :, :total], v[:, :, :total])
    return read


def real_size(path, dtype, rows, note):
    """Figures of one dtype at the real size, packed, each handed to `note(name, ratio, goal)`."""
    model, mtp = Model.from_pretrained(path, dtype), MTP.from_pretrained(load_config(path), path, dtype)
    pack(model), pack(mtp)
    name = str(dtype).removeprefix("torch.")
    other, their_step = theirs(path, dtype)
    mapped = Model.from_pretrained(path, dtype) if dtype == torch.bfloat16 else model
    took = turns({"ours": decode(model, 1), "theirs": their_step, "mapped": decode(mapped, 1),
                  "read": reading_speed(model), "8 texts": decode(model, 1, 8), "late": decode(model, 1, 1, 4096),
                  **{f"{n} rows": decode(model, n) for n in rows},
                  **{("the matrices", n): matrices(model, n) for n in (1, *rows)},
                  **{("attention and the delta rule", n): readings(model, n, CONTEXT + n) for n in (1, *rows)}})
    weights = sum(p.nbytes for p in model.parameters())
    floor = [s * weights / model.embed_tokens.weight.nbytes for s in took["read"]]
    note(f"{name}: plain decode, ours against transformers", ratio(took["theirs"], took["ours"]),
         1.3 if dtype == torch.float32 else 1.5, median(took["ours"]))
    if dtype == torch.bfloat16:
        note(f"{name}: packed against as mapped from the file, plain decode", ratio(took["mapped"], took["ours"]))
    note(f"{name}: plain decode after 4,096 tokens against after {CONTEXT}", ratio(took["late"], took["ours"]))
    note(f"{name}: share of the reading speed that plain decode reaches", ratio(floor, took["ours"]),
         0.8 if dtype == torch.float32 else None)
    note(f"{name}: share of plain decode that the matrices alone take", ratio(took["the matrices", 1], took["ours"]))
    for n in rows:
        note(f"{name}: {n} rows against 1", ratio(took[f"{n} rows"], took["ours"]), -1.08 if n == 2 else -1.15)
        for part in "the matrices", "attention and the delta rule":
            more = [b - a for a, b in zip(took[part, 1], took[part, n])]
            note(f"{name}: {n} rows against 1, added by {part}", ratio(more, took["ours"]))
    if dtype == torch.bfloat16:
        note(f"{name}: tokens a second, batch of 8 against 1",
             tuple(8 * x for x in ratio(took["ours"], took["8 texts"])), 3)
    cases = [(0.52, 1, 25, 1.30), (0.89, 1, 27, 1.65)] if dtype == torch.float32 else [(1.738, 3, 19, 2.0)]
    for average, N, count, goal in cases:
        took = speculative(model, mtp, average, N, count)
        what = f"{average:.0%} of one draft" if N == 1 else f"{1 + average} tokens a round, {N} drafts"
        note(f"{name}: speed-up at {what}", ratio(took["plain"], took["drafting"]), goal, median(took["drafting"]))
        note(f"{name}: drafting's share of the rounds at {what}", ratio(took["drafts"], took["drafting"]))
    ids = torch.zeros(1, 2048, dtype=torch.long)
    took = turns({"ours": lambda: model.hidden(ids, State(model)), "theirs": lambda: other.model(ids),
                  "matrices": matrices(model.layers, PIECE, 2048 // PIECE),
                  "readings": readings(model, PIECE, *range(PIECE, 2049, PIECE))}, 7)
    note(f"{name}: prefill of 2,048 tokens against transformers", ratio(took["theirs"], took["ours"]), 2,
         median(took["ours"]))
    note(f"{name}: share of this prefill that the matrices alone take", ratio(took["matrices"], took["ours"]))
    note(f"{name}: share of this prefill that attention and the delta rule alone take",
         ratio(took["readings"], took["ours"]))
    if dtype == torch.float32:
        took = delta_growth(model)
        each = [median(took[T]) / T for T in took]
        note("a DeltaNet layer, seconds a token at 16,384 against 1,024 tokens",
             (each[-1] / each[0], min(each) / each[0], max(each) / each[0]), -1.1)


def embedded(note):
    """Plain against drafting with real acceptance on the embedded model, by text types of data/prompts.

    A type's speed-up is that of the medians, added up over its prompts. A small model soon repeats itself, which is
    easy to guess; so the texts are timed once more, cut where they begin to.
    """
    model, mtp = Model.from_pretrained(TINY), MTP.from_pretrained(load_config(TINY), TINY)
    chat, words, seconds = Chat(model, TINY), torch.arange(model.cfg.vocab_size // 2), {}
    drafters = {"two drafts": lambda: DeepDrafter(model, mtp, 2),
                "a copy first, else two drafts among half the words": lambda: CopyFirstDrafter(model, mtp, words=words)}
    for entry in load_prompts(TINY):
        ids = prompt_ids(chat, entry)
        before_loop = max(loop_start(generate(model, ids, 60, chat.stop)), 8)
        for end, count in ("60 tokens", 60), ("no repetition", before_loop):
            begin = {"plain": lambda: started(stream(model, ids, count, chat.stop))}
            for way, make in drafters.items():
                begin[way] = lambda make=make: started(depth_rounds(model, ids, count, chat.stop, drafter=make()))
            took = turns(dict.fromkeys(begin, list), 7, begin)
            for way in drafters:
                each = seconds.setdefault((way, end), {}).setdefault(entry["type"], [0, 0])
                each[:] = each[0] + median(took["plain"]), each[1] + median(took[way])
    for (way, end), types in seconds.items():
        found = sorted(plain / drafting for plain, drafting in types.values())
        note(f"embedded model, {end}: speed-up with {way}, mean over text types",
             (sum(found) / len(found), found[0], found[-1]), 1.5 if "copy" in way else None)


def machine():
    """The processor's own name, on Linux; elsewhere its architecture."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def table(figures):
    """The figures as docs/speed.md shows them."""
    yield "| figure | measured (lowest to highest turn) | goal |\n|---|---|---|"
    for f in figures:
        goal = f"{'at most' if f['goal'] < 0 else 'at least'} {abs(f['goal'])}{' ✓' * f['met']}" if f["goal"] else ""
        yield f"| {f['figure']} | {f['ratio']:.2f} ({f['lowest']:.2f} to {f['highest']:.2f}) | {goal} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=FOLDER, help="where the random model lies")
    parser.add_argument("--out", type=Path, default=ROOT / "data" / "bench.json")
    args = parser.parse_args()
    full_size(args.model)
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    figures = []

    def note(name, found, goal=None, seconds=None):
        """Print and keep one figure; a goal below zero is one that must not be passed."""
        met = None if goal is None else found[0] <= -goal if goal < 0 else found[0] >= goal
        figures.append(dict(figure=name, ratio=found[0], lowest=found[1], highest=found[2], goal=goal, met=met,
                            seconds=seconds))
        print(f"{ {True: '✓', False: '✗', None: ' '}[met]} {name}: {found[0]:.2f} ({found[1]:.2f} to {found[2]:.2f})"
              + (f", goal {'at most' if goal < 0 else 'at least'} {abs(goal)}" if goal else "")
              + (f"; {seconds:.3f} s" if seconds else ""), flush=True)

    size = sum(file.stat().st_size for file in args.model.glob("*.safetensors"))
    loads = [subprocess.run([sys.executable, "-c", LOAD, str(args.model)], capture_output=True, text=True, check=True,
                            cwd=ROOT).stdout.split() for _ in range(7)]
    for i, (what, *goals) in enumerate([("loading the bf16 checkpoint", -1, -1.1), ("packing it", None, None)]):
        seconds, memory = (sorted(float(load[2 * i + k]) for load in loads) for k in (0, 1))
        note(f"{what}, seconds until ready", (seconds[1], seconds[0], seconds[2]), goals[0])
        note(f"{what}, resident memory after one token against the file",
             tuple(m / size for m in (memory[1], *memory[::2])), goals[1])
    real_size(args.model, torch.float32, [2], note)
    real_size(args.model, torch.bfloat16, [2, 4], note)
    embedded(note)
    about = dict(machine=machine(), cores=os.cpu_count(),
                   python=platform.python_version(), torch=torch.__version__, date=str(date.today()))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(about | {"turns": TURNS, "figures": figures}, indent=1))
    print(f"{args.out} written; for docs/speed.md:\n\n" + "\n".join(table(figures)))


if __name__ == "__main__":
    main()
