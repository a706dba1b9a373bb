"""Which parameters each pass uses, if replicas shard them. A *part* is a group of parameters that a device gathers and
reduces together.

A part is a stage, the rows of the embedding (E), or the rows of the output layer (S). If the embedding and the output
layer are one matrix on this device, S covers both:

    stage s   used by F, B, I, W and R of that stage. Unsharded vocabulary layers belong to the first and last stages
    E         used by E and G
    S         used by S, C and T; if the matrix is shared, also by E and G, or, if it is unsharded, by all passes of the
              first and last stages

Gathering and reducing start with an item of the row (`UNSHARD`, `REDUCE_GRAD`) and overlap with other passes. The first
pass that uses a gathered part waits for it; the end of the step waits for the reductions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TypeGuard

from .faults import Fault, neighbours
from .passes import (
    FREEING_KINDS,
    GATHERING_KINDS,
    OFFLOAD_KINDS,
    REDUCING_KINDS,
    SHAPES,
    SHARDING_KINDS,
    STAGE_KINDS,
    VOCABULARY_KINDS,
    Item,
    Kind,
    Pass,
    Rows,
    parts_of,
)
from .placement import Placement
from .vocabulary_mode import VocabularyMode

Part = int | Kind
"""A stage, or `Kind.E` or `Kind.S` for parameters of the vocabulary layers."""

_OF_VOCABULARY = {
    Kind.UNSHARD: {Kind.E: Kind.UNSHARD_E, Kind.S: Kind.UNSHARD_S},
    Kind.RESHARD: {Kind.E: Kind.RESHARD_E, Kind.S: Kind.RESHARD_S},
    Kind.REDUCE_GRAD: {Kind.E: Kind.REDUCE_GRAD_E, Kind.S: Kind.REDUCE_GRAD_S},
}
_PART = {kind: group for kinds in _OF_VOCABULARY.values() for group, kind in kinds.items()}
_USING = (STAGE_KINDS - OFFLOAD_KINDS) | VOCABULARY_KINDS


def sharding_pass(kind: Kind, group: Part) -> Pass:
    """The pass that gathers (`Kind.UNSHARD`), frees (`RESHARD`) or reduces (`REDUCE_GRAD`) a part."""
    return Pass(_OF_VOCABULARY[kind][group]) if isinstance(group, Kind) else Pass(kind, group)


def part_of(item: Pass) -> Part:
    """The part that a pass of `SHARDING_KINDS` gathers, frees or reduces."""
    if item.stage is not None:
        return item.stage
    return _PART[item.kind]


class ParameterUse:
    """The passes of a device that use each part.

    Args:
        groups: the parts of the vocabulary layers that the device has.

    Attributes:
        matrices: as `parts_of_matrices`.
    """

    def __init__(self, placement: Placement, mode: VocabularyMode, groups: Collection[Part]) -> None:
        one_matrix = Kind.S in groups and Kind.E not in groups
        self.matrices = embedding, output = parts_of_matrices(placement, mode, one_matrix=one_matrix)
        self._ends = (placement.first_stage, placement.last_stage) if one_matrix and not mode.sharded else ()
        group_of = {Kind.E: embedding, Kind.G: embedding, Kind.S: output, Kind.C: output, Kind.T: output}
        self._of_vocabulary = {kind: (group,) for kind, group in group_of.items() if group in groups}

    @classmethod
    def of_row(cls, placement: Placement, mode: VocabularyMode, row: Iterable[Item | None]) -> ParameterUse:
        """The users in a row, with the parts named by its sharding passes."""
        kinds = {item.kind for item in row if item is not None}
        groups = {group for kind, group in _PART.items() if kind in kinds}
        return cls(placement, mode, groups | {Kind.S} if mode.sharded else groups)

    def parts(self, item: Pass) -> tuple[Part, ...]:
        """The parts that a pass reads or adds gradients to."""
        if item.parts:
            return tuple(dict.fromkeys(group for component in item.parts for group in self.parts(component)))
        if item.kind not in _USING:
            return ()
        if item.stage is None:
            return self._of_vocabulary.get(item.kind, ())
        return (item.stage, Kind.S) if item.stage in self._ends else (item.stage,)

    def added(self, item: Pass) -> set[Part]:
        """The parts whose gradients a pass adds to."""
        return {
            group for component in parts_of(item) if component.kind in ADDING_KINDS for group in self.parts(component)
        }


def parts_of_matrices(placement: Placement, mode: VocabularyMode, *, one_matrix: bool) -> tuple[Part, Part]:
    """The parts that the embedding rows and the output layer rows belong to, on a device that has them.

    one_matrix: whether both are the same rows of one matrix on this device.
    """
    if one_matrix:
        return Kind.S, Kind.S
    return (Kind.E, Kind.S) if mode.sharded else (placement.first_stage, placement.last_stage)


def parts_of_device(placement: Placement, mode: VocabularyMode, device: int, *, tied: bool) -> tuple[Part, ...]:
    """The parts of a device.

    tied: whether the embedding and the output layer share their matrix.
    """
    stages = placement.stages_of(device)
    both_ends = {placement.first_stage, placement.last_stage} <= {*stages}
    matrices = parts_of_matrices(placement, mode, one_matrix=tied and (mode.sharded or both_ends))
    return tuple(dict.fromkeys((*stages, *(group for group in matrices if isinstance(group, Kind)))))


def check_sharding(placement: Placement, mode: VocabularyMode, rows: Rows) -> Iterator[Fault]:
    """The faults of sharding passes: a part is used while it is not gathered, is gathered twice, is freed while it
    is not gathered, or is reduced before its last gradient, twice, or not at all although others are."""
    sums = any(item is not None and item.kind in REDUCING_KINDS for row in rows for item in row)
    for device, row in enumerate(rows):
        if not sums and not any(item is not None and item.kind in SHARDING_KINDS for item in row):
            continue
        state = RowSharding(placement, mode, row)
        for position, item in enumerate(row):
            for message in state.take(item, position) if isinstance(item, Pass) else ():
                yield Fault(device, position, message, neighbours(rows, device, position))
        for group in sorted(state.used - state.summed.keys(), key=str) if sums else ():
            yield Fault(device, None, f"{sharding_pass(Kind.REDUCE_GRAD, group)} is missing, but others are summed")


class RowSharding:
    """The state of the parts of a device at a position of its row.

    used: parts that earlier passes have used.
    awaited: parts that are being gathered and have not been used yet.
    summed: parts whose gradients have been reduced, and the position where.
    """

    def __init__(self, placement: Placement, mode: VocabularyMode, row: Sequence[Item | None]) -> None:
        self._users = ParameterUse.of_row(placement, mode, row)
        self._sharded = {part_of(item) for item in row if _is_sharding(item) and item.kind in GATHERING_KINDS}
        self._gathered: set[Part] = set()
        self.used: set[Part] = set()
        self.awaited: set[Part] = set()
        self.summed: dict[Part, int] = {}

    def awaits(self, item: Pass) -> tuple[Part, ...]:
        """The parts that the next pass must wait for."""
        return tuple(group for group in self._users.parts(item) if group in self.awaited)

    def take(self, item: Pass, position: int) -> list[str]:
        """Advance past the next pass; return its faults."""
        groups = self._users.parts(item)
        self.used.update(groups)
        self.awaited.difference_update(groups)
        messages = []
        for group in groups:
            if group in self._sharded and group not in self._gathered:
                messages.append(
                    f"{item} needs {sharding_pass(Kind.UNSHARD, group)} before it, and no RESHARD in between"
                )
            if group in self.summed and group in self._users.added(item):
                summed = f"{sharding_pass(Kind.REDUCE_GRAD, group)} at position {self.summed[group]}"
                messages.append(f"{item} adds to gradients that are summed before it, by {summed}")
        if not _is_sharding(item):
            return messages
        group = part_of(item)
        if item.kind in GATHERING_KINDS:
            if group in self._gathered:
                messages.append(f"{item} gathers what is gathered already")
            self._gathered.add(group)
            self.awaited.add(group)
        elif item.kind in FREEING_KINDS:
            if group not in self._gathered:
                messages.append(f"{item} frees what is not gathered")
            self._gathered.discard(group)
            self.awaited.discard(group)
        else:
            if group in self.summed:
                messages.append(f"{item} is already at position {self.summed[group]}")
            self.summed.setdefault(group, position)
        return messages


def _is_sharding(item: Item | None) -> TypeGuard[Pass]:
    return isinstance(item, Pass) and item.kind in SHARDING_KINDS and (item.stage is not None) == SHAPES[item.kind][0]


ADDING_KINDS = frozenset({Kind.B, Kind.I, Kind.W, Kind.T, Kind.G})
"""Kinds that add to gradients of parameters. I is included: layers whose backward cannot be split add theirs there."""
