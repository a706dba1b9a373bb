"""Times of the passes of a model under a recipe, on some hardware, for arranging orders and for timing plans.

`arranging_model` chooses the times by which the orders of runs, estimates and plans are arranged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

from evenpipe.experts.overlap import ExpertOptions
from evenpipe.model.context_exchange import choose
from evenpipe.model.description import Description
from evenpipe.model.flops import usual_length
from evenpipe.model.row_work import slice_ends
from evenpipe.recipe.layout import ModelCosts
from evenpipe.recipe.parallelism import AXES, Parallelism, divisor_of
from evenpipe.recipe.recipe import ARRANGE, Recipe
from evenpipe.schedule import Costs, Placement, even_split
from evenpipe.vocabulary import LossOptions

from .analytic import Implementation, LayerTime, Setting, layer_time, least_seconds, whole_head_time
from .collectives import Axes, Pieces
from .hardware import Hardware, find_hardware
from .measured_passes import (
    NO_CORRECTION,
    Correction,
    MeasuredPasses,
    Ranks,
    between,
    correction_of,
    fingerprint,
    passes_of,
    whole_passes,
)
from .step import Cut, costs_of_cut, costs_of_slices
from .work import LayerWork, layers_of

Value = TypeVar("Value")

Span = tuple[int, int]
"""First token (inclusive) and last (exclusive) of a slice."""


OURS = Implementation()
"""The modules of transformers, as evenpipe runs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedModel:
    """A model on some hardware, and how long its passes take there."""

    description: Description
    works: tuple[LayerWork, ...]
    """Work of each layer."""
    model_costs: ModelCosts
    """Its work in FLOPs."""
    hardware: Hardware
    sequence: int
    dtype: str = "bf16"
    skew: float = 1.0
    """Load of the fullest replica that shares experts, relative to the mean."""
    loss: LossOptions = field(default_factory=LossOptions)
    """Options of evenpipe's output layer."""
    known: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """Cache of `once`."""

    def once(self, key: Any, make: Callable[[], Value]) -> Value:
        """Return the result of `make`, which is called only the first time for each key."""
        if key not in self.known:
            self.known[key] = make()
        result: Value = self.known[key]
        return result

    @property
    def implementation(self) -> Implementation:
        """How the model is computed."""
        return OURS

    @property
    def gradient_element(self) -> int:
        """Bytes per element of accumulated gradients: fp32."""
        return 4

    @property
    def layers(self) -> int:
        return len(self.works)

    @property
    def kinds(self) -> tuple[LayerWork, ...]:
        """The distinct layers."""
        return tuple({id(work): work for work in self.works}.values())

    def setting(self, recipe: Recipe, span: Span | None = None, *, all_devices: bool = False) -> Setting:
        """Return how a device computes whole sequences, or the slice `span`, under a recipe, while the same device of
        all replicas computes; with `all_devices`, while all devices of all replicas compute."""
        parallelism, implementation = recipe.parallelism, self.implementation
        computing = parallelism.gpus if all_devices else _side_by_side(parallelism)
        correction = self.correction(recipe, span)
        flash = implementation.attention == "flash"
        hardware = self.hardware.with_flash_attention() if flash else self.hardware
        setting = Setting(
            hardware=hardware.slowed(self._slower(computing, correction)),
            correction=correction,
            axes=self._axes(recipe),
            dtype=self.dtype,
            gradient_element=self.gradient_element,
            microbatch_size=recipe.batch.microbatch_size,
            sequence=self.sequence,
            sequence_parallel=parallelism.sequence_parallel,
            overlaps=self._overlaps(parallelism),
            kernels=implementation,
            recomputes_logits=self.loss.keep == "nothing",
        )
        return setting if span is None else setting.on(span)

    def _overlaps(self, sizes: Parallelism) -> bool:
        """Return whether tensor ranks overlap the exchange of rows with products."""
        if not sizes.sequence_parallel or self.hardware.torch_device == "cpu":
            return False
        by_default = self.implementation.overlaps_tensor_ranks and sizes.tp <= self.hardware.devices_per_node
        return sizes.tensor_overlap in {"ring", "fused"} or (sizes.tensor_overlap == "auto" and by_default)

    def _axes(self, recipe: Recipe) -> Axes:
        """Return the axes of a recipe. Only our runtime has a special kernel for attention on pieces of sequences (on
        GPUs), and overlaps products of experts with the transfer of rows."""
        sizes = recipe.parallelism
        exchange = self.exchange_of(sizes, recipe.slices)
        pieces = Pieces(
            exchange="ring" if exchange == "keys" and not self.implementation.ours else exchange,
            flash=(sizes.cp > 1 or recipe.slices > 1)
            and self.implementation.ours
            and self.hardware.torch_device != "cpu",
        )
        return Axes.of(
            **{name: getattr(sizes, name) for name in AXES},
            dp_shard=sizes.dp_shard,
            pieces=pieces,
            experts=sizes.experts if self.implementation.ours else ExpertOptions(columns=1, arrivals=1),
            skew=self.skew,
        )

    def exchange_of(self, sizes: Parallelism, slices: int) -> str:
        """Return "keys" or "heads", whichever the runtime chooses."""
        if sizes.cp == 1:
            return "keys"
        choice = choose(self.description, sizes.context_exchange, ranks=sizes.cp, tensor_ranks=sizes.tp, slices=slices)
        return choice.exchange

    def contention(self, recipe: Recipe) -> float:
        """Return the slowdown of compute while all devices of a pipeline compute, relative to `setting`. Replicas run
        in step: while j devices of one pipeline compute, so do the same j devices of all replicas."""
        parallelism = recipe.parallelism
        if parallelism.pp == 1:
            return 1.0
        correction = self.correction(recipe, (0, max(1, self.sequence // recipe.slices)))
        return self._slower(parallelism.gpus, correction) / self._slower(_side_by_side(parallelism), correction)

    def _slower(self, computing: int, correction: Correction) -> float:
        """Return the slowdown of compute while `computing` GPUs compute, relative to one GPU, or to one device with the
        measured number of ranks: that of the hardware, scaled by how far measured passes deviate from it."""
        node, measured_ranks, measured_contention = (
            self.hardware.devices_per_node,
            correction.ranks.processes,
            correction.contention,
        )
        computing = min(computing, node)
        if computing <= measured_ranks:
            return 1.0
        slower = self.hardware.slower(computing) / self.hardware.slower(measured_ranks)
        if measured_contention is None or correction.processes in (None, measured_ranks):
            return slower
        expected = self.hardware.slower(correction.processes) / self.hardware.slower(measured_ranks)
        share = (min(computing, correction.processes) - measured_ranks) / (correction.processes - measured_ranks)
        return slower * (1 + (measured_contention / expected - 1) * share)

    # --- measured passes of this model ---------------------------------------------------------------------------

    @property
    def measured(self) -> tuple[MeasuredPasses, ...]:
        """Return the measured passes of this model on this hardware, with these kernels and at most this sequence
        length."""
        if self.implementation != OURS:
            return ()
        description = self.description
        model_hash = fingerprint(self.works, description.vocabulary_size, description.hidden_size)
        return tuple(
            passes
            for passes in self.hardware.passes
            if (passes.model, passes.dtype) == (model_hash, self.dtype) and passes.sequence <= self.sequence
        )

    def correction(self, recipe: Recipe, span: Span | None = None) -> Correction:
        """Return the correction of analytic times by measurements of this sequence length, if there are any. Preferred
        are measurements with the same numbers of tensor and context ranks, and among these with the same exchange; then
        with the same number of tensor ranks only; then with one rank; then any.

        span: a slice. Its time per token is assumed to be at least that of the whole sequence; bounds assume this too.
        """
        if not self.hardware.passes:
            return NO_CORRECTION
        sizes = recipe.parallelism
        ways = (self.exchange_of(sizes, recipe.slices), "keys", "heads")
        candidates = *(Ranks(sizes.tp, sizes.cp, way) for way in ways), Ranks(sizes.tp), Ranks()
        for ranks in dict.fromkeys((*candidates, *sorted(passes.ranks for passes in self.hardware.passes))):
            corrections = self.once((Correction, ranks), partial(self._corrections, ranks))
            if corrections:
                size = recipe.batch.microbatch_size
                of_sequence, tokens = (
                    between(corrections, size * self.sequence),
                    span[1] - span[0] if span else self.sequence,
                )
                return (
                    of_sequence
                    if tokens == self.sequence
                    else between(corrections, size * tokens).at_least(of_sequence)
                )
        return NO_CORRECTION

    def _corrections(self, ranks: Ranks) -> dict[int, Correction]:
        """Return the corrections by tokens of a microbatch; empty without measurements of this sequence length."""
        measurements = sorted((passes for passes in self.measured if passes.ranks == ranks), key=attrgetter("sequence"))
        if not measurements or measurements[-1].sequence < self.sequence:
            return {}
        return {passes.tokens: self._correction(passes) for passes in measurements}

    def _correction(self, measured: MeasuredPasses) -> Correction:
        devices = measured.devices
        undisturbed = replace(self.hardware, passes=(), contention=1.0, cores=0)  # as the measured devices were
        uncorrected = replace(self, hardware=undisturbed, sequence=measured.sequence, known={})
        split = even_split(self.layers, devices)

        def costs(vocabulary: str) -> Costs:
            recipe = Recipe.of(
                pp=devices,
                tp=measured.tp,
                cp=measured.cp,
                context_exchange=measured.context_exchange,
                microbatch_size=measured.microbatch_size,
                vocabulary=vocabulary,
                layers_per_stage=split,
            )
            return pass_costs(uncorrected, recipe, Placement.linear(devices))

        shards, unsharded = costs("vocab-2"), costs("first-last")
        sharded = passes_of(shards, bare=shards.F)
        return correction_of(measured, sharded | whole_passes(unsharded, split, sharded, bare=unsharded.F))


def _side_by_side(parallelism: Parallelism) -> int:
    """Return how many GPUs always compute at the same time: the tensor and context ranks of a device, in all
    replicas."""
    return parallelism.gpus // parallelism.pp


def layer_times(model: TimedModel, recipe: Recipe, span: Span | None = None) -> tuple[LayerTime, ...]:
    """Return the times of every layer on whole sequences, or on the slice `span`, in the vocabulary mode of the recipe;
    equal layers are computed once."""
    unsharded = not recipe.mode.sharded and bool(model.hardware.passes)  # else both have the same times

    def times() -> tuple[LayerTime, ...]:
        setting = model.setting(recipe, span)
        if unsharded:
            setting = replace(setting, correction=setting.correction.beside_whole)
        by_work = {id(work): layer_time(work, setting) for work in model.kinds}
        return tuple(by_work[id(work)] for work in model.works)

    key = computing(recipe.parallelism), recipe.batch.microbatch_size, recipe.slices, unsharded, span
    return model.once(key, times)


def extra_times(model: TimedModel, recipe: Recipe, checkpointing: str) -> tuple[float, ...]:
    """Return how much longer the passes of every layer take with a checkpointing policy, as `LayerTime.extra`."""
    times = layer_times(model, recipe)

    def extra() -> tuple[float, ...]:
        by_id = {id(time): time.extra(checkpointing) for time in {id(time): time for time in times}.values()}
        return tuple(by_id[id(time)] for time in times)

    return model.once((extra_times, id(times), checkpointing), extra)  # `times` is kept, so no others have its id


def split_times(model: TimedModel, recipe: Recipe) -> tuple[tuple[float, ...], float]:
    """Return the seconds by which layers are split over devices, of each layer and of the unsharded output layer:
    forward and backward of a microbatch, with the recipe's recomputation."""
    times = layer_times(model, replace(recipe, vocabulary="redistribute"))
    description, policies = model.description, recipe.checkpointing_of(model.layers)
    head = whole_head_time(description.hidden_size, description.vocabulary_size, model.setting(recipe))
    layers = (time.forward + time.backward + time.extra(policy) for time, policy in zip(times, policies, strict=True))
    return tuple(layers), least_seconds(head)


def computing(sizes: Parallelism) -> Parallelism:
    """Return `sizes` without the options for sharding parameters, which do not affect passes."""
    return replace(sizes, data_parallel="replicate", dp_shard=None, reshard=False, prefetch=None)


def pass_costs(model: TimedModel, recipe: Recipe, placement: Placement) -> Costs:
    """Return the seconds of passes and transfers, without copies to the host; with factors per slice if sequences are
    cut."""
    cut = Cut(
        placement=placement,
        layers_per_stage=recipe.layers_per_stage or even_split(model.layers, placement.stages),
        checkpointing=recipe.checkpointing_of(model.layers),
        vocabulary=recipe.vocabulary,
    )

    def costs(span: Span | None = None) -> Costs:
        return costs_of_cut(
            cut,
            layer_times(model, recipe, span),
            model.setting(recipe, span),
            rows=model.description.vocabulary_size,
            hidden_size=model.description.hidden_size,
            contention=model.contention(recipe),
        )

    return costs() if recipe.slices == 1 else costs_of_slices(ends_of(model, recipe), costs)


def ends_of(model: TimedModel, recipe: Recipe) -> tuple[int, ...]:
    """Return the number of tokens up to the end of each slice of a sequence, as the runtime cuts it."""
    sizes, slices = recipe.parallelism, recipe.slices
    multiple, rows = divisor_of(sizes.cp, sizes.tp), model.model_costs.rows_for(recipe)
    cut = partial(slice_ends, rows, model.sequence, slices, multiple)
    return model.once((slice_ends, slices, multiple), cut)


# --- times by which a run arranges its orders ------------------------------------------------------------------


def known_times(model: TimedModel) -> ModelCosts:
    """Return the costs by which orders of a model on known hardware are arranged and its layers split."""
    return replace(
        model.model_costs,
        times=partial(pass_costs, model),
        split_times=partial(split_times, model),
        hardware=model.hardware.name,
    )


def arranging_model(
    description: Description,
    recipe: Recipe,
    at_hand: Hardware | None,
    dtype: str | None,
    loss: LossOptions | None = None,
) -> ModelCosts:
    """Return the costs by which the order of a run is arranged, unless its recipe has costs: the pass times of the
    model on the hardware that `recipe.arrange` names, else on the hardware at hand, else FLOPs.

    at_hand: a known GPU, the same on every process; None for any other hardware. dtype: of products; None if it is not
    in `ELEMENT_BYTES`. loss: default options if None. Raises InputError for unknown hardware, and for a file that
    cannot be read.
    """
    costs = ModelCosts.of(description, recipe.batch.sequence_length)
    named = recipe.arrange not in ARRANGE
    hardware = find_hardware(recipe.arrange) if named else at_hand if recipe.arrange == "auto" else None
    if hardware is None or dtype is None or dtype not in hardware.peak_flops:
        return costs
    sizes = recipe.parallelism
    multiple = divisor_of(sizes.cp, sizes.tp)
    sequence = recipe.batch.sequence_length or usual_length(description)
    model = TimedModel(
        description=description,
        works=layers_of(description),
        model_costs=costs,
        hardware=hardware,
        sequence=max(1, sequence // multiple) * multiple,
        dtype=dtype,
        loss=loss or LossOptions(),
    )
    return known_times(model)
