"""qwen_helpers.cache: K/V that grows without copying, S and window that never grow, snapshots, and what they print."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import chapters.model
from chapters.model import Model
from checkpoints import PITFALL, write_checkpoint
from qwen_helpers.cache import AttentionState, DeltaState, State, rollback, snapshot
from scripted import CLOSE, apart, remembered

quick = settings(max_examples=40, deadline=None, derandomize=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("cache"))


def rows(T, B=2, G=3, K=4):
    """Keys and values of T tokens, all different; V is wider than K."""
    k = torch.arange(B * G * T * K, dtype=torch.float32).view(B, G, T, K)
    return k, -k.repeat(1, 1, 1, 2)


@quick
@given(st.lists(st.integers(0, 90), min_size=1, max_size=8))
def test_append_equals_cat(pieces):
    """However the tokens come in, the cache is one after the other."""
    k, v = rows(sum(pieces))
    state = AttentionState()
    for new_k, new_v in zip(k.split(pieces, dim=2), v.split(pieces, dim=2)):
        given_k, given_v = state.append(new_k, new_v)
        assert torch.equal(given_k, k[:, :, :state.length]) and torch.equal(given_v, v[:, :, :state.length])
    assert torch.equal(state.k, k) and torch.equal(state.v, v) and state.length == sum(pieces)


@quick
@given(st.lists(st.tuples(st.integers(1, 20), st.floats(0, 1)), min_size=1, max_size=10))
def test_cut_and_append_equal_slicing_and_cat(steps):
    """A list of tokens that is cut and lengthened at random, beside a cache that is."""
    (k, v), state, taken, kept = rows(200), AttentionState(), 0, []
    for new, share in steps:
        state.append(k[:, :, taken:taken + new], v[:, :, taken:taken + new])
        kept += range(taken, taken + new)
        taken += new
        del kept[int(share * len(kept)):]
        state.cut(len(kept))
        assert torch.equal(state.k, k[:, :, kept]) and torch.equal(state.v, v[:, :, kept])


def places(state, tokens):
    """The addresses at which the keys have lain while `tokens` tokens were appended one by one."""
    k, v = rows(tokens)
    seen = []
    for t in range(tokens):
        address = state.append(k[:, :, t:t + 1], v[:, :, t:t + 1])[0].data_ptr()
        seen += [address] * (address not in seen[-1:])
    return seen


def test_storage_moves_a_logarithm_of_times():
    """No token copies the whole past: 2,000 tokens move the storage 6 times, and at most half of it is spare."""
    state = AttentionState()
    assert len(places(state, 2000)) <= 7
    assert state._k.shape[2] <= 2 * 2000 + 64


class Copying(AttentionState):
    """Fault: torch.cat at each token."""

    def append(self, k, v):
        self._k, self._v = (new if old is None else torch.cat([old, new], dim=2)
                            for old, new in ((self._k, k), (self._v, v)))
        self.length += k.shape[2]
        return self.k, self.v


def test_storage_control():
    assert len(places(Copying(), 200)) > 50


def test_views_are_not_changed_by_later_appends():
    """What append returned stays what it was, within the room and beyond it."""
    k, v = rows(300)
    state = AttentionState()
    views = [state.append(k[:, :, t:t + 1], v[:, :, t:t + 1]) for t in range(300)]
    for t, (old_k, old_v) in enumerate(views):
        assert torch.equal(old_k, k[:, :, :t + 1]) and torch.equal(old_v, v[:, :, :t + 1])


@pytest.mark.parametrize("length", [-1, 6, 1000])
def test_a_cut_beyond_the_cache_raises(length):
    state = AttentionState()
    state.append(*rows(5))
    with pytest.raises(ValueError, match=f"cannot cut 5 cached tokens to {length}"):
        state.cut(length)
    assert state.length == 5


def test_cut_to_nothing_and_to_all():
    state = AttentionState()
    state.cut(0)
    assert state.k is None and state.length == 0
    state.append(*rows(5))
    state.cut(5)
    assert torch.equal(state.k, rows(5)[0])
    state.cut(0)
    assert state.k.shape == (2, 3, 0, 4) and state.nbytes == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_S_and_window_are_at_least_fp32(path, dtype):
    """Sums over the whole text need the width, whatever the weights are; K/V keep the weights' dtype."""
    model = Model.from_pretrained(path, dtype)
    state = State(model)
    wide = torch.promote_types(dtype, torch.float32)
    for ids in torch.arange(20)[None].split([17, 1, 2], dim=1):
        for layer in state.layers[:3]:
            assert layer.S.dtype == layer.conv.dtype == wide
        model(ids, state)
    assert all(part.dtype == wide for part in (state.layers[0].S, state.layers[0].conv))
    assert state.layers[3].k.dtype == state.layers[3].v.dtype == dtype


def test_a_snapshot_does_not_move_with_the_state(path):
    """It holds copies: neither later tokens nor a rollback change it, so one can come back twice."""
    model = Model.from_pretrained(path, torch.float64)
    state, ids = State(model), torch.arange(29)[None]
    model(ids[:, :10], state)
    saved = snapshot(state)
    runs = []
    for _ in range(3):
        runs.append(model(ids[:, 10:20], state))
        rollback(state, saved)
        assert state.pos == state.layers[3].length == 10
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])


