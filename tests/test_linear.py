"""Big matrices the other way round: the same numbers as torch's own linear, and only where it helps."""
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from chapters.model import Model
from checkpoints import PITFALL, write_checkpoint
from qwen_helpers.linear import BIG, Linear, speed_up


@pytest.fixture(autouse=True, params=[1, 2])
def cores(monkeypatch, request):
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)


def layer(rows, columns):
    torch.manual_seed(0)
    return speed_up(nn.Linear(columns, rows, bias=False).requires_grad_(False))


@pytest.mark.parametrize("shape", [(1,), (1, 1), (2,), (1, 2), (1, 4), (1, 5), (3, 3), (2, 8), (1, 17), (0,)])
@pytest.mark.parametrize("transposed", [False, True])
def test_same_as_torch(shape, transposed):
    big = layer(2048, 1024)
    x = torch.randn(*shape, 1024)
    x = x.mT.contiguous().mT if transposed and len(shape) > 1 else x
    y = big(x)
    assert type(big) is Linear and y.shape == (*shape, 2048) and y.is_contiguous()
    torch.testing.assert_close(y, F.linear(x, big.weight), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_are_left_to_torch(dtype):
    big, x = layer(2048, 1024).to(dtype), torch.randn(2, 1024, dtype=dtype)
    assert torch.equal(big(x), F.linear(x, big.weight))


def test_gradients_flow_as_before():
    big, x = layer(2048, 1024), torch.randn(2, 1024, requires_grad=True)
    big(x).sum().backward()
    torch.testing.assert_close(x.grad, big.weight.sum(0).expand(2, -1), rtol=1e-4, atol=1e-4)
    assert big.weight.grad is None
    big.requires_grad_(True)(x).sum().backward()
    assert big.weight.grad is not None


def test_only_big_matrices_are_exchanged(tmp_path):
    write_checkpoint(tmp_path, PITFALL)
    small = Model.from_pretrained(tmp_path)
    assert not any(isinstance(module, Linear) for module in small.modules())
    assert isinstance(speed_up(nn.Linear(BIG // 512, 512, bias=False)), Linear)
    assert not isinstance(speed_up(nn.Linear(BIG // 512, 512)), Linear)           # it has a bias
