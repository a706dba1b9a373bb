"""Measured passes of a model on this machine, and the factors by which `analytic` is wrong there.

Shapes and data sheets do not tell how long a host takes to issue operations, what caches hold, or how efficient kernels
are at a given size. So `evenpipe profile --hardware CONFIG.toml` runs a pipeline of the model, and the ratios of
measured to `analytic` times correct the times of all other pipelines of that model: other schedules, modes, splits and
numbers of devices. The output layer is measured both sharded (vocab-2) and unsharded (first-last), because part of the
work of a shard per token does not grow with its rows, and because collectives of the shards slow down concurrent
passes. Stages are measured in two sizes, because part of a pass does not depend on its layers. Shorter sequences are
measured too, because part of the time of a layer does not depend on the number of tokens, and every slice of a sequence
takes that time. Between two measured numbers of tokens the time is interpolated linearly; outside their range the
factor of the nearest one is used. With tensor or context parallelism, pipelines with the same number of ranks per
device and the same exchange are used, or others if there are none.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from evenpipe.declaration import Names, PositiveInt, declare, field_types
from evenpipe.schedule.cost_values import Factor, Time

if TYPE_CHECKING:
    from evenpipe.schedule.costs import Cost, Costs

    from .work import LayerWork

BARE = "bare"
"""A forward that saves nothing for its backward."""
PASSES = ("F", "B", "I", "W")
STAGE = {name: f"stage_{name}" for name in PASSES}
"""Names of the part of a stage's pass that does not depend on its layers: seconds per stage and microbatch."""
LAYERS = (*PASSES, BARE)
"""Passes of stages without that part: seconds of a microbatch in all layers of the model, in a pipeline with sharded
vocabulary layers."""
PLAIN = {name: f"plain_{name}" for name in LAYERS}
"""Names of the same passes in a pipeline with unsharded vocabulary layers."""
SHARDS = ("S", "C", "T", "E", "G")
"""Passes of the vocabulary: seconds of a microbatch on one device, on average over devices."""
OUTPUT = {name: f"output_{name}" for name in PASSES}
"""Names of the time that an unsharded output layer adds to the passes of the last stage: seconds of a microbatch."""
TRANSFERS = ("p2p", "broadcast", "statistics", "reduce", "embedding")
MEASURED = (*LAYERS, *SHARDS, *PLAIN.values(), *OUTPUT.values(), *STAGE.values(), *TRANSFERS)


class Ranks(NamedTuple):
    """The processes that together compute the passes of a device."""

    tensor: int = 1
    context: int = 1
    exchange: str = "keys"
    """What context ranks exchange: "keys" or "heads"."""

    @property
    def processes(self) -> int:
        return self.tensor * self.context


ALONE = Ranks()


@declare("passes")
class MeasuredPasses:
    """A pipeline of a model, one stage per device, with sharded vocabulary layers (vocab-2) and with whole ones."""

    model: str
    """Its `fingerprint`."""
    dtype: str
    """Type of products, as `Setting.dtype`."""
    sequence: PositiveInt
    """Tokens per sequence."""
    microbatch_size: PositiveInt
    """Sequences per microbatch."""
    devices: PositiveInt
    contention: Factor
    """Factor on all passes while all devices compute, as `Costs.contention`."""
    seconds: Mapping[Annotated[str, Names(MEASURED)], Time]
    """By the names in `MEASURED`, without those that could not be measured."""
    tp: PositiveInt = 1
    """Tensor ranks of each device."""
    cp: PositiveInt = 1
    """Context ranks of each device."""
    context_exchange: Literal["keys", "heads"] = "keys"
    """Of context ranks: "keys" or "heads"."""

    @property
    def ranks(self) -> Ranks:
        """Tensor and context ranks of a device."""
        return Ranks(self.tp, self.cp, self.context_exchange)

    @property
    def tokens(self) -> int:
        """Tokens per microbatch, on all context ranks."""
        return self.microbatch_size * self.sequence

    def to_dict(self) -> dict[str, Any]:
        """Return the measurements for JSON and TOML, in the form that `hardware_from_dict` accepts."""
        return {name: getattr(self, name) for name in field_types(MeasuredPasses)} | {"seconds": dict(self.seconds)}