def test_a_snapshot_of_a_fresh_state(path):
    """Coming back to before the first token."""
    model = Model.from_pretrained(path, torch.float64)
    state, ids = State(model), torch.arange(9)[None]
    saved = snapshot(state)
    first = model(ids, state)
    rollback(state, saved)
    assert state.pos == 0 and float(state.layers[0].S.abs().max()) == 0
    assert torch.equal(model(ids, state), first)


def test_two_states_share_nothing(path):
    model = Model.from_pretrained(path, torch.float64)
    one, other = State(model), State(model)
    model(torch.arange(9)[None], one)
    assert other.pos == 0 and other.nbytes == sum(layer.nbytes for layer in other.layers[:3])
    assert all(float(layer.S.abs().max()) == 0 for layer in other.layers[:3])


def test_bytes(path):
    """K/V grows with the text, by the same amount for each token; S and window do not."""
    model = Model.from_pretrained(path, torch.float32)
    sizes = []
    for T in (1, 2, 20):
        state = State(model)
        model(torch.arange(T)[None], state)
        sizes.append([layer.nbytes for layer in state.layers])
        assert state.nbytes == sum(sizes[-1])
    assert [size[3] for size in sizes] == [2 * 4 * 2 * 8 * T for T in (1, 2, 20)]   # k and v, fp32, G 2, K 8
    assert sizes[0][:3] == sizes[1][:3] == sizes[2][:3] == [4 * (4 * 4 * 6 + 40 * 3)] * 3


def test_mask(path):
    """True for real tokens of each row, over all tokens so far; None without padding."""
    model = Model.from_pretrained(path)
    assert State(model).mask(3) is None
    state = State(model, 2, torch.tensor([0, 2]))
    assert state.mask(3).tolist() == [[True] * 3, [False, False, True]]
    state.pos = 3
    assert state.mask(1).tolist() == [[True] * 4, [False, False, True, True]]


def test_reprs_show_what_is_kept(path):
    """A cache shows its filled part, a memory its size, a state all of them."""
    model = Model.from_pretrained(path, torch.float32)
    state = State(model)
    assert repr(AttentionState()) == "AttentionState(empty)" == repr(state.layers[3])
    assert repr(state.layers[0]) == "DeltaState(S (1, 4, 4, 6), conv (1, 40, 3), 864 bytes)"
    model(torch.arange(16)[None], state)
    assert repr(state.layers[3]) == "AttentionState(16 tokens [████············] 2,048 bytes)"
    assert repr(state).splitlines()[0] == f"State(pos=16, {state.nbytes:,} bytes)"
    assert [line.split()[0] for line in repr(state).splitlines()[1:]] == ["0", "1", "2", "3"]


def test_delta_state_by_hand():
    """A snapshot is a copy even for whoever changes S in place, and so is what is restored from it."""
    state = DeltaState(torch.zeros(1, 1, 2, 3), torch.zeros(1, 5, 3))
    saved = state.snapshot()
    for _ in range(2):
        state.S += 1
        state.conv += 2
        state.restore(saved)
        assert float(state.S.abs().max()) == float(state.conv.abs().max()) == 0


def test_layer_types_in_any_order(tmp_path):
    """new_state follows layer_types; an all-attention model has no S, an all-DeltaNet model no K/V."""
    for kinds in (["full_attention"] * 4, ["linear_attention"] * 4, PITFALL["layer_types"][::-1]):
        text = PITFALL | dict(layer_types=kinds)
        model = Model.from_pretrained(write_checkpoint(tmp_path / kinds[0] / kinds[1], text), torch.float64)
        state = State(model)
        model(torch.arange(5)[None], state)
        saved, later = snapshot(state), torch.tensor([[6, 7]])
        expected = model(later, state)
        rollback(state, saved)
        assert torch.equal(model(later, state), expected)
        assert [isinstance(layer, AttentionState) for layer in state.layers] == [kind[0] == "f" for kind in kinds]


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    return Model.from_pretrained(write_checkpoint(tmp_path_factory.mktemp("pieces"), PITFALL), torch.float64)


IDS = torch.randint(0, 29, (2, 60), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("T", [1, 16, 17, 32, 33, 47, 60])
@pytest.mark.parametrize("pads", [None, [0, 40], [3, 16]])
def test_pieces_change_nothing(exact, monkeypatch, T, pads):
    pads = pads if pads is None else torch.tensor(pads).clamp(max=T - 1)
    one, many = State(exact, 2, pads), State(exact, 2, pads)
    whole = exact.hidden(IDS[:, :T], one)
    monkeypatch.setattr(chapters.model, "PIECE", 16)
    torch.testing.assert_close(exact.hidden(IDS[:, :T], many), whole, rtol=CLOSE, atol=CLOSE)
    assert max(apart(remembered(many), remembered(one)).values()) < CLOSE


def test_what_cannot_be_read_whole_is_not_read_in_part(exact, monkeypatch):
    monkeypatch.setattr(chapters.model, "PIECE", 16)
    for wrong, said in (torch.full((1, 4097), 3), "4,097"), (torch.cat([IDS[:1], torch.tensor([[99]])], 1), "99"):
        state = State(exact)
        with pytest.raises(ValueError, match=said):
            exact.hidden(wrong, state)
        assert state.pos == 0 and not state.moving
