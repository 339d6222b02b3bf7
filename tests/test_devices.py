"""No tensor of the model's work lands on the CPU when the model is elsewhere, shown without a GPU.

The model lies on torch's `meta` device, which has shapes and no numbers (0 stands for each). Whatever an operation makes on the CPU while
it works would meet tensors of a GPU in real life, and is caught.
"""
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from chapters.model import Model
from chapters.mtp import MTP, Drafter, forward_hidden
from qwen_helpers.cache import State, rollback, snapshot
from qwen_helpers.linear import ready
from qwen_helpers.weights import REAL_CONFIG, THREADS, TINY, load_config, set_defaults


class OnCpu(TorchDispatchMode):
    """Collects the operations that gave a tensor on the CPU."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:          # a number that the code looks at
            return 0
        out = func(*args, **(kwargs or {}))
        if any(isinstance(x, torch.Tensor) and x.device.type == "cpu" for x in tree_leaves(out)):
            self.found.append(str(func))
        return out


@pytest.fixture(scope="module")
def loaded():
    cfg = load_config(TINY)
    with torch.device("meta"):
        models = Model(cfg), MTP(cfg)
    yield [ready(model.bfloat16()) for model in models]
    torch.set_default_device(None)


def ids(rows, tokens):
    return torch.zeros(rows, tokens, dtype=torch.long, device="meta")


def prefill_and_decode(model, mtp):
    state = State(model)
    for tokens in (100, 1, 2):
        model(ids(1, tokens), state)


def draft_verify_roll_back(model, mtp):
    state, drafter = State(model), Drafter(model, mtp)
    logits, hidden = forward_hidden(model, ids(1, 70), state)
    drafter.read(ids(1, 70), hidden)
    saved = snapshot(state)
    forward_hidden(model, ids(1, 2), state)
    rollback(state, saved)
    drafter.read(ids(1, 1), hidden[:, :1])
    model.lm_head(drafter.last)


def padded_batch(model, mtp):
    state = State(model, 3, pads=torch.zeros(3, dtype=torch.long, device="meta"))
    for tokens in (70, 1):
        model(ids(3, tokens), state)


@pytest.mark.parametrize("work", [prefill_and_decode, draft_verify_roll_back, padded_batch])
def test_all_tensors_lie_where_the_model_lies(loaded, work):
    with OnCpu() as on_cpu:
        work(*loaded)
    assert not on_cpu.found


def test_control_a_tensor_made_on_the_cpu_is_caught():
    with OnCpu() as on_cpu:
        torch.arange(3, device="meta")
        torch.arange(3, device="cpu")
    assert on_cpu.found == ["aten.arange.default"]


def test_a_small_model_takes_one_thread_and_a_large_one_all(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for path, threads in (TINY, 1), (REAL_CONFIG, THREADS), (TINY, 1):
        set_defaults(load_config(path), "cpu")
        assert torch.get_num_threads() == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    set_defaults(load_config(REAL_CONFIG), "cpu")
    assert torch.get_num_threads() == 1


def test_a_model_on_the_cpu_leaves_nothing_of_one_elsewhere():
    """Loaded after a model on another device, data/tiny lies on the CPU, and so does what is made beside it."""
    before = torch.get_num_threads()
    try:
        Model.from_pretrained(TINY, device="meta")
        assert torch.zeros(1).device.type == "meta"
        model = Model.from_pretrained(TINY)
        assert model.lm_head.weight.device == torch.zeros(1).device == torch.device("cpu")
        assert MTP.from_pretrained(model.cfg, TINY).norm.weight.device == torch.zeros(1).device
    finally:
        torch.set_default_device(None)
        torch.set_num_threads(before)
