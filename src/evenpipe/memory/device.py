"""All bytes of a device: for its stages, its vocabulary layers, its parameters and the framework."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from evenpipe.recipe.loss import loss_of_model
from evenpipe.schedule import Item, Kind
from evenpipe.schedule.passes import parts_in
from evenpipe.vocabulary import split

from .bytes import DeviceMemory, PartBytes, StageBytes, StateBytes, VocabularyBytes
from .model_bytes import ModelBytes
from .parameters import Held, Of
from .pieces import Piece
from .programs import Planned
from .settings import Settings
from .states import ELEMENT_BYTES, TORCH_DTYPES, Dtypes, both_parts, both_states, part_bytes, state_bytes
from .vocabulary import VocabularyShape, batch_bytes, vocabulary_bytes


class StageHeld(NamedTuple):
    """Parameters of stages, without vocabulary matrices."""

    non_experts: Held
    """All parameters; without experts if the members of a group share them."""
    experts: Held
    """One member's experts, of which only the same member of other groups has replicas."""


class SliceBytes(NamedTuple):
    """Bytes of a slice of every sequence of a microbatch, or of whole sequences if they are not cut."""

    stages: Mapping[int, StageBytes]
    vocabulary: VocabularyBytes
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBytes:
    """Bytes of a device."""

    slices: tuple[SliceBytes, ...]
    state: StateBytes
    fixed: int
    """Permanent: inputs, workspaces, placeholders."""

    @classmethod
    def of(cls, source: ModelBytes, plan: Planned, settings: Settings, device: int) -> DeviceBytes:
        """Raises InputError if a stage cannot be traced."""
        placement = plan.program.placement
        held, buffers, by_stage = StageHeld(Held(), Held()), 0, {}
        for stage in placement.stages_of(device):
            stage_held = by_stage[stage] = _held(source, plan, settings, stage)
            held = StageHeld(held.non_experts + stage_held.non_experts, held.experts + stage_held.experts)
            buffers += source.parameters.buffers(*plan.bounds[stage])
        rows = _rows(source, plan, settings, device)
        one_matrix = source.description.tied and (settings.sharded or rows[0] == rows[1])
        embedding = Held() if one_matrix else source.parameters.vocabulary(rows[0], 0, one_matrix=True)
        output = source.parameters.vocabulary(0, rows[1], one_matrix=False)
        states = (
            state_bytes(
                parameters,
                settings.dtypes,
                settings.framework,
                zero=settings.parallelism.zero,
                replicas=replicas,
                casts=settings.casts,
                optimizer=settings.optimizer,
                offloaded=settings.offloaded,
                foreach=settings.foreach,
            )
            for parameters, replicas in zip(
                (held.non_experts + embedding + output, held.experts), _replicas(settings), strict=True
            )
        )
        pieces, slices = settings.pieces(source.description, source.row_work), []
        for piece in pieces:
            stages = {
                stage: _with_parameters(_stage(source, plan, settings, stage, piece), _part(stage_held, settings))
                for stage, stage_held in by_stage.items()
            }
            hidden = next(iter(stages.values())).output
            shape = _vocabulary_shape(source, settings, piece)
            vocabulary = _vocabulary(source, plan, settings, device, shape=shape, rows=rows, hidden=hidden)
            vocabulary = replace(
                vocabulary,
                embedding=replace(vocabulary.embedding, parameters=_part(StageHeld(embedding, Held()), settings)),
                parameters=_part(StageHeld(output, Held()), settings),
            )
            slices.append(SliceBytes(stages, vocabulary, shape.sequences * shape.tokens))
        hidden = next(iter(slices[0].stages.values())).output
        return cls(
            slices=tuple(slices),
            state=both_states(*states),
            fixed=_fixed(plan, settings, device, held=held.non_experts + held.experts, hidden=hidden, pieces=pieces)
            + buffers,
        )

    @property
    def gathered(self) -> int:
        """Bytes of the keys and values that a layer gathers from context ranks, at most."""
        return max(stage.peaks.gathered for slice_bytes in self.slices for stage in slice_bytes.stages.values())

    def memory(self, plan: Planned, settings: Settings, device: int, *, curve: bool = False) -> DeviceMemory:
        """Return the peak of the device over a step. curve: as for `Replay.memory`."""
        # In this unit, microbatches of other sizes share a replay.
        unit = math.gcd(*(slice_bytes.tokens for slice_bytes in self.slices))
        replay = plan.replay(
            device,
            settings.framework,
            places_rows=settings.gathers_blocks,
            slice_tokens=tuple(slice_bytes.tokens // unit for slice_bytes in self.slices),
        )
        first, *later = ((slice_bytes.stages, slice_bytes.vocabulary) for slice_bytes in self.slices)
        return replay.memory(*first, self.state, later=later, batch=self.fixed, curve=curve)

    def host(self, row: Sequence[Item | None]) -> int:
        """Return the peak bytes in slots of host memory over the device's row, without rounding to pages: activations,
        from O until they are copied back (L)."""
        # The forward of a microbatch that has R keeps only its input.
        passes = list(parts_in(row))
        recomputed = {(pass_.stage, pass_.microbatch, pass_.slice) for pass_ in passes if pass_.kind is Kind.R}
        held = highest = 0
        for pass_ in passes:
            if pass_.kind in (Kind.O, Kind.L):
                assert pass_.stage is not None
                stage = self.slices[pass_.slice].stages[pass_.stage]
                size = stage.input if (pass_.stage, pass_.microbatch, pass_.slice) in recomputed else stage.copied
                held += size if pass_.kind is Kind.O else -size
                highest = max(highest, held)
        return highest


def copied_bytes(source: ModelBytes, plan: Planned, settings: Settings) -> tuple[int, ...]:
    """Return, by stage, the bytes of copying one microbatch's activations to the host, or back. Raises InputError like
    `DeviceBytes.of`."""
    pieces = settings.pieces(source.description, source.row_work)
    return tuple(
        sum(_stage(source, plan, settings, stage, piece).copied for piece in pieces)
        for stage in range(plan.program.placement.stages)
    )


def _with_parameters(stage: StageBytes, parameters: PartBytes) -> StageBytes:
    """Return a stage with the parameters that it has on this rank."""
    return replace(stage, parameters=replace(parameters, input_gradients=stage.parameters.input_gradients))


def _stage(source: ModelBytes, plan: Planned, settings: Settings, stage: int, piece: Piece | None) -> StageBytes:
    """Return the bytes of a stage, without those of its parameters."""
    placement = plan.program.placement
    bounds, kinds = plan.bounds[stage], plan.kinds[placement.stage_device[stage]]
    ends = (stage == 0, stage == placement.last_stage)
    return _with_gradients(source.stage(bounds, ends, settings, kinds, piece), settings.dtypes)


def _with_gradients(stage: StageBytes, dtypes: Dtypes) -> StageBytes:
    """Return a stage with gradients in their dtype: the trace has them in that of the masters."""
    if dtypes.gradients == dtypes.masters:
        return stage
    input_gradients = (
        stage.parameters.input_gradients * ELEMENT_BYTES[dtypes.gradients] // ELEMENT_BYTES[dtypes.masters]
    )
    recomputed = None if stage.recomputed is None else _with_gradients(stage.recomputed, dtypes)
    return replace(
        stage,
        parameters=replace(stage.parameters, input_gradients=input_gradients),
        peaks=replace(stage.peaks, first_backward=None, first_input=None, first_weight=None),
        recomputed=recomputed,
    )


def _held(source: ModelBytes, plan: Planned, settings: Settings, stage: int) -> StageHeld:
    parallelism, last_stage = settings.parallelism, plan.program.placement.last_stage

    def held(of: Of) -> Held:
        return source.parameters.stage(
            *plan.bounds[stage],
            parallelism.tp,
            is_first=stage == 0,
            is_last=stage == last_stage,
            cut=source.cut(settings),
            members=parallelism.ep,
            of=of,
        )

    return StageHeld(held("all"), Held()) if parallelism.ep == 1 else StageHeld(held("others"), held("experts"))


def _replicas(settings: Settings) -> tuple[int, int]:
    """Return the number of replicas over which each field of `StageHeld` is sharded, or its gradients summed."""
    parallelism = settings.parallelism
    return parallelism.shards, parallelism.shards // parallelism.ep


def _part(held: StageHeld, settings: Settings) -> PartBytes:
    zero = settings.parallelism.zero
    parts = (
        part_bytes(parameters, settings.dtypes, settings.framework, zero=zero, replicas=replicas)
        for parameters, replicas in zip(held, _replicas(settings), strict=True)
    )
    return both_parts(*parts)


# --- vocabulary ------------------------------------------------------------------------------------------------------


def _padded_rows(source: ModelBytes, settings: Settings) -> int:
    multiple = settings.framework.vocabulary_multiple * (1 if settings.gathers_blocks else settings.parallelism.tp)
    return -(-source.description.vocabulary_size // multiple) * multiple


def _rows(source: ModelBytes, plan: Planned, settings: Settings, device: int) -> tuple[int, int]:
    """Return the rows of the embedding and of the output layer on each GPU of a device."""
    tp, placement = settings.parallelism.tp, plan.program.placement
    rows = _padded_rows(source, settings)
    if settings.sharded:
        local_rows = split(rows, placement.devices * tp)[device * tp].rows
        return local_rows, local_rows
    local_rows = split(rows, tp)[0].rows
    return local_rows * (device == placement.first_device), local_rows * (device == placement.last_device)


def _vocabulary_shape(source: ModelBytes, settings: Settings, piece: Piece | None) -> VocabularyShape:
    """All tokens of a piece have labels, except the last token of a sequence, which the first rank holds."""
    description, sequences = source.description, settings.microbatch_size
    tokens = settings.sequence // settings.parallelism.cp if piece is None else piece.tokens
    return VocabularyShape(
        rows=_padded_rows(source, settings),
        hidden_size=description.hidden_size,
        sequences=sequences,
        tokens=tokens,
        labelled=None if piece is None or piece.is_last else sequences * tokens,
        dtype=TORCH_DTYPES[settings.dtypes.compute],
        gradient_element=ELEMENT_BYTES[settings.dtypes.gradients],
        bias=description.head_bias_name is not None,
        options=loss_of_model(settings.loss, description),
    )


def _vocabulary(
    source: ModelBytes,
    plan: Planned,
    settings: Settings,
    device: int,
    *,
    shape: VocabularyShape,
    rows: tuple[int, int],
    hidden: int,
) -> VocabularyBytes:
    description, placement, parallelism = source.description, plan.program.placement, settings.parallelism
    vocabulary = vocabulary_bytes(
        settings.recipe.vocabulary,
        device,
        placement,
        shape,
        loss=settings.kernels.loss,
        stream=hidden,
        gathers=parallelism.sequence_parallel and parallelism.tp > 1 and settings.framework.gathers == "products",
        machine=settings.machine,
        tensor_parallel=parallelism.tp,
        own_rows=settings.gathers_blocks,
    )
    if settings.framework.placeholders and not settings.sharded and device == placement.first_device:
        # The gradient of all rows, before it is added to the sum.
        peak = rows[0] * description.hidden_size * settings.element
        vocabulary = replace(vocabulary, embedding=replace(vocabulary.embedding, backward_peak=peak))
    return vocabulary


def _fixed(
    plan: Planned,
    settings: Settings,
    device: int,
    *,
    held: Held,
    hidden: int,
    pieces: Sequence[Piece | None],
) -> int:
    """Return the bytes that a device always holds, besides parameters, gradients and optimizer state."""
    framework, placement = settings.framework, plan.program.placement
    shards = placement.devices if settings.sharded else 1
    if settings.gathers_blocks and (settings.sharded or device == placement.first_device):
        shards *= settings.parallelism.tp
    tokens, microbatches = settings.tokens_here, plan.program.microbatches
    total = batch_bytes(tokens * microbatches, machine=settings.machine, shards=shards)
    for piece in pieces:
        total += 0 if piece is None else 8 * piece.known_positions * microbatches
    if (
        pieces[0] is not None and settings.on_cpu
    ):  # ids and labels of whole sequences, besides ids and targets of pieces
        total += 8 * (2 * settings.parallelism.cp - 1) * tokens * microbatches
    if not settings.on_cpu:
        total += framework.workspace
    if framework.placeholders:
        total += sum(size for _, size in held.products) * settings.element
    if framework.holds_transferred and device != placement.first_device:
        total += hidden
    return total
