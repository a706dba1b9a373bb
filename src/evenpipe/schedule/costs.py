"""How long passes and transfers take: the cost file of the command line, and the numbers behind every timing."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from evenpipe.errors import InputError

from .passes import STAGE_KINDS, VOCABULARY_KINDS, Kind, Pass, TransferKind
from .placement import Placement

Cost = float | tuple[float, ...]

COLLECTIVES = ("broadcast", "statistics", "reduce", "embedding")
"""Names of the durations in `Costs.collectives`."""

_PER_STAGE = ("F", "B", "I", "W", "bytes")
_PER_DEVICE = ("S", "C", "T", "E", "G")
_ONE_NUMBER = ("p2p", "overlap_slowdown")
_COLLECTIVE_OF = {
    TransferKind.X: "broadcast",
    TransferKind.STATISTICS: "statistics",
    TransferKind.DX: "reduce",
    TransferKind.ROWS: "embedding",
    TransferKind.ROW_GRADIENTS: "embedding",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Times of passes and transfers, all in one unit of the caller's choice.

    A kind that is None has no time: an order that needs it is refused when it is timed.
    """

    F: Cost | None = None
    """Forward of a stage: one number, or one per stage. R takes as long."""
    B: Cost | None = None
    """Full backward; I + W by default."""
    I: Cost | None = None
    """Gradient with respect to a stage's input."""
    W: Cost | None = None
    """Gradient with respect to a stage's weights."""
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
    p2p: float = 0.0
    """One hop between two devices, from the end of its producer."""
    collectives: Mapping[str, float] = field(default_factory=dict)
    """Durations of `broadcast` (X), `statistics`, `reduce` (dX) and `embedding` (rows, either way), 0 by default."""
    overlap_slowdown: float = 1.0
    """Factor on compute while a collective runs, at least 1. The event model of `timing` leaves contention out; the
    full simulator applies it."""
    bytes: Cost | None = None
    """What one forward of a stage stores until its backward: one number, or one per stage."""

    def __post_init__(self) -> None:
        for name in (*_PER_STAGE, *_PER_DEVICE):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _cost(name, value))
        for name in _ONE_NUMBER:
            object.__setattr__(self, name, _number(name, getattr(self, name)))
        if self.overlap_slowdown < 1:
            raise InputError(f"costs: overlap_slowdown must be at least 1, not {self.overlap_slowdown}")
        if not isinstance(self.collectives, Mapping):
            raise InputError(
                f"costs: collectives must be a table of {', '.join(COLLECTIVES)}, not {self.collectives!r}"
            )
        _refuse_unknown(self.collectives, COLLECTIVES, "collectives: ")
        durations = {name: _number(f"collectives.{name}", value) for name, value in self.collectives.items()}
        object.__setattr__(self, "collectives", durations)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Costs:
        """Costs from a parsed cost file; fields as above.

        Raises InputError naming the field for an unknown key, a time that is negative, infinite or no number, an
        empty list, and when F, or B (or I and W) is missing.
        """
        if not isinstance(values, Mapping):
            raise InputError(f"costs must be a table of {', '.join(_FIELDS)}, not {values!r}")
        _refuse_unknown(values, _FIELDS, "")
        costs = cls(**values)
        if costs.F is None:
            raise InputError("costs: F is missing; give a number, or a list of one number per stage")
        if costs.B is None and (costs.I is None or costs.W is None):
            raise InputError("costs: B is missing; give B, or I and W, as a number or a list of one number per stage")
        return costs

    def stage_times(self, placement: Placement) -> dict[Kind, tuple[float, ...] | None]:
        """Per kind, one time per stage; None where no time was given. Raises InputError when a list is not so long."""
        spread = {name: _spread(name, getattr(self, name), placement.stages, "stage") for name in ("F", "B", "I", "W")}
        inputs, weights = spread["I"], spread["W"]
        backward = spread["B"]
        if backward is None and inputs is not None and weights is not None:
            backward = tuple(a + b for a, b in zip(inputs, weights, strict=True))
        copies = (0.0,) * placement.stages
        return {
            Kind.F: spread["F"],
            Kind.B: backward,
            Kind.I: inputs,
            Kind.W: weights,
            Kind.R: spread["F"],
            Kind.O: copies,
            Kind.L: copies,
        }

    def device_times(self, placement: Placement) -> dict[Kind, tuple[float, ...] | None]:
        """Per vocabulary kind, one time per device; None where no time was given."""
        return {Kind(name): _spread(name, getattr(self, name), placement.devices, "device") for name in _PER_DEVICE}

    def stage_bytes(self, placement: Placement) -> tuple[float, ...] | None:
        """What one forward of each stage stores, where given."""
        return _spread("bytes", self.bytes, placement.stages, "stage")

    def transfer_time(self, kind: TransferKind) -> float:
        """Duration of a transfer, from the end of its last producer."""
        name = _COLLECTIVE_OF.get(kind)
        return self.p2p if name is None else self.collectives.get(name, 0.0)


class PassTimes:
    """Duration of any pass under one placement."""

    def __init__(self, costs: Costs, placement: Placement) -> None:
        """Raises InputError when a list of `costs` does not have one number per stage or device."""
        self._stages = costs.stage_times(placement)
        self._devices = costs.device_times(placement)

    def of(self, item: Pass, device: int) -> float:
        """Duration of `item` on `device`; passes run as one take the sum. Raises InputError when it has no time."""
        kind = item.kind
        if kind in VOCABULARY_KINDS:
            times, index = self._devices[kind], device
        elif kind in STAGE_KINDS:
            assert item.stage is not None
            times, index = self._stages[kind], item.stage
        else:
            return sum(self.of(part, device) for part in item.parts)
        if times is None:
            raise InputError(f"costs: {kind.value} is missing, but the order has {item}; give a number or a list")
        try:
            return times[index]
        except IndexError:
            raise InputError(f"{item} is of no stage; stages are 0 to {len(times) - 1}") from None


_FIELDS = tuple(entry.name for entry in fields(Costs))


def _refuse_unknown(values: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0)[0]
            raise InputError(f"costs: {where}unknown key '{key}', did you mean {near}? Accepted: {', '.join(known)}")


def _cost(name: str, value: Any) -> Cost:
    if not isinstance(value, (list, tuple)):
        return _number(name, value)
    if not value:
        raise InputError(f"costs: {name} is an empty list; give one number, or one per stage or device")
    return tuple(_number(f"{name}[{index}]", entry) for index, entry in enumerate(value))


def _number(name: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise InputError(f"costs: {name} must be a finite number of at least 0, not {value!r}")
    return number


def _spread(name: str, value: Cost | None, count: int, what: str) -> tuple[float, ...] | None:
    if value is None:
        return None
    if not isinstance(value, tuple):
        return (value,) * count
    if len(value) != count:
        raise InputError(f"costs: {name} has {len(value)} numbers for {count} {what}s; give one number, or {count}")
    return value


EQUAL_COSTS = Costs(F=1, I=1, W=1, S=0.4, T=0.4, E=0, G=0)
"""Equal stages, a backward twice its forward, vocabulary passes that weigh something: what is taken when no costs are
given. Orders depend on little more than the ratio of forward to backward."""
