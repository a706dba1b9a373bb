"""Products of rows that are sorted by expert, each with its expert's matrix."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


class Groups:
    """Rows sorted by expert.

    rows sorted by expert   0 0 0 | 1 | 3 3        ends = [3, 4, 4, 6]: of each expert's rows; expert 2 has none
    """

    def __init__(self, ends: Tensor) -> None:
        """ends: [experts] int32, on the device of the rows."""
        self.ends = ends
        self._spans: list[tuple[int, int]] | None = None

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The first row of each expert and that behind its last. Waits for the device: only used without grouped
        products."""
        if self._spans is None:
            self._spans = spans_of(self.ends)
        return self._spans


def spans_of(ends: Tensor) -> list[tuple[int, int]]:
    """Return the first row of each expert and that behind its last."""
    stops = ends.tolist()
    return list(zip([0, *stops], stops, strict=False))


def grouped_product(rows: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
    """Return [rows, a] x [experts, a, b] -> [rows, b]: every row times its expert's matrix."""
    if len(rows) and has_grouped(rows, matrices):
        return functional.grouped_mm(rows, matrices, offs=groups.ends)
    output = rows.new_empty(rows.shape[0], matrices.shape[2])
    for expert, (start, end) in enumerate(groups.spans):
        if start < end:
            torch.mm(rows[start:end], matrices[expert], out=output[start:end])
    return output


def fill_grouped(result: Tensor, places: Tensor, rows: Tensor, matrices: Tensor, groups: Groups) -> None:
    """Write [rows, a] x [experts, a, b] to these places of [more rows, b]; those of an expert follow each other."""
    if not rows.is_cpu:
        result[places] = grouped_product(rows, matrices, groups)
        return
    for expert, (start, end) in enumerate(groups.spans):  # where grouped products are no more than this, without a copy
        if start < end:
            first = int(places[start])
            torch.mm(rows[start:end], matrices[expert], out=result[first : first + end - start])


def grouped_outer(left: Tensor, right: Tensor, groups: Groups) -> Tensor:
    """Return [rows, a] and [rows, b] -> [experts, a, b]: left^T right over each expert's rows, zeros for experts
    without rows."""
    if len(left) and has_grouped(left, right):
        return functional.grouped_mm(left.t(), right, offs=groups.ends)
    output = left.new_zeros(len(groups.ends), left.shape[1], right.shape[1])
    for expert, (start, end) in enumerate(groups.spans):
        if start < end:
            torch.mm(left[start:end].t(), right[start:end], out=output[expert])
    return output


def has_grouped(*tensors: Tensor) -> bool:
    """Return whether torch can multiply groups of these rows and matrices at once. Not in fp64, and only rows of whole
    16 bytes; on a GPU from compute capability 8.0 on."""
    if not hasattr(functional, "grouped_mm") or any(tensor.dtype == torch.float64 for tensor in tensors):
        return False
    sizes = [size for tensor in tensors for size in tensor.shape[1:]]
    if any(size * tensors[0].element_size() % 16 for size in sizes):
        return False
    return not tensors[0].is_cuda or torch.cuda.get_device_capability(tensors[0].device) >= (8, 0)
