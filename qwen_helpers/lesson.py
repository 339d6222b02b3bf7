"""Small things that lesson cells say often."""
import json

import torch

from .config import DATA
from .weights import small

BENCH = DATA / "bench.json"


def few(model, many):
    """What a slow demonstration repeats: all of it on a small model, an eighth, but three at least, on a large one.

    `many` is a number, or a list, of which every eighth is taken. A line says so where it is less.
    """
    count = many if isinstance(many, int) else len(many)
    least = count if small(model.cfg) else min(count, max(3, count // 8))
    if least < count:
        print(f"a large model takes its time: {least} of {count} here")
    return least if isinstance(many, int) else [many[i * count // least] for i in range(least)]


def apart(ours, theirs, tol, dtype=None):
    """(largest difference of two tensors, how much of it rounding may explain, the dtype that rounds).

    That is `tol`. Numbers in bf16 have 8 bits and in fp16 11, and layer after layer rounds: there it is 16 times the
    last bit of the largest, an eighth and a sixty-fourth of it. `dtype` names what they were computed in, if that is
    coarser than what they are kept in.
    """
    kinds = [kind for kind in (ours.dtype, theirs.dtype, dtype) if kind and kind.is_floating_point]
    coarse = max(kinds, key=lambda kind: torch.finfo(kind).eps, default=torch.float32)
    if tol and torch.finfo(coarse).bits < 32:
        largest = theirs[theirs.isfinite()].abs().max().item() if theirs.isfinite().any() else 0
        tol = max(tol, 16 * torch.finfo(coarse).eps * largest)
    ours, theirs = (x.detach().cpu().double() for x in (ours, theirs))
    return (ours - theirs).abs().max().item() if len(ours.flatten()) else 0.0, tol, coarse


def near(ours, theirs, tol=1e-3, dtype=None):
    """Whether two tensors have one shape and are equal up to rounding, see `apart`."""
    if ours.shape != theirs.shape:
        return False
    gap, allowed, _ = apart(ours, theirs, tol, dtype)
    return gap <= allowed


def close(ours, theirs, what="", tol=1e-5, dtype=None):
    """Print the largest difference of two tensors and raise if it is more than rounding, see `apart`."""
    ours, theirs = (torch.as_tensor(x) for x in (ours, theirs))
    if ours.shape != theirs.shape:
        raise AssertionError(f"{what}: shapes differ, {tuple(ours.shape)} and {tuple(theirs.shape)}")
    gap, allowed, coarse = apart(ours, theirs, tol, dtype)
    kind = f" in {str(coarse).removeprefix('torch.')}" if allowed > tol else ""
    if not gap <= allowed:
        raise AssertionError(f"{what}: largest difference {gap:.1e} is above {allowed:.0e}{kind}")
    print(f"✓ {what}: largest difference {gap:.1e}" + (f"{kind}; up to {allowed:.0e} is rounding" if kind else ""))


def check(answer, right, mistakes, tol=1e-5):
    """Say whether a "your turn" answer is right; `mistakes` maps what may have gone wrong -> the value it gives."""
    if answer is None:
        return print("… nothing here yet: replace None above, run both cells again")
    try:
        answer = torch.as_tensor(answer).cpu()
    except (TypeError, ValueError, RuntimeError):
        return print(f"✗ this is a {type(answer).__name__}, not a number or a tensor of numbers")
    tol = tol if torch.as_tensor(right).is_floating_point() else 0      # whole numbers must be exact
    for word, value in {"✓ right": right, **{f"✗ {what}": value for what, value in mistakes.items()}}.items():
        value = torch.as_tensor(value).cpu()
        if answer.shape == value.shape and torch.allclose(answer.double(), value.double(), tol, tol):
            return print(word)
    shapes = [tuple(torch.as_tensor(x).shape) for x in (answer, right)]
    print(f"✗ the shape is {shapes[0]}, it should be {shapes[1]}" if shapes[0] != shapes[1] else "✗ not these numbers yet")


def pieces(tk, ids):
    """The text that each token adds; "" while a character is still in halves (`tk.decode` needs whole runs)."""
    texts, start, shown = [], 0, ""
    for end in range(1, len(ids) + 1):
        text = tk.decode(list(ids[start:end]), skip_special_tokens=False)
        whole = text.rstrip("\ufffd")
        texts.append(whole[len(shown):])
        shown = max(shown, whole, key=len)
        if whole == text:                       # no half is left: what comes next is a run of its own
            start, shown = end, ""
    return texts


def label(tk, token):
    """One token as a short label: "½" for half a character, marks for spaces and line ends."""
    return (pieces(tk, [token])[0] or "½").replace(" ", "␣").replace("\n", "↵")


def measured(*parts):
    """Print the figures of data/bench.json whose names begin with one of `parts`: `make bench` wrote it, at the real size."""
    bench = json.loads(BENCH.read_text(encoding="utf-8"))
    print(f"{bench['machine']}, {bench['cores']} cores, torch {bench['torch']}, {bench['date']}")
    for figure in bench["figures"]:
        if figure["figure"].startswith(parts):
            print("{figure}: {ratio:.2f} ({lowest:.2f} to {highest:.2f})".format(**figure))
