"""Big matrices, read at the speed of memory when there are few rows to multiply."""
import torch
import torch.nn as nn
import torch.nn.functional as F

BIG, FEW = 2 ** 16, 4


class Linear(nn.Linear):
    """`nn.Linear` without a bias: same weight, same result; a few fp32 rows on a CPU are computed as (W xᵀ)ᵀ.

    Several libraries give x Wᵀ of a few rows to a single core, which cannot read as fast as the memory delivers.
    They spread W xᵀ over all cores, if there are at least two rows; on one core up to four rows gain too, and more do
    not. Chapter 13 times both.
    """

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        fp32 = rows.dtype == torch.float32 and rows.device.type == "cpu"
        most = FEW if torch.get_num_threads() == 1 else 4 * FEW
        if not fp32 or not 0 < len(rows) <= most or self.weight.requires_grad:
            return F.linear(x, self.weight)
        if len(rows) == 1:
            y = (self.weight @ rows.expand(2, -1).contiguous().T)[:, :1]
        else:
            y = torch.cat([self.weight @ few.T for few in rows.split(FEW)], dim=1)
        return y.T.contiguous().view(*x.shape[:-1], -1)


def speed_up(model):
    """Let the big matrices of a loaded model compute as `Linear` does; returns the model."""
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.numel() >= BIG and module.bias is None:
            module.__class__ = Linear
    return model
