"""What each optimizer keeps of parameters between steps, and what it makes in a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from evenpipe.errors import InputError

Optimizer = Literal["adamw", "muon", "adafactor", "sgd"]

_AT_ONCE = 1 << 26
"""Elements of stacked matrices that Muon orthogonalises together, as `runtime/optimizers/muon.py` has it."""
_BUCKET = 1 << 24
"""Elements of parameters in shards that Adafactor updates together, as `runtime/optimizers/adafactor.py` has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Trained parameters, as optimizers tell them apart. Elements, but for `tensors` and `matrix_tensors`."""

    elements: int = 0
    tensors: int = 0
    matrices: int = 0
    """Of what Muon orthogonalises."""
    matrix_tensors: int = 0
    largest_matrix: int = 0
    largest: int = 0
    """Of the largest tensor."""
    row_factors: int = 0
    """Numbers that Adafactor keeps and that lie where the rows of their parameter lie."""
    column_factors: int = 0
    """Numbers that it keeps on every process that holds rows."""

    def __add__(self, other: Trained) -> Trained:
        return Trained(
            elements=self.elements + other.elements,
            tensors=self.tensors + other.tensors,
            matrices=self.matrices + other.matrices,
            matrix_tensors=self.matrix_tensors + other.matrix_tensors,
            largest_matrix=max(self.largest_matrix, other.largest_matrix),
            largest=max(self.largest, other.largest),
            row_factors=self.row_factors + other.row_factors,
            column_factors=self.column_factors + other.column_factors,
        )


def trained_tensor(shape: Sequence[int], *, matrix: bool, elements: int | None = None) -> Trained:
    """One parameter.

    Args:
        matrix: whether Muon is for it.
        elements: what tensor parallelism leaves of it; None: all.
    """
    whole = math.prod(shape)
    elements = whole if elements is None else elements
    rows, columns = elements, 0
    if len(shape) >= 2 and whole:
        rows, columns = elements // shape[-1], elements // shape[-2]
    if len(shape) > 2:  # stacked matrices are spread one by one
        rows, columns = rows + columns, 0
    return Trained(
        elements=elements,
        tensors=1,
        matrices=elements * matrix,
        matrix_tensors=int(matrix),
        largest_matrix=elements * matrix,
        largest=elements,
        row_factors=rows,
        column_factors=columns,
    )


def check_optimizer_name(optimizer: str) -> None:
    """Raises InputError for a name that is none of `Optimizer`."""
    if optimizer not in get_args(Optimizer):
        raise InputError(f"optimizer is {optimizer!r}, expected one of {', '.join(get_args(Optimizer))}")


def kept_numbers(optimizer: str, trained: Trained) -> tuple[int, int]:
    """(numbers that are spread as parameters are, numbers that are the same on all holders). SGD's momentum counts."""
    match optimizer:
        case "adafactor":
            return trained.row_factors, trained.column_factors
        case "sgd":
            return trained.elements, 0
        case "muon":
            return 2 * trained.elements - trained.matrices, 0
    return 2 * trained.elements, 0


def step_counters(optimizer: str, trained: Trained) -> int:
    """How many parameters have a number of steps."""
    return {"sgd": 0, "muon": trained.tensors - trained.matrix_tensors}.get(optimizer, trained.tensors)


def bytes_in_step(optimizer: str, trained: Trained, *, master: int, shards: int) -> int:
    """At most, beside state.

    Muon has the momentum of a matrix in bf16, and four more copies of it while it is orthogonalised; in shards, twice
    the rows of as many matrices as there are shards, and a whole one with each. Adafactor has the updates of a bucket,
    or of one parameter where parameters are whole.

    Args:
        master: bytes of an element of the parameters.
        shards: over how many replicas parameters are spread.
    """
    if optimizer == "muon":
        momentum = (2 if shards == 1 else 8) * trained.largest_matrix
        return momentum + 8 * min(trained.largest_matrix, _AT_ONCE)
    if optimizer == "adafactor":
        most = trained.largest if shards == 1 else min(trained.elements, _BUCKET + trained.largest)
        return master * -(-most // shards)
    return 0
