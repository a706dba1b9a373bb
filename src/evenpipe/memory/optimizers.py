"""Counts the state that each optimizer keeps between steps, and its temporaries in a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from evenpipe.optimizers.adafactor import BUCKET_ELEMENTS
from evenpipe.optimizers.muon import ELEMENTS_AT_ONCE

Optimizer = Literal["adamw", "muon", "adafactor", "sgd", "amsgrad", "plain-sgd"]
""""amsgrad": AdamW with AMSGrad. "plain-sgd": without momentum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Counts of trained parameters, by the optimizer state that they need. All fields count elements, except `tensors`
    and `matrix_tensors`."""

    elements: int = 0
    tensors: int = 0
    matrices: int = 0
    """Elements that Muon orthogonalises."""
    matrix_tensors: int = 0
    largest_matrix: int = 0
    largest: int = 0
    """Elements of the largest tensor."""
    row_factors: int = 0
    """Numbers that Adafactor keeps on the process with the rows of their parameter."""
    column_factors: int = 0
    """Numbers that Adafactor keeps on every process with rows of their parameter."""

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
    """Return the counts of a parameter.

    Args:
        matrix: whether Muon orthogonalises it.
        elements: elements per rank with tensor parallelism; None: all.
    """
    total = math.prod(shape)
    elements = total if elements is None else elements
    rows, columns = elements, 0
    if len(shape) >= 2 and total:
        rows, columns = elements // shape[-1], elements // shape[-2]
    if len(shape) > 2:  # each process holds whole matrices of the stack
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


def kept_numbers(optimizer: str, trained: Trained) -> tuple[int, int]:
    """Return two counts of numbers kept: those sharded like parameters, and those kept by every process with rows. SGD
    has momentum."""
    match optimizer:
        case "adafactor":
            return trained.row_factors, trained.column_factors
        case "sgd":
            return trained.elements, 0
        case "plain-sgd":
            return 0, 0
        case "amsgrad":
            return 3 * trained.elements, 0
        case "muon":
            return 2 * trained.elements - trained.matrices, 0
    return 2 * trained.elements, 0


def step_counters(optimizer: str, trained: Trained) -> int:
    """Return the number of parameters with a step counter."""
    return {"sgd": 0, "plain-sgd": 0, "muon": trained.tensors - trained.matrix_tensors}.get(optimizer, trained.tensors)


def bytes_in_step(optimizer: str, trained: Trained, *, master: int, shards: int) -> int:
    """Return the maximum bytes of temporaries in a step.

    Muon needs the momentum of a matrix in bf16, and four more copies of it during orthogonalisation; with shards, two
    rounds of rows of a matrix per shard, and a whole matrix for each round. Adafactor needs the updates of a bucket,
    or of a parameter if parameters are not sharded.

    Args:
        master: bytes of an element of the parameters.
        shards: number of replicas over which parameters are sharded.
    """
    if optimizer == "muon":
        momentum = (2 if shards == 1 else 8) * trained.largest_matrix
        return momentum + 8 * min(trained.largest_matrix, ELEMENTS_AT_ONCE)
    if optimizer == "adafactor":
        update_elements = trained.largest if shards == 1 else min(trained.elements, BUCKET_ELEMENTS + trained.largest)
        return master * -(-update_elements // shards)
    return 0
