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