def fingerprint(works: Sequence[LayerWork], rows: int, hidden_size: int) -> str:
    """Return a hash of a model's shapes, which is equal for models whose passes take the same time."""
    return hashlib.sha256(repr((tuple(works), rows, hidden_size)).encode()).hexdigest()[:16]


def stage_passes(costs: Costs, looped: Costs) -> dict[str, float]:
    """Return times by the names in `STAGE`, from costs of the same layers in fewer and in more stages, a list per kind.

    If such a time would be negative, or as long as an entire pass, the two measurements contradict each other (one of
    them was disturbed), and the entire time of a pass is attributed to its layers.
    """
    seconds = {}
    for name in PASSES:
        few, many = getattr(costs, name), getattr(looped, name)
        if isinstance(few, tuple) and isinstance(many, tuple) and len(many) > len(few):
            overhead = (math.fsum(many) - math.fsum(few)) / (len(many) - len(few))
            seconds[STAGE[name]] = overhead if 0.0 <= overhead < min(*few, *many) else 0.0
    return seconds


def passes_of(costs: Costs, bare: Cost | None = None, overhead: Mapping[str, float] | None = None) -> dict[str, float]:
    """Return `MeasuredPasses.seconds` from measured costs of a pipeline with one stage per device and vocab-2.

    bare: costs of its forwards that save nothing. overhead: from `stage_passes`.
    """
    seconds: dict[str, float] = {}
    for name, times in _stage_times(costs, bare, overhead).items():
        seconds[name] = math.fsum(times)
    for name in SHARDS:
        time = getattr(costs, name)
        if time is not None:
            seconds[name] = math.fsum(time) / len(time) if isinstance(time, tuple) else time
    durations = {"p2p": costs.p2p, **costs.collectives}
    durations |= {name: link.time for name, link in costs.links.items() if name in TRANSFERS}
    return seconds | {name: time for name, time in durations.items() if time > 0}


