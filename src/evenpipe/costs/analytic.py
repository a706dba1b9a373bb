"""Pass times from the shapes of a model and the speed of the hardware, without running the model.

    product     max(FLOPs / achieved, bytes / bandwidth) + one operation; FLOPs dominate from some hundred tokens on
    streaming   bytes / bandwidth + operations
    attention   FLOPs of the unmasked pairs / the speed of fused attention; the backward has 2.5 times as many (five
                products, one of them recomputed)
    tensor      two blocks per layer (attention, MLP): F all-gathers the input of each block and reduce-scatters its
                result, I all-gathers the gradient of the result and reduce-scatters that of the input; recomputation
                skips the last reduce-scatter, or with "selective" every one. Without `Setting.overlaps` nothing
                overlaps; otherwise each exchange overlaps with the product that uses or produces its rows, except for
                one of its chunks (there are as many as ranks). The all-gather of each input for W overlaps with the
                preceding products (except the first of a pass, see `step.py`), in B with the input gradients, and the
                reduce-scatter in B with the weight gradients: the longer of the two counts. Recomputation keeps the
                whole input. Streamed tensors are split too. Without sequence parallelism there are two all-reduces in
                the forward and two in the backward
    vocabulary  tensor ranks gather X and their statistics in S, and sum dX in C or T; those of the first stage sum the
                rows of the embedding in F, and their gradients in B or I; each column carries its share of X and dX
    experts     grouped products, overlapped with the exchange of rows between the replicas that share the experts
                (`experts.overlap`)
    context     every attention layer exchanges keys and values, or heads for tokens (`model/context_exchange.py`), in
                F, in the backward and in recomputation, and copies what it sends and receives. None of this overlaps.
                Every device has the same share of the unmasked pairs

F runs every operation of a layer once. I runs as many products, for the input gradients, and the backward of attention
and streaming. W runs as many products again, for the weight gradients, and accumulates the results.
tests/costs/test_analytic.py compares these times with measurements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import NamedTuple

from evenpipe.errors import InputError
from evenpipe.model.context_exchange import moved
from evenpipe.model.flops import Attention
from evenpipe.words import unknown

from .collectives import Axes
from .experts import one_way_seconds, times_of_experts
from .hardware import ELEMENT_BYTES, Hardware
from .measured_passes import BARE, NO_CORRECTION, OUTPUT, PASSES, Correction
from .work import (
    BACKWARD_OPERATIONS,
    BACKWARD_STREAMED,
    CAST_BYTES,
    LOSS_BYTES,
    LOSS_BYTES_ON_A_CPU,
    ExpertWork,
    LayerWork,
    Product,
    cast_elements,
    operations_forward,
    streamed_forward,
)

BESIDE_COLLECTIVES = {"vocab-1": 1.065, "vocab-2": 1.065, "interlaced": 1.02}
"""Slowdown of stage passes that overlap with collectives of the vocabulary layers, which use multiprocessors and
bandwidth, by mode. Fitted to F and B of the published runs on A100 with and without vocabulary passes (arXiv
2411.05288, artifact): 1.05 to 1.09, and 1.01 to 1.03 for interlaced, where all devices wait for the collectives of the
output layer and only those of the embedding overlap. CPUs use the measured `Hardware.contention` instead."""

UNFUSED_BYTES = {"eager": (24, 30), "unfused": (13, 19)}
"""Bytes per query and key that attention without a fused kernel reads and writes, forward and backward. "eager":
probabilities are written in fp32, masked, normalised and cast. "unfused": scores, probabilities in 16 bits, and dropout
with its mask, each read once and written once (arXiv 2205.05198, section 4.1)."""

STATISTICS = 3
"""fp32 numbers per token and shard that the vocabulary layers gather."""


class Implementation(NamedTuple):
    """How a framework computes. Default: the modules of transformers, as evenpipe runs them."""

    fused: frozenset[str] = frozenset()
    """Which of `FUSIBLE` are one kernel each."""
    attention: str = "sdpa"
    """As `Kernels.attention`."""
    adds_weight_gradients: bool = False
    """The product for a weight gradient accumulates directly; otherwise it first makes a new tensor."""
    products: str = "compute"
    """As `Kernels.products`."""
    saves_casts: bool = False
    """As `Framework.saves_casts`."""
    loss: str = "evenpipe"
    """As `Kernels.loss`."""
    stops_early: bool = True
    """A recomputed layer stops after the last tensor that its backward needs; otherwise it runs to its end."""
    halves_selective: bool = False
    """Selective checkpointing recomputes every second product, not only the operations between products."""
    waits_for_transfers: bool = False
    """A transfer between stages blocks both devices: no pass runs until it has arrived."""
    overlaps_tensor_ranks: bool = True
    """As `Framework.overlaps_tensor_ranks`."""
    exchanges: str = "stages"
    """As `Framework.exchanges`."""
    ours: bool = True
    """Whether this is evenpipe itself, not another framework."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a device computes: everything except the model and its split that pass times depend on."""

    hardware: Hardware
    axes: Axes
    kernels: Implementation
    dtype: str
    """Type of products and activations: "bf16" or "fp32"."""
    gradient_element: int = 4
    """Bytes per element of accumulated gradients."""
    microbatch_size: int
    """Sequences per microbatch."""
    sequence: int
    """Tokens per sequence."""
    sequence_parallel: bool = True
    overlaps: bool = False
    """Tensor ranks overlap the exchange of rows with products."""
    recomputes_logits: bool = False
    """T of evenpipe's loss recomputes the logits."""
    correction: Correction = NO_CORRECTION
    """Derived from measured passes of this model."""

    def __post_init__(self) -> None:
        for dtype in (self.dtype, self.product_dtype):
            self.hardware.peak(dtype)
        if self.sequence % self.axes.context.size:
            raise InputError(
                f"cp is {self.axes.context.size}, but a sequence of {self.sequence} tokens cannot be cut into so many"
                " equal parts"
            )

    @property
    def casts(self) -> bool:
        """Whether the operands of layers' products are cast to 8 bits."""
        return self.kernels.products != "compute"

    @property
    def product_dtype(self) -> str:
        """Type of the operands of layers' products."""
        return "fp8" if self.casts else self.dtype

    def without_casts(self) -> Setting:
        """Return the same setting with all products in the dtype of activations."""
        return replace(self, kernels=self.kernels._replace(products="compute")) if self.casts else self

    @property
    def tensor(self) -> int:
        """Size of the tensor axis: shards of every matrix."""
        return self.axes.tensor.size

    @cached_property
    def tokens(self) -> int:
        """Tokens of a microbatch, or of a slice of it, on one device."""
        start, end = self.span
        return self.microbatch_size * (end - start) // self.axes.context.size

    @property
    def span(self) -> tuple[int, int]:
        """First token (inclusive) and last (exclusive) of a slice of the sequence, or of all of it."""
        return self.axes.pieces.span or (0, self.sequence)

    def on(self, span: tuple[int, int] | None) -> Setting:
        """Return the same setting for a slice, or for whole sequences if `span` is None."""
        return replace(self, axes=replace(self.axes, pieces=replace(self.axes.pieces, span=span)))

    def unfused_attention(self, work: LayerWork) -> tuple[int, int] | None:
        """Return the bytes per query-key pair that attention reads and writes between its products, forward and
        backward; None for a fused kernel."""
        attention, uncut = self.kernels.attention, self.axes.context.size == 1 and self.axes.pieces.span is None
        return UNFUSED_BYTES.get("eager" if work.eager and uncut and attention == "sdpa" else attention)

    def keys(self, attention: Attention) -> float:
        """Return the keys that a token of the slice attends to, on average."""
        start, end = self.span
        earlier_pairs = attention.pairs(start) * start if start else 0.0
        return (attention.pairs(end) * end - earlier_pairs) / (end - start)

    @cached_property
    def element(self) -> int:
        """Bytes per element of activations."""
        return ELEMENT_BYTES[self.dtype]

    @cached_property
    def hidden_share(self) -> float:
        """Share of each tensor of hidden size that a tensor rank holds."""
        return 1 / self.tensor if self.sequence_parallel else 1.0

    def hop_bytes(self, hidden_size: int) -> float:
        """Bytes of a hop."""
        return self.tokens * hidden_size * self.element * self.hidden_share

    def exchange_seconds(self, hidden_size: int) -> float:
        """Time of an all-gather or reduce-scatter of hidden states over tensor ranks."""
        return self.axes.tensor.gather_seconds(self.hardware, self.tokens * hidden_size * self.element)

    # --- one matrix ------------------------------------------------------------------------------------------

    def product_seconds(self, product: Product, which: str = "forward") -> float:
        """Return the time of one of the three products of a matrix, split over the tensor axis: "forward", "inputs"
        (the gradient of its input) or "weights" (dW, which is accumulated in fp32)."""
        size = product.parameters / self.tensor
        tokens = self.tokens * product.met / product.copies
        flops = self.tokens * product.flops / self.tensor / product.copies
        outputs = product.outputs / self.tensor
        moved = tokens * (product.inputs + outputs) * self.element
        shape = {
            "forward": (tokens, outputs, product.inputs),
            "inputs": (tokens, product.inputs, outputs),
            "weights": (outputs, product.inputs, tokens),
        }[which]
        if which != "weights":
            moved += size / product.copies * self.element
        hardware = self.hardware
        each = max(hardware.product_seconds(flops, self.product_dtype, shape), hardware.streaming_seconds(moved))
        seconds = product.copies * each
        if which != "weights":
            return seconds
        added = size * 2 * self.gradient_element  # read and written
        if self.kernels.adds_weight_gradients:
            return max(seconds, hardware.streaming_seconds(added))
        return seconds + hardware.streaming_seconds(added + size * 2 * self.element)  # and dW itself


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """Seconds of a layer and microbatch."""

    forward: float = 0.0
    bare: float = 0.0
    """F that saves only its input."""
    inputs: float = 0.0
    weights: float = 0.0
    full_backward: float = 0.0
    """B, which computes both gradients, without recomputation."""
    weights_repeated: float = 0.0
    """W after recomputation, when tensor ranks already hold the whole input."""
    full_backward_repeated: float = 0.0
    """B after recomputation, likewise."""
    recompute_selective: float = 0.0
    """Recomputation if the results of products and attention were saved."""
    recompute_full: float = 0.0
    """Recomputation if only the layer's input was saved."""
    exchanged: LayerTime | None = None
    """The part of these times in which tensor ranks only exchange rows; None with one rank."""
    across: LayerTime | None = None
    """The part in which context ranks or members of an expert group communicate across nodes; None if none do."""

    @property
    def backward(self) -> float:
        """The shorter of the full backward and the split one."""
        return min(self.full_backward, self.inputs + self.weights)

    # Below, `checkpointing` is one of the policies "none", "selective", "full".

    def extra(self, checkpointing: str) -> float:
        """Return the time that recomputation adds to forward and backward."""
        weights, full_backward = self.weights_of(checkpointing), self.full_backward_of(checkpointing)
        backward = self.recompute(checkpointing) + min(full_backward, self.inputs + weights)
        return self.forward_of(checkpointing) + backward - self.forward - self.backward

    def forward_of(self, checkpointing: str) -> float:
        """Return the forward."""
        return self.bare if checkpointing == "full" else self.forward

    def recompute(self, checkpointing: str) -> float:
        """Return the time of recomputation in the backward."""
        return {"none": 0.0, "selective": self.recompute_selective, "full": self.recompute_full}[checkpointing]

    def weights_of(self, checkpointing: str) -> float:
        """Return W."""
        return self.weights if checkpointing == "none" else self.weights_repeated

    def full_backward_of(self, checkpointing: str) -> float:
        """Return B without its recomputation."""
        return self.full_backward if checkpointing == "none" else self.full_backward_repeated


