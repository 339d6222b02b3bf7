"""Big matrices, packed once in the order in which the processor's fastest routine reads them."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd import forward_ad

from .weights import set_defaults

# Operators of torch that are not public are used, so only in versions in which the tests have seen them right.
TESTED = "2.9.0", "2.13.0"
SMALL, ROWS = 2 ** 16, 4                        # up to which size packing costs time; how many rows to pack for
TYPES = torch.float32, torch.bfloat16


class Linear(nn.Linear):
    """`nn.Linear` without a bias: same weight, same result, computed from a packed copy of the weight.

    A weight that is exchanged or changed is noticed, unless it is changed in place behind `.data`; it is computed with
    as it lies, as is a product that needs gradients. A copy of the layer is not packed.
    """
    packed = None                               # (packed weight, the weight, the memory it lay in, its version)

    def forward(self, x):
        packed, weight = self.packed, self.weight
        training = weight.requires_grad and torch.is_grad_enabled()
        if packed and (training or not same(weight, *packed[1:])):      # a fused optimizer writes and counts no version
            packed = self.packed = None
        if packed and takes(weight, x):
            return torch.ops.mkldnn._linear_pointwise(x, packed[0], None, "none", [], "")
        return F.linear(x, weight)

    def _apply(self, fn, recurse=True):
        self.packed = None                      # another dtype or device
        return super()._apply(fn, recurse)

    def __getstate__(self):
        return self.__dict__ | {"packed": None}


def same(weight, packed, memory, version):
    """Whether a weight is what was packed. Nothing else can come to lie in `memory`, since it is held on to."""
    return (weight is packed and weight._version == version and weight.data_ptr() == memory.data_ptr()
            and weight.shape == memory.shape and weight.stride() == memory.stride())


def takes(weight, x):
    """Whether oneDNN does what torch would: no derivatives, no autocast, and nothing that torch refuses."""
    return (x.dtype == weight.dtype and x.shape[-1] == weight.shape[1] and x.is_cpu and x.numel()
            and not (x.requires_grad and torch.is_grad_enabled())
            and not torch.is_autocast_enabled("cpu") and forward_ad._current_level < 0)


def pack(model):
    """Pack the big fp32 and bf16 matrices of a model on a CPU; returns the model. Chapter 13 times it.

    It takes as much memory again as these weights, and the private memory of one process. Where torch is of another
    version than TESTED or comes without oneDNN, and in dtypes that the processor has no routine for, matrices stay as
    they are.
    """
    able = torch.__version__.split("+")[0] in TESTED and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    for module in model.modules() if able else ():
        if isinstance(module, Linear) and module.packed and same(module.weight, *module.packed[1:]):
            continue
        weight = getattr(module, "weight", None)
        if (type(module) in (nn.Linear, Linear) and module.bias is None and weight.numel() > SMALL
                and weight.dtype in TYPES and weight.device.type == "cpu" and not weight.is_inference()
                and (weight.dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported())):
            memory, module.__class__ = weight.detach(), Linear
            module.packed = torch.ops.mkldnn._reorder_linear_weight(memory, ROWS), weight, memory, weight._version
    return model


def ready(model):
    """A model just loaded, set to run without gradients, and torch set to make what it reads where it lies.

    fp32 weights, which are copies of what the file holds, are packed; bf16 weights stay mapped from the file, in memory
    once for all who read it, until somebody calls `pack`.
    """
    model.eval().requires_grad_(False)
    set_defaults(model.cfg, next(model.parameters()).device)
    return pack(model) if all(p.dtype == torch.float32 for p in model.parameters()) else model
