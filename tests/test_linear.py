"""Packed matrices: the same numbers as torch's own linear, for every change of the weight that a lesson makes."""
import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import parametrize

from chapters.model import Model
from checkpoints import PITFALL, write_checkpoint
from qwen_helpers.linear import SMALL, Linear, pack
from qwen_helpers.weights import TINY


def layer(dtype=torch.float32):
    torch.manual_seed(0)
    return pack(nn.Linear(512, 1024, bias=False, dtype=dtype).requires_grad_(False))


def check(layer, x):
    """Whether the packed copy was used; the result is right either way."""
    used, product = [], torch.ops.mkldnn._linear_pointwise
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops.mkldnn, "_linear_pointwise", lambda *args: used.append(1) or product(*args))
        y = layer(x)
    loose = dict(rtol=1e-2, atol=1e-2) if x.dtype == torch.bfloat16 else dict(rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(y, F.linear(x, layer.weight), **loose)
    return bool(used)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (1, 1), (2,), (1, 2), (1, 4), (3, 3), (1, 17), (600,), (0,), (2, 0)])
@pytest.mark.parametrize("transposed", [False, True])
def test_same_as_torch(dtype, shape, transposed):
    x = torch.randn(*shape, 512, dtype=dtype)
    x = x.mT.contiguous().mT if transposed and len(shape) > 1 else x
    assert check(layer(dtype), x) == (x.numel() > 0)


def test_a_row_does_not_depend_on_its_neighbours():
    big, x = layer(), torch.randn(16, 512)
    for rows in 1, 2, 3, 4, 8:
        torch.testing.assert_close(big(x[:rows]), big(x)[:rows], rtol=1e-6, atol=1e-6)


def test_what_is_packed_is_packed_again_only_if_it_changed():
    big = layer()
    first = big.packed
    assert pack(big).packed is first
    big.weight.mul_(2)
    assert pack(big).packed is not first and check(big, torch.randn(2, 512))


@pytest.mark.parametrize("change", [
    lambda big: big.weight.mul_(2),
    lambda big: big.weight[3].zero_(),
    lambda big: setattr(big, "weight", nn.Parameter(-big.weight, requires_grad=False)),
    lambda big: setattr(big.weight, "data", big.weight + 1),
    lambda big: big.load_state_dict({"weight": big.weight + 1}),
    lambda big: big.load_state_dict({"weight": big.weight + 1}, assign=True),
    lambda big: big.bfloat16().float(),
    lambda big: big.double().float(),
], ids=["in place", "one row", "exchanged", "its data exchanged", "loaded", "loaded in place", "bf16", "fp64"])
def test_a_changed_weight_counts(change):
    big, x = layer(), torch.randn(2, 512)
    before = big(x)
    change(big)
    assert not check(big, x)
    assert not torch.equal(big(x), before) or torch.equal(F.linear(x, big.weight), before)
    assert check(pack(big), x)


def test_copies_are_not_packed():
    big, x = layer(), torch.randn(2, 512)
    other = copy.deepcopy(big)
    assert check(big, x) and not check(other, x)
    assert set(big.state_dict()) == {"weight"}


def test_other_dtypes_and_devices_are_left_to_torch():
    assert not check(layer().double(), torch.randn(2, 512).double())
    assert pack(nn.Linear(512, 1024, bias=False, device="meta"))(torch.empty(2, 512, device="meta")).shape == (2, 1024)


def test_gradients_flow_as_before():
    big, x = layer(), torch.randn(2, 512, requires_grad=True)
    big(x).sum().backward()
    torch.testing.assert_close(x.grad, big.weight.sum(0).expand(2, -1), rtol=1e-4, atol=1e-4)
    assert big.weight.grad is None
    big.requires_grad_(True)(x).sum().backward()
    assert big.weight.grad is not None


def test_without_onednn(monkeypatch):
    class Bare:
        pass
    monkeypatch.setattr(torch.ops, "mkldnn", Bare())
    big = layer()
    assert type(big) is nn.Linear and torch.equal(big(torch.ones(1, 512)), F.linear(torch.ones(1, 512), big.weight))