def layer_time(work: LayerWork, setting: Setting) -> LayerTime:
    """Return the times of a layer."""
    times, across, axes = [_computed(work, setting)], [], setting.axes
    if work.experts is not None:
        times.append(_of_experts(work, work.experts, setting))
        if not axes.experts.members.inside_node(setting.hardware):
            across.append(_between_members(work, work.experts, setting))
    if axes.context.size > 1 and work.attention.heads:
        times.append(_between_pieces(work.attention, setting))
        across += [] if axes.context.inside_node(setting.hardware) else times[-1:]
    exchanged = None if setting.tensor == 1 else _exchanged(work, setting)
    times += [] if exchanged is None else [exchanged]
    return replace(_sum(times), exchanged=exchanged, across=_sum(across) if across else None)


_TIMES = tuple(entry.name for entry in fields(LayerTime) if entry.name not in ("exchanged", "across"))


def _sum(times: Sequence[LayerTime]) -> LayerTime:
    return replace(LayerTime(), **{name: sum(getattr(time, name) for time in times) for name in _TIMES})


def _transfers(forward: float, inputs: float, full_backward: float, recompute: tuple[float, float]) -> LayerTime:
    """Return times of communication. recompute: with selective and with full recomputation."""
    return LayerTime(
        forward=forward,
        bare=forward,
        inputs=inputs,
        full_backward=full_backward,
        full_backward_repeated=full_backward,
        recompute_selective=recompute[0],
        recompute_full=recompute[1],
    )


