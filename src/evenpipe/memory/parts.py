"""The memory of a device's parameters and their gradients along its row, part by part.

gradients            from the first pass that adds to them, unless they always exist
whole parameters     from UNSHARD to RESHARD, if they are sharded; the first pass that uses them copies them piecewise
                     out of the buffer of the all-gather
sums over replicas   from REDUCE_GRAD, in place of the gradients
"""

from __future__ import annotations

from collections import defaultdict

from evenpipe.memory.allocations import EMBEDDING_PART, OUTPUT_PART, Allocation, Moments, PartAllocations, parameters_of
from evenpipe.schedule import Pass, Program
from evenpipe.schedule.sharding import ParameterUse, Part, RowSharding, part_of


class Parts:
    """The parameters during one walk. gradients_exist: whether gradients exist when the step begins."""

    def __init__(self, program: Program, device: int, moments: Moments, *, gradients_exist: bool) -> None:
        placement, row = program.placement, program.rows[device]
        self._moments = moments
        self._gradients_exist = gradients_exist
        self._made: set[Allocation] = set()
        self._sharding = RowSharding(placement, program.vocabulary, row)
        embedding, output = ParameterUse.of_row(placement, program.vocabulary, row).matrices
        self._allocations: dict[Part, list[PartAllocations]] = defaultdict(list)
        for stage in placement.stages_of(device):
            self._allocations[stage].append(parameters_of(stage))
        self._allocations[embedding].append(EMBEDDING_PART)
        self._allocations[output].append(OUTPUT_PART)

    def reach(self, item: Pass, position: int) -> None:
        """Begin the next pass of the row: wait for the parameters that it uses."""
        for part in self._sharding.awaits(item):
            for allocations in self._allocations[part]:
                self._moments.moment(allocations.gathering_peak)
        self._sharding.take(item, position)

    def gather(self, item: Pass) -> None:
        """Walk UNSHARD."""
        self._moments.hold(*(allocations.gathered for allocations in self._allocations[part_of(item)]))

    def free(self, item: Pass) -> None:
        """Walk RESHARD."""
        self._moments.drop(*(allocations.gathered for allocations in self._allocations[part_of(item)]))

    def reduce(self, item: Pass) -> None:
        """Walk REDUCE_GRAD."""
        for allocations in self._allocations[part_of(item)]:
            made = self._made.intersection(allocations.gradients)
            if made:
                self._moments.moment(allocations.reducing_peak)
                self._moments.drop(*made)
                self._moments.hold(allocations.reduced)

    def lacks(self, gradients: Allocation) -> bool:
        """Return whether a pass that adds to these gradients has to allocate them."""
        return not self._gradients_exist and gradients not in self._made

    def make(self, gradients: Allocation) -> None:
        """Allocate gradients, unless they exist."""
        if self.lacks(gradients):
            self._made.add(gradients)
            self._moments.hold(gradients)
