"""The work of a device for its replicas within a step, and before or after which pass of its row it happens.

    replicated   reduce: sums over replicas begin after the last pass that adds to a part's gradients
    sharded      gather at the start of the step; ready: before the first pass that uses a part; reduce as above

The parts of a device are its stages and its rows of the vocabulary. All replicas execute the same rows, so they reach
these positions in the same order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from evenpipe.communication.communicator import Communicator
from evenpipe.parallel import ReplicatedGradients, ShardedModule
from evenpipe.parallel.parameters import Matrix, ShardedMatrix
from evenpipe.recipe.layout import Layout
from evenpipe.runtime.device import HeldModel
from evenpipe.schedule import Kind, Pass, Program, parts_of
from evenpipe.schedule.passes import SHARDING_KINDS

Actions = Mapping[Pass, list[Callable[[], None]]]

EMBEDDING_KINDS = frozenset({Kind.E, Kind.G})
OUTPUT_KINDS = frozenset({Kind.S, Kind.C, Kind.T})


@dataclass(slots=True)
class _Part:
    """Parameters that are completed, and used, together."""

    name: str
    uses: Callable[[Pass], bool]
    """Returns whether a pass reads these parameters or adds to their gradients."""
    ready: Callable[[], None] | None
    reduce: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Places:
    """Positions in the row of a program."""

    program: Program
    before: Actions
    after: Actions


class Replicas:
    """Sums gradients over replicas, and gathers sharded parameters, at their positions in the row of a program."""

    def __init__(
        self, held: HeldModel, layout: Layout, device: int, communicator: Communicator, *, is_first: bool
    ) -> None:
        """
        Args:
            communicator: of the processes that are this device in their pipelines.
            is_first: whether this is the first pipeline.
        """
        self._device = device
        self._held = held
        self._sharded: list[ShardedModule] = []
        self._replicated: ReplicatedGradients | None = None
        vocabulary = list(_vocabulary_parts(held, layout))
        if held.sharded:
            self._parts = [self._sharded_stage(stage, module) for stage, module in held.sharded.items()]
            for name, uses, matrices in vocabulary:
                self._parts += [self._sharded_matrix(name, uses, matrix) for matrix in matrices]
        else:
            stages = {f"stage {stage}": [one for _, one in held.parameters[stage]] for stage in held.parameters}
            parameters = {name: [matrix.parameter for matrix in matrices] for name, _, matrices in vocabulary}
            sums = self._replicated = ReplicatedGradients(stages | parameters, communicator, is_first=is_first)

            def part(name: str, uses: Callable[[Pass], bool]) -> _Part:
                return _Part(name, uses, None, lambda: sums.reduce(name))

            self._parts = [part(f"stage {stage}", _of_stage(stage)) for stage in held.parameters]
            self._parts += [part(name, uses) for name, uses, _ in vocabulary]
        self._places: _Places | None = None

    def _sharded_stage(self, stage: int, module: ShardedModule) -> _Part:
        self._sharded.append(module)
        return _Part(f"stage {stage}", _of_stage(stage), module.ready, module.reduce)

    def _sharded_matrix(self, name: str, uses: Callable[[Pass], bool], matrix: Matrix) -> _Part:
        assert isinstance(matrix, ShardedMatrix)
        self._sharded.append(matrix.sharded)
        return _Part(name, uses, matrix.sharded.ready, matrix.sharded.reduce)

    def follow_flags(self) -> None:
        """Between steps: other parameters are trainable now, the same on all replicas."""
        for module in self._sharded:
            module.follow_flags()
        if self._replicated is not None:
            self._replicated.follow_flags()

    def begin(self, program: Program) -> tuple[Actions, Actions]:
        """At the start of a walk: return the actions before passes of the row, and after them."""
        for module in self._sharded:
            module.gather()
        if self._replicated is not None and not program.forward_only:
            self._replicated.begin()
        if self._places is None or self._places.program is not program:
            self._places = self._find(program)
        return self._places.before, self._places.after

    def finish(self) -> None:
        """At the end of a walk: complete the sums and put them in place, and free whole sharded parameters."""
        if self._replicated is not None:
            self._replicated.finish()
        for module in self._sharded:
            module.free()
            module.finish()

    def _find(self, program: Program) -> _Places:
        row = [item for item in program.rows[self._device] if isinstance(item, Pass)]
        before: dict[Pass, list[Callable[[], None]]] = defaultdict(list)
        after: dict[Pass, list[Callable[[], None]]] = defaultdict(list)
        for part in self._parts:
            uses = [item for item in row if any(part.uses(one) for one in parts_of(item))]
            if uses and part.ready is not None:
                before[uses[0]].append(part.ready)
            if uses and not program.forward_only:
                after[uses[-1]].append(part.reduce)
        return _Places(program, dict(before), dict(after))


def _of_stage(*stages: int) -> Callable[[Pass], bool]:
    return lambda item: item.stage in stages and item.kind not in SHARDING_KINDS


def _of_kinds(kinds: frozenset[Kind]) -> Callable[[Pass], bool]:
    return lambda item: item.kind in kinds


def _vocabulary_parts(held: HeldModel, layout: Layout) -> Iterator[tuple[str, Callable[[Pass], bool], list[Matrix]]]:
    """Yield (name, the passes that use it, matrices). Tied weights that are held once are one part, with the passes of
    both."""
    last = layout.program.placement.last_stage
    by_embedding = _of_kinds(EMBEDDING_KINDS) if layout.sharded else _of_stage(0)
    by_output = _of_kinds(OUTPUT_KINDS) if layout.sharded else _of_stage(last)
    embedding, head = held.embedding_matrix, list(held.head_matrices)
    if embedding is not None and embedding in head:
        yield "vocabulary", lambda item: by_embedding(item) or by_output(item), head
        return
    if embedding is not None:
        yield "embedding", by_embedding, [embedding]
    if head:
        yield "output layer", by_output, head