def _between_pieces(attention: Attention, setting: Setting) -> LayerTime:
    """Return the times in which context ranks only exchange what attention needs, and compute nothing."""
    axis, hardware, pieces = setting.axes.context, setting.hardware, setting.axes.pieces
    local_bytes = setting.tokens * setting.element

    def seconds(elements: float) -> float:
        if pieces.exchange == "ring":
            moving = (axis.size - 1) * axis.hop_seconds(hardware, local_bytes * elements)
            return moving + hardware.streaming_seconds(2 * axis.size * local_bytes * elements)
        if pieces.exchange == "keys":
            gathered = axis.size * local_bytes * elements
            return axis.gather_seconds(hardware, gathered) + hardware.streaming_seconds(2 * gathered)
        return axis.exchange_seconds(hardware, local_bytes * elements) + hardware.streaming_seconds(
            4 * local_bytes * elements, 2
        )

    sliced = pieces.span is not None
    way = "heads" if pieces.exchange == "heads" else "keys"
    tensors = moved(attention, way, ranks=axis.size, tensor_ranks=setting.tensor, keys_held=sliced)
    forward, backward = (sum(map(seconds, each)) for each in tensors)
    factor = setting.correction.between_pieces
    corrected_forward = factor("F") * forward
    return _transfers(
        corrected_forward, factor("I") * backward, factor("B") * backward, (corrected_forward, corrected_forward)
    )


