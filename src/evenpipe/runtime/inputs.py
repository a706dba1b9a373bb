"""The inputs of a step, and their validation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evenpipe.attention.row_context import documents_of
from evenpipe.errors import InputError
from evenpipe.given import shown
from evenpipe.model import Description
from evenpipe.recipe.parallelism import Parallelism, divisor_of
from evenpipe.vocabulary.shards import outside
from evenpipe.words import count, join, refused

IGNORE_INDEX = -100

INPUT_NAMES = ("input_ids", "labels", "position_ids", "attention_mask", "token_weights")


@dataclass(frozen=True, slots=True)
class Inputs:
    """The caller's inputs of a step: tensors are [batch, sequence]; None if not given."""

    input_ids: Tensor | None
    labels: Tensor | None = None
    position_ids: Tensor | None = None
    attention_mask: Tensor | None = None
    token_weights: Tensor | None = None
    accumulate: int | None = None
    """Number of steps whose gradients are accumulated before an update; None if not given."""
    separate: bool = False
    """Whether the documents of a row are trained independently of each other."""
    total_tokens: float | None = None
    """Total weight of the labels of an update, over its steps and all replicas; None if not given."""
    batch: Mapping[str, Any] | None = None
    """Tensors by name, instead of `input_ids` and so on, until `unpacked`."""

    @classmethod
    def of(cls, batch: Tensor | Mapping[str, Any] | None, *tensors: Any, **options: Any) -> Inputs:
        """Return the inputs of a call whose first argument is `input_ids` or a mapping of all tensors by name."""
        if isinstance(batch, Mapping):
            return replace(cls(None, *tensors, **options), batch=batch)
        return cls(batch, *tensors, **options)

    @property
    def steps(self) -> int:
        """Number of steps per update."""
        return 1 if self.accumulate is None else self.accumulate


class Divisor(NamedTuple):
    """The constraint on the number of tokens of a sequence, which must be a multiple of `number`."""

    number: int
    minimum: int
    """The smallest number of tokens."""
    reason: str
    """Where the constraint comes from, for messages."""

    @classmethod
    def of(cls, sizes: Parallelism, slices: int) -> Divisor:
        """Return the divisor: tensor ranks share the tokens of a piece; each context rank has two equal chunks of every
        slice."""
        number = divisor_of(sizes.cp, sizes.tp)
        parts = [
            *([f"two chunks for each of {sizes.cp} context ranks"] if sizes.cp > 1 else []),
            *([f"{sizes.tp} tensor ranks"] if sizes.tp > 1 else []),
            *([f"{slices} slices"] if slices > 1 else []),
        ]
        return cls(number, number * slices, ", ".join(parts))


WHOLE = Divisor(1, 1, "")


def unpacked(inputs: Inputs) -> Inputs:
    """Return the same inputs with the tensors of `batch` in their fields.

    Raises:
        InputError: the batch has an unknown name, a name that is also given as an argument, or no token ids.
    """
    if inputs.batch is None:
        return inputs
    tensors: dict[str, Any] = {name: value for name, value in inputs.batch.items() if value is not None}
    accepted = join(INPUT_NAMES)
    for name in tensors:
        if name not in INPUT_NAMES:
            raise InputError(f"batch: it has {shown(name)}, which a step does not take; expected only {accepted}")
        if getattr(inputs, name) is not None:
            raise InputError(f"{name}: given in the batch and as an argument too; expected one of both")
    if "input_ids" not in tensors:
        raise InputError(f"batch: it has {join(list(tensors)) or 'nothing'}; expected at least input_ids")
    return replace(inputs, batch=None, **tensors)


