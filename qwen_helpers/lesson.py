"""Small things that lesson cells say often."""
import json
from pathlib import Path

import torch

BENCH = Path(__file__).resolve().parents[1] / "data" / "bench.json"


def apart(ours, theirs, tol):
    """(largest difference of two tensors, how much of it rounding may explain).

    That is `tol`. A number in bf16 has 8 bits, and layer after layer rounds: there it is an eighth of the largest.
    """
    if tol and torch.bfloat16 in (ours.dtype, theirs.dtype):
        tol = max(tol, theirs.abs().max().item() / 8)
    return (ours.detach().cpu().double() - theirs.detach().cpu().double()).abs().max().item(), tol


def near(ours, theirs, tol=1e-3):
    """Whether two tensors are equal up to rounding."""
    gap, allowed = apart(ours, theirs, tol)
    return gap <= allowed


def close(ours, theirs, what="", tol=1e-5):
    """Print the largest difference of two tensors and raise if it is more than rounding, see `apart`."""
    ours, theirs = (torch.as_tensor(x) for x in (ours, theirs))
    if ours.shape != theirs.shape:
        raise AssertionError(f"{what}: shapes differ, {tuple(ours.shape)} and {tuple(theirs.shape)}")
    gap, allowed = apart(ours, theirs, tol)
    if not gap <= allowed:
        raise AssertionError(f"{what}: largest difference {gap:.1e} is above {allowed:.0e}")
    print(f"✓ {what}: largest difference {gap:.1e}" + (f", in bf16; up to {allowed:.0e} is rounding" if allowed > tol else ""))


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
