"""Which pass needs which: the single source for timing, checker, communication transform and runtime.

What a pass needs depends on its kind, its stage and its device, and is the same for every unit. A flow (`flows`)
between devices becomes a `Route`, on which every unit has one transfer; a flow that stays on one device, and a need of
earlier passes of the same stage, only constrain the order of passes:

    F -> B or I -> W        F -> R -> B        F -> O -> D -> L -> R or B
    S -> C -> T, or S -> T with two barriers

Slices of one sequence meet in attention: a slice looks at the keys of those before it, and their gradients are complete
when those behind it have gone back. So a stage runs F in the order of slices, and B or I in the reverse order:

    F(slice - 1) -> F(slice)        B(slice + 1) -> B(slice)
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Protocol

from .flows import PER_PAIR, Flow, Site, flows
from .passes import HOP_KINDS, ROLE, STAGE_KINDS, VOCABULARY_KINDS, Kind, Pass, Transfer, TransferKind, parts_of
from .placement import Placement

End = tuple[TransferKind, int | None, int | None]
"""How one member of a transfer calls it: its kind, its stage, and the stage at the other end of a hop if there are
several."""

What = tuple[Kind, int | None]
"""Kind and stage of a pass whose device and unit are known."""


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """A flow between devices: a transfer without its unit. `number` counts the routes of a placement.

    The data is ready when every producer has run. Every member issues the transfer before its own consumer, which waits
    for it, except on the device of a sole producer, which has the data already.
    """

    number: int
    kind: TransferKind
    members: tuple[int, ...]
    root: int | None
    communicator: str
    producers: tuple[Site, ...]
    consumers: tuple[Site, ...]
    ends: tuple[End, End]
    """At the source of a hop and at its destination; twice the same for a collective."""

    def transfer(self, device: int, microbatch: int, slice_: int = 0) -> Transfer:
        """Return the transfer of one unit as `device` issues it: SEND_F at one end of a hop is RECV_F at the
        other."""
        kind, stage, peer = self.end(device)
        return Transfer(kind, stage, microbatch, slice_, self.members, self.root, self.communicator, peer)

    def end(self, device: int) -> End:
        """Return how `device` calls its transfers."""
        return self.ends[device != self.members[0]]


@dataclass(frozen=True, slots=True)
class Rule:
    """What the passes of one kind and stage on one device need and produce, the same for every unit."""

    after: tuple[What, ...] = ()
    """Passes of the same device that must have run."""
    if_present: tuple[What, ...] = ()
    """The same, for passes that the order may lack."""
    in_sequence: tuple[tuple[Kind, int | None, int], ...] = ()
    """Passes of the same device that must have run, of the slice so many further on in the same sequence, if there is
    one."""
    uses: tuple[Route, ...] = ()
    """Routes whose transfer the device must have issued, because this pass consumes the data."""
    waits: tuple[Route, ...] = ()
    """Routes among them whose transfer must have completed: those with a producer on another device."""
    feeds: tuple[Route, ...] = ()
    """Routes whose transfer becomes ready with this pass (and with the other producers, if there are several)."""


class Schedulable(Protocol):
    """An Order or a Program: everything that dependencies follow from."""

    @property
    def placement(self) -> Placement: ...
    @property
    def barriers(self) -> int: ...
    @property
    def forward_only(self) -> bool: ...


class Dependencies:
    """The routes of one placement, and the rule of every pass in it. With one device there are no routes."""

    def __init__(
        self, placement: Placement, barriers: int = 0, forward_only: bool = False, sharing: str = PER_PAIR
    ) -> None:
        """`barriers` and `forward_only` as in `Order`, `sharing` as in `Program`."""
        self.placement = placement
        self._combines = barriers != 2 or forward_only
        everything = list(flows(placement, barriers, forward_only))
        self.routes = tuple(_routes([flow for flow in everything if not flow.local], sharing, placement))
        self._after, self._uses, self._feeds = _needs(everything, self.routes)
        self._rules: dict[tuple[int, Kind, int | None], Rule] = {}
        self._route_of = {(*route.end(device), device): route for route in self.routes for device in route.members}

    @classmethod
    def of(cls, order: Schedulable, sharing: str = PER_PAIR) -> Dependencies:
        """Return the dependencies of an order or program; `sharing` is that of the program."""
        return dependencies_of(order.placement, order.barriers, order.forward_only, sharing)

    def rule(self, device: int, kind: Kind, stage: int | None) -> Rule:
        """Return the rule of a kind and stage on a device; an empty one for a pass that does not belong there."""
        found = self._rules.get((device, kind, stage))
        return self._made(device, kind, stage) if found is None else found

    def _made(self, device: int, kind: Kind, stage: int | None) -> Rule:
        """Make a rule on first use. Most kinds of pass appear in no row, so making all in advance would not pay."""
        held = self.placement.stage_device
        if kind in STAGE_KINDS:
            belongs = stage is not None and 0 <= stage < len(held) and held[stage] == device
        else:
            belongs = kind in VOCABULARY_KINDS and stage is None and 0 <= device < self.placement.devices
        if not belongs:
            return _NO_RULE
        site = Site(device, ROLE[kind], stage)
        fixed, optional = _own_stage(kind, stage, self._combines)
        uses = tuple(self._uses.get(site, ()))
        rule = self._rules[device, kind, stage] = Rule(
            tuple(dict.fromkeys((*fixed, *self._after.get(site, ())))),
            optional,
            tuple((of_kind, stage, step) for of_kind, step in _IN_SEQUENCE.get(ROLE[kind], ())),
            uses,
            tuple(route for route in uses if any(made.device != device for made in route.producers)),
            tuple(self._feeds.get(site, ())),
        )
        return rule

    def after(self, item: Pass, device: int) -> tuple[Pass, ...]:
        """Return the passes of the same device that must have run before `item`. B stands for B or I."""
        return tuple(
            Pass(kind, stage, part.microbatch, part.slice)
            for part in parts_of(item)
            for kind, stage in self.rule(device, part.kind, part.stage).after
        )

    def waits_for(self, item: Pass, device: int) -> tuple[Transfer, ...]:
        """Return the transfers that must have completed on `device` before it runs `item`, as that device issues
        them."""
        return tuple(
            route.transfer(device, part.microbatch, part.slice)
            for part in parts_of(item)
            if part.microbatch is not None
            for route in self.rule(device, part.kind, part.stage).waits
        )

    def feeds(self, item: Pass, device: int) -> tuple[Transfer, ...]:
        """Return the transfers that carry the results of `item` on `device`, as that device issues them."""
        return tuple(
            route.transfer(device, part.microbatch, part.slice)
            for part in parts_of(item)
            if part.microbatch is not None
            for route in self.rule(device, part.kind, part.stage).feeds
        )

    def route_of(self, transfer: Transfer, device: int) -> Route | None:
        """Return the route of a transfer that `device` issues, by its end there, or None."""
        return self._route_of.get((transfer.kind, transfer.stage, transfer.peer, device))

    def producers(self, transfer: Transfer, device: int) -> tuple[tuple[int, Pass], ...]:
        """Return (device, pass) of each pass that produces a part of the data of `transfer`, issued by `device`."""
        route = self.route_of(transfer, device)
        sites = () if route is None else route.producers
        return tuple((site.device, site.at(transfer.microbatch, transfer.slice)) for site in sites)

    def consumers(self, transfer: Transfer, device: int) -> tuple[tuple[int, Pass], ...]:
        """Return (device, pass) of each pass that uses the data of `transfer`, issued by `device`."""
        route = self.route_of(transfer, device)
        sites = () if route is None else route.consumers
        return tuple((site.device, site.at(transfer.microbatch, transfer.slice)) for site in sites)


def dependencies_of(
    placement: Placement, barriers: int = 0, forward_only: bool = False, sharing: str = PER_PAIR
) -> Dependencies:
    """Return dependencies, which the placement keeps: they never change."""
    key = Dependencies, barriers, forward_only, sharing
    found: Dependencies | None = placement.derived.get(key)
    if found is None:
        found = placement.derived[key] = Dependencies(placement, barriers, forward_only, sharing)
    return found


def _routes(between_devices: list[Flow], sharing: str, placement: Placement) -> list[Route]:
    return [
        Route(
            number,
            flow.kind,
            flow.members,
            flow.root,
            flow.communicator(sharing),
            flow.producers,
            flow.consumers,
            _ends(flow, placement),
        )
        for number, flow in enumerate(between_devices)
    ]


def _ends(flow: Flow, placement: Placement) -> tuple[End, End]:
    if flow.kind not in HOP_KINDS:
        return (flow.kind, None, None), (flow.kind, None, None)
    source, target = flow.producers[0].stage, flow.consumers[0].stage
    assert source is not None and target is not None
    forward = flow.kind is TransferKind.SEND_F
    beside_source = placement.successors(source) if forward else placement.predecessors(source)
    beside_target = placement.predecessors(target) if forward else placement.successors(target)
    return (
        (flow.kind, source, target if len(beside_source) > 1 else None),
        (_RECEIVING[flow.kind], target, source if len(beside_target) > 1 else None),
    )


def _needs(
    everything: list[Flow], routes: tuple[Route, ...]
) -> tuple[dict[Site, list[What]], dict[Site, list[Route]], dict[Site, list[Route]]]:
    """Return, by site, what flows demand: passes of the same device that go before it, routes that it uses, and routes
    that it feeds."""
    after: defaultdict[Site, list[What]] = defaultdict(list)
    uses: defaultdict[Site, list[Route]] = defaultdict(list)
    feeds: defaultdict[Site, list[Route]] = defaultdict(list)
    for flow in everything:
        for consumer in flow.consumers:
            if all(producer.device == consumer.device for producer in flow.producers):
                after[consumer] += [(producer.kind, producer.stage) for producer in flow.producers]
    for route in routes:
        for producer in route.producers:
            feeds[producer].append(route)
        for consumer in route.consumers:
            uses[consumer].append(route)
    return after, uses, feeds


def _own_stage(kind: Kind, stage: int | None, combines: bool) -> tuple[tuple[What, ...], tuple[What, ...]]:
    """Return the needs of a pass on its own stage or shard, always and if present; `combines` = the order has C
    passes."""
    match kind:
        case Kind.B | Kind.I:
            return ((Kind.F, stage),), ((Kind.R, stage), (Kind.L, stage))
        case Kind.W:
            return ((Kind.I, stage),), ()
        case Kind.R:
            return ((Kind.F, stage),), ((Kind.L, stage),)
        case Kind.O:
            return ((Kind.F, stage),), ()
        case Kind.D:
            return ((Kind.O, stage),), ()
        case Kind.L:
            return ((Kind.D, stage),), ()
        case Kind.C:
            return ((Kind.S, None),), ()
        case Kind.T:
            return ((Kind.C if combines else Kind.S, None),), ()
        case _:
            return (), ()


_RECEIVING = {TransferKind.SEND_F: TransferKind.RECV_F, TransferKind.SEND_B: TransferKind.RECV_B}
_IN_SEQUENCE = {Kind.F: ((Kind.F, -1),), Kind.B: ((Kind.B, +1),)}
_NO_RULE = Rule()
