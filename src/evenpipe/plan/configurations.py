"""Ways of running a model on a number of GPUs: the space of the search.

    layout           sizes of the four axes, sequences per microbatch, level of sharding over replicas
    configuration    a layout with a schedule, a vocabulary mode, and the layers of every stage

Excluded are impossible layouts (heads that do not divide, more stages than layers, a batch that does not divide) and
slow ones: tensor and context parallelism across nodes, which loses a third of the speed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any, Literal

from evenpipe.costs.analytic import WHOLE, Cut, LayerTime, Setting, costs_of_cut, layer_time
from evenpipe.costs.collectives import Axes
from evenpipe.costs.hardware import ELEMENT_BYTES, Hardware
from evenpipe.costs.measured_passes import (
    NO_CORRECTION,
    Correction,
    MeasuredPasses,
    between,
    correction_of,
    fingerprint,
    passes_of,
    whole_passes,
)
from evenpipe.costs.work import LayerWork, layers_of
from evenpipe.errors import InputError
from evenpipe.memory.framework import FRAMEWORKS
from evenpipe.memory.kernels import PRESETS, Kernels
from evenpipe.memory.parallelism import Parallelism
from evenpipe.model.description import Description
from evenpipe.model.flops import arranging_flops
from evenpipe.schedule import MODES, SCHEDULES, Costs, Order, Placement, even_split, generate, planning, split_by_cost
from evenpipe.schedule.passes import Kind
from evenpipe.schedule.planning import BARRIERS
from evenpipe.schedule.registry import options_of
from evenpipe.schedule.transforms.offload import offloaded

LEAST = "least"
"""Instead of a checkpointing policy: on every device only as much recomputation as its memory requires. Instead of a
choice for copies to the host: "free" if not everything fits on the devices, else "scheduled"."""

OFFLOAD = (*planning.OFFLOAD, LEAST)

POLICIES = ("none", "selective", "full")

EVENPIPE = "transformers"
"""Kernels that evenpipe itself runs: transformers' own."""

