"""The costs of an entire step, from the times of its layers: what each stage and device computes and transfers.

`analytic` gives the times of a layer and of the output layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from evenpipe.schedule import Costs, Placement
from evenpipe.schedule.slice_costs import of_slices
from evenpipe.schedule.vocabulary_mode import VocabularyMode

from .analytic import BESIDE_COLLECTIVES, STATISTICS, LayerTime, Setting, head_time, whole_head_time
from .cards import slowdowns
from .measured_passes import OUTPUT, PASSES


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The split of layers over devices that `Costs` are made for."""

    placement: Placement
    layers_per_stage: tuple[int, ...]
    checkpointing: tuple[str, ...]
    """Per layer: "none", "selective" or "full"."""
    vocabulary: str
    """The mode, one of `evenpipe.schedule.MODES`."""

    @property
    def sharded(self) -> bool:
        """Whether every device has a shard of both vocabulary layers."""
        return VocabularyMode(self.vocabulary).sharded


def costs_of_cut(
    cut: Cut, layers: Sequence[LayerTime], setting: Setting, *, rows: int, hidden_size: int, contention: float = 1.0
) -> Costs:
    """Return the seconds of all passes and transfers of a step.

    layers: with the correction `beside_whole` if vocabulary layers are not sharded. rows: of the embedding and of the
    output layer.
    """
    devices, hardware, pipeline = cut.placement.devices, setting.hardware, setting.axes.pipeline
    correction = setting.correction
    stages = _stage_times(cut, layers, correction.stage)
    exchanged: dict[str, list[float]] = {}
    if setting.tensor > 1:
        exchanged = _stage_times(cut, [layer.exchanged for layer in layers if layer.exchanged], {})
        for name, (first, last) in _exchanged_at_ends(cut, setting, hidden_size).items():
            for times in (stages[name], exchanged[name]):
                times[0] += first
                times[-1] += last
        if setting.sequence_parallel:
            for stage, seconds in enumerate(_first_gathered(cut, setting, hidden_size)):
                for times in (stages["W"], exchanged["W"]):
                    times[stage] += seconds
    embedded = setting.tokens * hidden_size * setting.hidden_share
    wide = setting.hop_bytes(hidden_size)
    collectives: dict[str, float] = {}
    if cut.sharded:
        to_all = pipeline.broadcast_seconds(hardware, wide)
        statistics = pipeline.gather_seconds(hardware, setting.tokens * devices * STATISTICS * 4.0)
        collectives = {"broadcast": to_all, "reduce": to_all, "statistics": statistics, "embedding": to_all}
        collectives = {name: correction[name] * seconds for name, seconds in collectives.items()}
    p2p = correction["p2p"] * pipeline.hop_seconds(hardware, wide)
    p2p, collectives = _on_shared_cards(cut, layers, setting, stages, p2p=p2p, collectives=collectives)
    if setting.kernels.waits_for_transfers:
        stages["F"][:-1] = [time + p2p for time in stages["F"][:-1]]
        for name in ("B", "I"):
            stages[name][1:] = [time + p2p for time in stages[name][1:]]
        p2p = 0.0
    rows_in = 2 * setting.element

    def costs(factor: float = 1.0, **fields: Any) -> Costs:
        fields |= {name: tuple(factor * time for time in row) for name, row in stages.items()}
        waits = {name: tuple(factor * time for time in row) for name, row in exchanged.items()}
        return Costs(**fields, p2p=p2p, contention=contention, tensor_exchange={**waits, **shard_waits})

    shard_waits: dict[str, float] = {}
    if not cut.sharded:
        stages["F"][0] += correction["E"] * hardware.streaming_seconds(embedded * rows_in)
        for name, seconds in whole_head_time(hidden_size, rows, setting).items():
            stages[name][-1] += seconds
        for name in ("W", "B"):
            stages[name][0] += _embedding_gradient(setting, rows, hidden_size, devices=1)
        return costs()
    one_barrier = cut.vocabulary == "vocab-2"
    second = "C" if one_barrier else "T"
    if setting.tensor > 1:
        shard_waits = {
            "S": correction.exchange("S") * _gathered_for_loss(setting, hidden_size),
            second: correction.exchange(second) * setting.exchange_seconds(hidden_size),
        }
    shard = head_time(hidden_size, rows / devices, setting)
    # Every tensor rank combines its share of the gradients of all tokens.
    combined = correction["C"] * hardware.streaming_seconds(4.0 * setting.tokens * hidden_size * setting.element, 4)
    combined += shard_waits.get(second, 0.0)
    first_product = shard.forward + shard.loss_forward + shard_waits.get("S", 0.0)
    return costs(
        BESIDE_COLLECTIVES[cut.vocabulary] if devices > 1 and hardware.torch_device != "cpu" else 1.0,
        S=first_product + (shard.inputs if one_barrier else 0.0),
        C=combined if one_barrier else 0.0,
        T=shard.weights + shard.loss_backward + (0.0 if one_barrier else shard.inputs + combined),
        E=correction["E"] * hardware.streaming_seconds(embedded / devices * rows_in),
        G=_embedding_gradient(setting, rows, hidden_size, devices),
        collectives=collectives,
    )


