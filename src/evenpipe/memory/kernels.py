"""Implementations of operations: they save different tensors for the backward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from evenpipe.words import refused, unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Implementations with different saved bytes. Presets: `PRESETS`."""

    attention: Literal["sdpa", "fused", "flash", "unfused", "eager"] = "sdpa"
    """"fused": q, k, v, the result and an fp32 log-sum-exp per head and token, for any window, with the fastest kernel
    of the GPU; "flash": the same with FlashAttention-2; "sdpa": transformers' default, the same if no mask is needed,
    and a mask and repeated keys and values if a window is shorter than the sequence (models that refuse it run
    "eager"); "unfused": two products, and Megatron-LM's softmax between them, which keeps probabilities in 16 bits,
    with dropout also its mask and result; "eager": transformers' modules, which keep probabilities in fp32, too.
    The bytes of the last two grow with the square of the sequence."""
    norm: Literal["fused", "eager"] = "eager"
    """"fused": the input and one fp32 number per token; "eager": the tensors that autograd saves in transformers' own
    modules."""
    activation: Literal["fused", "eager"] = "eager"
    """For a gated MLP, "fused": only gate and up; "eager": also the activated gate. Without a gate, "fused": its
    input."""
    rotary: Literal["fused", "eager"] = "eager"
    """Rotary embedding of queries and keys; "eager": as transformers computes it. Both save only the tables."""
    experts: Literal["rows", "pairs"] = "rows"
    """"rows": a layer's experts keep their input and the first product, as this library runs them; "pairs": the
    implementation in the model's config, with grouped products that keep a row for each token and expert."""
    weight_gradient: Literal["fused", "eager"] = "eager"
    """"fused": the product for a weight gradient adds to the existing gradient; "eager": it first returns a new
    tensor."""
    products: Literal["compute", "fp8", "mxfp8"] = "compute"
    """Products of layers are in the dtype of activations, or of operands cast to 8 bits, with one scale per tensor or
    per 32 elements (MXFP8). The output layer and attention itself stay in the dtype of activations. Scales are not
    counted, so fp8 and mxfp8 have the same bytes and times."""
    parameters: Literal["compute", "cast"] = "compute"
    """Matrices of layers exist in the dtype of activations, or only as operands of fp8 products, cast from masters, as
    with Megatron-LM's --fp8-param-gather."""
    selective: Literal["products", "half"] = "products"
    """What "selective" checkpointing keeps besides attention: the results of all products, or of every second one, as
    torchtitan's "op" does."""
    transfers: Literal["beside", "between"] = "beside"
    """Transfers of hidden states between stages overlap with passes ("beside"), or run between them, as with
    Megatron-LM's --no-overlap-p2p-communication: then the next pass waits on both devices. Affects only times."""
    loss: Literal["evenpipe", "fp32", "bf16", "in-place", "fused", "chunked"] = "evenpipe"
    """Output layer and loss: "evenpipe": S, C and T of this library. The others are those of frameworks: "fp32": logits
    in fp32 and the framework's cross-entropy; "bf16": the same in bf16; "in-place": vocabulary-parallel in place;
    "fused": one fused kernel that keeps bf16 logits; "chunked": a recomputed head and loss in chunks."""

    def __post_init__(self) -> None:
        check_literals("kernels", self)


def check_literals(label: str, instance: Any) -> None:
    """Raise InputError if a field that is a `Literal` has another value."""
    for name, kind in get_type_hints(type(instance)).items():
        if get_origin(kind) is Literal and getattr(instance, name) not in get_args(kind):
            raise refused(f"{label}: {name}", getattr(instance, name), " or ".join(get_args(kind)))


_FUSED = Kernels(attention="fused", norm="fused", activation="fused", rotary="fused")

COMPILED = "compiled"

PRESETS = {
    "transformers": Kernels(),
    COMPILED: replace(_FUSED, attention="sdpa"),
    "fused": _FUSED,
    "megatron": replace(_FUSED, attention="flash", experts="pairs", weight_gradient="fused", loss="in-place"),
    "transformer-engine": replace(_FUSED, experts="pairs", weight_gradient="fused", loss="fused"),
    "fsdp": Kernels(attention="flash", norm="fused", selective="half", loss="fp32"),
}
"""By name: the modules of transformers as `evenpipe train` runs them; the same through torch.compile, which fuses the
operations between products, and keeps for the backward what fused kernels keep; the same with fused kernels; the
kernels of Megatron-LM (`gradient_accumulation_fusion` is its default), also with Transformer Engine and its fused
cross-entropy; and the kernels of torch's FSDP in torchtitan without `torch.compile`: FlashAttention-2, fused norms, and
a loss of fp32 logits."""


def kernels_named(text: str) -> tuple[str, Kernels]:
    """Return the preset's name, and its kernels with the changes after the name, as in "megatron,attention=unfused".
    Raises InputError for an unknown name, field or value."""
    name, *changes = text.split(",")
    if name not in PRESETS:
        raise unknown("kernels", name, PRESETS)
    chosen: dict[str, Any] = {}
    for change in changes:
        key, _, value = change.partition("=")
        accepted = get_type_hints(Kernels)
        if key not in accepted:
            raise unknown(f"kernels: {text}: field", key, accepted)
        chosen[key] = value
    return name, replace(PRESETS[name], **chosen)
