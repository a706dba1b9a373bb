"""Times of passes and transfers: the cost file of the command line, and the basis of every timing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import MISSING, field, fields, replace
from typing import Annotated, Any

from evenpipe import words
from evenpipe.declaration import Declared, Names, NonEmptyList, Table, declare, from_table
from evenpipe.errors import InputError
from evenpipe.words import refused

from .cost_values import Cost, Factor, SignedCost, Time, added, multiplied, spread
from .links import LINKS, REPLICAS, CopyEngine, Link, check_links
from .passes import FREEING_KINDS, SHAPES, SHARDING_KINDS, VOCABULARY_KINDS, Kind, Pass, TransferKind
from .placement import Placement
from .rules import ON_DEVICE

__all__ = ["COLLECTIVES", "EQUAL_COSTS", "HOST_COSTS", "CopyEngine", "Cost", "Costs", "Link", "PassTimes"]

COLLECTIVES = LINKS[1:-1]
"""Names of the durations in `Costs.collectives`."""

RECEIVE = "receive"
"""Key of `Costs.memory` for the buffers of hops."""

LAYERS = ("F", "B", "I", "W", "R")
"""Kinds of pass of a stage that compute."""
_PER_DEVICE = ("S", "C", "T", "E", "G")
_SHARDING = tuple(kind.value for kind in sorted(SHARDING_KINDS - FREEING_KINDS))
"""Kinds that send data to replicas."""
_MEMORY = (*LAYERS, "O", "L", "D", *_PER_DEVICE, *sorted(SHARDING_KINDS), RECEIVE)
_CLASS_OF = {
    TransferKind.X: "broadcast",
    TransferKind.STATISTICS: "statistics",
    TransferKind.DX: "reduce",
    TransferKind.ROWS: "embedding",
    TransferKind.ROW_GRADIENTS: "embedding",
}


@declare("costs", unwrap_single=False)
class Costs(Declared):
    """Times of passes and transfers, all in one unit of the caller's choice.

    A kind that is None has no time: timing an order that needs it raises InputError. The event model of `timing`
    ignores all fields that mention the full simulator.
    """

    F: Cost | None = None
    """Forward of a stage: one number, or one per stage."""
    B: Cost | None = None
    """Full backward; I + W by default."""
    I: Cost | None = None
    """Gradient with respect to a stage's input."""
    W: Cost | None = None
    """Gradient with respect to a stage's weights."""
    R: Cost | None = None
    """Recomputation of a stage; as long as its F by default."""
    S: Cost | None = None
    """Output layer, first half: one number, or one per device."""
    C: Cost | None = 0.0
    """Combination of the statistics, per device."""
    T: Cost | None = None
    """Output layer, second half, per device."""
    E: Cost | None = None
    """Embedding forward, per device."""
    G: Cost | None = None
    """Embedding gradient, per device."""
    O: Cost | None = None
    """Copy of the activations of a forward of a stage to the host; by default their bytes divided by the bandwidth of
    `engine`. It runs beside compute in the full simulator."""
    L: Cost | None = None
    """The copy back, likewise."""
    p2p: Time = 0.0
    """One hop between two devices, from the end of its producer. Hops delay each other only with `links`."""
    collectives: Mapping[Annotated[str, Names(COLLECTIVES)], Time] = field(default_factory=dict)
    """Durations of `broadcast` (X), `statistics`, `reduce` (dX) and `embedding` (rows, either way), 0 by default."""
    links: Mapping[str, Table[Link]] = field(default_factory=dict)
    """Replaces `p2p` and `collectives`: latency, bandwidth and bytes of `p2p`, of each collective, and of single
    hops ("F:3>4" is forward from device 3 to 4). In the full simulator a communicator with a link carries one transfer
    at a time; `timing` uses only the classes, not the single hops."""
    sharding: Mapping[Annotated[str, Names(_SHARDING)], Cost] = field(default_factory=dict)
    """Bytes that a device sends to its replicas in UNSHARD and REDUCE_GRAD (one number, or one per stage), UNSHARD_E,
    UNSHARD_S, REDUCE_GRAD_E and REDUCE_GRAD_S (or one per device); `links` must have `replicas`. They run one at a time
    beside compute, and share the network of their device: while one and a hop with a link are under way there, each
    goes at half speed. For the full simulator."""
    overlap_slowdown: Factor = 1.0
    """Factor on compute while a collective runs on that device, at least 1. For the full simulator."""
    contention: Factor = 1.0
    """Factor on compute while all other devices compute too, at least 1, and proportionally less while only some do.
    For devices that share the memory bandwidth of a machine. For the full simulator."""
    tensor_exchange: Mapping[Annotated[str, Names((*LAYERS, *_PER_DEVICE))], Cost] = field(default_factory=dict)
    """Of the time of each kind of pass (F, B, I, W, R per stage; S, C, T, E, G per device), the part in which tensor
    ranks of the device only exchange rows. For pictures: times include it."""
    engine: Table[CopyEngine] = field(default_factory=CopyEngine)
    """The engine that carries O and L. For the full simulator."""
    bytes: Cost | None = None
    """Bytes that one forward of a stage stores until its backward: one number, or one per stage."""
    memory: Mapping[Annotated[str, Names(_MEMORY)], SignedCost] | None = None
    """Bytes that each kind of pass adds, in place of `bytes`: positive from its start, negative from its end. One
    number, or one per stage (F, B, I, W, R, O, D, L, UNSHARD, RESHARD, REDUCE_GRAD) or device (S, C, T, E, G,
    UNSHARD_E, ...); `receive` is the buffer of a hop,
    from the moment when it is issued to the end of the pass that uses it. L gives the bytes of copies without a given
    time. For the full simulator."""
    slices: Mapping[Annotated[str, Names(("layers", "tokens", *LAYERS))], NonEmptyList[Cost]] = field(
        default_factory=dict
    )
    """If sequences are cut, factors for each slice, in whose place times and bytes above are those of a slice on
    average. `layers`: for F, B, I, W and R (one number per slice, or a list of one per stage); F, B, I, W, R: for that
    kind alone; `tokens`: for everything else, but for what is sent to replicas."""

    def __hash__(self) -> int:
        return hash((self.F, self.B, self.I, self.W, self.S, self.T, self.p2p))

    def check(self) -> None:
        check_links(self.links)
        for name in ("p2p", *COLLECTIVES):
            if name in self.links and (self.p2p if name == "p2p" else self.collectives.get(name)):
                duplicate = name if name == "p2p" else f"collectives.{name}"
                raise InputError(f"costs.{duplicate} and links.{name} both give its duration; give only one of them")
        if self.sharding and REPLICAS not in self.links:
            raise InputError(f"costs.sharding gives bytes, but links.{REPLICAS} is missing; give its bandwidth")
        for index, factor in enumerate(self.slices.get("tokens", ())):
            if isinstance(factor, tuple):
                raise refused(f"costs.slices.tokens[{index}]", factor, "a number of at least 0")
        if len({len(row) for row in self.slices.values()}) > 1:
            sizes = ", ".join(f"{len(row)} in {key}" for key, row in self.slices.items())
            raise InputError(f"costs.slices must have as many factors in each list, one per slice, not {sizes}")
        if self.memory is not None and not (self.receive_bytes >= 0):
            raise refused("costs.memory.receive", self.memory[RECEIVE], "a number of at least 0")

    @classmethod
    def from_dict(cls, values: Any) -> Costs:
        """Read costs from a parsed cost file; fields as above.

        Raises InputError naming the field for an unknown key, a time that is negative, infinite or not a number, an
        empty list, and a missing F, or B (or I and W).
        """
        costs = from_table(cls, values)
        if costs.F is None:
            raise InputError("costs.F is missing; give a number, or a list of one number per stage")
        if costs.B is None and (costs.I is None or costs.W is None):
            raise InputError("costs.B is missing; give B, or I and W, as a number or a list of one number per stage")
        return costs

    def to_dict(self) -> dict[str, Any]:
        """The dict that `from_dict` takes, for JSON and TOML, without fields at their defaults."""
        values: dict[str, Any] = {}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if (
                value is None
                or (entry.default is not MISSING and value == entry.default)
                or value in ({}, CopyEngine())
            ):
                continue
            if isinstance(value, CopyEngine):
                value = _explicit_fields(value)
            elif isinstance(value, Mapping):
                value = {
                    name: _explicit_fields(element) if isinstance(element, Link) else _to_json(element)
                    for name, element in value.items()
                }
            values[entry.name] = _to_json(value)
        return values

    def by_slice(self, slices: int) -> tuple[Costs, ...]:
        """The costs of each of `slices` slices of a sequence, without factors; identical if there are no factors.

        Raises InputError if the factors are for another number of slices.
        """
        if not self.slices:
            return (self,) * slices
        known = len(next(iter(self.slices.values())))
        if known != slices:
            mismatch = f"factors for {words.count(known, 'slice')}, but sequences have {words.count(slices, 'slice')}"
            raise InputError(f"costs.slices has {mismatch}")
        return tuple(map(self._of_slice, range(slices)))

    def _of_slice(self, index: int) -> Costs:
        factor = {name: values[index] for name, values in self.slices.items()}
        layers: Cost = factor.get("layers", 1.0)
        tokens = self.token_factors[index] if self.token_factors else 1.0
        layer_times: dict[str, Any] = {name: getattr(self, name) for name in LAYERS}
        for name, sources in (("B", ("I", "W")), ("R", ("F",))):
            if layer_times[name] is None and name in factor:  # times derived from others may have separate factors
                layer_times[name] = added(*(getattr(self, source) for source in sources))

        def scaled(values: Any) -> Any:
            if isinstance(values, Mapping):
                return {name: scaled(value) for name, value in values.items()}
            if isinstance(values, Link):
                return values if values.bytes is None else replace(values, bytes=values.bytes * tokens)
            return None if values is None else multiplied("tokens", values, tokens)

        known_times = {name: time for name, time in layer_times.items() if time is not None}
        changed: dict[str, Any] = {
            name: multiplied(name, time, factor.get(name, layers)) for name, time in known_times.items()
        }
        scaled_names = ("O", "L", "bytes", *_PER_DEVICE, "p2p", "collectives", "links", "tensor_exchange", "memory")
        return replace(self, **changed, **{name: scaled(getattr(self, name)) for name in scaled_names}, slices={})

    @property
    def token_factors(self) -> tuple[float, ...]:
        """The factors on bytes and on everything except layers, one per slice; empty if slices do not differ."""
        return tuple(value for value in self.slices.get("tokens", ()) if isinstance(value, float))

    @property
    def on_average(self) -> Costs:
        """The costs with every slice at the mean."""
        return replace(self, slices={}) if self.slices else self

    def stage_times(self, placement: Placement) -> dict[Kind, tuple[float, ...] | None]:
        """One time per stage for each kind, None for kinds without a time. Raises InputError if a list has the
        wrong length.

        O, D and L take no time here: copies overlap with compute.
        """
        times = {Kind(name): spread(name, getattr(self, name), placement.stages, "stage") for name in LAYERS}
        inputs, weights = times[Kind.I], times[Kind.W]
        if times[Kind.B] is None and inputs is not None and weights is not None:
            times[Kind.B] = tuple(a + b for a, b in zip(inputs, weights, strict=True))
        if times[Kind.R] is None:
            times[Kind.R] = times[Kind.F]
        return times | dict.fromkeys((Kind.O, Kind.D, Kind.L), (0.0,) * placement.stages)

    def needed_times(self, placement: Placement, kinds: Collection[Kind], why: str) -> tuple[tuple[float, ...], ...]:
        """The times per stage of these kinds. Raises InputError, ending with `why`, if one is missing."""
        times = self.stage_times(placement)
        for kind in kinds:
            if times[kind] is None:
                raise InputError(f"costs.{kind.value} is missing; {why}")
        return tuple(times[kind] or () for kind in kinds)

    def device_times(self, placement: Placement) -> dict[Kind, tuple[float, ...] | None]:
        """One time per device for each vocabulary kind, None for kinds without a time."""
        return {Kind(name): spread(name, getattr(self, name), placement.devices, "device") for name in _PER_DEVICE}

    def stage_bytes(self, placement: Placement) -> tuple[float, ...] | None:
        """The bytes that one forward of each stage stores, if given."""
        return spread("bytes", self.bytes, placement.stages, "stage")

    def copy_times(self, placement: Placement) -> dict[Kind, tuple[float, ...]]:
        """The time of O and L of each stage on the copy engine; 0 if nothing is given.

        Raises InputError if the engine has a bandwidth but there is neither a time nor `bytes`.
        """
        times = {}
        zeros = (0.0,) * placement.stages
        for kind in (Kind.O, Kind.L):
            durations = spread(kind.value, getattr(self, kind.value), placement.stages, "stage")
            if durations is None and self.engine.bandwidth is not None:
                sizes = (self.memory_deltas(placement) or {}).get(Kind.L) or self.stage_bytes(placement)
                if sizes is None:
                    raise InputError(f"costs.bytes is missing, but engine.bandwidth needs it; or give {kind.value}")
                durations = tuple(size / self.engine.bandwidth for size in sizes)
            times[kind] = zeros if durations is None else durations
        return times

    def exchange_times(self, placement: Placement) -> dict[Kind, tuple[float, ...]]:
        """`tensor_exchange`, by stage or by device; R without a value exchanges as long as F."""
        exchange = self.tensor_exchange
        if "F" in exchange and "R" not in exchange:
            exchange = {**exchange, "R": exchange["F"]}
        return {Kind(name): _spread("tensor_exchange", name, value, placement) for name, value in exchange.items()}

    def sharding_times(self, placement: Placement) -> dict[Kind, tuple[float, ...]]:
        """The time that each kind of collective over replicas takes without contention: by stage, or by device for
        the vocabulary layers. Kinds without bytes are absent."""
        link = self.links.get(REPLICAS, Link())
        times = {}
        for name, value in self.sharding.items():
            sizes = _spread("sharding", name, value, placement)
            times[Kind(name)] = tuple(replace(link, bytes=size).time if size else 0.0 for size in sizes)
        return times

    def with_copies(self, placement: Placement, copy_time: Cost) -> Costs:
        """The costs with times of O and L if they have none: `copy_time` (one number, or one per stage) times
        forward plus backward of the stage. Unchanged if a forward or backward has no time.

        Raises InputError if a list does not have one number per stage.
        """
        times = self.stage_times(placement)
        forward, backward = times[Kind.F], times[Kind.B]
        shares = spread("copy_time", copy_time, placement.stages, "stage")
        assert shares is not None
        known = self.O is not None or self.L is not None or self.engine.bandwidth is not None
        if known or forward is None or backward is None:
            return self
        copies = tuple(
            share * (forward_time + backward_time)
            for share, forward_time, backward_time in zip(shares, forward, backward, strict=True)
        )
        return replace(self, O=copies, L=copies)

    def memory_deltas(self, placement: Placement) -> dict[Kind, tuple[float, ...]] | None:
        """The bytes that each kind adds, per stage, or per device for vocabulary kinds; None if not known.

        Without `memory`, a forward stores `bytes`, and B or W releases them; D releases them and L allocates them
        again.
        """
        if self.memory is None:
            sizes = self.stage_bytes(placement)
            if sizes is None:
                return None
            return {kind: tuple(change * size for size in sizes) for kind, change in ON_DEVICE.items()}
        deltas = {name: value for name, value in self.memory.items() if name != RECEIVE}
        return {Kind(name): _spread("memory", name, value, placement) for name, value in deltas.items()}

    def check_devices(self, placement: Placement) -> None:
        """Raise InputError if a link, or a group in `engine.shared`, names a device that does not exist."""
        for name in self.links:
            _, colon, ends = name.partition(":")
            for device in map(int, ends.split(">") if colon else ()):
                if device >= placement.devices:
                    raise InputError(f"costs.links.{name} is not a hop; devices are 0 to {placement.devices - 1}")
        for group in self.engine.shared:
            for device in group:
                if device >= placement.devices:
                    raise InputError(
                        f"costs.engine.shared has device {device}; devices are 0 to {placement.devices - 1}"
                    )

    @property
    def receive_bytes(self) -> float:
        """The bytes of the buffer of a hop at its receiver; 0 unless `memory` gives them."""
        size = 0.0 if self.memory is None else self.memory.get(RECEIVE, 0.0)
        assert isinstance(size, float)
        return size

    def link(self, kind: TransferKind, communicator: str = "") -> Link | None:
        """The link that carries this transfer, or None if the transfer takes a fixed time."""
        specific = self.links.get(communicator) if communicator else None
        general = self.links.get(_CLASS_OF.get(kind, "p2p"))
        return general if specific is None else specific.over(general)

    def transfer_time(self, kind: TransferKind, communicator: str = "") -> float:
        """The duration of a transfer from the end of its last producer, on `communicator` if given."""
        link = self.link(kind, communicator)
        if link is not None:
            return link.time
        name = _CLASS_OF.get(kind)
        return self.p2p if name is None else self.collectives.get(name, 0.0)


