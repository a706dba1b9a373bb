"""All bytes of one device: for its stages, its vocabulary layers, its parameters and the framework."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from evenpipe.errors import InputError
from evenpipe.vocabulary import LossOptions

from .bytes import StageBytes, StateBytes, VocabularyBytes
from .heads import Head, whole_head
from .model_bytes import ModelBytes
from .parameters import Held, padded_rows
from .programs import Planned
from .run import Run
from .states import ELEMENT_BYTES, state_bytes
from .vocabulary import VocabularyShape, batch_bytes, vocabulary_bytes

COPIES_NOTHING = ("full", "attention")
"""Checkpointing that does not keep the result of attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBytes:
    """Bytes of one device."""

    stages: Mapping[int, StageBytes]
    vocabulary: VocabularyBytes
    state: StateBytes
    fixed: int
    """Permanent: inputs, workspaces, placeholders."""

    @classmethod
    def of(cls, source: ModelBytes, plan: Planned, run: Run, device: int) -> DeviceBytes:
        """Raises InputError if a stage has no closed form and cannot be traced."""
        placement, parallelism = plan.program.placement, run.parallelism
        last_stage = placement.stages - 1
        split_backwards = plan.splits(device)
        stages: dict[int, StageBytes] = {}
        held, buffers = Held(), 0
        for stage in placement.stages_of(device):
            first, last = plan.bounds[stage]
            ends = (stage == 0, stage == last_stage)
            own = source.parameters.stage(first, last, parallelism.tp, is_first=ends[0], is_last=ends[1])
            held += own
            buffers += source.parameters.buffers(first, last)
            stages[stage] = _stage(source, run, (first, last), ends, own=own, split=split_backwards)
        rows = _rows(source, plan, run, device)
        of_vocabulary = source.parameters.vocabulary(
            *rows, one_matrix=source.description.tied and (run.sharded or rows[0] == rows[1])
        )
        state = state_bytes(
            held + of_vocabulary,
            run.dtypes,
            run.framework,
            zero=parallelism.zero,
            replicas=parallelism.replicas,
            optimizer=run.optimizer,
            offloaded=run.offloaded,
            foreach=run.foreach,
        )
        hidden = next(iter(stages.values())).input
        return cls(
            stages=stages,
            vocabulary=_vocabulary(source, plan, run, device, rows=rows, hidden=hidden),
            state=state,
            fixed=_fixed(plan, run, device, held=held, hidden=hidden) + buffers,
        )


def _stage(
    source: ModelBytes, run: Run, bounds: tuple[int, int], ends: tuple[bool, bool], *, own: Held, split: bool
) -> StageBytes:
    (first, last), parallelism = bounds, run.parallelism
    whole = parallelism.tp == parallelism.cp == 1
    if run.traced and not whole:
        raise InputError(f"traced: with tp = {parallelism.tp} and cp = {parallelism.cp}, expected 1 for both")
    if run.traced or (whole and not source.has_closed_form):
        return source.traced_stage(bounds, ends, run, split=split)
    found = source.closed_stage(bounds, ends, run)
    gradient = ELEMENT_BYTES[run.dtypes.gradients]
    found = replace(found, gradients=own.trained * gradient, input_gradients=own.unsplit * gradient)
    copies = _attention_copies(source, run, first, last)
    if copies:
        found = replace(found, stored=found.stored + copies, forward_peak=found.forward_peak + copies)
    return found


def _attention_copies(source: ModelBytes, run: Run, first: int, last: int) -> int:
    """Return the bytes of second copies of attention results, if the framework needs them in two layouts."""
    exchanged = run.parallelism.cp > 1 and run.parallelism.cp_exchange == "all-to-all"
    if not run.framework.attention_copies or not (run.microbatch_size > 1 or exchanged):
        return 0
    total = 0
    for shape, choice in zip(source.shapes[first:last], run.checkpointing[first:last], strict=True):
        if choice not in COPIES_NOTHING:
            total += run.tokens_here * shape.heads * shape.value_size * run.element // run.parallelism.tp
    return total


# --- vocabulary ------------------------------------------------------------------------------------------------------


def _rows(source: ModelBytes, plan: Planned, run: Run, device: int) -> tuple[int, int]:
    """Return the rows of the embedding and of the output layer on each GPU of a device."""
    tp = run.parallelism.tp
    rows = padded_rows(source.description.vocabulary_size, run.framework.vocabulary_multiple * tp)
    placement = plan.program.placement
    if run.sharded:
        part = -(-rows // (placement.devices * tp))  # as `vocabulary.shards.split` cuts them
        own = max(0, min(rows - device * tp * part, part))
        return own, own
    part = -(-rows // tp)
    return part * (device == placement.first_device), part * (device == placement.last_device)


def _vocabulary(
    source: ModelBytes, plan: Planned, run: Run, device: int, *, rows: tuple[int, int], hidden: int
) -> VocabularyBytes:
    description, placement = source.description, plan.program.placement
    multiple = run.framework.vocabulary_multiple * run.parallelism.tp
    shape = VocabularyShape(
        rows=padded_rows(description.vocabulary_size, multiple),
        hidden_size=description.hidden_size,
        sequences=run.microbatch_size,
        tokens=run.sequence // run.parallelism.cp,
        element=run.element,
        gradient_element=ELEMENT_BYTES[run.dtypes.gradients],
        bias=description.head_bias_name is not None,
        options=LossOptions(logit_scale=description.logit_scale, soft_cap=description.soft_cap),
        tied=description.tied,
    )
    found = vocabulary_bytes(
        run.vocabulary,
        device,
        placement,
        shape,
        kernels=run.kernels,
        machine=run.machine,
        tensor_parallel=run.parallelism.tp,
    )
    if run.sharded:
        return found
    if run.framework.placeholders and device == placement.first_device:
        found = replace(
            found, embedding_backward_peak=rows[0] * description.hidden_size * run.element
        )  # the gradient of all rows, before it is added to the sum
    if device == placement.last_device and run.kernels.loss != "evenpipe":
        head = Head(
            tokens=run.tokens_here,
            rows=rows[1],
            hidden_size=description.hidden_size,
            element=run.element,
            hidden=hidden,
            gathers=run.sequence_parallel,
        )
        found = whole_head(found, head, run.kernels.loss, run.framework)
    return found


def _fixed(plan: Planned, run: Run, device: int, *, held: Held, hidden: int) -> int:
    """Return the bytes that a device always holds, besides states."""
    framework, placement = run.framework, plan.program.placement
    shards = placement.devices if run.sharded else 1
    total = batch_bytes(run.tokens_here * plan.program.microbatches, machine=run.machine, shards=shards)
    if not run.on_cpu:
        total += framework.workspace
    if framework.placeholders:
        total += sum(size for _, size in held.products) * run.element
    if framework.holds_sent_gradient and device != placement.first_device:
        total += hidden
    return total
