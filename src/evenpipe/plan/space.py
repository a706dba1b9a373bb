"""The space of the search: all configurations that a number of GPUs could run.

Excluded are impossible layouts (heads or a batch that do not divide evenly, more stages than layers) and slow ones:
tensor parallelism across nodes, which loses a third of the speed, and context parallelism across nodes that leaves each
GPU few tokens (`TOKENS_ACROSS`), because computation grows faster with the number of tokens than communication does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from evenpipe.costs.experts import chosen_overlap
from evenpipe.costs.timed_model import layer_times
from evenpipe.errors import InputError
from evenpipe.experts.overlap import ExpertOptions
from evenpipe.model.context_exchange import heads_divide
from evenpipe.recipe.batch_shape import BatchShape
from evenpipe.recipe.offload import OffloadOptions
from evenpipe.recipe.parallelism import AXES, DATA_PARALLEL, Parallelism, divisor_of
from evenpipe.recipe.recipe import Recipe
from evenpipe.schedule import MODES, SCHEDULES, VocabularyMode, planning
from evenpipe.schedule.registry import options_of
from evenpipe.words import count, refused

from .configuration import LEAST, POLICIES, Configuration
from .problem import Problem
from .programs import Options
from .runnable import refusal_of_cut, refusal_of_estimate, refusal_of_experts, refusal_of_pieces, refusal_of_slices
from .splits import splits

TOKENS_ACROSS = 8192
"""Least number of tokens of a sequence on each GPU for context parallelism across nodes: that of the training of
Llama 3 405B (arXiv 2407.21783, table 4: 131 072 over 16)."""

SLICES = (4,)
"""Numbers of slices of long sequences, besides 1."""

LONG = 32768
"""Least number of tokens of a sequence that is cut into slices, unless slices are requested."""

BUBBLE = 0.2
"""Least bubble of 1F1B, relative to its work, at which sequences are cut, likewise."""

TOKENS_OF_SLICE = 4096
"""Least mean number of tokens of a slice on each GPU, likewise: products of fewer tokens are slower."""

OFFLOAD = (*planning.OFFLOAD, LEAST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The choices of the search. None: everything that is possible."""

    dp: tuple[int, ...] | None = None
    ep: tuple[int, ...] | None = None
    """Replicas that share experts. None: all divisors of dp between which experts divide evenly."""
    tp: tuple[int, ...] | None = None
    cp: tuple[int, ...] | None = None
    pp: tuple[int, ...] | None = None
    zero: tuple[Literal[0, 1, 2, 3], ...] = (1, 3)
    """ZeRO levels for layouts with replicas; other layouts have nothing to shard."""
    dp_shard: tuple[int, ...] | None = None
    """As in `Parallelism`, for layouts where it is possible. None: shards are spread over all replicas."""
    microbatch_sizes: tuple[int, ...] | None = None
    slices: tuple[int, ...] | None = None
    """Numbers of slices per sequence, for pipelines. None: 1, and also `SLICES` for long sequences and few
    microbatches."""
    schedules: tuple[str, ...] = ("1f1b", "interleaved", "zb-h1", "zbv", "v-half", "v-min")
    stages_per_device: tuple[int, ...] = (2, 4)
    """For schedules in which it can be chosen."""
    vocabularies: tuple[str, ...] = ("first-last", "redistribute", "vocab-1", "vocab-2")
    checkpointing: tuple[str, ...] = (LEAST,)
    """`LEAST`, or policies for all layers."""
    offload: tuple[str, ...] = ("scheduled",)
    """Some of `OFFLOAD`."""
    host_shares: tuple[float | None, ...] = (0.0,)
    """Shares of the optimizer's moments on the host, 0 to 1; None: as large as memory requires and time allows."""
    only_runnable: bool = False
    """Leave out what the runtime refuses, and slices of sequences if they would change what the model computes."""

    def __post_init__(self) -> None:
        for name, known in (
            ("schedules", SCHEDULES),
            ("vocabularies", MODES),
            ("checkpointing", (LEAST, *POLICIES)),
            ("offload", OFFLOAD),
            ("zero", (0, 1, 2, 3)),
        ):
            values = getattr(self, name)
            unknown = [f"{value!r} is unknown" for value in values if value not in known]
            if unknown or not values:
                fault = unknown[0] if unknown else "nothing is given"
                raise InputError(f"{name}: {fault}; it must be some of {', '.join(map(str, known))}")
        for share in self.host_shares:
            if share is not None and not 0 <= share <= 1:
                raise refused("host share", share, f"between 0 and 1, or {LEAST}")
        for name in (*AXES, "dp_shard", "microbatch_sizes", "slices", "stages_per_device"):
            values = getattr(self, name)
            if values is not None and (not values or min(values) < 1):
                raise InputError(f"{name} is {values!r}; each must be a whole number of at least 1")


