"""Small things that lesson cells say often."""
import torch


def close(ours, theirs, what="", tol=1e-5):
    """Print the largest difference of two tensors and raise if it is above `tol`."""
    ours, theirs = (torch.as_tensor(x) for x in (ours, theirs))
    if ours.shape != theirs.shape:
        raise AssertionError(f"{what}: shapes differ, {tuple(ours.shape)} and {tuple(theirs.shape)}")
    gap = (ours.double() - theirs.double()).abs().max().item()
    if not gap <= tol:
        raise AssertionError(f"{what}: largest difference {gap:.1e} is above {tol:.0e}")
    print(f"✓ {what}: largest difference {gap:.1e}")


def check(answer, right, mistakes, tol=1e-5):
    """Say whether a "your turn" answer is right; `mistakes` maps what may have gone wrong -> the value it gives."""
    if answer is None:
        return print("… nothing here yet: replace None above, run both cells again")
    try:
        answer = torch.as_tensor(answer)
    except (TypeError, ValueError, RuntimeError):
        return print(f"✗ this is a {type(answer).__name__}, not a number or a tensor of numbers")
    tol = tol if torch.as_tensor(right).is_floating_point() else 0      # whole numbers must be exact
    for word, value in {"✓ right": right, **{f"✗ {what}": value for what, value in mistakes.items()}}.items():
        value = torch.as_tensor(value)
        if answer.shape == value.shape and torch.allclose(answer.double(), value.double(), tol, tol):
            return print(word)
    shapes = [tuple(torch.as_tensor(x).shape) for x in (answer, right)]
    print(f"✗ the shape is {shapes[0]}, it should be {shapes[1]}" if shapes[0] != shapes[1] else "✗ not these numbers yet")


def pieces(tk, ids):
    """The text that each token adds; "" while a character is still in halves (`tk.decode` needs whole runs)."""
    texts, shown = [], ""
    for end in range(1, len(ids) + 1):
        text = tk.decode(list(ids[:end]), skip_special_tokens=False)
        whole = text.rstrip("\ufffd")
        texts.append(whole[len(shown):])
        shown = max(shown, whole, key=len)
    return texts


def label(tk, token):
    """One token as a short label: "½" for half a character, marks for spaces and line ends."""
    return (pieces(tk, [token])[0] or "½").replace(" ", "␣").replace("\n", "↵")
