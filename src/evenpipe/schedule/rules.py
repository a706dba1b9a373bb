"""The rules: what every kind of pass needs, produces, keeps and frees. They are defined only here.

Everything follows from three tables:

    NEEDS     what a pass needs from its own stage (or shard) on its own device
    flows     what passes of a stage or device produce for passes of another
    KEEPS     what a pass leaves on its device for later passes, and what it frees

I takes the role of B if a backward is split into I and W: other stages need the gradient of the input, whichever pass
computes it. So pass groups and needs always name the role B, never I.

A flow between devices is a `Route`, with one transfer per unit (a slice of a microbatch). All passes of a kind and
stage on one device, a `PassGroup`, have the same `Rule`, regardless of their unit. Sources: arXiv 2411.05288, sections
4 and 5 (vocabulary passes) and appendix C (embedding); 2405.15362 (I and W); 2406.03488 (slices).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from .passes import BACKWARD_KINDS, HOP_KINDS, ROLE, STAGE_KINDS, Kind, Transfer, TransferKind
from .placement import Placement
from .vocabulary_mode import VocabularyMode

if TYPE_CHECKING:
    from .order import DeviceRows

PER_PAIR, PER_KIND, ONE = SHARING = ("per-pair", "per-kind", "one")
"""How transfers share communicators:

    per-pair    one for each ordered pair of devices and direction (F:0>1), one for each collective; ROWS and
                ROW_GRADIENTS share one
    per-kind    one for all hops forward (F), one for all hops back (B), one for small collectives (SMALL: statistics),
                one for large ones (LARGE: X, DX and rows)
    one         one for everything (ALL)

Each communicator costs memory (with NCCL 0.5 to 0.7 GB on a GPU), and its transfers wait for each other.
"""
SMALL, LARGE = "SMALL", "LARGE"
"""Names of the communicators of collectives if sharing is per kind."""

NEEDS: Mapping[Kind, tuple[tuple[Kind, int], ...]] = {
    Kind.F: ((Kind.F, -1),),
    Kind.B: ((Kind.F, 0), (Kind.R, 0), (Kind.L, 0), (Kind.B, +1)),
    Kind.W: ((Kind.B, 0),),
    Kind.R: ((Kind.F, 0), (Kind.L, 0)),
    Kind.O: ((Kind.F, 0),),
    Kind.D: ((Kind.O, 0),),
    Kind.L: ((Kind.D, 0),),
    Kind.C: ((Kind.S, 0),),
    Kind.T: ((Kind.C, 0),),
}
"""Kinds of the same stage, device and microbatch that must have run, each with an offset to its slice.

Attention uses the keys of earlier slices, so forwards run in the order of slices. Gradients of those keys are complete
when the backwards of later slices have run, so backwards run in reverse order. T needs S if it combines the statistics.
"""

IF_PRESENT = frozenset({Kind.R, Kind.L})
"""Kinds that are needed only for units for which the device has them."""


class Kept(StrEnum):
    """What a device holds between passes, once per stage and unit, or per unit for `PROBABILITIES`."""

    ACTIVATIONS = "activations"
    """What a forward leaves for the backward of its stage: the graph, or with R only the input until R has run."""
    WEIGHT_INPUTS = "weight inputs"
    """What I leaves for W."""
    ON_HOST = "activations on the host"
    PROBABILITIES = "probabilities"
    """What S leaves for T."""


KEEPS: Mapping[Kind, Mapping[Kept, int]] = {
    Kind.F: {Kept.ACTIVATIONS: +1},
    Kind.B: {Kept.ACTIVATIONS: -1},
    Kind.I: {Kept.ACTIVATIONS: -1, Kept.WEIGHT_INPUTS: +1},
    Kind.W: {Kept.WEIGHT_INPUTS: -1},
    Kind.D: {Kept.ACTIVATIONS: -1, Kept.ON_HOST: +1},
    Kind.L: {Kept.ACTIVATIONS: +1, Kept.ON_HOST: -1},
    Kind.S: {Kept.PROBABILITIES: +1},
    Kind.T: {Kept.PROBABILITIES: -1},
}
"""+1 for what a kind leaves on its device, -1 for what it frees. O only starts a copy, and R recomputes what F did not
keep. An unsharded output layer is part of the last stage's F, and of its B, or I and W."""


def changes(of: Collection[Kept]) -> dict[Kind, int]:
    """By how much each kind of pass changes the number of these on its device. Kinds without a change are absent."""
    sums = {kind: sum(by for category, by in change.items() if category in of) for kind, change in KEEPS.items()}
    return {kind: by for kind, by in sums.items() if by}


ON_DEVICE = changes({Kept.ACTIVATIONS, Kept.WEIGHT_INPUTS})
"""Stage activations on the device: forwarded, not yet released, and not on the host."""
IN_FLIGHT = changes({Kept.ACTIVATIONS, Kept.WEIGHT_INPUTS, Kept.ON_HOST})
"""Stage activations in flight: forwarded and not yet released by B, or by W if the backward is split."""