Options = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The model, the machine and the batch."""

    description: Description
    works: tuple[LayerWork, ...]
    """Work of each layer."""
    flops: tuple[float, ...]
    """Forward FLOPs per token of each layer: the runtime arranges orders by them."""
    head_flops: float
    hardware: Hardware
    gpus: int
    memory_bytes: int
    """Memory of a GPU."""
    sequence: int
    sequences_per_step: int
    dtype: str = "bf16"
    kernels_name: str = "transformers"
    known: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """Cached results: layers and output layers of a layout."""

    @property
    def kernels(self) -> Kernels:
        """The kernels that run."""
        return PRESETS[self.kernels_name]

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.works)

    @property
    def kinds(self) -> tuple[LayerWork, ...]:
        """The distinct layers."""
        return tuple({id(work): work for work in self.works}.values())

    def setting(self, layout: Layout, *, together: bool = False) -> Setting:
        """Return how a device computes under `layout`, beside the replicas that share its machine; `together`: while
        all devices of all of them compute."""
        kernels, parallelism = self.kernels, layout.parallelism
        others = parallelism.gpus - 1 if together else parallelism.dp - 1
        correction = self.correction(layout.microbatch_size)
        return Setting(
            hardware=self.hardware.slowed(self._slower(others, correction)),
            correction=correction,
            axes=Axes.of(dp=parallelism.dp, tp=parallelism.tp, cp=parallelism.cp, pp=parallelism.pp),
            dtype=self.dtype,
            microbatch_size=layout.microbatch_size,
            sequence=self.sequence,
            sequence_parallel=parallelism.sequence_parallel,
            fused=kernels.norm == "fused",
            flash=kernels.attention != "eager",
            adds_weight_gradients=kernels.weight_gradient == "fused",
            loss=kernels.loss,
            stops_early=FRAMEWORKS[self.kernels_name].stops_early,
        )

    def contention(self, layout: Layout) -> float:
        """Return the slowdown of compute while all devices of a pipeline compute, beyond the figures of `setting`: if j
        of them compute, so do dp * j of all replicas."""
        parallelism = layout.parallelism
        if parallelism.pp == 1:
            return 1.0
        correction = self.correction(layout.microbatch_size)
        return self._slower(parallelism.gpus - 1, correction) / self._slower(parallelism.dp - 1, correction)

    def _slower(self, others: int, correction: Correction) -> float:
        """Return the slowdown of compute beside this many other devices: in proportion to that of a whole node."""
        most = self.hardware.contention if correction.contention is None else correction.contention
        per_other = (most - 1) / max(1, self.hardware.devices_per_node - 1)
        return 1 + per_other * min(others, self.hardware.devices_per_node - 1)

    # --- measured passes of this model ---------------------------------------------------------------------------

    @property
    def measured(self) -> tuple[MeasuredPasses, ...]:
        """Return the passes of this model, with this sequence length and these kernels, on this hardware."""
        if self.kernels_name != EVENPIPE:
            return ()
        description = self.description
        own = fingerprint(self.works, description.vocabulary_size, description.hidden_size)
        return tuple(
            one
            for one in self.hardware.passes
            if (one.model, one.dtype, one.sequence) == (own, self.dtype, self.sequence)
        )

    def correction(self, microbatch_size: int) -> Correction:
        """Return the correction of analytic times by measurements, if there are any."""
        if not self.hardware.passes:
            return NO_CORRECTION
        found: dict[int, Correction] | None = self.known.get("corrections")
        if found is None:
            found = self.known["corrections"] = {one.microbatch_size: self._correction(one) for one in self.measured}
        return between(found, microbatch_size) if found else NO_CORRECTION

    def _correction(self, measured: MeasuredPasses) -> Correction:
        devices = measured.devices
        uncorrected = replace(self, hardware=replace(self.hardware, passes=()), known={})
        split = even_split(self.layers, devices)

        def costs(vocabulary: str) -> Costs:
            one = Configuration(
                layout=Layout(
                    parallelism=Parallelism(dp=1, tp=1, cp=1, pp=devices),
                    microbatch_size=measured.microbatch_size,
                    microbatches=1,
                ),
                schedule="1f1b",
                options=(),
                vocabulary=vocabulary,
                layers_per_stage=split,
                checkpointing=("none",),
            )
            return costs_of(uncorrected, one, Placement.linear(devices))

        shards, whole = costs("vocab-2"), costs("first-last")
        sharded = passes_of(shards, bare=shards.F)
        return correction_of(measured, sharded | whole_passes(whole, split, sharded, bare=whole.F))


def problem_of(
    description: Description,
    hardware: Hardware,
    *,
    gpus: int,
    sequence: int,
    sequences_per_step: int,
    memory_bytes: int | None = None,
    dtype: str = "bf16",
    kernels: str = "transformers",
) -> Problem:
    """Return the problem for the values of a user. Raises InputError for impossible numbers."""
    for name, value in (("gpus", gpus), ("sequence", sequence), ("sequences per step", sequences_per_step)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{name} is {value!r}, expected a whole number of at least 1")
    if memory_bytes is not None and memory_bytes < 1:
        raise InputError(f"gpu memory is {memory_bytes} bytes, expected more than 0")
    if kernels not in PRESETS:
        raise InputError(f"kernels is '{kernels}', expected one of {', '.join(PRESETS)}")
    longest = description.maximum_length
    if longest is not None and sequence > longest and description.position_rows is not None:
        raise InputError(f"sequence is {sequence}, expected at most {longest}, the longest that the model supports")
    if dtype not in ELEMENT_BYTES:
        raise InputError(f"dtype is '{dtype}', expected one of {', '.join(ELEMENT_BYTES)}")
    hardware.peak(dtype)
    flops, head = arranging_flops(description, sequence)
    return Problem(
        description=description,
        works=layers_of(description),
        flops=flops,
        head_flops=head,
        hardware=hardware,
        gpus=gpus,
        memory_bytes=hardware.memory_bytes if memory_bytes is None else memory_bytes,
        sequence=sequence,
        sequences_per_step=sequences_per_step,
        dtype=dtype,
        kernels_name=kernels,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The choices of the search. None: everything that is possible."""

    dp: tuple[int, ...] | None = None
    tp: tuple[int, ...] | None = None
    cp: tuple[int, ...] | None = None
    pp: tuple[int, ...] | None = None
    zero: tuple[Literal[0, 1, 2, 3], ...] = (1, 3)
    """Levels for layouts with replicas; others have nothing to shard."""
    microbatch_sizes: tuple[int, ...] | None = None
    schedules: tuple[str, ...] = ("1f1b", "interleaved", "zb-h1", "zbv", "v-half", "v-min")
    stages_per_device: tuple[int, ...] = (2, 4)
    """For schedules that leave a choice."""
    vocabularies: tuple[str, ...] = ("first-last", "redistribute", "vocab-1", "vocab-2")
    checkpointing: tuple[str, ...] = (LEAST,)
    """`LEAST`, or policies for all layers."""
    offload: tuple[str, ...] = ("scheduled",)
    """Some of `OFFLOAD`."""
    host_shares: tuple[float | None, ...] = (0.0,)
    """Shares of the optimizer's moments on the host, 0 to 1; None: as large as memory requires and time allows."""

    def __post_init__(self) -> None:
        for name, known in (
            ("schedules", SCHEDULES),
            ("vocabularies", MODES),
            ("checkpointing", (LEAST, *POLICIES)),
            ("offload", OFFLOAD),
            ("zero", (0, 1, 2, 3)),
        ):
            given = getattr(self, name)
            if not given:
                raise InputError(f"{name}: nothing is given, expected some of {', '.join(map(str, known))}")
            for value in given:
                if value not in known:
                    raise InputError(f"{name}: {value!r} is unknown, expected some of {', '.join(map(str, known))}")
        for share in self.host_shares:
            if share is not None and not 0 <= share <= 1:
                raise InputError(f"host share is {share!r}, expected numbers between 0 and 1, or {LEAST}")
        for name in ("dp", "tp", "cp", "pp", "microbatch_sizes", "stages_per_device"):
            given = getattr(self, name)
            if given is not None and (not given or min(given) < 1):
                raise InputError(f"{name} is {given!r}, expected whole numbers of at least 1")


