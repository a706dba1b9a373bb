"""Linear layers: torch's, and transformers' `Conv1D` (GPT-2), whose matrix is [in, out]."""

from __future__ import annotations

from torch import nn
from transformers.pytorch_utils import Conv1D

LINEAR = (nn.Linear, Conv1D)


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, of a subclass too."""
    return isinstance(module, LINEAR)


def is_transposed(module: nn.Module) -> bool:
    """Return whether a linear layer's matrix is [in, out], and not [out, in]."""
    return isinstance(module, Conv1D)


def is_one_product(module: nn.Module) -> bool:
    """Return whether a linear layer computes one product with a parameter, and adds a bias: its forward is that of
    torch or transformers, not replaced in a subclass or in the layer, and no hook computes its weight."""
    return (
        type(module).forward in {kind.forward for kind in LINEAR}
        and module._parameters.keys() == {"weight", "bias"}
        and isinstance(module._parameters["weight"], nn.Parameter)
        and "forward" not in vars(module)
    )
