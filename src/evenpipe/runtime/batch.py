"""The inputs of a step: checked once, sent to every device once, cut into microbatches.

With several replicas, the first process of each has its own batch. These processes first exchange the total weights of
their tokens, so that the weights of all tokens in all batches add up to 1; if one refuses its batch, all do. The same
exchange shows whether processes agree on the trainable parameters and their hooks.

Every device knows all token ids and labels. So every device can compute the loss from the statistics of the vocabulary
shards, and both ends of an exchange of embedding rows know its size.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evenpipe.attention.carry import Carries
from evenpipe.attention.row_context import RowContext, activated
from evenpipe.errors import InputError
from evenpipe.model import Description
from evenpipe.parallel.grid import Grid
from evenpipe.parallel.groups import Groups
from evenpipe.runtime.inputs import (
    IGNORE_INDEX,
    INPUT_NAMES,
    WHOLE,
    Divisor,
    Inputs,
    check,
    fields_of,
    unpacked,
    with_labels,
    with_positions,
)
from evenpipe.runtime.trained import Trained

NO_TOTAL = -1.0
"""In messages: the update's total is not given."""
ROUNDING_OF_TOTALS = 1 + 1e-5
"""A step's total weight may exceed the given total by this factor, since the caller may have added in fp32."""


@dataclass(frozen=True, slots=True)
class Microbatch:
    """A part of a step's batch, or a piece of every sequence in such a part. In training all parts are equal.
    n = sequences x tokens."""

    token_ids: Tensor
    """[sequences, tokens] int64, on the host, because message sizes are computed from them."""
    targets: Tensor
    """[n] int64, on the host: the token that each position predicts, IGNORE_INDEX if there is none."""
    weights: Tensor
    """[n] fp32 or fp64: each position's share of the update's loss. They add up to 1 over all microbatches, replicas
    and steps of the update."""
    position_ids: Tensor | None
    """[sequences, tokens] int64, or None for 0, 1, 2, ..."""
    attention_mask: Tensor | None
    """[sequences, tokens] int64, 1 for tokens and 0 for padding, or None without padding."""
    on_host: tuple[Tensor | None, Tensor | None] = None, None
    """Copies of position ids and mask on the host."""

    row_context: RowContext | None = None
    """What evenpipe's attention sees of the whole rows, of which this may be a piece, with position ids. None if these
    are whole rows and the model's own attention is used."""
    carries: Carries | None = None
    """Shared by the slices of the same sequences; None if sequences are not sliced."""
    slice: int = 0

    @property
    def tokens(self) -> int:
        return self.token_ids.numel()

    def through(
        self, stage: int, module: Callable[..., Tensor | tuple[Tensor, ...]], inputs: Sequence[Tensor], **options: Any
    ) -> tuple[Tensor, ...]:
        """Return the outputs of stage number `stage` for this microbatch."""
        row_context = self.row_context
        if self.position_ids is not None:
            options["position_ids"] = self.position_ids
        if row_context is None:
            if self.attention_mask is not None:
                options["attention_mask"] = self.attention_mask
            output = module(*inputs, **options)
        else:
            carried = None if self.carries is None else self.carries.exchange(stage, self.slice, row_context.exchange)
            with activated(row_context if carried is None else replace(row_context, exchange=carried)):
                output = module(*inputs, **options)
            if carried is not None:
                carried.end_forward()
        return output if isinstance(output, tuple) else (output,)


@dataclass(frozen=True, slots=True)
class Batch:
    """All microbatches of a step, the same on every device of the pipeline."""

    microbatches: tuple[Microbatch, ...]
    """By unit. If sequences are sliced, the slices of a microbatch follow one another."""
    sequences: int
    sequence_length: int
    valid_tokens: int
    """Number of positions with a label that counts, over all replicas."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals of the batches of all replicas."""

    weight: float
    """Total weight of all positions with a label that counts; without weights, their number."""
    valid_tokens: int
    accumulate: int = 1
    """Number of steps per update."""
    fewest_sequences: int = 1
    """The number of sequences in the smallest batch of any replica."""
    of_update: float | None = None
    """Total `weight` over all steps of the update; None if unknown: then all steps count equally."""
    drawn: int = 0
    """The random number that the first replica drew for this step."""

    @property
    def divisor(self) -> float:
        """What the weight of each position is divided by."""
        return self.weight * self.accumulate if self.of_update is None else self.of_update

    @property
    def loss_factor(self) -> int:
        """Factor from this step's share of the update's loss to the reported loss, which is the loss of this step alone
        if all steps count equally, else the share."""
        return self.accumulate if self.of_update is None else 1


