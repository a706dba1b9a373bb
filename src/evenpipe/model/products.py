"""The matrix products of linear layers and experts: the output, the input's gradient, the weight's gradient.

Everything that multiplies by a layer's weight calls the layer's `Products`: the layer itself in one process, split
backwards, compiled layers, tensor ranks, and experts of a group. So other kinds of products (fp8) are set in one place:

    use_products(layer, MyProducts())

The output layer has its own products (`vocabulary/products.py`), accumulated in fp32 along slices of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Groups:
    """Rows sorted by expert.

    rows sorted by expert   0 0 0 | 1 | 3 3        ends = [3, 4, 4, 6], one per expert; expert 2 has no rows
    """

    def __init__(self, ends: Tensor) -> None:
        """ends: [experts] int32, on the device of the rows."""
        self.ends = ends
        self._spans: list[tuple[int, int]] | None = None

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(start, stop) of the rows of each expert. Waits for the device: only used without grouped products."""
        if self._spans is None:
            self._spans = spans_of(self.ends)
        return self._spans


def spans_of(ends: Tensor) -> list[tuple[int, int]]:
    """Return (start, stop) of the rows of each expert."""
    stops = ends.tolist()
    return list(zip([0, *stops], stops, strict=False))


class Products:
    """Products in the dtype of their operands, as in torch. Subclasses may compute each product in another way."""

    def output(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return [..., in] times the transpose of [out, in], plus the bias [out]."""
        return functional.linear(hidden, weight, bias)

    def input_gradient(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """Return [..., out] times [out, in]: one matrix product for any layout, as in torch's own backward."""
        if gradient.is_contiguous():
            return gradient.matmul(weight)
        return (gradient.reshape(-1, weight.shape[0]) @ weight).view(*gradient.shape[:-1], weight.shape[1])

    def weight_gradient(self, gradient: Tensor, hidden: Tensor, *, transposed: bool = False) -> Tensor:
        """Return the gradient [out, in] of a weight, or [in, out], from [n, out] and [n, in]."""
        return hidden.t() @ gradient if transposed else gradient.t() @ hidden

    def grouped_output(self, rows: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
        """Return [rows, in] times [experts, in, out]: every row times its expert's matrix."""
        if len(rows) and has_grouped(rows, matrices):
            return functional.grouped_mm(rows, matrices, offs=groups.ends)
        output = rows.new_empty(rows.shape[0], matrices.shape[2])
        for expert, (start, end) in enumerate(groups.spans):
            if start < end:
                torch.mm(rows[start:end], matrices[expert], out=output[start:end])
        return output

    def grouped_input_gradient(self, gradient: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
        """Return [rows, out] times [experts, out, in]."""
        return Products.grouped_output(self, gradient, matrices, groups)

    def grouped_weight_gradient(
        self, gradient: Tensor, rows: Tensor, groups: Groups, *, transposed: bool = False
    ) -> Tensor:
        """Return gradients [experts, out, in], or [experts, in, out], from [rows, out] and [rows, in]; zeros for
        experts without rows."""
        left, right = (rows, gradient) if transposed else (gradient, rows)
        if len(left) and has_grouped(left, right):
            return functional.grouped_mm(left.t(), right, offs=groups.ends)
        output = left.new_zeros(len(groups.ends), left.shape[1], right.shape[1])
        for expert, (start, end) in enumerate(groups.spans):
            if start < end:
                torch.mm(left[start:end].t(), right[start:end], out=output[expert])
        return output


PLAIN = Products()

SUMMED = "_summed"
"""Attribute of a parameter in the computing dtype: the fp32 tensor to whose `.grad` its gradients are added."""


def products_of(layer: nn.Module) -> Products:
    """Return the products of a linear layer, or of a module of experts."""
    products: Products = layer.__dict__.get("_products", PLAIN)
    return products


def has_grouped(*tensors: Tensor) -> bool:
    """Return whether torch has a grouped product for these rows and matrices: not in fp64, only if rows are a multiple
    of 16 bytes, and on a GPU from compute capability 8.0."""
    if not hasattr(functional, "grouped_mm") or any(tensor.dtype == torch.float64 for tensor in tensors):
        return False
    sizes = [size for tensor in tensors for size in tensor.shape[1:]]
    if any(size * tensors[0].element_size() % 16 for size in sizes):
        return False
    return not tensors[0].is_cuda or torch.cuda.get_device_capability(tensors[0].device) >= (8, 0)


def fill_grouped(result: Tensor, positions: Tensor, rows: Tensor, matrices: Tensor, groups: Groups) -> None:
    """Write plain products [rows, a] x [experts, a, b] to these positions of `result` [more rows, b], without a copy on
    a CPU. The positions of an expert are consecutive."""
    for expert, (start, end) in enumerate(groups.spans):
        if start < end:
            first = int(positions[start])
            torch.mm(rows[start:end], matrices[expert], out=result[first : first + end - start])


class Product(torch.autograd.Function):
    """A linear layer in one process, computed by its own products."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, how: tuple[Products, bool]) -> Tensor:
        """how: the products, and whether the weight is [in, out] rather than [out, in]."""
        ctx.save_for_backward(hidden, weight)
        ctx.how = products, transposed = how
        return products.output(hidden, weight.t() if transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (hidden, weight), (products, transposed) = ctx.saved_tensors, ctx.how
        of_hidden = of_weight = of_bias = None
        rows = gradient.reshape(-1, gradient.shape[-1])
        if ctx.needs_input_grad[0]:
            of_hidden = products.input_gradient(gradient, weight.t() if transposed else weight)
        if ctx.needs_input_grad[1]:
            columns = hidden.reshape(-1, hidden.shape[-1])
            of_weight = products.weight_gradient(rows, columns, transposed=transposed)
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0)
        return of_hidden, of_weight, of_bias, None