def check(inputs: Inputs, *, microbatches: int, model: Description, tokens: Divisor = WHOLE) -> None:
    """Check the inputs of the first process.

    Args:
        microbatches: the number of sequences must be a multiple of it.
        tokens: the constraint on the number of tokens.

    Raises:
        InputError: a shape, dtype or value is wrong; the message names the argument, its value and the accepted ones.
    """
    input_ids, labels, position_ids, attention_mask, token_weights = fields_of(inputs)
    vocabulary, maximum_length = model.vocabulary_size, model.maximum_length
    for name, value in zip(INPUT_NAMES, fields_of(inputs), strict=True):
        if value is not None and not isinstance(value, Tensor):
            which = " or a mapping of tensors by name" if name == "input_ids" else ""
            raise InputError(f"{name} is {type(value).__name__}; it must be a torch.Tensor{which}")
    if inputs.accumulate is not None and (type(inputs.accumulate) is not int or inputs.accumulate < 1):
        raise refused("accumulate", inputs.accumulate, "a whole number of steps, 1 or more")
    if inputs.total_tokens is not None:
        _check_total(inputs.total_tokens, inputs.accumulate, model)
    if input_ids is None:
        raise InputError(
            "input_ids: the first process of the pipeline was given None; expected [batch, sequence] int64"
        )
    if input_ids.dim() != 2 or input_ids.dtype != torch.int64 or input_ids.numel() == 0:
        raise InputError(
            f"input_ids is {list(input_ids.shape)} {input_ids.dtype}; it must be [batch, sequence] torch.int64, not"
            " empty"
        )
    batch, sequence = input_ids.shape
    if batch % microbatches:
        raise InputError(
            f"input_ids has {count(batch, 'sequence')}; their number must be a multiple of the"
            f" {count(microbatches, 'microbatch')}"
        )
    if maximum_length is not None and sequence > maximum_length:
        raise InputError(
            f"input_ids: {count(sequence, 'token')} per sequence, the model allows at most {maximum_length}"
        )
    if sequence % tokens.number or sequence < tokens.minimum:
        accepted = f"a multiple of {tokens.number}" if tokens.number > 1 else ""
        minimum = f"at least {tokens.minimum}" if tokens.minimum > tokens.number else ""
        requirement = " and ".join(clause for clause in (accepted, minimum) if clause)
        raise InputError(
            f"input_ids has {count(sequence, 'token')} per sequence; it must have {requirement} ({tokens.reason})"
        )
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= vocabulary:
        raise InputError(
            f"input_ids contains token {low if low < 0 else high}; tokens must be 0 to {vocabulary - 1} (the"
            " vocabulary)"
        )
    optional = {
        "labels": (labels, torch.int64),
        "position_ids": (position_ids, torch.int64),
        "attention_mask": (attention_mask, None),
        "token_weights": (token_weights, None),
    }
    for name, (tensor, dtype) in optional.items():
        if tensor is None:
            continue
        if tensor.shape != input_ids.shape or (dtype is not None and tensor.dtype != dtype):
            expected = f"{list(input_ids.shape)}" + (f" {dtype}" if dtype else "")
            raise InputError(f"{name} is {list(tensor.shape)} {tensor.dtype}; it must be {expected}, as input_ids")
    counted = None if labels is None else labels[labels != IGNORE_INDEX]
    if counted is None and high >= model.head_rows:  # a token that is only an input, such as that of an image
        counted = input_ids[:, 1:] if attention_mask is None else input_ids[:, 1:][attention_mask[:, 1:] != 0]
    from_ids = ", a token of input_ids" if labels is None else ""
    if counted is not None and (wrong := outside(counted, model.head_rows)) is not None:
        raise InputError(
            f"labels contains {wrong}{from_ids}; each must be 0 to {model.head_rows - 1} or {IGNORE_INDEX} for"
            " positions without one"
        )
    for name, tensor in (("position_ids", position_ids), ("attention_mask", attention_mask)):
        if tensor is not None and not model.takes(name):
            raise InputError(f"{name}: {model.architecture} does not take it; expected None")
    rows = model.position_rows
    if position_ids is not None and (int(position_ids.min()) < 0 or int(position_ids.max()) >= (rows or 2**63)):
        accepted = "at least 0" if rows is None else f"0 to {rows - 1}"
        raise InputError(
            f"position_ids run from {int(position_ids.min())} to {int(position_ids.max())}; they must be {accepted}"
        )
    if attention_mask is not None:
        _check_mask(attention_mask, separate=inputs.separate)
    if token_weights is not None:
        if token_weights.is_complex() or not bool(torch.isfinite(token_weights).all()):
            raise InputError("token_weights: contains a value that is not a finite number")
        if bool((token_weights < 0).any()):
            raise InputError(
                f"token_weights contains {token_weights.min().item():g}; each must be at least 0 for a mean"
            )


def _check_total(total: Any, accumulate: int | None, model: Description) -> None:
    number: Any = total.item() if isinstance(total, Tensor) and total.numel() == 1 else total
    if isinstance(number, bool) or not isinstance(number, Real) or not 0 <= float(number) < float("inf"):
        raise refused(
            "total_tokens",
            total,
            "the number of labels that all steps of the update count, as the"
            " sum of pipeline.count_labels over its batches",
        )
    if accumulate is None and model.router_loss is not None:
        raise InputError(
            f"total_tokens: {total!r} without accumulate, but the routers of {model.architecture} add a loss of each"
            " step; expected also accumulate, the number of steps of the update"
        )


def _check_mask(attention_mask: Tensor, *, separate: bool) -> None:
    if separate:
        raise InputError(
            "attention_mask: given; expected None with separate documents: padding is a document without labels (its"
            " position ids begin at 0, its labels are -100)"
        )
    is_one = attention_mask == 1
    if not bool((is_one | (attention_mask == 0)).all()) or bool((is_one[:, 1:] > is_one[:, :-1]).any()):
        raise InputError("attention_mask: expected rows of ones followed by zeros (padding on the right)")


def with_positions(inputs: Inputs, model: Description) -> Inputs:
    """Return the inputs with the position ids that the model itself derives from token ids, if it does.

    Raises:
        InputError: the model has no positions for this number of tokens.
    """
    if inputs.position_ids is not None or inputs.input_ids is None:
        return inputs
    positions, rows = model.positions_of(inputs.input_ids), model.position_rows
    if positions is not None and rows is not None and int(positions.max()) >= rows:
        assert model.padding_index is not None
        longest = rows - 1 - model.padding_index
        raise InputError(
            f"input_ids: {count(inputs.input_ids.shape[1], 'token')} per sequence, the model allows at most {longest}"
        )
    return replace(inputs, position_ids=positions)


def fields_of(inputs: Inputs) -> tuple[Tensor | None, ...]:
    return inputs.input_ids, inputs.labels, inputs.position_ids, inputs.attention_mask, inputs.token_weights


def with_labels(inputs: Inputs) -> Inputs:
    """Return the inputs with labels: by default all tokens except padding. The first tokens of separate documents have
    none."""
    labels, documents = inputs.labels, None
    if inputs.input_ids is None:
        return inputs
    if inputs.separate and inputs.position_ids is not None:
        documents = documents_of(inputs.position_ids)
    if labels is None or documents is not None:
        labels = (inputs.input_ids if labels is None else labels).clone()
    if inputs.labels is None and inputs.attention_mask is not None:
        labels[inputs.attention_mask == 0] = IGNORE_INDEX
    if documents is not None:
        labels[:, 1:].masked_fill_(documents.diff(dim=-1) != 0, IGNORE_INDEX)
    return replace(inputs, labels=labels)