def distribute(
    inputs: Inputs,
    *,
    called: str,
    microbatches: int,
    model: Description,
    tokens: Divisor = WHOLE,
    groups: Groups,
    grid: Grid,
    trained: Trained,
    drawn: int = 0,
    torch_device: torch.device,
) -> tuple[Inputs, Totals]:
    """Check the step's inputs on the first process of each replica and send them to the replica's other processes.

    Collective over everyone: an all-gather of a row of numbers per process, which also shows whether all of them
    called the same method. If a batch is refused, nothing more is sent. Then the first process of each replica
    broadcasts an int64 tensor with all integers, and the weights if there are any.

    Args:
        called: name of the public method.
        microbatches, tokens: as for `check`.
        trained: flags read for this step.
        drawn: this process's random number for the step; only that of the very first process is used.

    Returns:
        The inputs, the same on every process of the replica, with labels: the given ones, or the ids without padding.
        Weights are on `torch_device`, the other tensors on the host. Also the totals over all replicas.

    Raises:
        InputError: on every process, if the inputs of a first process are refused, if processes disagree on the
            trainable parameters or their hooks, if replicas disagree on the update, or if some processes called another
            method.
    """
    fault: InputError | None = None
    local_inputs: Inputs | None = None
    row = _Row()
    if grid.feeds:
        try:
            local_inputs = _on_cpu(inputs, microbatches=microbatches, model=model, tokens=tokens)
        except InputError as error:
            fault = error
        else:
            row = _row_of(local_inputs, drawn)
    table = groups.begin(called, [*row, *trained.for_all()], "the size of the batch", "the step")
    replicas = grid.size("dp")
    sources = [_Row._make(numbers[: len(row)]) for numbers in table[:: len(table) // replicas]]
    source = sources[grid.coordinate("dp")]
    if not all(entry.good for entry in sources):
        which = "another" if source.good else "the"
        raise fault or InputError(f"input_ids: refused by the first process of {which} pipeline; see its error")
    totals = Totals(
        sum(_as_float(entry.weight) for entry in sources),
        sum(entry.valid_tokens for entry in sources),
        source.accumulate,
        min(entry.sequences for entry in sources),
        _total_of(source.of_update),
        sources[0].drawn,
    )
    if (fault := _fault_of_update(sources, totals)) is not None:
        raise fault
    if not trained.agree([numbers[len(row) :] for numbers in table], replicas):
        flags = groups.gather(trained.by_name(), "which parameters are trained", "the step")
        raise trained.disagreement(flags, replicas)
    return _share(local_inputs, source, groups, torch_device), totals


class _Row(NamedTuple):
    """What the first process of a replica reports about its batch. All zeros on other processes, and for a refused
    batch."""

    good: int = 0
    sequences: int = 0
    tokens: int = 0
    has_positions: int = 0
    has_mask: int = 0
    has_weights: int = 0
    wide: int = 0
    """Whether weights are fp64."""
    weight: int = 0
    """The bits of `Totals.weight`."""
    valid_tokens: int = 0
    accumulate: int = 0
    of_update: int = 0
    """The bits of `Totals.of_update`, or of NO_TOTAL."""
    drawn: int = 0


def _row_of(inputs: Inputs, drawn: int) -> _Row:
    assert inputs.input_ids is not None
    present = [tensor is not None for tensor in (inputs.position_ids, inputs.attention_mask, inputs.token_weights)]
    wide = inputs.token_weights is not None and inputs.token_weights.dtype == torch.float64
    total = _batch_total(*_weights(inputs))
    of_update = NO_TOTAL if inputs.total_tokens is None else float(inputs.total_tokens)
    numbers = (_as_integer(total.weight), total.valid_tokens, inputs.steps, _as_integer(of_update), drawn)
    return _Row._make([1, *inputs.input_ids.shape, *present, wide, *numbers])


def _on_cpu(inputs: Inputs, *, microbatches: int, model: Description, tokens: Divisor) -> Inputs:
    """Check the inputs of a first process; return them with labels and positions, on the CPU."""
    inputs = unpacked(inputs)
    check(inputs, microbatches=microbatches, model=model, tokens=tokens)
    inputs = with_positions(inputs, model)
    fields = zip(INPUT_NAMES, fields_of(inputs), strict=True)
    on_cpu: dict[str, Any] = {name: tensor.cpu() for name, tensor in fields if tensor is not None}
    return with_labels(replace(inputs, **on_cpu))


def _fault_of_update(replicas: Sequence[_Row], totals: Totals) -> InputError | None:
    """Return the error in the number of steps and the total of the update, as given by each replica; None if they are
    right."""
    steps, weights = (
        [replica.accumulate for replica in replicas],
        [_total_of(replica.of_update) for replica in replicas],
    )
    if len(set(steps)) > 1:
        return InputError(f"accumulate: {steps} by replica; expected the same number of steps in all of them")
    if len(set(weights)) > 1:
        return InputError(f"total_tokens: {weights} by replica; expected in all of them that of all replicas together")
    total = totals.of_update
    if total is not None and totals.weight > total * ROUNDING_OF_TOTALS:
        return InputError(
            f"total_tokens: {total:.10g}, but this step alone counts {totals.weight:.10g}; expected the number of all"
            " steps of the update, over all replicas"
        )
    return None


def count_weight(
    inputs: Inputs, *, model: Description, numbers_of_all: Callable[[list[float]], list[list[float]]], feeds: bool
) -> float:
    """Return the total weight of the labels of a batch over all replicas, as `distribute` counts it; without weights,
    their number. Collective.

    Args:
        inputs: from processes with `feeds`, the first of each pipeline; those of other processes are ignored.
        numbers_of_all: gathers numbers from all processes.

    Raises:
        InputError: on every process, if one of the batches is refused.
    """
    fault, numbers = None, [1.0, 0.0]
    if feeds:
        try:
            checked = _on_cpu(inputs, microbatches=1, model=model, tokens=WHOLE)
            numbers[1] = _batch_total(*_weights(checked)).weight
        except InputError as error:
            fault, numbers = error, [0.0, 0.0]
    table = numbers_of_all(numbers)
    if fault is None and not all(good for good, _ in table):
        fault = InputError("input_ids: refused by the first process of a pipeline; see its error")
    if fault is not None:
        raise fault
    return sum(weight for _, weight in table)


def _share(inputs: Inputs | None, row: _Row, groups: Groups, torch_device: torch.device) -> Inputs:
    """Send the inputs of a replica's first process to all of its processes. `inputs` is None on the others."""
    on_host: Tensor | None = None
    if inputs is not None:
        on_host = torch.stack([tensor.to(torch.int64) for tensor in fields_of(inputs)[:4] if tensor is not None])
        integers = on_host.to(torch_device)
    else:
        size = (2 + row.has_positions + row.has_mask, row.sequences, row.tokens)
        integers = torch.empty(size, dtype=torch.int64, device=torch_device)
    groups.broadcast(integers, "token ids and labels", "the step")
    weights = None
    if row.has_weights:
        dtype = torch.float64 if row.wide else torch.float32
        if inputs is not None:
            assert inputs.token_weights is not None
            weights = inputs.token_weights.to(device=torch_device, dtype=dtype).contiguous()
        else:
            weights = torch.empty((row.sequences, row.tokens), dtype=dtype, device=torch_device)
        groups.broadcast(weights, "token weights", "the step")
    if on_host is None:
        on_host = integers.cpu()  # all that is read on the host at once: a single wait
    return Inputs(
        input_ids=on_host[0],
        labels=on_host[1],
        position_ids=on_host[2] if row.has_positions else None,
        attention_mask=on_host[2 + row.has_positions] if row.has_mask else None,
        token_weights=weights,
    )


def _batch_total(targets: Tensor, weights: Tensor) -> Totals:
    return Totals(float(weights.sum()), int((targets != IGNORE_INDEX).sum()))


def _as_integer(number: float) -> int:
    """Return the bits of an fp64 number as an integer, for a message of integers."""
    return int.from_bytes(struct.pack("<d", number), "little", signed=True)


def _as_float(bits: int) -> float:
    return struct.unpack("<d", bits.to_bytes(8, "little", signed=True))[0]


def _total_of(bits: int) -> float | None:
    total = _as_float(bits)
    return None if total == NO_TOTAL else total


def cut(
    inputs: Inputs,
    totals: Totals | None = None,
    *,
    microbatches: int,
    dtype: torch.dtype,
    torch_device: torch.device | str = "cpu",
) -> Batch:
    """Shift the labels, compute weights that add up to 1 over all replicas and all steps of the update, and cut the
    batch into microbatches of equal size; if that is impossible, the first ones have one more sequence.

    Labels are aligned with `input_ids`, as in transformers: position t predicts label t + 1. A position's weight is the
    token weight of the label that it predicts (1 by default) divided by the update's sum of weights, so the loss of the
    update is the (weighted) mean over all its valid tokens and not a mean of means. If that sum is unknown, the steps
    of an update count equally. If no label of the step counts, all weights, the loss and all gradients are 0.

    A microbatch without padding has no mask, so that no stage has to read one. With position ids it keeps the mask,
    which tells transformers that a row does not contain several sequences.

    Args:
        inputs: as returned by `distribute`.
        totals: over all replicas; None for those of this batch.
        dtype: of the weights; fp64 if the model computes in fp64, else fp32.
        torch_device: device of weights, positions and masks.
    """
    input_ids, _, position_ids, attention_mask, _ = fields_of(inputs)
    assert input_ids is not None
    sequences, tokens = input_ids.shape
    targets, weights = _weights(inputs)
    totals = totals or _batch_total(targets, weights)
    weights = torch.zeros_like(weights) if totals.weight == 0 else weights / totals.divisor
    weights = weights.to(torch_device, dtype)
    assert sequences >= microbatches

    def parts(tensor: Tensor | None) -> Iterable[Tensor | None]:
        return repeat(None, microbatches) if tensor is None else tensor.tensor_split(microbatches)

    split = () if attention_mask is None else attention_mask.tensor_split(microbatches)
    needed = [position_ids is not None or not bool((mask == 1).all()) for mask in split]

    def masks(attention_mask: Tensor | None) -> Iterable[Tensor | None]:
        if not any(needed):
            return repeat(None, microbatches)
        return (mask if needs else None for mask, needs in zip(parts(attention_mask), needed, strict=True))

    device_mask = attention_mask.to(torch_device) if attention_mask is not None and any(needed) else None
    positions = None if position_ids is None else position_ids.to(torch_device)

    return Batch(
        microbatches=tuple(
            Microbatch(*fields)
            for fields in zip(
                input_ids.tensor_split(microbatches),
                (chunk.flatten() for chunk in targets.tensor_split(microbatches)),
                (chunk.flatten() for chunk in weights.tensor_split(microbatches)),
                parts(positions),
                masks(device_mask),
                zip(parts(position_ids), masks(attention_mask), strict=True),
                strict=True,
            )
        ),
        sequences=sequences,
        sequence_length=tokens,
        valid_tokens=totals.valid_tokens,
    )


def _targets(inputs: Inputs) -> Tensor:
    """Return [sequences, tokens]: the label of the next position, IGNORE_INDEX if there is none."""
    assert inputs.labels is not None
    targets = torch.full_like(inputs.labels, IGNORE_INDEX)
    targets[:, :-1] = inputs.labels[:, 1:]
    return targets


def _weights(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return targets and their unnormalised weights, both [sequences, tokens]. Weights are fp64, and 0 for ignored
    targets."""
    targets = _targets(inputs)
    weights = (targets != IGNORE_INDEX).to(torch.float64)
    if inputs.token_weights is not None:
        weights[:, :-1] *= inputs.token_weights[:, 1:].to(weights.device, torch.float64)
    return targets, weights
