"""The work of a device for its replicas within a step: gathers and frees parameters, and sums gradients.

The program says when: `UNSHARD`, `RESHARD`, `REDUCE_GRAD`. All replicas execute the same rows, so they issue these in
the same order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from evenpipe.communication.communicator import Communicator
from evenpipe.parallel import ReplicatedGradients, ShardedModule
from evenpipe.parallel.parameters import Matrix, ShardedMatrix
from evenpipe.runtime.device import HeldModel
from evenpipe.schedule import Pass, Program
from evenpipe.schedule.passes import GATHERING_KINDS, REDUCING_KINDS
from evenpipe.schedule.sharding import Part, part_of, parts_of_matrices


class Replicas:
    """The parameters of a device that replicas share, by part."""

    def __init__(self, held: HeldModel, program: Program, communicator: Communicator, *, is_first: bool) -> None:
        """
        Args:
            program: any that runs here: its placement and barriers say which part a matrix belongs to.
            communicator: of the processes that are this device in their pipelines.
            is_first: whether this is the first pipeline.
        """
        self._sharded: dict[Part, list[ShardedModule]] = defaultdict(list)
        self._replicated: ReplicatedGradients | None = None
        self._names: dict[Part, list[str]] = defaultdict(list)
        """Of the sums of replicated parameters."""
        vocabulary = list(_vocabulary(held, program))
        sharded = {stage: one for stage, one in held.by_stage.items() if isinstance(one, ShardedModule)}
        if sharded:
            for stage, module in sharded.items():
                self._sharded[stage].append(module)
            for part, _, matrices in vocabulary:
                for matrix in matrices:
                    assert isinstance(matrix, ShardedMatrix)
                    self._sharded[part].append(matrix.sharded)
            return
        parameters = {}
        for stage, there in held.parameters.items():
            parameters[f"stage {stage}"] = [parameter for _, parameter in there]
            self._names[stage].append(f"stage {stage}")
        for part, name, matrices in vocabulary:
            parameters[name] = [matrix.parameter for matrix in matrices]
            self._names[part].append(name)
        self._replicated = ReplicatedGradients(parameters, communicator, is_first=is_first)

    def follow_flags(self) -> None:
        """Between steps: other parameters are trainable now, the same on all replicas."""
        for module in self._modules():
            module.follow_flags()
        if self._replicated is not None:
            self._replicated.follow_flags()

    def begin(self, *, gradients: bool) -> None:
        """At the start of a walk; forget the remains of a failed one."""
        for module in self._modules():
            module.begin()
        if self._replicated is not None and gradients:
            self._replicated.begin()

    def run(self, item: Pass) -> None:
        """Run a pass of `SHARDING_KINDS`."""
        part = part_of(item)
        if item.kind in REDUCING_KINDS:
            for name in self._names[part]:
                assert self._replicated is not None
                self._replicated.reduce(name)
        for module in self._sharded[part]:
            if item.kind in GATHERING_KINDS:
                module.gather()
            elif item.kind in REDUCING_KINDS:
                module.reduce()
            else:
                module.free()

    def ready(self, part: Part) -> None:
        """Wait until a part that is being gathered is whole."""
        for module in self._sharded[part]:
            module.ready()

    def finish(self) -> None:
        """At the end of a walk: complete the sums, and put them in place."""
        for module in self._modules():
            module.finish()
        if self._replicated is not None:
            self._replicated.finish()

    def _modules(self) -> Iterator[ShardedModule]:
        return (module for modules in self._sharded.values() for module in modules)


def _vocabulary(held: HeldModel, program: Program) -> Iterator[tuple[Part, str, list[Matrix]]]:
    """Yield (part, name, matrices)."""
    embedding, head = held.embedding_matrix, list(held.head_matrices)
    one_matrix = embedding is not None and embedding in head
    parts = parts_of_matrices(program.placement, program.barriers, one_matrix=one_matrix)
    if embedding is not None and not one_matrix:
        yield parts[0], "embedding", [embedding]
    if head:
        yield parts[1], "vocabulary" if one_matrix else "output layer", head