RUNNABLE = Space(tp=(1,), cp=(1,), zero=(0, 3))
"""The choices that `evenpipe train` can run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the axes and of a microbatch."""

    parallelism: Parallelism
    microbatch_size: int
    """Sequences per microbatch."""
    microbatches: int
    """Microbatches per step and replica."""

    @property
    def model_parallel(self) -> int:
        """Return the number of GPUs that share one copy of the model."""
        return self.parallelism.tp * self.parallelism.cp * self.parallelism.pp


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One way of running the model."""

    layout: Layout
    schedule: str
    options: Options
    """Options of the schedule's generator."""
    vocabulary: str
    layers_per_stage: tuple[int, ...]
    checkpointing: tuple[str, ...]
    """`LEAST` or a policy, alone: for all layers; in an evaluated plan, one policy per layer."""
    offload: str = "scheduled"
    """One of `OFFLOAD`; never `LEAST` in an evaluated plan."""
    copy_time: tuple[float, ...] = ()
    """By stage, the relative copy times that arrange copies, as `OffloadOptions.copy_time`; for an evaluated plan with
    copies."""
    copy_seconds: tuple[float, ...] = ()
    """By stage, the time of one copy; for such a plan."""
    host_share: float | None = 0.0
    """Share of the optimizer's moments on the host; None: open (not in an evaluated plan)."""

    @property
    def name(self) -> str:
        """Return the configuration in one line."""
        parallelism = self.layout.parallelism
        axes = [f"{axis}{size}" for axis in ("dp", "tp", "cp", "pp") if (size := getattr(parallelism, axis)) > 1]
        parts = ["·".join(axes) or "one GPU"]
        if parallelism.zero:
            parts.append(f"zero-{parallelism.zero}")
        parts.append(self.schedule_name)
        if parallelism.pp > 1:
            parts.append(self.vocabulary)
        if self.offload not in ("scheduled", "none"):
            parts.append(f"offload {self.offload}")
        if self.host_share:
            parts.append(f"host share {self.host_share:g}")
        parts.append(f"{self.layout.microbatch_size} x {self.layout.microbatches}")
        return " ".join(parts)

    @property
    def moves(self) -> bool:
        """Return whether it has activations on the host, or may have."""
        if self.offload != "scheduled":
            return self.offload != "none"
        shape = shape_of(self.schedule, self.options, self.layout.parallelism.pp)
        return shape is not None and shape.moves

    @property
    def schedule_name(self) -> str:
        """Return the name, with the stages per device if there is a choice."""
        stages = dict(self.options).get("stages_per_device")
        return self.schedule if stages is None else f"{self.schedule}/{stages}"