def _computed(work: LayerWork, setting: Setting) -> LayerTime:
    """Return the times without communication between tensor ranks."""
    hardware, tokens = setting.hardware, setting.tokens
    products, inputs, weights = (
        sum(setting.product_seconds(product, which) for product in work.dense)
        for which in ("forward", "inputs", "weights")
    )
    attention, attention_backward = _attention(work, setting)
    # Without sequence parallelism only the bytes of attention heads and the MLP are split: half of all, by assumption.
    share = 1 / setting.tensor if setting.sequence_parallel else (1 + 1 / setting.tensor) / 2
    streamed = tokens * streamed_forward(work, setting.element, setting.kernels.fused) * share
    operations = operations_forward(setting.kernels.fused)
    streaming = hardware.streaming_seconds(streamed, operations)
    streaming_backward = hardware.streaming_seconds(streamed * BACKWARD_STREAMED, operations * BACKWARD_OPERATIONS)
    forward = products + attention + streaming
    inputs = inputs + attention_backward + streaming_backward
    if setting.casts:
        of_inputs, of_gradients = (
            hardware.streaming_seconds(tokens * size * CAST_BYTES / setting.tensor, len(work.dense))
            for size in cast_elements(work)
        )
        forward += of_inputs
        inputs += of_gradients
        weights += 0.0 if setting.kernels.saves_casts else of_inputs
    skipped = setting.product_seconds(work.last) if work.last is not None and setting.kernels.stops_early else 0.0
    recompute = {"selective": streaming + products / 2 * setting.kernels.halves_selective, "full": forward - skipped}
    return _corrected(
        setting, forward, inputs=inputs, weights=weights, full_backward=inputs + weights, recompute=recompute
    )


