"""The passes and transfers of a microbatch with their times, and the longest paths between them.

All microbatches of a step have the same passes, so lower bounds need only this small graph.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter

from evenpipe.errors import InputError
from evenpipe.schedule import Costs, Kind, Placement, Rules, VocabularyMode
from evenpipe.schedule.passes import ROLE
from evenpipe.schedule.rules import PassGroup

UNREACHED = -math.inf


Name = tuple[int, Kind, int | None]
"""Device, kind (B for I) and stage."""


@dataclass(slots=True)
class Microbatch:
    """The graph of a microbatch. Nodes are numbered in topological order.

    By node: `takes`, its time (the minimum over slices if sequences are cut); `mean`, its time averaged over slices;
    `device`, -1 for a transfer; `needs`, its direct predecessors. By device: `nodes_of`, its passes. By stage:
    `forward`, the node of F; `backward`, that of B or I; `release`, that of the pass that releases the activation, B or
    W. The last two are empty for an order that only evaluates.
    """

    placement: Placement
    takes: list[float]
    mean: list[float]
    device: list[int]
    needs: list[list[int]]
    forward: list[int]
    backward: list[int]
    release: list[int]
    nodes_of: list[list[int]]

    @classmethod
    def of(
        cls,
        placement: Placement,
        costs: Sequence[Costs],
        *,
        split: bool = False,
        vocabulary: VocabularyMode = VocabularyMode.FIRST_LAST,
        forward_only: bool = False,
    ) -> Microbatch:
        """The graph. costs: by slice. split: backwards are I and W instead of B. Raises InputError if a kind has no
        time."""
        rules = Rules(placement, vocabulary, forward_only=forward_only)
        times = [of_slice.stage_times(placement) | of_slice.device_times(placement) for of_slice in costs]
        takes: list[tuple[float, ...]] = []
        device_of: list[int] = []
        names: dict[Name, int] = {}

        def add(device: int, kind: Kind, stage: int | None) -> int:
            slice_times = [of_kind for of_slice in times if (of_kind := of_slice[kind]) is not None]
            if not slice_times:
                raise InputError(f"costs.{kind.value} is missing, but a lower bound needs it; give a number or a list")
            names[device, ROLE[kind], stage] = len(takes)
            takes.append(tuple(of_kind[device if stage is None else stage] for of_kind in slice_times))
            device_of.append(device)
            return len(takes) - 1

        forward, backward, release = [], [], []
        for stage, device in enumerate(placement.stage_device):
            forward.append(add(device, Kind.F, stage))
            if not forward_only:
                kind = Kind.I if split else Kind.B
                backward.append(add(device, kind, stage))
                release.append(add(device, Kind.W, stage) if split else backward[-1])
        for kind in sorted(rules.vocabulary_kinds):
            for device in range(placement.devices):
                add(device, kind, None)
        routes = range(len(takes), len(takes) + len(rules.routes))
        for route in rules.routes:
            takes.append(tuple(of_slice.transfer_time(route.kind, route.communicator()) for of_slice in costs))
            device_of.append(-1)
        needs: list[list[int]] = [[] for _ in takes]
        for (device, kind, of_stage), node in names.items():
            rule = rules.rule(PassGroup(device, kind, of_stage))
            needs[node] += [
                names[name] for need in rule.needs if not need.step and (name := (device, *need[:2])) in names
            ]
            needs[node] += [routes[route.number] for route in rule.waits]
            for route in rule.feeds:
                needs[routes[route.number]].append(node)
        nodes_of: list[list[int]] = [[] for _ in range(placement.devices)]
        for (device, *_), node in names.items():
            nodes_of[device].append(node)
        order = TopologicalSorter(dict.fromkeys(range(len(takes)), ()))
        for node, earlier in enumerate(needs):
            order.add(node, *earlier)
        ranked = list(order.static_order())
        rank = {node: position for position, node in enumerate(ranked)}
        return cls(
            placement,
            [min(takes[node]) for node in ranked],
            [sum(takes[node]) / len(costs) for node in ranked],
            [device_of[node] for node in ranked],
            [[rank[earlier] for earlier in needs[node]] for node in ranked],
            [rank[node] for node in forward],
            [rank[node] for node in backward],
            [rank[node] for node in release],
            [[rank[node] for node in nodes] for nodes in nodes_of],
        )

    @property
    def work(self) -> list[float]:
        """The time of all passes per device, averaged over slices."""
        return [sum(self.mean[node] for node in nodes) for nodes in self.nodes_of]

    def longest_from(self, sources: Collection[int]) -> list[float]:
        """Return, per node, the longest path to its start from the start of any of `sources`; UNREACHED if none."""
        longest = [UNREACHED] * len(self.takes)
        for node in sources:
            longest[node] = 0.0
        for node, needs in enumerate(self.needs):
            length = longest[node]
            for earlier in needs:
                path = longest[earlier] + self.takes[earlier]
                length = max(length, path)
            longest[node] = length
        return longest

    def longest_to(self, targets: Collection[int]) -> list[float]:
        """Return, per node, the longest path from its end to the end of any of `targets`; UNREACHED if none."""
        longest = [UNREACHED] * len(self.takes)
        for node in targets:
            longest[node] = 0.0
        for node in reversed(range(len(self.takes))):
            path = longest[node] + self.takes[node]
            for earlier in self.needs[node]:
                longest[earlier] = max(longest[earlier], path)
        return longest