# --- pass times ----------------------------------------------------------------------------------------------


def layer_times(problem: Problem, layout: Layout, vocabulary: str) -> tuple[LayerTime, ...]:
    """Return times of every layer, beside vocabulary layers of a mode; equal layers are computed once."""
    whole = vocabulary in WHOLE
    found: tuple[LayerTime, ...] | None = problem.known.get((layout, whole))
    if found is None:
        setting = problem.setting(layout)
        if whole:
            setting = replace(setting, correction=setting.correction.beside_whole)
        times = {id(work): layer_time(work, setting) for work in problem.kinds}
        found = problem.known[layout, whole] = tuple(times[id(work)] for work in problem.works)
    return found


def costs_of(problem: Problem, configuration: Configuration, placement: Placement) -> Costs:
    """Return the seconds of passes and transfers."""
    setting = problem.setting(configuration.layout)
    checkpointing = configuration.checkpointing
    if len(checkpointing) == 1:
        policy = "none" if checkpointing[0] == LEAST else checkpointing[0]
        checkpointing = (policy,) * problem.layers
    costs = costs_of_cut(
        Cut(
            placement=placement,
            layers_per_stage=configuration.layers_per_stage,
            checkpointing=checkpointing,
            vocabulary=configuration.vocabulary,
        ),
        layer_times(problem, configuration.layout, configuration.vocabulary),
        setting,
        rows=problem.description.vocabulary_size,
        hidden_size=problem.description.hidden_size,
        contention=problem.contention(configuration.layout),
    )
    copies = configuration.copy_seconds
    return replace(costs, O=copies, L=copies) if copies else costs


# --- choices -------------------------------------------------------------------------------------------------


def layouts(problem: Problem, space: Space) -> list[Layout]:
    """Return all layouts in the space. Raises InputError if there is none, with the reason."""
    found = list(_layouts(problem, space))
    if not found:
        given = [f"{name} {getattr(space, name)}" for name in ("dp", "tp", "cp", "pp") if getattr(space, name)]
        raise InputError(
            f"gpus is {problem.gpus} with {problem.sequences_per_step} sequences per step"
            f"{' and ' + ', '.join(given) if given else ''}, but nothing divides: expected GPUs = dp x tp x cp x pp"
            f" with at most {problem.layers} devices per pipeline, heads divided by tp, and sequences divided by dp"
        )
    return found


