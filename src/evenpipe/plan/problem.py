"""The problem of a search: a model, a machine and a batch, and the times of its passes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from evenpipe.costs.analytic import LayerTime, Setting, layer_time
from evenpipe.costs.collectives import Axes, Pieces
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
from evenpipe.costs.step import WHOLE, Cut, costs_of_cut, costs_of_slices
from evenpipe.costs.work import LayerWork, layers_of
from evenpipe.errors import InputError
from evenpipe.memory.framework import FRAMEWORKS
from evenpipe.memory.kernels import PRESETS, Kernels
from evenpipe.memory.model_bytes import ModelBytes
from evenpipe.model.context_exchange import choose
from evenpipe.model.description import Description
from evenpipe.model.expert_rows import check_skew
from evenpipe.model.row_work import slice_ends
from evenpipe.recipe.layout import ModelCosts
from evenpipe.recipe.parallelism import AXES, Parallelism, divisor_of
from evenpipe.recipe.recipe import Recipe
from evenpipe.schedule import Costs, Placement, even_split

from .programs import Programs

EVENPIPE = "transformers"
"""Kernels that evenpipe itself runs: transformers' own."""

KEPT = 4096
"""Results that `Problem.lately` keeps."""

Found = TypeVar("Found")

Span = tuple[int, int]
"""Of a slice: its first token, and the one behind its last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The model, the machine and the batch."""

    description: Description
    works: tuple[LayerWork, ...]
    """Work of each layer."""
    model_costs: ModelCosts
    """What the runtime arranges orders by."""
    hardware: Hardware
    gpus: int
    memory_bytes: int
    """Memory of a GPU."""
    sequence: int
    sequences_per_step: int
    dtype: str = "bf16"
    kernels_name: str = "transformers"
    skew: float = 1.0
    """What the fullest of the replicas that share experts gets over the mean."""
    known: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """Results that a search needs again, for `once`."""

    def once(self, key: Any, make: Callable[[], Found]) -> Found:
        """Return what `make` returned for this key the first time."""
        if key not in self.known:
            self.known[key] = make()
        found: Found = self.known[key]
        return found

    def lately(self, key: Any, make: Callable[[], Found]) -> Found:
        """As `once`, of many keys: what was not needed for long is made again."""
        recent: OrderedDict[Any, Any] = self.once(OrderedDict, OrderedDict)
        if key in recent:
            recent.move_to_end(key)
        else:
            recent[key] = make()
            if len(recent) > KEPT:
                recent.popitem(last=False)
        found: Found = recent[key]
        return found

    @property
    def programs(self) -> Programs:
        return self.once(Programs, lambda: Programs(self.model_costs))

    @property
    def bytes(self) -> ModelBytes:
        return self.once(ModelBytes, lambda: ModelBytes(self.description))

    @property
    def kernels(self) -> Kernels:
        return PRESETS[self.kernels_name]

    @property
    def is_ours(self) -> bool:
        """Whether evenpipe runs these kernels, not another framework."""
        return FRAMEWORKS[self.kernels_name] is FRAMEWORKS[EVENPIPE]

    @property
    def layers(self) -> int:
        return len(self.works)

    @property
    def kinds(self) -> tuple[LayerWork, ...]:
        """The distinct layers."""
        return tuple({id(work): work for work in self.works}.values())

    def setting(self, recipe: Recipe, *, together: bool = False) -> Setting:
        """Return how a device computes under a recipe, beside the replicas that share its machine; `together`: while
        all devices of all of them compute."""
        kernels, parallelism, size = self.kernels, recipe.parallelism, recipe.batch.microbatch_size
        computing = parallelism.gpus if together else _side_by_side(parallelism)
        correction = self.correction(size, parallelism.tp)
        return Setting(
            hardware=self.hardware.slowed(self._slower(computing, correction)),
            correction=correction,
            axes=self._axes(recipe),
            dtype=self.dtype,
            microbatch_size=size,
            sequence=self.sequence,
            sequence_parallel=parallelism.sequence_parallel,
            fused=kernels.norm == "fused",
            attention=kernels.attention,
            adds_weight_gradients=kernels.weight_gradient == "fused",
            loss=kernels.loss,
            stops_early=FRAMEWORKS[self.kernels_name].stops_early,
        )

    def _axes(self, recipe: Recipe) -> Axes:
        """Return the axes of a recipe; attention of pieces on GPUs runs its forward again in our backward."""
        sizes = recipe.parallelism
        pieces = Pieces(
            exchange=self.exchange_of(sizes, recipe.slices),
            attends_again=(sizes.cp > 1 or recipe.slices > 1) and self.is_ours and self.hardware.torch_device != "cpu",
        )
        return Axes.of(
            **{name: getattr(sizes, name) for name in AXES},
            pieces=pieces,
            experts=sizes.experts,
            skew=self.skew,
        )

    def exchange_of(self, sizes: Parallelism, slices: int) -> str:
        """Return "keys" or "heads", as the runtime chooses."""
        if sizes.cp == 1:
            return "keys"
        choice = choose(self.description, sizes.context_exchange, ranks=sizes.cp, tensor_ranks=sizes.tp, slices=slices)
        return choice.exchange

    def contention(self, recipe: Recipe) -> float:
        """Return the slowdown of compute while all devices of a pipeline compute, beyond the figures of `setting`: if j
        of them compute, so do the GPUs of j devices of all replicas."""
        parallelism = recipe.parallelism
        if parallelism.pp == 1:
            return 1.0
        correction = self.correction(recipe.batch.microbatch_size, parallelism.tp)
        return self._slower(parallelism.gpus, correction) / self._slower(_side_by_side(parallelism), correction)

    def _slower(self, computing: int, correction: Correction) -> float:
        """Return the slowdown of compute while this many GPUs compute, relative to one, or to a device of as many
        tensor ranks as were measured: in proportion to that of a whole node."""
        most = self.hardware.contention if correction.contention is None else correction.contention
        alone, node = correction.tensor_parallel, self.hardware.devices_per_node
        return 1 + (most - 1) * max(0, min(computing, node) - alone) / max(1, node - alone)

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

    def correction(self, microbatch_size: int, tensor_parallel: int = 1) -> Correction:
        """Return the correction of analytic times by measurements, if there are any: with the same number of tensor
        ranks if possible, else without tensor parallelism, else with any number of ranks."""
        if not self.hardware.passes:
            return NO_CORRECTION
        for ranks in dict.fromkeys((tensor_parallel, 1, *sorted(one.tensor_parallel for one in self.hardware.passes))):
            found = self.once((Correction, ranks), partial(self._corrections, ranks))
            if found:
                return between(found, microbatch_size)
        return NO_CORRECTION

    def _corrections(self, ranks: int) -> dict[int, Correction]:
        return {one.microbatch_size: self._correction(one) for one in self.measured if one.tensor_parallel == ranks}

    def _correction(self, measured: MeasuredPasses) -> Correction:
        devices = measured.devices
        alone = replace(self.hardware, passes=(), contention=1.0)  # as the measured devices were
        uncorrected = replace(self, hardware=alone, known={})
        split = even_split(self.layers, devices)

        def costs(vocabulary: str) -> Costs:
            recipe = Recipe.of(
                pp=devices,
                tp=measured.tensor_parallel,
                microbatch_size=measured.microbatch_size,
                vocabulary=vocabulary,
                layers_per_stage=split,
            )
            return pass_costs(uncorrected, recipe, Placement.linear(devices))

        shards, whole = costs("vocab-2"), costs("first-last")
        sharded = passes_of(shards, bare=shards.F)
        return correction_of(measured, sharded | whole_passes(whole, split, sharded, bare=whole.F))


