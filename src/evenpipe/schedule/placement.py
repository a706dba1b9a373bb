"""Which device holds which stage, and the graph of stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from evenpipe.errors import InputError
from evenpipe.words import quoted, refused

Edge = tuple[int, int]
"""A stage, and a stage that takes its output."""


@dataclass(frozen=True, slots=True)
class Placement:
    """`stage_device[stage]` is the device of each stage; every device holds at least one.

    Stages form a graph with `edges` from lower to higher stages, by default a chain. It begins with stage 0, which
    takes the embedded tokens, and ends with the last stage, which feeds the output layer; every other stage has one or
    more predecessors and successors. Only this class knows which stages are adjacent.
    """

    devices: int
    stage_device: tuple[int, ...]
    edges: tuple[Edge, ...] = ()
    _stages_of: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    _predecessors: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    _successors: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    cache: dict[Any, Any] = field(init=False, repr=False, compare=False, default_factory=dict)
    """Objects that other modules derived from this placement, cached for its lifetime."""

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise refused("devices", self.devices, "at least 1")
        for stage, device in enumerate(self.stage_device):
            if not 0 <= device < self.devices:
                raise InputError(f"stage {stage} is placed on device {device}, but devices are 0 to {self.devices - 1}")
        holders = set(self.stage_device)
        empty = next((device for device in range(self.devices) if device not in holders), None)
        if empty is not None:
            raise InputError(f"device {empty} holds no stage; every device needs at least one")
        stages_of: list[list[int]] = [[] for _ in range(self.devices)]
        for stage, device in enumerate(self.stage_device):
            stages_of[device].append(stage)
        object.__setattr__(self, "_stages_of", tuple(map(tuple, stages_of)))
        self._connect()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the cache."""
        return Placement, (self.devices, self.stage_device, self.edges)

    def _connect(self) -> None:
        """Check and sort the edges, and record the neighbours of each stage."""
        edges = tuple(sorted(self.edges)) or _chain(self.stages)
        predecessors: list[list[int]] = [[] for _ in self.stage_device]
        successors: list[list[int]] = [[] for _ in self.stage_device]
        for source, target in edges:
            if not 0 <= source < target < self.stages:
                raise InputError(
                    f"edge {source}>{target} must lead to a higher stage; stages are 0 to {self.last_stage}"
                )
            if target in successors[source]:
                raise InputError(f"edge {source}>{target} is given twice")
            predecessors[target].append(source)
            successors[source].append(target)
        for stage in range(self.stages):
            if not predecessors[stage] and stage != self.first_stage:
                raise InputError(f"no edge leads to stage {stage}; only stage 0 begins the graph of stages")
            if not successors[stage] and stage != self.last_stage:
                raise InputError(f"no edge leaves stage {stage}; only stage {self.last_stage} ends the graph of stages")
        for name, value in (("edges", edges), ("_predecessors", predecessors), ("_successors", successors)):
            object.__setattr__(self, name, tuple(value if name == "edges" else map(tuple, value)))

    @classmethod
    def linear(cls, devices: int) -> Placement:
        """One stage per device, in order: 0 1 2 3."""
        return cls.looped(devices, 1)

    @classmethod
    def looped(cls, devices: int, stages_per_device: int) -> Placement:
        """A round-robin placement: 0 1 2 3 0 1 2 3 for two stages per device (arXiv 2104.04473, section 2.2)."""
        if stages_per_device < 1:
            raise refused("stages per device", stages_per_device, "at least 1")
        return cls(devices, tuple(range(devices)) * stages_per_device)

    @classmethod
    def v_shape(cls, devices: int) -> Placement:
        """A V: 0 1 2 3 3 2 1 0, so that device 0 holds both ends (arXiv 2405.15362)."""
        return cls(devices, (*range(devices), *reversed(range(devices))))

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.stage_device)

    @property
    def first_stage(self) -> int:
        """The stage that takes the embedded tokens."""
        return 0

    @property
    def last_stage(self) -> int:
        """The stage that feeds the output layer."""
        return self.stages - 1

    @property
    def first_device(self) -> int:
        """Device of the first stage."""
        return self.stage_device[self.first_stage]

    @property
    def last_device(self) -> int:
        """Device of the last stage."""
        return self.stage_device[self.last_stage]

    @property
    def is_chain(self) -> bool:
        """Whether every stage has at most one predecessor and one successor."""
        return self.edges == _chain(self.stages)

    def device_of(self, stage: int) -> int:
        """The device that holds `stage`."""
        return self.stage_device[stage]

    def stages_of(self, device: int) -> tuple[int, ...]:
        """The stages that `device` holds, ascending."""
        return self._stages_of[device]

    def predecessors(self, stage: int) -> tuple[int, ...]:
        """The stages whose output `stage` takes."""
        return self._predecessors[stage]

    def successors(self, stage: int) -> tuple[int, ...]:
        """The stages that take the output of `stage`."""
        return self._successors[stage]


def edges_of_text(text: str) -> tuple[Edge, ...]:
    """The edges that are written as in "0>1,0>2,1>3,2>3". Raises InputError for any other text."""
    edges = []
    for word in text.split(","):
        source, mark, target = word.strip().partition(">")
        if not mark or not source.isdecimal() or not target.isdecimal():
            raise InputError(f"edges: {quoted(word)} is not an edge; they are written as in 0>1,0>2,1>3,2>3")
        edges.append((int(source), int(target)))
    return tuple(edges)


def _chain(stages: int) -> tuple[Edge, ...]:
    return tuple(pairwise(range(stages)))