def is_per_stage(name: str) -> bool:
    """Whether a key of `Costs.memory` or `Costs.sharding` has one number per stage rather than per device."""
    return name != RECEIVE and SHAPES[Kind(name)][0]


def _spread(table_name: str, name: str, value: Cost, placement: Placement) -> tuple[float, ...]:
    count, owner = (placement.stages, "stage") if is_per_stage(name) else (placement.devices, "device")
    result = spread(f"{table_name}.{name}", value, count, owner)
    assert result is not None
    return result


class PassTimes:
    """Duration of every pass under one placement, with sequences cut into `slices`."""

    def __init__(self, costs: Costs, placement: Placement, slices: int = 1) -> None:
        """Raises InputError if a list of `costs` does not have one number per stage or device, or per slice."""
        per_slice = costs.by_slice(slices if costs.slices else 1)
        self._by_slice = [
            slice_costs.stage_times(placement) | slice_costs.device_times(placement) for slice_costs in per_slice
        ]

    def of(self, item: Pass, device: int) -> float:
        """The duration of `item`; for a joint pass, the sum over its parts. Raises InputError if it has no time."""
        kind = item.kind
        by_kind = self._by_slice[min(item.slice, len(self._by_slice) - 1)]
        if kind not in by_kind:
            return sum(self.of(component, device) for component in item.parts)
        times, index = by_kind[kind], device if kind in VOCABULARY_KINDS else item.stage
        assert index is not None
        if times is None:
            raise InputError(f"costs.{kind.value} is missing, but the order has {item}; give a number or a list")
        try:
            return times[index]
        except IndexError:
            raise InputError(f"{item} names a stage that does not exist; stages are 0 to {len(times) - 1}") from None