class PassGroup(NamedTuple):
    """All passes of a kind (B for I) and stage (None for vocabulary passes) on one device."""

    device: int
    kind: Kind
    stage: int | None = None


class Flow(NamedTuple):
    """Data that each of `producers` produces and each of `consumers` needs. Hops are named by their sending end."""

    kind: TransferKind
    producers: tuple[PassGroup, ...]
    consumers: tuple[PassGroup, ...]


def flows(placement: Placement, mode: VocabularyMode, *, forward_only: bool = False) -> Iterator[Flow]:
    """All flows of an order.

    F(s)      -> F(t)        hidden states, one hop for every edge from stage s to stage t
    B(t)      -> B(s)        their gradient, one hop back
    E         -> F(first)    ROWS: embedding rows, to the device of the first stage
    F(last)   -> S           X: broadcast of the last hidden states
    S         -> C, or T     STATISTICS: all-gather, to the kind that combines
    C, or T   -> B(last)     DX: reduce of the hidden gradient
    B(first)  -> G           ROW_GRADIENTS: back to the shards

    E, G, S, C and T run on every device. An evaluation ends with STATISTICS to C.
    """

    def of(kind: Kind, stage: int) -> tuple[PassGroup, ...]:
        return (PassGroup(placement.device_of(stage), kind, stage),)

    for source in range(placement.stages):
        for target in placement.successors(source):
            yield Flow(TransferKind.SEND_F, of(Kind.F, source), of(Kind.F, target))
            if not forward_only:
                yield Flow(TransferKind.SEND_B, of(Kind.B, target), of(Kind.B, source))
    mode = mode.of_rows(forward_only=forward_only)
    if mode.combining is None:
        return

    def everywhere(kind: Kind) -> tuple[PassGroup, ...]:
        return tuple(PassGroup(device, kind) for device in range(placement.devices))

    first, last = placement.first_stage, placement.last_stage
    combining = everywhere(mode.combining)
    yield Flow(TransferKind.ROWS, everywhere(Kind.E), of(Kind.F, first))
    yield Flow(TransferKind.X, of(Kind.F, last), everywhere(Kind.S))
    yield Flow(TransferKind.STATISTICS, everywhere(Kind.S), combining)
    if not forward_only:
        yield Flow(TransferKind.DX, combining, of(Kind.B, last))
        yield Flow(TransferKind.ROW_GRADIENTS, of(Kind.B, first), everywhere(Kind.G))


End = tuple[TransferKind, int | None, int | None]
"""How a member names a transfer: kind, stage, and the stage at the other end of a hop if there are several."""


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """A flow between devices: a transfer without its unit. `number` counts the routes of a placement.

    The data is ready when every producer has run. Every member issues the transfer before its own consumer, which waits
    for it, except on the device of a sole producer, which already has the data.
    """

    number: int
    kind: TransferKind
    producers: tuple[PassGroup, ...]
    consumers: tuple[PassGroup, ...]
    members: tuple[int, ...]
    """(source, destination) of a hop, else all devices, ascending."""
    ends: tuple[End, End]
    """At the source of a hop and at its destination; the same twice for a collective."""

    @property
    def is_hop(self) -> bool:
        """Whether it connects two devices; other routes are collectives."""
        return self.kind in HOP_KINDS

    @property
    def root(self) -> int | None:
        """The source of X and ROW_GRADIENTS, the destination of DX and ROWS; None for hops and STATISTICS."""
        if self.is_hop or len(self.producers) == len(self.consumers):
            return None
        return min(self.producers, self.consumers, key=len)[0].device

    def communicator(self, sharing: str = PER_PAIR) -> str:
        """The name of the communicator that carries it, with `sharing` as in `SHARING`."""
        if sharing == ONE:
            return "ALL"
        if self.is_hop:
            direction = self.kind.value[-1]
            return direction if sharing == PER_KIND else "{}:{}>{}".format(direction, *self.members)
        if sharing == PER_KIND:
            return SMALL if self.kind is TransferKind.STATISTICS else LARGE
        return TransferKind.ROWS.value if self.kind is TransferKind.ROW_GRADIENTS else self.kind.value

    def end(self, device: int) -> End:
        """How `device` names its transfers."""
        return self.ends[device != self.members[0]]

    def transfer(self, device: int, microbatch: int, slice_: int = 0, sharing: str = PER_PAIR) -> Transfer:
        """The transfer of a unit as `device` issues it: one end of a hop is SEND_F, the other RECV_F."""
        kind, stage, peer = self.end(device)
        return Transfer(kind, stage, microbatch, slice_, self.members, self.root, self.communicator(sharing), peer)


class Need(NamedTuple):
    """Passes of the same device that must have run: kind (B for I), stage, and the offset to their slice."""

    kind: Kind
    stage: int | None
    step: int = 0


