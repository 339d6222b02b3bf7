"""What enters a model is checked here, in words, before torch meets it."""
from collections.abc import Collection
from numbers import Integral, Real

import torch


def check_tensor(ids):
    if isinstance(ids, torch.Tensor) and ids.numel() == 0:
        raise ValueError("there is nothing to read: a text needs at least one token")
    if not isinstance(ids, torch.Tensor) or ids.dtype not in (torch.int64, torch.int32):
        kind = f"a tensor of {ids.dtype}" if isinstance(ids, torch.Tensor) else f"a {type(ids).__name__}"
        raise TypeError(f"token ids are a tensor of whole numbers, not {kind}: write torch.tensor([[3, 1, 4]])")


def check_ids(ids, cfg, before=0):
    """Raise unless ids are token ids (B, T) that the model of `cfg` can read after the `before` tokens it has read."""
    if torch.compiler.is_compiling():
        return
    check_tensor(ids)
    if ids.dim() != 2:
        raise ValueError(f"token ids have the shape (B, T), one row a text, not {tuple(ids.shape)}: "
                         f"one text alone is ids[None]")
    if before + ids.shape[1] > cfg.max_position_embeddings:
        raise ValueError(f"the text has {before + ids.shape[1]:,} tokens, this model reads at most "
                         f"{cfg.max_position_embeddings:,}: shorten the prompt, or ask for fewer new tokens")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= cfg.vocab_size:
        raise ValueError(f"there is no token {low if low < 0 else high}, this model has 0 to {cfg.vocab_size - 1:,}: "
                         f"take the tokenizer of the same folder as the model")


def check_run(max_new_tokens, stop=(), ids=None):
    """Raise unless a text can be written: a budget of 0 or more tokens, a set of ids to stop at, and one prompt.

    A stop token that the vocabulary does not have never comes, and does no harm.
    """
    if not isinstance(max_new_tokens, Integral) or max_new_tokens < 0:
        raise ValueError(f"max_new_tokens = {max_new_tokens!r:.60}: it is a whole number, 0 or more")
    if not isinstance(stop, Collection) or isinstance(stop, (str, bytes)):
        raise TypeError(f"stop = {stop!r:.60}: it is a set of token ids, as {{1, 2}}")
    if ids is not None:
        check_tensor(ids)
    if ids is not None and ids.dim() == 2 and len(ids) > 1:
        raise ValueError(f"this writes one text at a time, not {len(ids)}: chapter 13 takes several")


def check_knobs(temperature, top_k, top_p):
    """Raise unless logits can be drawn from under these knobs (greedy, at temperature 0, does not draw)."""
    if not isinstance(temperature, Real) or not 1e-6 <= temperature <= 1e6:
        raise ValueError(f"temperature = {temperature!r:.60}: it is a number from 1e-6 to 1e6, or 0 in `pick`, for greedy")
    if not isinstance(top_k, Integral) or top_k < 0:
        raise ValueError(f"top_k = {top_k!r:.60}: it is a whole number, 0 to keep all tokens")
    if not isinstance(top_p, Real) or not 0 <= top_p <= 1:
        raise ValueError(f"top_p = {top_p!r:.60}: it is a number from 0 to 1, 1 to keep all tokens")


def check_head(mtp, cfg):
    """Raise unless a draft head is as wide as the model of `cfg`."""
    if mtp.cfg.hidden_size != cfg.hidden_size:
        raise ValueError(f"this draft head reads {mtp.cfg.hidden_size:,} numbers a token, the model gives "
                         f"{cfg.hidden_size:,}: load both from one folder")