def _on_shared_cards(
    cut: Cut,
    layers: Sequence[LayerTime],
    setting: Setting,
    stages: Mapping[str, list[float]],
    *,
    p2p: float,
    collectives: Mapping[str, float],
) -> tuple[float, dict[str, float]]:
    """Return the seconds of hops and collectives that share network cards with each other and with communication inside
    passes, and lengthen the passes in `stages` by the resulting delay. p2p, collectives: seconds without sharing."""
    if setting.axes.pipeline.inside_node(setting.hardware):
        return p2p, dict(collectives)
    across = _stage_times(cut, [layer.across or LayerTime() for layer in layers], {})
    placement = cut.placement
    busy = {
        "hops": 2 * (placement.stages - 1) * p2p,
        "collectives": placement.devices * sum(collectives.values()),
        "exchange": _work(across),
    }
    slower = slowdowns(busy, _work(stages))  # all summed over devices
    for name, times in stages.items():
        times[:] = [time + (slower["exchange"] - 1) * moving for time, moving in zip(times, across[name], strict=True)]
    return slower["hops"] * p2p, {name: slower["collectives"] * seconds for name, seconds in collectives.items()}


def _work(stages: Mapping[str, Sequence[float]]) -> float:
    """Return the seconds of all stages for a microbatch, with the shorter backward."""
    return sum(stages["F"]) + min(sum(stages["B"]), sum(stages["I"]) + sum(stages["W"]))


def costs_of_slices(ends: Sequence[int], costs: Callable[[tuple[int, int]], Costs]) -> Costs:
    """Return the costs of slices of a sequence: mean times, and the factors of each slice.

    ends: tokens up to the end of each slice. costs: returns the costs of a slice, given its first token (inclusive) and
    last (exclusive).
    """
    spans = list(pairwise((0, *ends)))
    return of_slices(list(map(costs, spans)), [float(end - start) for start, end in spans])


def _embedding_gradient(setting: Setting, rows: int, hidden_size: int, devices: int) -> float:
    """Return the time of G on each of `devices` devices, which share the rows of the embedding."""
    size = setting.tokens * hidden_size * setting.hidden_share * (setting.element + 2 * setting.gradient_element)
    if setting.kernels.loss != "evenpipe":  # torch makes a dense gradient of all rows: zeroed, then read to be added
        size += rows / setting.tensor * hidden_size * (2 * setting.element + 2 * setting.gradient_element)
    return setting.correction["G"] * setting.hardware.streaming_seconds(size / devices)


def _exchanged_at_ends(cut: Cut, setting: Setting, hidden_size: int) -> dict[str, tuple[float, float]]:
    """Return, by the names in `PASSES`, the times in which tensor ranks of the first stage sum rows of the embedding
    and their gradients, and those of the last stage gather and sum for an unsharded output layer."""
    exchange, unsharded = setting.exchange_seconds(hidden_size), not cut.sharded
    correction = setting.correction.beside_whole if unsharded else setting.correction
    last = _gathered_for_loss(setting, hidden_size) if unsharded else 0.0, exchange if unsharded else 0.0
    at_last = {"F": last[0], "B": last[1], "I": last[1]}
    return {
        name: (correction.exchange(name) * 2 * exchange, correction.exchange(OUTPUT[name]) * seconds)
        for name, seconds in at_last.items()
    }


def _first_gathered(cut: Cut, setting: Setting, hidden_size: int) -> list[float]:
    """Return, by stage, the time in which W gathers its first input, which nothing overlaps; 0 if all layers of the
    stage are recomputed."""
    seconds = setting.correction.exchange("W") * setting.exchange_seconds(hidden_size)
    bounds = pairwise(accumulate(cut.layers_per_stage, initial=0))
    return [seconds if "none" in cut.checkpointing[first:last] else 0.0 for first, last in bounds]


def _gathered_for_loss(setting: Setting, hidden_size: int) -> float:
    """Return the time in which tensor ranks gather hidden states for the output layer, and then the statistics."""
    table = setting.tokens * setting.tensor * STATISTICS * 4.0
    return setting.exchange_seconds(hidden_size) + setting.axes.tensor.gather_seconds(setting.hardware, table)


