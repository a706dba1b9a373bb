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
from typing import TYPE_CHECKING

from .flows import PER_PAIR, Flow, Site, flows
from .passes import HOP_KINDS, ROLE, STAGE_KINDS, VOCABULARY_KINDS, Kind, Transfer, TransferKind
from .placement import Placement

if TYPE_CHECKING:
    from .order import Order
    from .program import Program

End = tuple[TransferKind, int | None, int | None]
"""How one member of a transfer calls it: kind, stage, and the stage at the other end of a hop if there are several."""

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

    @classmethod
    def of(cls, number: int, flow: Flow, placement: Placement, sharing: str) -> Route:
        """Return the route of a flow, with `sharing` as in `SHARING`."""
        name, ends = flow.communicator(sharing), _ends(flow, placement)
        return cls(number, flow.kind, flow.members, flow.root, name, flow.producers, flow.consumers, ends)

    def transfer(self, device: int, microbatch: int, slice_: int = 0) -> Transfer:
        """Return the transfer of one unit as `device` issues it: one end of a hop is SEND_F, the other RECV_F."""
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
    """Passes of the same device that must have run, of the slice so many further on in the sequence, if it is there."""
    uses: tuple[Route, ...] = ()
    """Routes whose transfer the device must have issued, because this pass consumes the data."""
    waits: tuple[Route, ...] = ()
    """Routes among them whose transfer must have completed: those with a producer on another device."""
    feeds: tuple[Route, ...] = ()
    """Routes whose transfer becomes ready with this pass (and with the other producers, if there are several)."""


class Dependencies:
    """The routes of one placement, and the rule of every pass in it. With one device there are no routes."""

    def __init__(
        self, placement: Placement, barriers: int = 0, forward_only: bool = False, sharing: str = PER_PAIR
    ) -> None:
        """`barriers` and `forward_only` as in `Order`, `sharing` as in `Program`."""
        self.placement = placement
        self._combines = barriers != 2 or forward_only
        everything = list(flows(placement, barriers, forward_only))
        between_devices = (flow for flow in everything if not flow.local)
        self.routes = tuple(Route.of(number, flow, placement, sharing) for number, flow in enumerate(between_devices))
        self._after: defaultdict[Site, list[What]] = defaultdict(list)
        """By site, passes of the same device that go before it, because of a flow."""
        self._uses: defaultdict[Site, list[Route]] = defaultdict(list)
        self._feeds: defaultdict[Site, list[Route]] = defaultdict(list)
        for flow in everything:
            for consumer in flow.consumers:
                if all(producer.device == consumer.device for producer in flow.producers):
                    self._after[consumer] += [(producer.kind, producer.stage) for producer in flow.producers]
        for route in self.routes:
            for producer in route.producers:
                self._feeds[producer].append(route)
            for consumer in route.consumers:
                self._uses[consumer].append(route)
        self._rules: dict[tuple[int, Kind, int | None], Rule] = {}
        self._route_of = {(*route.end(device), device): route for route in self.routes for device in route.members}

    @classmethod
    def of(cls, order: Order | Program, sharing: str = PER_PAIR) -> Dependencies:
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
        fixed, optional = _OWN_STAGE.get(kind, ((), ()))
        if kind is Kind.T and not self._combines:
            fixed = (Kind.S,)
        uses = tuple(self._uses.get(site, ()))
        rule = self._rules[device, kind, stage] = Rule(
            tuple(dict.fromkeys((*((needed, stage) for needed in fixed), *self._after.get(site, ())))),
            tuple((needed, stage) for needed in optional),
            tuple((of_kind, stage, step) for of_kind, step in _IN_SEQUENCE.get(ROLE[kind], ())),
            uses,
            tuple(route for route in uses if any(made.device != device for made in route.producers)),
            tuple(self._feeds.get(site, ())),
        )
        return rule

    def route_of(self, transfer: Transfer, device: int) -> Route | None:
        """Return the route of a transfer that `device` issues, by its end there, or None."""
        return self.route_at((transfer.kind, transfer.stage, transfer.peer), device)

    def route_at(self, end: End, device: int) -> Route | None:
        """Return the route that has this end on `device`, or None."""
        return self._route_of.get((*end, device))


def dependencies_of(
    placement: Placement, barriers: int = 0, forward_only: bool = False, sharing: str = PER_PAIR
) -> Dependencies:
    """Return dependencies, which the placement keeps: they never change."""
    key = Dependencies, barriers, forward_only, sharing
    found: Dependencies | None = placement.derived.get(key)
    if found is None:
        found = placement.derived[key] = Dependencies(placement, barriers, forward_only, sharing)
    return found


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


_OWN_STAGE: dict[Kind, tuple[tuple[Kind, ...], tuple[Kind, ...]]] = {
    Kind.B: ((Kind.F,), (Kind.R, Kind.L)),
    Kind.I: ((Kind.F,), (Kind.R, Kind.L)),
    Kind.W: ((Kind.I,), ()),
    Kind.R: ((Kind.F,), (Kind.L,)),
    Kind.O: ((Kind.F,), ()),
    Kind.D: ((Kind.O,), ()),
    Kind.L: ((Kind.D,), ()),
    Kind.C: ((Kind.S,), ()),
    Kind.T: ((Kind.C,), ()),
}
"""What a pass needs on its own stage or shard, always and if present. T needs S if the order has no C."""
_RECEIVING = {TransferKind.SEND_F: TransferKind.RECV_F, TransferKind.SEND_B: TransferKind.RECV_B}
_IN_SEQUENCE = {Kind.F: ((Kind.F, -1),), Kind.B: ((Kind.B, +1),)}
_NO_RULE = Rule()