def _corrected(
    setting: Setting,
    forward: float,
    *,
    inputs: float,
    weights: float,
    full_backward: float,
    recompute: Mapping[str, float],
) -> LayerTime:
    """Return the given times, which exclude communication of tensor ranks, corrected by measurements."""
    correction = setting.correction
    return LayerTime(
        forward=correction["F"] * forward,
        bare=(correction[BARE] if BARE in correction.factors else correction["F"]) * forward,
        inputs=correction["I"] * inputs,
        weights=correction["W"] * weights,
        weights_repeated=correction["W"] * weights,
        full_backward=correction["B"] * full_backward,
        full_backward_repeated=correction["B"] * full_backward,
        recompute_selective=correction["F"] * recompute["selective"],
        recompute_full=correction["F"] * recompute["full"],
    )


def _of_experts(work: LayerWork, experts: ExpertWork, setting: Setting) -> LayerTime:
    """Return the times of experts, including the exchange of their rows."""
    passes, activation = times_of_experts(experts, work.hidden_size, setting)
    recompute = {"selective": activation, "full": passes.R if setting.kernels.stops_early else passes.F}
    return _corrected(setting, passes.F, inputs=passes.I, weights=passes.W, full_backward=passes.B, recompute=recompute)


def _between_members(work: LayerWork, experts: ExpertWork, setting: Setting) -> LayerTime:
    """Return the times of the exchange between the members of an expert group, whether or not it is overlapped."""
    one_way = one_way_seconds(experts, work.hidden_size, setting)
    return _transfers(
        2 * one_way, 2 * one_way, 2 * one_way, (0.0, one_way if setting.kernels.stops_early else 2 * one_way)
    )


BLOCKS = 2
"""Blocks of a layer: attention and MLP."""


def _exchanged(work: LayerWork, setting: Setting) -> LayerTime:
    """Return the times in which tensor ranks only exchange rows, and compute nothing."""
    correction, exchange = setting.correction.exchange, setting.exchange_seconds(work.hidden_size)
    gathered, summed = (
        _exposed(work, setting, exchange, "forward", of_results=of_results) for of_results in (False, True)
    )
    arriving, leaving = (
        _exposed(work, setting, exchange, "inputs", of_results=of_results) for of_results in (True, False)
    )
    weights = recompute_selective = gathering = 0.0
    summing, recompute_full = BLOCKS * exchange, gathered + summed
    if setting.sequence_parallel:
        recompute_full -= summed / BLOCKS if work.last is not None and setting.kernels.stops_early else 0.0
        recompute_selective = BLOCKS * exchange  # the reduce-scattered results were saved
        if work.gathered:
            made_before = sum(setting.product_seconds(product, "weights") for product in work.dense) / len(
                work.gathered
            )
            weights = len(work.gathered) * max(0.0, exchange - made_before)
        for block in work.gathered:
            inputs, made = (
                sum(setting.product_seconds(product, which) for product in block) for which in ("inputs", "weights")
            )
            gathering += max(0.0, exchange - inputs)
            summing -= min(exchange, made)
    bare = correction(BARE if BARE in setting.correction.factors else "F")
    return LayerTime(
        forward=correction("F") * (gathered + summed),
        bare=bare * (gathered + summed),
        inputs=correction("I") * (arriving + leaving),
        weights=correction("W") * weights,
        full_backward=correction("B") * (arriving + gathering + summing),
        full_backward_repeated=correction("B") * (arriving + summing),
        recompute_selective=correction("F") * recompute_selective,
        recompute_full=correction("F") * recompute_full,
    )


def _exposed(work: LayerWork, setting: Setting, exchange: float, which: str, *, of_results: bool) -> float:
    """Return the time in which a layer's blocks only exchange the rows of their inputs, or `of_results`, and compute
    nothing. exchange: time of an exchange. which: the product that uses or produces the rows."""
    if not setting.overlaps:
        return BLOCKS * exchange
    overlapped = [sum(setting.product_seconds(product, which) for product in block) for block in work.gathered]
    if of_results and overlapped:
        remaining = sum(setting.product_seconds(product, which) for product in work.dense) - sum(overlapped)
        overlapped = [remaining / len(overlapped)] * len(overlapped)
    pieces = (setting.tensor - 1) / setting.tensor
    return sum(max(0.0, exchange - pieces * seconds) for seconds in overlapped) + (BLOCKS - len(overlapped)) * exchange