RUNNABLE = Space(zero=(0, 3), only_runnable=True)
"""The choices that `evenpipe train` can run."""


def usual_space(problem: Problem) -> Space:
    """Return the default choices: those that evenpipe can run, or all of them with another framework's kernels."""
    return RUNNABLE if problem.is_ours else Space()


def layouts(problem: Problem, space: Space) -> list[Recipe]:
    """Return all layouts in the space: recipes without a chosen schedule. Layouts that the search will refuse are left
    out only if tp or cp is given, because checking takes seconds. Raises InputError, with the reason, if there is none.
    """
    candidates = list(_layouts(problem, space))
    if space.tp or space.cp:
        runs = [layout for layout in candidates if not refuses(problem, space, layout)]
        if candidates and not runs:
            raise InputError(refuses(problem, space, candidates[0]))
        candidates = runs
    if not candidates:
        refused = [refusal_of_experts(problem, members) for members in space.ep or ()]
        if refused and all(refused):
            raise InputError(refused[0])
        axes = [f"{name} {getattr(space, name)}" for name in AXES if getattr(space, name)]
        raise InputError(
            f"gpus is {problem.gpus} with {count(problem.sequences_per_step, 'sequence')} per"
            f" step{' and ' + ', '.join(axes) if axes else ''}, but nothing divides: expected GPUs = dp x tp x cp x"
            f" pp with at most {count(problem.layers, 'device')} per pipeline, heads and tokens of a sequence divided"
            " by tp, its tokens by 2 cp, sequences divided by dp, and dp by ep"
        )
    return candidates


def refuses(problem: Problem, space: Space, layout: Recipe) -> str:
    """Return why a layout is not in the space although its sizes are: its memory cannot be estimated; or, with
    `only_runnable`, the runtime cannot shard the model over its tensor ranks, or pieces of sequences would change what
    the model computes. Empty if the layout is in the space."""
    sizes = layout.parallelism
    if space.only_runnable and (reason := refusal_of_cut(problem, sizes.tp) or refusal_of_pieces(problem, sizes.cp)):
        return reason
    return refusal_of_estimate(problem, layout)


