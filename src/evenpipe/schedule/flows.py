"""Flows between passes, the same for every unit.

    F(s)      -> F(t)        hidden states, one hop for every edge from stage s to stage t
    B(t)      -> B(s)        their gradient, one hop back
    E         -> F(first)    ROWS: embedding rows, to the device of the first stage
    B(first)  -> G           ROW_GRADIENTS: back to the shards
    F(last)   -> S           X: broadcast of the last hidden states
    S         -> C, or T     STATISTICS: all-gather; to T when the order has two barriers
    C, or T   -> B(last)     DX: reduce of the hidden gradient

E, G, S, C and T run on every device. B stands for I if a backward is split into I and W. An order for evaluation
ends with STATISTICS to C. Sources: arXiv 2411.05288, sections 4 and 5 (one barrier: algorithm 2, two: algorithm 1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .effects import effect_of
from .passes import HOP_KINDS, VOCABULARY_KINDS, Kind, TransferKind
from .placement import Placement

PER_PAIR, PER_KIND, ONE = SHARING = ("per-pair", "per-kind", "one")
"""How transfers share communicators:

    per-pair    one for each ordered pair of devices and direction (F:0>1), one for each collective; both of the rows
                share one
    per-kind    one for all hops forward (F), one for all hops back (B), one for each collective
    one         one for everything (ALL)

Each communicator costs memory (with NCCL 0.5 to 0.7 GB on a GPU), and its transfers wait for each other.
"""


@dataclass(frozen=True, slots=True)
class Site:
    """All passes of one kind and stage (None for vocabulary passes) on one device."""

    device: int
    kind: Kind
    stage: int | None = None


@dataclass(frozen=True, slots=True)
class Flow:
    """Data that each of `producers` makes and each of `consumers` needs. Hops are named by their sending end."""

    kind: TransferKind
    producers: tuple[Site, ...]
    consumers: tuple[Site, ...]

    @property
    def members(self) -> tuple[int, ...]:
        """Return the devices that take part: (source, destination) of a hop, else all, ascending."""
        devices = [site.device for site in self.producers + self.consumers]
        return tuple(devices) if self.kind in HOP_KINDS else tuple(sorted(set(devices)))

    @property
    def local(self) -> bool:
        """Whether it stays on one device and needs no transfer."""
        return len(set(self.members)) == 1

    @property
    def root(self) -> int | None:
        """Return the source of X and ROW_GRADIENTS, the destination of DX and ROWS; None for hops and STATISTICS."""
        if self.kind in {TransferKind.X, TransferKind.ROW_GRADIENTS}:
            return self.producers[0].device
        if self.kind in {TransferKind.DX, TransferKind.ROWS}:
            return self.consumers[0].device
        return None

    def communicator(self, sharing: str = PER_PAIR) -> str:
        """Return the name of the communicator that carries it, with `sharing` as in `SHARING`."""
        if sharing == ONE:
            return "ALL"
        if self.kind in HOP_KINDS:
            direction = "F" if self.kind is TransferKind.SEND_F else "B"
            return direction if sharing == PER_KIND else "{}:{}>{}".format(direction, *self.members)
        return TransferKind.ROWS.value if self.kind is TransferKind.ROW_GRADIENTS else self.kind.value


def flows(placement: Placement, barriers: int, forward_only: bool) -> Iterator[Flow]:
    """Return all flows of an order with this placement; `barriers` and `forward_only` as in `Order`."""
    for stage, device in enumerate(placement.stage_device):
        for successor in placement.successors(stage):
            there = placement.device_of(successor)
            yield Flow(TransferKind.SEND_F, (Site(device, Kind.F, stage),), (Site(there, Kind.F, successor),))
            if not forward_only:
                yield Flow(TransferKind.SEND_B, (Site(there, Kind.B, successor),), (Site(device, Kind.B, stage),))
    if barriers:
        yield from _vocabulary_flows(placement, barriers, forward_only)


def _vocabulary_flows(placement: Placement, barriers: int, forward_only: bool) -> Iterator[Flow]:
    kinds = [Kind.F, *([] if forward_only else [Kind.B]), *sorted(vocabulary_kinds(barriers, forward_only))]
    effects = {kind: effect_of(kind, barriers, forward_only=forward_only) for kind in kinds}
    ends = {TransferKind.ROWS: placement.first_stage, TransferKind.ROW_GRADIENTS: placement.first_stage}

    def sites(kind: Kind, flow: TransferKind) -> tuple[Site, ...]:
        if kind in VOCABULARY_KINDS:
            return tuple(Site(device, kind) for device in range(placement.devices))
        stage = ends.get(flow, placement.last_stage)
        return (Site(placement.device_of(stage), kind, stage),)

    for flow in _COLLECTIVES:
        producers = [site for kind in kinds if flow in effects[kind].makes for site in sites(kind, flow)]
        consumers = [site for kind in kinds if flow in effects[kind].takes for site in sites(kind, flow)]
        if producers and consumers:  # an order that only evaluates has no B and no G
            yield Flow(flow, tuple(producers), tuple(consumers))


_COLLECTIVES = (
    *(TransferKind.ROWS, TransferKind.X, TransferKind.STATISTICS),
    *(TransferKind.DX, TransferKind.ROW_GRADIENTS),
)
"""In the order of a step."""


def vocabulary_kinds(barriers: int, forward_only: bool) -> frozenset[Kind]:
    """Return the kinds of vocabulary passes that every device runs once per unit."""
    if not barriers:
        return frozenset()
    if forward_only:
        return frozenset({Kind.E, Kind.S, Kind.C})
    trained = {Kind.E, Kind.S, Kind.T, Kind.G}
    return frozenset(trained | {Kind.C} if barriers == 1 else trained)
