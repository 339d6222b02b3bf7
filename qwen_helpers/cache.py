"""What a generation remembers between two forwards: K/V of attention, S and conv window of DeltaNet.

Shapes: B batch, G key-value groups, T tokens so far, K key size, V value size, H value heads.
"""
import torch


class AttentionState:
    """Keys and values of one attention layer, (B, G, T, K) each.

    `append` writes into spare room that doubles when it is full, so no token copies the whole past.
    """

    def __init__(self):
        self.length = 0
        self._k = self._v = None

    @property
    def k(self):
        return None if self._k is None else self._k[:, :, :self.length]

    @property
    def v(self):
        return None if self._v is None else self._v[:, :, :self.length]

    def append(self, k, v):
        """Add keys and values of the new tokens; returns those of all tokens so far."""
        end = self.length + k.shape[2]
        if self._k is None or end > self._k.shape[2]:
            self._k, self._v = (self._grown(old, new, end) for old, new in ((self._k, k), (self._v, v)))
        self._k[:, :, self.length:end] = k
        self._v[:, :, self.length:end] = v
        self.length = end
        return self.k, self.v

    def _grown(self, old, new, end):
        B, G, _, K = new.shape
        room = new.new_empty(B, G, max(2 * end, 64), K)
        if old is not None:
            room[:, :, :self.length] = old[:, :, :self.length]
        return room

    def cut(self, length):
        """Forget all tokens from `length` on. K/V rows are separate, so cutting is exact."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot cut {self.length} cached tokens to {length}")
        self.length = length

    def take(self, rows, columns):
        """Keep these texts of the batch, and of each these columns (rows, T). A key carries its own position along."""
        self._k, self._v = (x[rows].take_along_dim(columns[:, None, :, None], dim=2) for x in (self.k, self.v))
        self.length = columns.shape[1]

    def snapshot(self):
        return self.length

    def check(self, saved):
        if not isinstance(saved, int) or not 0 <= saved <= self.length:
            raise ValueError(f"a snapshot of attention is a length up to {self.length}, not {saved!r:.60}")

    def restore(self, saved):
        self.cut(saved)

    @property
    def nbytes(self):
        return 0 if self._k is None else self.k.nbytes + self.v.nbytes

    def __repr__(self):
        if self._k is None:
            return "AttentionState(empty)"
        filled = round(16 * self.length / self._k.shape[2])
        return f"AttentionState({self.length} tokens [{'█' * filled}{'·' * (16 - filled)}] {self.nbytes:,} bytes)"


class DeltaState:
    """Memory of one DeltaNet layer: S (B, H, K, V) and the last conv inputs (B, channels, kernel - 1).

    Both are at least fp32, whatever the weights are, and their size does not depend on the text.
    Every token is mixed into S, so it cannot be cut: `snapshot` copies, `restore` puts the copy back.
    `S_after` and `conv_after` are None, or lists to which each token read adds S and window as they are after it.
    """

    def __init__(self, S, conv):
        self.S, self.conv = S, conv
        self.S_after = self.conv_after = None

    def snapshot(self):
        return self.S.clone(), self.conv.clone()

    def check(self, saved):
        kinds = [(getattr(part, "shape", None), getattr(part, "dtype", None)) for part in saved] \
            if isinstance(saved, tuple) else None
        if kinds != [(self.S.shape, self.S.dtype), (self.conv.shape, self.conv.dtype)]:
            raise ValueError(f"a snapshot of DeltaNet is the pair S {tuple(self.S.shape)}, "
                             f"conv {tuple(self.conv.shape)}, not {saved!r:.60}")

    def restore(self, saved):
        self.S.copy_(saved[0])
        self.conv.copy_(saved[1])

    @property
    def nbytes(self):
        return self.S.nbytes + self.conv.nbytes

    def __repr__(self):
        return f"DeltaState(S {tuple(self.S.shape)}, conv {tuple(self.conv.shape)}, {self.nbytes:,} bytes)"


class State:
    """Everything one generation remembers: `.pos` tokens read, and one state for each layer.

    `pads` (B,) counts the padding to the left of each row; None means there is none.
    A State belongs to one call: make a new one for the next text.
    """

    def __init__(self, model, batch=1, pads=None):
        self.pos, self.pads, self.moving = 0, pads, False
        self.device = model.lm_head.weight.device
        self.layers = [layer.new_state(batch) for layer in model.layers]

    def begin(self):
        """A forward starts. ValueError if the one before was cut off, with some layers moved on and some not."""
        self.settled()
        self.moving = True

    def finish(self, T):
        """All layers have read T more tokens."""
        self.pos, self.moving = self.pos + T, False

    def settled(self):
        if self.moving:
            raise ValueError("a forward was interrupted and left this state half-way: make a new State and read the text "
                             "again, or roll back to a snapshot")

    def mask(self, T):
        """(B, pos + T), True for real tokens, False for padding; None without padding."""
        if self.pads is None:
            return None
        return torch.arange(self.pos + T, device=self.device) >= self.pads[:, None]

    @property
    def nbytes(self):
        return sum(layer.nbytes for layer in self.layers)

    def __repr__(self):
        return "\n".join([f"State(pos={self.pos}, {self.nbytes:,} bytes)"]
                         + [f"  {i:2} {layer!r}" for i, layer in enumerate(self.layers)])


def known_layers(state):
    """The layers' states; TypeError for one that nobody knows how to bring back."""
    for layer in state.layers:
        if not isinstance(layer, (AttentionState, DeltaState)):
            raise TypeError(f"{type(layer).__name__} has no rollback: only AttentionState and DeltaState do")
    return state.layers


def snapshot(state):
    """What `rollback` needs to come back to this moment: a length for each K/V cache, a copy of each S and window."""
    state.settled()
    return state.pos, [layer.snapshot() for layer in known_layers(state)]


def rollback(state, saved):
    """Bring the state back to the moment of `saved`. A snapshot that does not fit raises and changes nothing."""
    pos, parts = saved
    layers = known_layers(state)
    if len(parts) != len(layers):
        raise ValueError(f"the snapshot holds {len(parts)} layers, the state has {len(layers)}")
    if not isinstance(pos, int) or not 0 <= pos <= state.pos:
        raise ValueError(f"the snapshot is of position {pos!r}, the state stands at {state.pos}")
    for layer, part in zip(layers, parts):
        layer.check(part)
    for layer, part in zip(layers, parts):
        layer.restore(part)
    state.pos, state.moving = pos, False