def _stage_times(cut: Cut, layers: Sequence[LayerTime], stage_overhead: Mapping[str, float]) -> dict[str, list[float]]:
    """Return the seconds of every stage by the names in `PASSES`, without vocabulary layers. stage_overhead: seconds of
    a pass that do not depend on its layers."""
    overhead = {name: stage_overhead.get(name, 0.0) for name in PASSES}
    stages: dict[str, list[float]] = {name: [] for name in PASSES}
    first = 0
    for count in cut.layers_per_stage:
        stage_layers, choices = layers[first : first + count], cut.checkpointing[first : first + count]
        recompute = sum(map(LayerTime.recompute, stage_layers, choices))
        stages["F"].append(overhead["F"] + sum(map(LayerTime.forward_of, stage_layers, choices)))
        stages["B"].append(overhead["B"] + recompute + sum(map(LayerTime.full_backward_of, stage_layers, choices)))
        stages["I"].append(overhead["I"] + recompute + sum(layer.inputs for layer in stage_layers))
        stages["W"].append(overhead["W"] + sum(map(LayerTime.weights_of, stage_layers, choices)))
        first += count
    return stages


# --- before and after the passes of a step ---------------------------------------------------------------------

OPTIMIZER_BYTES = 40.0
"""Bytes read and written per parameter by gradient clipping and AdamW: the gradient is read twice, the weight and two
moments are read and written, and the copy in the compute dtype is written."""


class Parameters(NamedTuple):
    """Numbers of parameters on a device."""

    others: float
    experts: float = 0.0
    """Parameters of experts, of which fewer replicas hold copies."""

    @property
    def all(self) -> float:
        return self.others + self.experts


LOST_ACROSS_NODES = 0.5
"""Fraction of the time of collectives between nodes by which they lengthen the passes that overlap with them, because
they use multiprocessors and bandwidth and wait for the slowest node. Fitted to eight FSDP runs on 64 A100 (torchtitan,
docs/performance.md), for which the error is 2 % with it and 10 % without. Two runs of LLM Foundry, which were not
fitted, are off by 4 and 3 % instead of 8 and 11 %."""


class Overlap(NamedTuple):
    """What overlaps with gathering parameters and summing gradients over replicas, which are done part by part."""

    parts: int = 1
    """Parts of a device: its stages, or its layers. The transfer of each part overlaps with passes of another part."""
    forward: float = 0.0
    backward: float = 0.0
    """Seconds of these passes of a microbatch, of all parts."""
    times: int = 1
    """How often a step gathers and sums: 1, or for every microbatch; with ZeRO-3 before each forward and backward."""
    every_pass: bool = False
    """Whether ZeRO-3 gathers parameters again for the backward."""


_ALONE = Overlap()


def step_end_seconds(
    parameters: Parameters,
    setting: Setting,
    *,
    zero: int,
    overlap: Overlap = _ALONE,
) -> float:
    """Return the time outside passes on a device with these parameters: the part of the gradient reduction that no pass
    overlaps, the optimizer's step and, with sharding, the all-gather of parameters (ZeRO-1: at the end of the step;
    ZeRO-3: for every step)."""
    hardware, copies, seconds, optimized = setting.hardware, setting.axes.copies, 0.0, 0.0
    for count, replicas in zip(parameters, (setting.axes.replicas, setting.axes.experts.replicas), strict=True):
        if count:
            size, across = count / overlap.parts, not replicas.inside_node(hardware)
            summed = replicas.gather_seconds(hardware, size * setting.gradient_element)
            # The sums of the replicas that share the parameters are all-reduced with those of the other copies.
            shared = 2 * copies.gather_seconds(hardware, size * setting.gradient_element / replicas.size)
            gathered = replicas.gather_seconds(hardware, size * (setting.element if zero else setting.gradient_element))
            regathered = gathered if zero == 0 or (zero == 3 and overlap.every_pass) else 0.0
            exchanged = summed + regathered + shared
            lost = LOST_ACROSS_NODES * (1.0 if across else shared / exchanged if exchanged else 0.0)
            seconds += overlap.times * _exposed(exchanged, overlap.backward, overlap.parts, lost)
            if zero:
                lost = LOST_ACROSS_NODES * across
                seconds += overlap.times * _exposed(gathered, overlap.forward, overlap.parts, lost)
            optimized += count / (replicas.size if zero else 1)
    return seconds + hardware.streaming_seconds(optimized * OPTIMIZER_BYTES, 10)


def _exposed(each: float, passes: float, parts: int, lost: float) -> float:
    """Return the time that transferring parts, one after the other, adds to passes. Nothing overlaps with the first (or
    last) part; every other one overlaps with the passes of one part. each: seconds to transfer one part. passes:
    seconds of the passes of all parts. lost: fraction of the overlapped time by which passes take longer."""
    overlapped = min(each, passes / parts)
    return each + (parts - 1) * (each - overlapped + lost * overlapped)
