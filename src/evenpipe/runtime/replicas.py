"""The work of a device for its replicas within a step: gathers and frees parameters, and sums gradients.

The program says when: `UNSHARD`, `RESHARD`, `REDUCE_GRAD`. All replicas execute the same rows, so they issue these in
the same order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from torch import nn

from evenpipe.parallel import Grid, ReplicatedGradients, ShardedModule
from evenpipe.parallel.grid import COPIES, EXPERT_COPIES
from evenpipe.parallel.groups import Groups
from evenpipe.parallel.parameters import Matrix, ShardedMatrix
from evenpipe.runtime.device import HeldModel
from evenpipe.schedule import Pass, Program
from evenpipe.schedule.passes import GATHERING_KINDS, REDUCING_KINDS
from evenpipe.schedule.sharding import Part, part_of, parts_of_matrices


class Replicas:
    """The parameters of a device that replicas share, by part."""

    def __init__(self, held: HeldModel, program: Program, grid: Grid, groups: Groups) -> None:
        """program: any that runs here: its placement and vocabulary mode say which part a matrix belongs to."""
        self._sharded: dict[Part, list[ShardedModule]] = defaultdict(list)
        self._sums: dict[Part, list[tuple[ReplicatedGradients, str]]] = defaultdict(list)
        """Of replicated parameters."""
        dense: dict[tuple[Part, str], list[nn.Parameter]] = {}
        experts: dict[tuple[Part, str], list[nn.Parameter]] = {}
        for one in held.parts:
            if isinstance(one.parameters, ShardedModule):
                self._sharded[one.stage].append(one.parameters)
            else:
                parts = experts if one.are_experts else dense
                parts[one.stage, one.name] = [parameter for _, parameter in one.parameters]
        for part, name, matrices in _vocabulary(held, program):
            sharded = [matrix.sharded for matrix in matrices if isinstance(matrix, ShardedMatrix)]
            self._sharded[part] += sharded
            if not sharded:
                dense[part, name] = [matrix.parameter for matrix in matrices]
        self._replicated: list[ReplicatedGradients] = []
        for parts, sums, copies in ((dense, groups.replicas, COPIES), (experts, groups.expert_replicas, EXPERT_COPIES)):
            if sums is None or not parts:
                continue
            is_first = not any(map(grid.coordinate, copies))
            found = ReplicatedGradients({name: held for (_, name), held in parts.items()}, sums, is_first=is_first)
            self._replicated.append(found)
            for part, name in parts:
                self._sums[part].append((found, name))

    def follow_flags(self) -> None:
        """Between steps: other parameters are trainable now, the same on all replicas."""
        for module in self._modules():
            module.follow_flags()
        for sums in self._replicated:
            sums.follow_flags()

    def begin(self, *, gradients: bool) -> None:
        """At the start of a walk; forget the remains of a failed one."""
        for module in self._modules():
            module.begin()
        for sums in self._replicated if gradients else ():
            sums.begin()

    def run(self, item: Pass) -> None:
        """Run a pass of `SHARDING_KINDS`."""
        part = part_of(item)
        if item.kind in REDUCING_KINDS:
            for sums, name in self._sums[part]:
                sums.reduce(name)
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
        for sums in self._replicated:
            sums.finish()

    def _modules(self) -> Iterator[ShardedModule]:
        return (module for modules in self._sharded.values() for module in modules)


def _vocabulary(held: HeldModel, program: Program) -> Iterator[tuple[Part, str, list[Matrix]]]:
    """Yield (part, name, matrices)."""
    embedding, head = held.embedding_matrix, list(held.head_matrices)
    one_matrix = embedding is not None and embedding in head
    parts = parts_of_matrices(program.placement, program.vocabulary, one_matrix=one_matrix)
    if embedding is not None and not one_matrix:
        yield parts[0], "embedding", [embedding]
    if head:
        yield parts[1], "vocabulary" if one_matrix else "output layer", head