class Rule(NamedTuple):
    """What the passes of a group need and produce, the same for every unit."""

    needs: tuple[Need, ...] = ()
    """Passes of the same device. Kinds in `IF_PRESENT`, and slices that do not exist, may be missing."""
    uses: tuple[Route, ...] = ()
    """Routes whose transfer the device must have issued, because these passes consume the data."""
    waits: tuple[Route, ...] = ()
    """The routes in `uses` whose transfer must have completed: routes with a producer on another device."""
    feeds: tuple[Route, ...] = ()
    """Routes whose transfer becomes ready when these passes (and any other producers) have run."""


class Rules:
    """The routes of a placement in one mode, and the rule of every group of passes.

    A single device has no routes: all needs are within its row.
    """

    def __init__(self, placement: Placement, mode: VocabularyMode, *, forward_only: bool = False) -> None:
        self.placement, self.forward_only = placement, forward_only
        self.mode = mode.of_rows(forward_only=forward_only)
        self._needs: defaultdict[PassGroup, list[Need]] = defaultdict(list)
        self._uses: defaultdict[PassGroup, list[Route]] = defaultdict(list)
        self._feeds: defaultdict[PassGroup, list[Route]] = defaultdict(list)
        routes: list[Route] = []
        for flow in flows(placement, mode, forward_only=forward_only):
            devices = tuple(group.device for group in flow.producers + flow.consumers)
            for consumer in flow.consumers:
                if all(made.device == consumer.device for made in flow.producers):
                    self._needs[consumer] += [Need(made.kind, made.stage) for made in flow.producers]
            if len(set(devices)) == 1:
                continue
            members = devices if flow.kind in HOP_KINDS else tuple(sorted(set(devices)))
            route = Route(len(routes), *flow, members, _ends(flow, placement))
            routes.append(route)
            for producer in flow.producers:
                self._feeds[producer].append(route)
            for consumer in flow.consumers:
                self._uses[consumer].append(route)
        self.routes = tuple(routes)
        self._route_of = {(device, *route.end(device)): route for route in routes for device in route.members}
        self._rules: dict[PassGroup, Rule] = {}

    @classmethod
    def of(cls, schedule: DeviceRows) -> Rules:
        """The rules of an order or program. The placement caches them, since they never change."""
        cache, key = schedule.placement.cache, (Rules, schedule.vocabulary, schedule.forward_only)
        if key not in cache:
            cache[key] = cls(schedule.placement, schedule.vocabulary, forward_only=schedule.forward_only)
        rules: Rules = cache[key]
        return rules

    @property
    def vocabulary_kinds(self) -> tuple[Kind, ...]:
        """The vocabulary passes that every device runs once per unit."""
        return self.mode.kinds(forward_only=self.forward_only)

    def group(self, device: int, kind: Kind, stage: int | None) -> PassGroup | None:
        """The group of a kind of pass and stage, or None if it does not belong on the device."""
        if kind in STAGE_KINDS:
            held = self.placement.stage_device
            belongs = stage is not None and 0 <= stage < len(held) and held[stage] == device
            belongs = belongs and not (self.forward_only and kind in BACKWARD_KINDS)
        else:
            belongs = stage is None and 0 <= device < self.placement.devices and kind in self.vocabulary_kinds
        return PassGroup(device, ROLE[kind], stage) if belongs else None

    def rule(self, group: PassGroup) -> Rule:
        """The rule of a group."""
        rule = self._rules.get(group)
        return self._made(group) if rule is None else rule

    def of_pass(self, device: int, kind: Kind, stage: int | None) -> Rule:
        """The rule of a kind of pass and stage on a device; an empty rule if it does not belong there."""
        group = self.group(device, kind, stage)
        return Rule() if group is None else self.rule(group)

    def route(self, device: int, transfer: Transfer) -> Route | None:
        """The route of a transfer that `device` issues, found by its end on that device, or None."""
        return self._route_of.get((device, transfer.kind, transfer.stage, transfer.peer))

    def _made(self, group: PassGroup) -> Rule:
        """Make a rule on first use: most groups appear in no row."""
        local_needs = NEEDS.get(group.kind, ())
        if group.kind is self.mode.combining:
            local_needs = ((Kind.S, 0),)
        needs = (*(Need(kind, group.stage, step) for kind, step in local_needs), *self._needs.get(group, ()))
        uses = tuple(self._uses.get(group, ()))
        waits = tuple(route for route in uses if any(made.device != group.device for made in route.producers))
        rule = self._rules[group] = Rule(tuple(dict.fromkeys(needs)), uses, waits, tuple(self._feeds.get(group, ())))
        return rule


def _ends(flow: Flow, placement: Placement) -> tuple[End, End]:
    if flow.kind not in HOP_KINDS:
        return (flow.kind, None, None), (flow.kind, None, None)
    source, target = flow.producers[0].stage, flow.consumers[0].stage
    assert source is not None and target is not None
    onward, back = placement.successors, placement.predecessors
    if flow.kind is TransferKind.SEND_B:
        onward, back = back, onward
    receiving = TransferKind.RECV_F if flow.kind is TransferKind.SEND_F else TransferKind.RECV_B
    return (
        (flow.kind, source, target if len(onward(source)) > 1 else None),
        (receiving, target, source if len(back(target)) > 1 else None),
    )