def _layouts(problem: Problem, space: Space) -> Iterator[Layout]:
    heads = {work.heads for work in problem.works if work.heads}
    node = problem.hardware.devices_per_node
    for tp in divisors(problem.gpus):
        if not _allowed(tp, space.tp) or any(count % tp for count in heads) or tp > node:
            continue
        for cp in divisors(problem.gpus // tp):
            if not _allowed(cp, space.cp) or tp * cp > node or problem.sequence % (2 * cp if cp > 1 else 1):
                continue
            for pp in divisors(problem.gpus // (tp * cp)):
                dp = problem.gpus // (tp * cp * pp)
                if not _allowed(pp, space.pp) or not _allowed(dp, space.dp) or pp > problem.layers:
                    continue
                if problem.sequences_per_step % dp:
                    continue
                share = problem.sequences_per_step // dp
                for zero in space.zero if dp * cp > 1 else (0,):
                    parallelism = Parallelism(dp=dp, tp=tp, cp=cp, pp=pp, zero=zero)
                    for size in _microbatch_sizes(share, space.microbatch_sizes):
                        yield Layout(parallelism=parallelism, microbatch_size=size, microbatches=share // size)


def _microbatch_sizes(share: int, allowed: tuple[int, ...] | None) -> Iterator[int]:
    """Return powers of two, or the given sizes, that divide a replica's part of the batch."""
    sizes = allowed or tuple(2**power for power in range(share.bit_length()))
    return (size for size in sizes if share % size == 0)


def _allowed(size: int, allowed: tuple[int, ...] | None) -> bool:
    return allowed is None or size in allowed


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors, ascending."""
    return tuple(one for one in range(1, number + 1) if number % one == 0)


def configurations(problem: Problem, space: Space, layout: Layout, head_layers: float) -> Iterator[Configuration]:
    """Return all configurations of a layout. head_layers: the output layer's time, in layers."""
    devices = layout.parallelism.pp
    schedules = space.schedules if devices > 1 else space.schedules[:1]
    modes = space.vocabularies if devices > 1 else space.vocabularies[:1]
    seen: set[tuple[Any, ...]] = set()
    for schedule, options in _schedules(schedules, space, problem.layers, devices):
        shape = shape_of(schedule, options, devices)
        if shape is None or shape.placement.stages > problem.layers:
            continue
        for mode in modes:
            for split in splits(problem.layers, shape.placement, mode, round(head_layers, 2)):
                # Modes with whole vocabulary layers differ only in their splits.
                key = (schedule, options, split, mode if BARRIERS[mode] else "")
                if key in seen:
                    continue
                seen.add(key)
                copies = space.offload if devices > 1 else ("scheduled",)
                for policy, offload, share in product(space.checkpointing, copies, space.host_shares):
                    yield Configuration(
                        layout=layout,
                        schedule=schedule,
                        options=options,
                        vocabulary=mode,
                        layers_per_stage=split,
                        checkpointing=(policy,),
                        offload=offload,
                        host_share=share,
                    )


def _schedules(names: Sequence[str], space: Space, layers: int, devices: int) -> Iterator[tuple[str, Options]]:
    for name in names:
        if "stages_per_device" in options_of(name):
            for count in space.stages_per_device:
                if count > 1 and devices > 1 and count * devices <= layers:
                    yield name, (("stages_per_device", count),)
            if devices == 1:
                yield name, (("stages_per_device", 1),)
        else:
            yield name, ()


@dataclass(frozen=True, slots=True)
class Shape:
    """Properties of a schedule that do not depend on its size."""

    placement: Placement
    split: bool
    """Whether its backwards are split into I and W."""
    by_costs: bool
    """Whether its generator plans by costs, so activations in flight are only nearly those of equal stages."""
    moves: bool
    """Whether it moves activations to the host."""


@cache
def shape_of(schedule: str, options: Options, devices: int) -> Shape | None:
    """Return the shape of a schedule on this many devices; None if it has no order for them."""
    try:
        order: Order = generate(schedule, devices, 2 * devices, **dict(options))
    except InputError:
        return None
    return Shape(
        placement=order.placement,
        split=any(item.kind is Kind.I for item in order.passes(0)),
        by_costs="costs" in inspect.signature(SCHEDULES[schedule]).parameters,
        moves=bool(offloaded(order)),
    )


@cache
def splits(layers: int, placement: Placement, mode: str, head_layers: float) -> tuple[tuple[int, ...], ...]:
    """Return the candidate splits of layers over stages, each once.

    Even splits, with the remainder on the first stages, or on the last, where 1F1B holds fewer microbatches; with
    "redistribute", the splits that minimise the longest stage, and the busiest device, which differ if devices hold
    several stages.
    """
    stages = placement.stages
    if mode != "redistribute":
        even = even_split(layers, stages)
        return tuple(dict.fromkeys((even, even[::-1])))
    by_stage = split_by_cost([1.0] * layers, stages, last_extra=head_layers)
    found = [by_stage]
    if stages > placement.devices:
        found.append(_by_device(layers, placement, head_layers))
    return tuple(dict.fromkeys(found))


def _by_device(layers: int, placement: Placement, head_layers: float) -> tuple[int, ...]:
    """Minimise the work of the busiest device, with its layers spread evenly over its stages."""
    load = [0.0] * placement.devices
    load[placement.last_device] += head_layers
    held = [0] * placement.devices
    for _ in range(layers):
        device = min(range(placement.devices), key=lambda device: (load[device], device))
        load[device] += 1
        held[device] += 1
    counts = [0] * placement.stages
    for device in range(placement.devices):
        stages = placement.stages_of(device)
        share, rest = divmod(held[device], len(stages))
        for place, stage in enumerate(stages):
            counts[stage] = share + (place < rest)
    return tuple(counts)
