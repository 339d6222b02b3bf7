"""A tiny fp64 model with an oracle, and drafts by script: what the tests of the draft loop play on."""
from functools import partial
from itertools import cycle

import torch

from chapters.model import Model
from chapters.mtp import MTP, Drafter, mtp_rounds, read_again
from checkpoints import PITFALL, write_checkpoint
from qwen_helpers.cache import AttentionState, DeltaState, State, rollback

RIGHT, WRONG, MIX = "1", "0", "1101001110"
CLOSE = 1e-9            # fp64: one row against several differs in the last bits only
PROMPT = [3, 1, 4, 1, 5, 9, 2]


def remembered(state):
    """Copies of what a state holds, by part: S, conv windows, keys and values, pos."""
    delta = [layer for layer in state.layers if isinstance(layer, DeltaState)]
    full = [layer for layer in state.layers if isinstance(layer, AttentionState)]
    return {"S": [layer.S.clone() for layer in delta], "window": [layer.conv.clone() for layer in delta],
            "kv": [part.clone() for layer in full for part in (layer.k, layer.v)], "pos": [torch.tensor(state.pos)]}


def distance(ours, theirs):
    """The largest difference between two lists of tensors; infinite where shapes differ."""
    gaps = ((a - b).abs().flatten() if a.shape == b.shape else torch.tensor([float("inf")])
            for a, b in zip(ours, theirs, strict=True))
    return max((float(gap.max()) for gap in gaps if len(gap)), default=0.0)


def apart(ours, theirs):
    """The largest difference of each remembered part."""
    return {part: distance(ours[part], theirs[part]) for part in theirs}


def read(model, ids, pads=None, cuts=()):
    """(logits of all tokens, the state) after reading rows of ids, in one call or cut into several."""
    state, edges = State(model, len(ids), pads), [0, *sorted(cuts), ids.shape[1]]
    logits = [model(ids[:, a:b], state) for a, b in zip(edges, edges[1:]) if b > a]
    return torch.cat(logits, dim=1), state


def row_apart(model, row, b, pad, logits, state):
    """How far row b of a padded batch is from the same ids alone, in logits, S, window and keys and values."""
    alone, solo = read(model, torch.tensor([row]))
    ours = [logits[b:b + 1, pad:]]
    theirs = [alone]
    for batched, single in zip(state.layers, solo.layers):
        parts = ("k", "v") if hasattr(single, "append") else ("S", "conv")
        ours += [getattr(batched, part)[b:b + 1, :, pad if part in "kv" else 0:] for part in parts]
        theirs += [getattr(single, part) for part in parts]
    return distance(ours, theirs)


def oracle(model, prompt, count):
    """Greedy decoding by a whole forward without any cache for each token."""
    ids = prompt
    for _ in range(count):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)
    return ids[0, prompt.shape[1]:].tolist()


class World:
    """A random model and its draft head, a prompt, the oracle's text, and what plain decoding of it remembers."""

    def __init__(self, folder, text=PITFALL, prompt=PROMPT, length=60, seed=1):
        self.path = write_checkpoint(folder, text, seed=seed)
        self.model = Model.from_pretrained(self.path, torch.float64)
        self.mtp = MTP.from_pretrained(self.model.cfg, self.path, torch.float64)
        self.prompt = torch.tensor([prompt])
        self.text = oracle(self.model, self.prompt, length)
        self.ids = torch.cat([self.prompt, torch.tensor([self.text])], dim=1)
        self.hidden = self.model.hidden(self.ids)                       # (1, T, D), after the final norm
        state = State(self.model)
        steps = [self.prompt, *torch.tensor(self.text)[:, None, None]]
        self.plain = [(self.model(step, state), remembered(state))[1] for step in steps]

    def wrong(self, token):
        return (token + 1) % self.model.cfg.vocab_size

    def apart(self, state, emitted):
        """How far a state is from plain decoding that has read all but the last of the emitted tokens."""
        return apart(remembered(state), self.plain[len(emitted) - 1])

    def head_pass(self, count):
        """(keys, values), and the last output, of the draft head in one pass over the prompt and `count` tokens."""
        rows, state = self.prompt.shape[1] + count - 1, AttentionState()
        out = self.mtp(self.model.embed_tokens(self.ids[:, 1:rows + 1]), self.hidden[:, :rows], 0, state)
        return [state.k, state.v], out[:, -1]


class Scripted(Drafter):
    """Reads through the real draft head, and proposes by a bit pattern: 1 the oracle's token, 0 the one after it."""

    def __init__(self, world, bits, count):
        super().__init__(world.model, world.mtp)
        self.world, self.bits, self.count = world, cycle(bits), count
        self.tokens, self.hidden = [], []                               # all rows read, for the tests to look at

    def read(self, tokens, hidden):
        self.tokens += tokens[0].tolist()
        self.hidden.append(hidden)
        super().read(tokens, hidden)

    def propose(self):
        done = len(self.tokens) - self.world.prompt.shape[1] + 1        # tokens emitted so far
        coming = self.world.text[done:done + self.count]
        return [token if bit == "1" else self.world.wrong(token) for token, bit in zip(coming, self.bits)]


def play(world, bits, count, budget=40, stop=(), undo=rollback, drafter=Scripted):
    """The rounds of one scripted run: yields (round, tokens emitted so far, state, drafter)."""
    state, drafter, emitted = State(world.model), drafter(world, bits, count), []
    for done in mtp_rounds(world.model, world.mtp, world.prompt, budget, stop, state=state, drafter=drafter,
                           back=partial(read_again, undo=undo)):
        emitted += done.kept
        yield done, emitted, state, drafter


def cut_only(state, saved):
    """The trap, as an `undo`: keys and values are cut, S and the conv window stay."""
    for layer, part in zip(state.layers, saved[1]):
        if isinstance(layer, AttentionState):
            layer.restore(part)
    state.pos = saved[0]