def _side_by_side(parallelism: Parallelism) -> int:
    """Return the GPUs that compute whenever one of them does: tensor and context ranks of a device, in all replicas."""
    return parallelism.gpus // parallelism.pp


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
    skew: float = 1.0,
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
    check_skew(skew)
    return Problem(
        description=description,
        works=layers_of(description),
        model_costs=ModelCosts.of(description, sequence),
        hardware=hardware,
        gpus=gpus,
        memory_bytes=hardware.memory_bytes if memory_bytes is None else memory_bytes,
        sequence=sequence,
        sequences_per_step=sequences_per_step,
        dtype=dtype,
        kernels_name=kernels,
        skew=skew,
    )


def layer_times(problem: Problem, recipe: Recipe, span: Span | None = None) -> tuple[LayerTime, ...]:
    """Return times of every layer on whole sequences, or on the slice that is `span`, beside vocabulary layers of the
    mode; equal layers are computed once."""
    whole = recipe.vocabulary in WHOLE and bool(problem.hardware.passes)  # else both have the same times

    def times() -> tuple[LayerTime, ...]:
        setting = problem.setting(recipe).on(span)
        if whole:
            setting = replace(setting, correction=setting.correction.beside_whole)
        found = {id(work): layer_time(work, setting) for work in problem.kinds}
        return tuple(found[id(work)] for work in problem.works)

    key = computing(recipe.parallelism), recipe.batch.microbatch_size, recipe.slices, whole, span
    return problem.once(key, times)


def computing(sizes: Parallelism) -> Parallelism:
    """Return the same without what changes no pass: how parameters are sharded."""
    return replace(sizes, data_parallel="replicate", reshard=False, prefetch=None)


def pass_costs(problem: Problem, recipe: Recipe, placement: Placement) -> Costs:
    """Return the seconds of passes and transfers, without copies to the host; for sequences in slices with factors."""
    cut = Cut(
        placement=placement,
        layers_per_stage=recipe.layers_per_stage or even_split(problem.layers, placement.stages),
        checkpointing=recipe.checkpointing_of(problem.layers),
        vocabulary=recipe.vocabulary,
    )

    def costs(setting: Setting) -> Costs:
        return costs_of_cut(
            cut,
            layer_times(problem, recipe, setting.axes.pieces.span),
            setting,
            rows=problem.description.vocabulary_size,
            hidden_size=problem.description.hidden_size,
            contention=problem.contention(recipe),
        )

    setting = problem.setting(recipe)
    return costs(setting) if recipe.slices == 1 else costs_of_slices(setting, ends_of(problem, recipe), costs)


def ends_of(problem: Problem, recipe: Recipe) -> tuple[int, ...]:
    """Return the number of tokens up to the end of each slice of a sequence, as the runtime cuts it."""
    sizes, slices = recipe.parallelism, recipe.slices
    multiple, rows = divisor_of(sizes.cp, sizes.tp), problem.model_costs.rows_for(recipe)
    cut = partial(slice_ends, rows, problem.sequence, slices, multiple)
    return problem.once((slice_ends, slices, multiple), cut)