def _attention(work: LayerWork, setting: Setting) -> tuple[float, float]:
    """Return the forward and backward time of attention itself."""
    sizes = work.attention
    if not sizes.heads:
        return 0.0, 0.0
    flash = setting.axes.pieces.flash
    hardware = setting.hardware.with_flash_attention() if flash else setting.hardware
    unfused = setting.unfused_attention(work)
    if unfused is None:
        flops = setting.tokens * sizes.flops(setting.keys(sizes)) / setting.tensor
        forward, backward = hardware.attention_seconds(flops, setting.dtype)
    else:  # every pair is computed
        pairs = setting.tokens * setting.span[1] * sizes.heads / setting.tensor
        flops = 2.0 * pairs * (sizes.query_size + sizes.value_size)
        products = hardware.product_seconds(flops, setting.dtype)
        forward = products + hardware.streaming_seconds(pairs * unfused[0], 6)
        backward = 2 * products + hardware.streaming_seconds(pairs * unfused[1], 6)
    return forward, backward + (forward if flash and work.eager else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTime:
    """Seconds per microbatch of an output layer or of a shard of it: its three products and the loss."""

    forward: float
    inputs: float
    weights: float
    loss_forward: float
    loss_backward: float

    @property
    def seconds(self) -> float:
        """Total time."""
        return self.forward + self.inputs + self.weights + self.loss_forward + self.loss_backward


def head_time(hidden_size: int, rows: float, setting: Setting) -> HeadTime:
    """Return the time of `rows` rows of the output layer, split over the tensor axis too."""
    loss = setting.kernels.loss
    if loss not in LOSS_BYTES:
        raise unknown("loss", loss, LOSS_BYTES)
    setting = setting.without_casts()
    matrix = Product(hidden_size, max(1, round(rows)))
    plain = loss == "evenpipe" and setting.hardware.torch_device == "cpu"
    forward, backward = (
        setting.hardware.streaming_seconds(setting.tokens * rows / setting.tensor * size, 8)
        for size in (LOSS_BYTES_ON_A_CPU if plain else LOSS_BYTES[loss])
    )
    recomputes = loss == "chunked" or (loss == "evenpipe" and setting.recomputes_logits)
    recompute = setting.product_seconds(matrix) if recomputes else 0.0
    # With one barrier, as in measurements, S runs the first three of these and T the last two.
    first, second = setting.correction["S"], setting.correction["T"]
    return HeadTime(
        forward=first * setting.product_seconds(matrix),
        loss_forward=first * forward,
        inputs=first * setting.product_seconds(matrix, "inputs"),
        weights=second * setting.product_seconds(matrix, "weights"),
        loss_backward=second * (backward + recompute),
    )


def whole_head_time(hidden_size: int, rows: int, setting: Setting) -> dict[str, float]:
    """Return the seconds that an unsharded output layer adds to F, B, I and W of the last stage, per microbatch: from
    measurements if there are any, otherwise from the times of shards."""
    factors = setting.correction.factors
    shards = _added(head_time(hidden_size, rows, setting))
    plain = _added(head_time(hidden_size, rows, replace(setting, correction=NO_CORRECTION)))
    return {name: factors[OUTPUT[name]] * plain[name] if OUTPUT[name] in factors else shards[name] for name in PASSES}


def _added(head: HeadTime) -> dict[str, float]:
    forward, inputs = head.forward + head.loss_forward, head.inputs + head.loss_backward
    return {"F": forward, "B": inputs + head.weights, "I": inputs, "W": head.weights}


def least_seconds(passes: Mapping[str, float]) -> float:
    """Return the total time of F and the shorter backward."""
    return passes["F"] + min(passes["B"], passes["I"] + passes["W"])