def test_only_big_matrices_are_packed(tmp_path):
    write_checkpoint(tmp_path, PITFALL)
    assert not any(isinstance(module, Linear) for module in Model.from_pretrained(tmp_path).modules())
    assert isinstance(pack(nn.Linear(SMALL // 512 + 1, 512, bias=False)), Linear)
    assert not isinstance(pack(nn.Linear(SMALL // 512, 512, bias=False)), Linear)
    assert not isinstance(pack(nn.Linear(SMALL, 2)), Linear)               # it has a bias


def test_fp32_is_packed_and_bf16_stays_mapped():
    fp32, bf16 = (Model.from_pretrained(TINY, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert fp32.lm_head.packed and type(bf16.lm_head) is nn.Linear
    assert pack(bf16).lm_head.packed


def square(size=256):
    torch.manual_seed(0)
    big = nn.Linear(size, size, bias=False)
    big.weight = nn.Parameter(torch.randn(size, size), requires_grad=False)     # version 0, as from a file
    return pack(big)


def right(big, x):
    torch.testing.assert_close(big(x), F.linear(x, big.weight), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("change", [
    lambda big: setattr(big.weight, "data", big.weight.data.T),
    lambda big: setattr(big, "weight", nn.Parameter(big.weight.T, requires_grad=False)),
    lambda big: setattr(big, "weight", nn.Parameter(big.weight[:100], requires_grad=False)),
    lambda big: setattr(big.weight, "data", big.weight.data[:100])], ids=["turned", "turned anew", "cut", "its data cut"])
def test_another_look_at_the_same_memory(change):
    big = square()
    change(big)
    right(big, torch.randn(2, 256))


@pytest.mark.parametrize("size", [128, 256, 1024])
def test_a_new_weight_where_the_old_one_lay(size):
    for count in range(1, 12):
        for change in (lambda big: setattr(big.weight, "data", big.weight.data + 1),
                       lambda big: big.load_state_dict({"weight": torch.randn(size, size)}, assign=True)):
            big = square(size)
            for _ in range(count):
                change(big)
            right(big, torch.randn(2, size))


@pytest.mark.parametrize("step", [
    lambda p: torch.optim.AdamW([p], 0.1, fused=True).step(), lambda p: p.data.sub_(0.1 * p.grad)], ids=["fused", ".data"])
def test_a_trained_weight_is_not_packed(step):
    big, x = square().requires_grad_(True), torch.randn(2, 256)
    big(x).sum().backward()
    step(big.weight)
    right(big.requires_grad_(False), x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")       # of torch itself
def test_forward_derivatives_and_autocast():
    big, x, t = square(), torch.randn(2, 256), torch.randn(2, 256)
    torch.testing.assert_close(torch.func.jvp(big, (x,), (t,))[1], F.linear(t, big.weight))
    weights = torch.randn(3, 256, 256)
    assert torch.vmap(lambda w: torch.func.functional_call(big, {"weight": w}, (x,)))(weights).shape == (3, 2, 256)
    with torch.autocast("cpu", torch.bfloat16):
        assert big(x).dtype == big(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("x", [torch.randn(2, 255), torch.randn(2, 256).double(), torch.ones(2, 256).long()])
def test_a_wrong_input_is_torchs_to_refuse(x):
    big = square()
    with pytest.raises(RuntimeError) as ours:
        big(x)
    with pytest.raises(RuntimeError) as torchs:
        F.linear(x, big.weight)
    assert str(ours.value) == str(torchs.value)


def test_only_plain_linears_are_packed():
    class Louder(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class Twice(nn.Module):
        def forward(self, weight):
            return 2 * weight
    assert type(pack(Louder(256, 256, bias=False))) is Louder
    big, x = nn.Linear(256, 256, bias=False).requires_grad_(False), torch.randn(2, 256)
    parametrize.register_parametrization(big, "weight", Twice())
    right(pack(big), x)
    with torch.inference_mode():
        right(pack(nn.Linear(256, 256, bias=False)), x)