def _explicit_fields(value: Link | CopyEngine) -> dict[str, Any]:
    """The fields of a link or an engine that differ from their defaults."""
    entries = {entry.name: (getattr(value, entry.name), entry.default) for entry in fields(value)}
    return {name: _to_json(current) for name, (current, default) in entries.items() if current != default}


def _to_json(value: Any) -> Any:
    return [_to_json(element) for element in value] if isinstance(value, tuple) else value


ASSUMED_COPY = 0.25
"""Default time of a copy to the host, or back, relative to forward plus backward."""

EQUAL_COSTS = Costs(F=1, I=1, W=1, S=0.4, T=0.4, E=0, G=0, O=3 * ASSUMED_COPY, L=3 * ASSUMED_COPY)
"""The default costs: equal stages, backwards twice as long as forwards, small vocabulary passes, and copies to the host
and back that together take half as long as forward and backward. Orders depend on little more than the ratio of forward
to backward."""

HOST_COSTS = replace(EQUAL_COSTS, bytes=1.0)
"""The same for orders with offload: one forward stores one unit of bytes."""

EQUAL_SHARDING = {
    "UNSHARD": 1.0,
    "UNSHARD_E": 0.4,
    "UNSHARD_S": 0.4,
    "REDUCE_GRAD": 2.0,
    "REDUCE_GRAD_E": 0.8,
    "REDUCE_GRAD_S": 0.8,
}
"""`Costs.sharding` for equal costs and a bandwidth of 1: gathering the parameters of a stage takes as long as a
forward, and reducing their gradients, in a wider dtype, twice as long."""
