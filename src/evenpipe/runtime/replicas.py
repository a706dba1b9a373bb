"""What a device does in a step with the other processes that hold its parameters. With replicas it gathers and frees
parameters and sums gradients. At the end it sums gradients with its tensor ranks and with the other device that has a
copy of tied weights.

The program says when to communicate with replicas: `UNSHARD`, `RESHARD`, `REDUCE_GRAD`. All replicas execute the same
rows, so they issue these passes in the same order.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from evenpipe.parallel import GradientReducer, ShardedModule
from evenpipe.parallel.grid import COPIES
from evenpipe.parallel.groups import Groups
from evenpipe.parallel.parameters import Matrix, ShardedMatrix
from evenpipe.runtime.device import HeldModel
from evenpipe.schedule import Pass, Program
from evenpipe.schedule.passes import GATHERING_KINDS, REDUCING_KINDS
from evenpipe.schedule.sharding import Part, part_of, parts_of_matrices


class Replicas:
    """The parameters of a device that other processes hold as well."""

    def __init__(self, held: HeldModel, program: Program, groups: Groups) -> None:
        """program: any program that runs here; its placement and vocabulary mode say which part a matrix belongs to."""
        self._sharded: dict[Part, list[ShardedModule]] = defaultdict(list)
        self._sums: dict[Part, list[GradientReducer]] = defaultdict(list)
        """Sums of the gradients of replicated parameters."""
        self._at_the_end: list[GradientReducer] = []
        placed = {shard.tensor: shard for shard in held.shards.values()}
        for held_part in held.parts:
            communicator = groups.expert_replicas if held_part.are_experts else groups.replicas
            if isinstance(held_part.parameters, ShardedModule):
                self._sharded[held_part.stage].append(held_part.parameters)
            elif communicator is not None:
                parameters = [placed[parameter] for _, parameter in held_part.parameters]
                sums = GradientReducer(parameters, communicator, COPIES, f"gradients of {held_part.name}")
                self._sums[held_part.stage].append(sums)
        for part, name, matrices in _vocabulary(held, program):
            sharded = [matrix.sharded for matrix in matrices if isinstance(matrix, ShardedMatrix)]
            self._sharded[part] += sharded
            if not sharded and groups.replicas is not None:
                parameters = [placed[matrix.parameter] for matrix in matrices]
                self._sums[part].append(GradientReducer(parameters, groups.replicas, COPIES, f"gradients of {name}"))
        if groups.shared is not None:
            label = "gradients that tensor ranks share"  # together: there are few, and most are small
            self._at_the_end.append(GradientReducer(held.shared, groups.shared, ("tp",), label, in_place=math.inf))
        if held.tied_copy is not None and groups.tied is not None:
            copy = [placed[held.tied_copy.parameter]]
            self._at_the_end.append(GradientReducer(copy, groups.tied, ("pp",), "tied gradients", set_aside=True))
        self._gradients = False

    def follow_flags(self) -> None:
        """Apply changed `requires_grad` flags, between steps. They are the same on all replicas."""
        for module in self._modules():
            module.follow_flags()

    def begin(self, *, gradients: bool) -> None:
        """Start a walk; discard what a failed one has left."""
        self._gradients = gradients
        for module in self._modules():
            module.begin()
        if gradients:
            for sums in reversed([*self._replicated(), *self._at_the_end]):  # the sum that ends last begins first
                sums.begin()

    def run(self, item: Pass) -> None:
        """Run a pass of `SHARDING_KINDS`."""
        part = part_of(item)
        if item.kind in REDUCING_KINDS:
            for sums in self._sums[part]:
                sums.reduce()
        for module in self._sharded[part]:
            if item.kind in GATHERING_KINDS:
                module.gather()
            elif item.kind in REDUCING_KINDS:
                module.reduce()
            else:
                module.free()

    def ready(self, part: Part) -> None:
        """Wait until the all-gather of a part is complete."""
        for module in self._sharded[part]:
            module.ready()

    def finish(self) -> None:
        """End a walk: complete the sums, and store them as gradients."""
        for module in self._modules():
            module.finish()
        for sums in self._replicated():
            sums.finish()
        for sums in self._at_the_end if self._gradients else ():
            sums.reduce()
            sums.finish()

    def _modules(self) -> Iterator[ShardedModule]:
        return (module for modules in self._sharded.values() for module in modules)

    def _replicated(self) -> Iterator[GradientReducer]:
        return (sums for of_part in self._sums.values() for sums in of_part)


def _vocabulary(held: HeldModel, program: Program) -> Iterator[tuple[Part, str, list[Matrix]]]:
    """Yield (part, name, matrices)."""
    embedding, head = held.embedding_matrix, list(held.head_matrices)
    one_matrix = embedding is not None and embedding in head
    parts = parts_of_matrices(program.placement, program.vocabulary, one_matrix=one_matrix)
    if embedding is not None and not one_matrix:
        yield parts[0], "embedding", [embedding]
    if head:
        yield parts[1], "vocabulary" if one_matrix else "output layer", head
