"""A device's row of a program, in the form in which it is executed: everything known in advance is looked up once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from evenpipe.errors import InputError
from evenpipe.schedule import Item, Kind, Pass, Program, Transfer, TransferKind, parts_of
from evenpipe.schedule.passes import BACKWARD_KINDS, ROLE, SHAPES, StageUnit, unit_of
from evenpipe.schedule.placement import Edge
from evenpipe.schedule.releases import releases
from evenpipe.schedule.rules import IN_FLIGHT, PassGroup, flows
from evenpipe.schedule.sharding import Part, RowSharding


@dataclass(frozen=True, slots=True)
class Step:
    """One item of a row."""

    item: Item
    run: Callable[[Any], None]
    """Called with the item."""
    text: str
    arrived: tuple[Transfer, ...]
    """Transfers sent by this device that have certainly arrived once a pass has its inputs."""
    takes: int = 0
    """Number of values that a pass takes."""
    makes: int = 0
    """Number of values that it stores."""
    adds: int = 0
    """Change of the number of stage activations in flight."""
    awaits: tuple[Part, ...] = ()
    """Parameters in an all-gather whose first user is this pass."""


class Row:
    """One device's row of a program."""

    def __init__(
        self,
        program: Program,
        device: int,
        passes: Mapping[Kind, Callable[[Pass], None]],
        transfers: Mapping[TransferKind, Callable[[Transfer], None]],
    ) -> None:
        """passes, transfers: the handler of each kind."""
        validate_program(program)
        self.program, self._slices = program, program.slices
        placement = program.placement
        self.first_stage, self.last_stage = placement.first_stage, placement.last_stage
        stages = placement.stages_of(device)
        self.edges_in: dict[int, tuple[Edge, ...]] = {
            stage: tuple((source, stage) for source in placement.predecessors(stage)) for stage in stages
        }
        """Incoming edges of each stage; the first stage has none."""
        self.edges_out: dict[int, tuple[Edge, ...]] = {
            stage: tuple((stage, target) for target in placement.successors(stage)) for stage in stages
        }
        """Outgoing edges of each stage; the last stage has none."""
        self.gradients = not program.forward_only
        self.split: set[StageUnit] = set()
        """Stages and units whose backward is split into I and W."""
        self.recomputed: set[StageUnit] = set()
        """Stages and units with R."""
        self.offloaded: set[StageUnit] = set()
        """Stages and units with O, D and L."""
        arrived = releases(program, device)
        value_flows = list(flows(placement, program.vocabulary, forward_only=program.forward_only))
        takes = Counter(site for flow in value_flows for site in flow.consumers)
        makes = Counter(site for flow in value_flows for site in flow.producers)
        sharding = RowSharding(placement, program.vocabulary, program.rows[device])
        steps: list[Step] = []
        for position, item in enumerate(program.rows[device]):
            if isinstance(item, Transfer):
                assert _fits(item, program), item
                steps.append(Step(item, transfers[item.kind], str(item), ()))
            elif item is not None:
                sites = [PassGroup(device, ROLE[component.kind], component.stage) for component in parts_of(item)]
                adds = sum(IN_FLIGHT.get(component.kind, 0) for component in parts_of(item)) if self.gradients else 0
                take_count, make_count = sum(map(takes.__getitem__, sites)), sum(map(makes.__getitem__, sites))
                sent = arrived.get(position, ())
                awaits = sharding.awaits(item)
                fault = sharding.take(item, position)
                assert not fault, fault
                steps.append(Step(item, passes[item.kind], str(item), sent, take_count, make_count, adds, awaits))
                for component in parts_of(item):
                    assert _fits(component, program), item
                    if component.kind is Kind.I:
                        self.split.add(self.stage_unit(component))
                    elif component.kind is Kind.R:
                        self.recomputed.add(self.stage_unit(component))
                    elif component.kind is Kind.O:
                        self.offloaded.add(self.stage_unit(component))
        self.steps = tuple(steps)

    def unit(self, item: Item) -> int:
        """Return the unit of an item."""
        return unit_of(item, self._slices)

    def edge(self, item: Transfer) -> Edge:
        """Return the edge of a hop, in the direction of the data."""
        stage, peer = item.stage, item.peer
        assert stage is not None
        if peer is None:  # the stage has only one
            forward = item.kind in (TransferKind.SEND_F, TransferKind.RECV_B)
            peer = self.edges_out[stage][0][1] if forward else self.edges_in[stage][0][0]
        return (stage, peer) if item.kind in (TransferKind.SEND_F, TransferKind.SEND_B) else (peer, stage)

    def stage_unit(self, item: Pass) -> StageUnit:
        """Return the stage and unit of a stage's pass."""
        assert item.stage is not None
        return item.stage, unit_of(item, self._slices)

    def moves_graph(self, key: StageUnit) -> bool:
        """Return whether the tensors that F saves go to the host. With R only the stage's input does."""
        return key in self.offloaded and key not in self.recomputed


def validate_program(program: Program) -> None:
    """Raise InputError for a valid program that the runtime cannot execute."""
    if not program.placement.is_chain:
        raise InputError(
            "schedule: a graph of stages can be planned, simulated and drawn, but the runtime trains a chain only;"
            " expected stages with one before and one behind each"
        )


def _fits(item: Item, program: Program) -> bool:
    """Return whether an item has the fields that the walker assumes, and backward passes occur only in a training
    program. All other faults of a program make the walker fail."""
    index = item.microbatch
    if item.kind is Kind.OVERLAP_F_B:
        return False  # it has no parts
    valid = (item.stage is not None, index is not None) == SHAPES[item.kind] and 0 <= (item.slice or 0) < program.slices
    in_range = index is None or 0 <= index < program.microbatches
    return valid and in_range and not (program.forward_only and item.kind in BACKWARD_KINDS)