def whole_passes(
    costs: Costs,
    layers_per_stage: Sequence[int],
    sharded: Mapping[str, float],
    bare: Cost | None = None,
    overhead: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Return passes of such a pipeline with unsharded vocabulary layers (first-last), by the names in `PLAIN` and
    `OUTPUT`.

    costs, bare, overhead: as for `passes_of`. sharded: `passes_of` the pipeline with sharded vocabulary layers, from
    which the time of the embedding on the first stage is taken. A single device runs its layers and the output layer in
    one pass; its layers are assumed to take as long as in the sharded pipeline.
    """
    embedding = {"F": sharded.get("E", 0.0), BARE: sharded.get("E", 0.0)}
    embedding |= dict.fromkeys(("W", "B"), sharded.get("G", 0.0))
    devices, layers = len(layers_per_stage), sum(layers_per_stage)
    earlier_layers = layers - layers_per_stage[-1]
    seconds = {}
    for name, times in _stage_times(costs, bare, overhead).items():
        if name not in sharded:
            continue
        embedded = devices * embedding.get(name, 0.0)
        if devices == 1:
            remainder = times[0] - embedded - sharded[name]
        else:
            plain = max(0.0, math.fsum(times[:-1]) - embedded) * layers / earlier_layers
            seconds[PLAIN[name]] = plain
            remainder = times[-1] - plain * layers_per_stage[-1] / layers
        if name in OUTPUT:
            seconds[OUTPUT[name]] = max(0.0, remainder)
    return seconds


def _stage_times(costs: Costs, bare: Cost | None, overhead: Mapping[str, float] | None) -> dict[str, tuple[float, ...]]:
    """Return the known times by the names in `LAYERS`, per stage, without `overhead`."""
    times = {name: getattr(costs, name) for name in PASSES} | {BARE: bare}
    overheads = {name: (overhead or {}).get(STAGE["F" if name == BARE else name], 0.0) for name in times}
    known = {name: time if isinstance(time, tuple) else (time,) for name, time in times.items() if time is not None}
    return {name: tuple(max(0.0, time - overheads[name]) for time in times) for name, times in known.items()}


@dataclass(frozen=True)
class Correction:
    """Factors on analytic times, by the names in `MEASURED`; times without a factor are used as they are."""

    factors: Mapping[str, float] = field(default_factory=dict)
    stage: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a pass that do not depend on its layers, by the names in `PASSES`."""
    contention: float | None = None
    """Slowdown while all measured devices compute, relative to only one; None: that of the hardware."""
    ranks: Ranks = ALONE
    """Ranks of each measured device. With 2 or more, factors apply to passes including the exchange between these
    ranks; otherwise to computation only."""
    processes: int | None = None
    """Total number of ranks of all measured devices; None: the contention is that of the hardware."""

    def __getitem__(self, name: str) -> float:
        return self.factors.get(name, 1.0)

    def exchange(self, name: str) -> float:
        """Return the factor on the exchange of tensor ranks within a pass."""
        return self[name] if self.ranks.tensor > 1 else 1.0

    def between_pieces(self, name: str) -> float:
        """Return the factor on the exchange of context ranks within a pass."""
        return self[name] if self.ranks.context > 1 else 1.0

    @cached_property
    def beside_whole(self) -> Correction:
        """Return the correction for stages of a pipeline with unsharded vocabulary layers: `LAYERS` with the factors of
        `PLAIN`, where these were measured."""
        plain = {name: self.factors[plain_name] for name, plain_name in PLAIN.items() if plain_name in self.factors}
        return replace(self, factors={**self.factors, **plain})

    def at_least(self, other: Correction) -> Correction:
        """Return the correction with every factor and time raised to that of `other` if it is lower."""
        factors, stage = (
            {name: max(time, other_values.get(name, time)) for name, time in values.items()}
            for values, other_values in ((self.factors, other.factors), (self.stage, other.stage))
        )
        return replace(self, factors=factors, stage=stage)


NO_CORRECTION = Correction()


def correction_of(measured: MeasuredPasses, analytic: Mapping[str, float]) -> Correction:
    """Return the correction if `analytic` are the analytic times of the measured pipeline, by the same names."""
    factors = {
        name: measured.seconds[name] / analytic[name]
        for name in MEASURED
        if measured.seconds.get(name, 0) > 0 and analytic.get(name, 0) > 0
    }
    stage = {name: measured.seconds[stage_name] for name, stage_name in STAGE.items() if stage_name in measured.seconds}
    ranks = measured.ranks
    return Correction(factors, stage, measured.contention, ranks, measured.devices * ranks.processes)


def between(corrections: Mapping[int, Correction], tokens: int) -> Correction:
    """Return the correction for microbatches of `tokens` tokens from those of measured numbers of tokens."""
    measured = sorted(corrections)
    few = max((count for count in measured if count <= tokens), default=measured[0])
    many = min((count for count in measured if count >= tokens), default=measured[-1])
    if few == many:
        return corrections[few]
    share = (1 / few - 1 / tokens) / (1 / few - 1 / many)  # factors on a time per token are linear in 1 / tokens
    shorter, longer = corrections[few], corrections[many]

    def mean(few: float, many: float) -> float:
        return few + share * (many - few)

    factors = {name: mean(shorter[name], longer[name]) for name in shorter.factors.keys() & longer.factors.keys()}
    stage = {name: mean(shorter.stage[name], longer.stage[name]) for name in shorter.stage.keys() & longer.stage.keys()}
    assert shorter.contention is not None and longer.contention is not None
    return replace(shorter, factors=factors, stage=stage, contention=mean(shorter.contention, longer.contention))