def _layouts(problem: Problem, space: Space) -> Iterator[Recipe]:
    heads = {work.attention.heads for work in problem.works if work.attention.heads}
    node = problem.hardware.devices_per_node
    for tp, cp, pp in product(divisors(problem.gpus), repeat=3):
        dp, remainder = divmod(problem.gpus, tp * cp * pp)
        sizes = {"dp": dp, "tp": tp, "cp": cp, "pp": pp}
        if remainder or any(size not in (getattr(space, axis) or (size,)) for axis, size in sizes.items()):
            continue
        share, uneven = divmod(problem.sequences_per_step, dp)
        if uneven or pp > problem.layers or problem.sequence % divisor_of(cp, tp) or any(count % tp for count in heads):
            continue
        if tp > node or (tp * cp > node and problem.sequence // cp < TOKENS_ACROSS):
            continue
        zeros = space.zero if dp * cp > 1 else (0,)
        for zero, ep, shard in product(zeros, _members(problem, space, dp), space.dp_shard or (None,)):
            if shard is not None and (not zero or dp % shard or shard % ep):
                continue
            parallelism = Parallelism(
                dp=dp,
                ep=ep,
                tp=tp,
                cp=cp,
                pp=pp,
                data_parallel=DATA_PARALLEL[zero],
                dp_shard=shard,
                context_exchange="keys",
            )
            for size in space.microbatch_sizes or divisors(share):
                if share % size == 0:
                    batch = BatchShape(
                        microbatches=share // size, microbatch_size=size, sequence_length=problem.sequence
                    )
                    yield _with_overlap(problem, _with_exchange(problem, Recipe(parallelism=parallelism, batch=batch)))


def _members(problem: Problem, space: Space, dp: int) -> list[int]:
    """Return the numbers of replicas that may share experts."""
    even = math.gcd(*(work.experts.count for work in problem.kinds if work.experts is not None)) or 1
    possible = space.ep or divisors(math.gcd(dp, even))
    return [ep for ep in possible if dp % ep == 0 and not refusal_of_experts(problem, ep)]


def _with_overlap(problem: Problem, layout: Recipe) -> Recipe:
    """Return a layout with the choice of what overlaps the exchange of experts, if they are shared: the best choice for
    the first layer with experts."""
    sizes = layout.parallelism
    if sizes.ep == 1:
        return layout
    first = next(work for work in problem.works if work.experts is not None)
    assert first.experts is not None
    overlap = chosen_overlap(first.experts, first.hidden_size, problem.setting(layout)).overlap
    experts = ExpertOptions(columns=overlap.columns, arrivals=overlap.arrivals)
    return replace(layout, parallelism=replace(sizes, experts=experts))


def _with_exchange(problem: Problem, layout: Recipe) -> Recipe:
    """Return a layout in which context ranks exchange heads for tokens, if that is possible and takes less time."""
    sizes = {"ranks": layout.parallelism.cp, "tensor_ranks": layout.parallelism.tp}
    if sizes["ranks"] == 1 or not all(heads_divide(work.attention, **sizes) for work in problem.kinds):
        return layout
    exchanging_heads = replace(layout, parallelism=replace(layout.parallelism, context_exchange="heads"))
    keys, heads = (
        sum(time.forward + time.backward for time in layer_times(problem, recipe))
        for recipe in (layout, exchanging_heads)
    )
    return exchanging_heads if heads < keys else layout


def divisors(number: int) -> tuple[int, ...]:
    return tuple(divisor for divisor in range(1, number + 1) if number % divisor == 0)


def configurations(problem: Problem, space: Space, layout: Recipe, head_layers: float) -> Iterator[Configuration]:
    """Yield all configurations of a layout. head_layers: the output layer's time, in layers."""
    devices = layout.devices
    schedules = space.schedules if devices > 1 else space.schedules[:1]
    modes = space.vocabularies if devices > 1 else space.vocabularies[:1]
    seen: set[tuple[Any, ...]] = set()
    cuts = _slices(problem, space, layout)
    for schedule, options in _schedules(schedules, space, problem.layers, devices):
        shape = problem.programs.shape(schedule, options, devices)
        if shape is None or shape.placement.stages > problem.layers:
            continue
        for mode in modes:
            for split in splits(problem, layout, shape, mode, head_layers):
                # Modes with whole vocabulary layers differ only in their splits.
                key = (schedule, options, split, mode if VocabularyMode(mode).sharded else "")
                if key in seen:
                    continue
                seen.add(key)
                copies = space.offload if devices > 1 else ("scheduled",)
                choices = (cuts if shape.slices else (1,)), space.checkpointing, copies, space.host_shares
                for slices, policy, offload, share in product(*choices):
                    recipe = replace(
                        layout,
                        batch=replace(layout.batch, slices=slices),
                        schedule=schedule,
                        schedule_options=options,
                        vocabulary=mode,
                        layers_per_stage=split,
                        activation_checkpointing="none" if policy == LEAST else policy,
                        offload=OffloadOptions(activations="scheduled" if offload == LEAST else offload),
                    )
                    decided = {"activation_checkpointing": policy, "offload": offload}
                    still_open = tuple(name for name, choice in decided.items() if choice == LEAST)
                    yield Configuration(recipe=recipe, shape=shape, open=still_open, host_share=share)


def _slices(problem: Problem, space: Space, layout: Recipe) -> tuple[int, ...]:
    """Return the numbers of slices to try for a layout; 1 means that sequences are not cut."""
    sizes = layout.parallelism
    if layout.devices == 1 or (space.only_runnable and refusal_of_slices(problem)):
        return (1,)
    limit = problem.sequence // divisor_of(sizes.cp, sizes.tp)
    if space.slices is not None:
        return tuple(count for count in space.slices if count <= limit) or (1,)
    if problem.sequence < LONG or layout.devices - 1 < BUBBLE * layout.microbatches or not problem.is_ours:
        return (1,)
    return (1, *(count for count in SLICES if problem.sequence // sizes.cp >= count * TOKENS_OF_SLICE))


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
