"""The three matrix products of the output layer, each in the fastest way for the dtype on the machine.

Letters: X hidden states [tokens, hidden_size]; W weight [rows, hidden_size]; E exponentials [tokens, rows].
Accumulators are fp32 (fp64 for fp64). If a product cannot write them directly, it is cut along the vocabulary,
never along the tokens, so that the weight gradient of a microbatch stays one sum over all its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

SLICE_ROWS = 16384


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return fp64 for fp64, fp32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of kept exponentials: that of the hidden states, except that fp16 (too small a range) becomes
    fp32."""
    return torch.float32 if dtype == torch.float16 else dtype


@cache
def cpu_has_bf16() -> bool:
    """Return whether this machine's processor multiplies bf16; if not, torch emulates it, slowly."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def writes_accumulator(operand: Tensor) -> bool:
    """Return whether torch's product of this dtype on this device writes its fp32 accumulators as fp32."""
    return operand.dtype == torch.bfloat16 and operand.is_cuda


def _multiplies_natively(operand: Tensor) -> bool:
    """Return whether a product of this dtype is fast here, though its result is rounded to the same dtype."""
    return operand.dtype == torch.bfloat16 and operand.device.type == "cpu" and cpu_has_bf16()


def _widens(operand: Tensor) -> bool:
    """Return whether products of this dtype are so slow here that both factors are widened first."""
    narrow = operand.dtype != accumulator_dtype(operand.dtype)
    return narrow and not (writes_accumulator(operand) or _multiplies_natively(operand))


def vocabulary_slices(rows: int, size: int = SLICE_ROWS) -> Iterator[slice]:
    """Yield ranges of at most `size` of `rows`."""
    for start in range(0, rows, size):
        yield slice(start, min(rows, start + size))


def logits_dtype(operand: Tensor) -> torch.dtype:
    """Return the dtype of `logits_product`: the accumulator dtype, unless only a rounded product is fast here."""
    return operand.dtype if _multiplies_natively(operand) else accumulator_dtype(operand.dtype)


def logits_product(hidden: Tensor, weight: Tensor, out: Tensor) -> None:
    """Compute out = X W^T, with `out` in `logits_dtype`."""
    if hidden.dtype == out.dtype:
        torch.mm(hidden, weight.t(), out=out)
    elif writes_accumulator(hidden):
        torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)
    else:
        hidden = hidden.to(out.dtype)
        for rows in vocabulary_slices(weight.shape[0]):
            out[:, rows] = torch.mm(hidden, weight[rows].to(out.dtype).t())


def _multiplies_into(left: Tensor, right: Tensor, out: Tensor, *, add: bool) -> bool:
    """Compute out = left right, or out += left right, if torch can do so at once and fast; else return False."""
    if left.dtype == right.dtype == out.dtype and not _widens(out):
        torch.addmm(out, left, right, beta=int(add), out=out)
    elif not writes_accumulator(right):
        return False
    elif add:
        torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
    else:
        torch.mm(left, right, out_dtype=out.dtype, out=out)
    return True


def _put(product: Tensor, out: Tensor, *, add: bool) -> None:
    if add:
        out.add_(product)
    else:
        out.copy_(product)


def hidden_product(exponentials: Tensor, weight: Tensor, out: Tensor, *, add: bool) -> None:
    """Compute out = E W, or out += E W; `out` is [tokens, hidden_size] in the accumulator dtype."""
    if _multiplies_into(exponentials, weight, out, add=add):
        return
    if _multiplies_natively(weight):
        _put(torch.mm(exponentials, weight), out, add=add)
        return
    for rows in vocabulary_slices(weight.shape[0]):
        wide, wide_weight = exponentials[:, rows].to(out.dtype), weight[rows].to(out.dtype)
        torch.addmm(out, wide, wide_weight, beta=int(add or rows.start > 0), out=out)


def weight_product(exponentials: Tensor, scaled_hidden: Tensor, out: Tensor, *, add: bool = True) -> None:
    """Compute out += E^T (r X), or out = E^T (r X): one sum over all tokens.

    `out` is [rows, hidden_size] in the accumulator dtype or in that of E: then sums are rounded to it once.
    """
    if _multiplies_into(exponentials.t(), scaled_hidden, out, add=add):
        return
    if widens := _widens(scaled_hidden):
        scaled_hidden = scaled_hidden.to(accumulator_dtype(out.dtype))
    for rows in vocabulary_slices(out.shape[0]):
        factor = exponentials[:, rows].to(scaled_hidden.dtype) if widens else exponentials[:, rows]
        if factor.dtype == out.dtype:
            torch.addmm(out[rows], factor.t(), scaled_hidden, beta=int(add), out=out[rows])
        else:
            _put(torch.mm(factor.t(), scaled_hidden), out[rows], add=add)


def column_product(exponentials: Tensor, coefficients: Tensor, out: Tensor) -> None:
    """Compute out += E^T r, with coefficients r [tokens] and `out` [rows] in the accumulator dtype."""
    if exponentials.dtype == out.dtype:
        out.addmv_(exponentials.t(), coefficients)
    else:
        for rows in vocabulary_slices(out.shape[0]):
            out[rows].addmv_(exponentials[:, rows].to(out.dtype).t(), coefficients)
