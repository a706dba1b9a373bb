"""The three matrix products of the output layer, each done the best way that the machine has for the dtype.

Letters: X hidden states [tokens, hidden_size]; W weight [rows, hidden_size]; E exponentials [tokens, rows].
Accumulators are fp32 (fp64 for fp64). Where a product cannot write them directly, it is cut along the vocabulary,
never along the tokens, so that the weight gradient of a microbatch stays one sum over all its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

SLICE_ROWS = 16384


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, fp32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """What exponentials are kept in: the dtype of the hidden states, except that fp16 (no range) becomes fp32."""
    return torch.float32 if dtype == torch.float16 else dtype


@cache
def _cpu_has_bf16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _writes_accumulator(operand: Tensor) -> bool:
    """Does torch's product of this dtype on this device write fp32 from its fp32 accumulators?"""
    return operand.dtype == torch.bfloat16 and operand.is_cuda


def _multiplies_natively(operand: Tensor) -> bool:
    """Is a product of this dtype fast here, though its result is rounded to the same dtype?"""
    return operand.dtype == torch.bfloat16 and operand.device.type == "cpu" and _cpu_has_bf16()


def vocabulary_slices(rows: int, size: int = SLICE_ROWS) -> Iterator[slice]:
    """Cut `rows` into runs of at most `size`."""
    for start in range(0, rows, size):
        yield slice(start, min(rows, start + size))


def logits_product(hidden: Tensor, weight: Tensor, scale: float, out: Tensor, rounded: Tensor | None = None) -> None:
    """out = scale * X W^T, with `out` in the accumulator dtype.

    `rounded` is room of the same shape in the dtype of X, for products that cannot write `out` themselves.
    """
    if hidden.dtype == out.dtype:
        torch.addmm(out, hidden, weight.t(), beta=0, alpha=scale, out=out)
    elif _writes_accumulator(hidden):
        torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)
        if scale != 1.0:
            out.mul_(scale)
    elif _multiplies_natively(hidden):
        rounded = torch.mm(hidden, weight.t(), out=rounded) if rounded is not None else torch.mm(hidden, weight.t())
        if scale == 1.0:
            out.copy_(rounded)
        else:
            torch.mul(rounded, scale, out=out)
    else:
        hidden = hidden.to(out.dtype)
        for part in vocabulary_slices(weight.shape[0]):
            out[:, part] = torch.mm(hidden, weight[part].to(out.dtype).t()).mul_(scale)


def hidden_product(exponentials: Tensor, weight: Tensor, out: Tensor) -> None:
    """out += E W, with `out` [tokens, hidden_size] in the accumulator dtype."""
    if exponentials.dtype == weight.dtype == out.dtype:
        out.addmm_(exponentials, weight)
    elif _writes_accumulator(weight):
        torch.addmm(out, exponentials, weight, out_dtype=out.dtype, out=out)
    elif _multiplies_natively(weight):
        out.add_(torch.mm(exponentials, weight))
    else:
        for part in vocabulary_slices(weight.shape[0]):
            out.addmm_(exponentials[:, part].to(out.dtype), weight[part].to(out.dtype))


def weight_product(exponentials: Tensor, scaled_hidden: Tensor, out: Tensor) -> None:
    """out += E^T (r X), with `out` [rows, hidden_size] in the accumulator dtype: one sum over all tokens."""
    if exponentials.dtype == scaled_hidden.dtype == out.dtype:
        out.addmm_(exponentials.t(), scaled_hidden)
    elif _writes_accumulator(scaled_hidden):
        torch.addmm(out, exponentials.t(), scaled_hidden, out_dtype=out.dtype, out=out)
    elif _multiplies_natively(scaled_hidden):
        for part in vocabulary_slices(out.shape[0]):
            out[part].add_(torch.mm(exponentials[:, part].t(), scaled_hidden))
    else:
        scaled_hidden = scaled_hidden.to(out.dtype)
        for part in vocabulary_slices(out.shape[0]):
            out[part].addmm_(exponentials[:, part].to(out.dtype).t(), scaled_hidden)


def column_product(exponentials: Tensor, coefficients: Tensor, out: Tensor) -> None:
    """out += E^T r, with coefficients r [tokens] and `out` [rows] in the accumulator dtype."""
    if exponentials.dtype == out.dtype:
        out.addmv_(exponentials.t(), coefficients)
    else:
        for part in vocabulary_slices(out.shape[0]):
            out[part].addmv_(exponentials[:, part].to(out.dtype).t(), coefficients)
