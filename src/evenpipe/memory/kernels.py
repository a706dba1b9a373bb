"""Which implementations run: what they save for the backward differs, and so does what fits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from evenpipe.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Implementations whose saved bytes differ. Presets: `PRESETS`."""

    attention: Literal["sdpa", "flash", "eager"] = "sdpa"
    """"flash": q, k, v, the result and an fp32 log-sum-exp per head and token, whatever the window; "sdpa": what
    transformers takes by itself, the same while no mask is needed, and a mask and repeated keys and values where a
    window is shorter than the sequence (models that refuse it run "eager"); "eager": the probabilities as well, which
    grow with the square of the sequence."""
    norm: Literal["fused", "eager"] = "eager"
    """"fused": the input and one fp32 number per token; "eager": what autograd saves of transformers' own modules."""
    activation: Literal["fused", "eager"] = "eager"
    """Of a gated MLP "fused": gate and up alone; "eager": the activated gate too. Of another "fused": its input."""
    rotary: Literal["fused", "eager"] = "eager"
    """Rotary embedding of queries and keys; "eager": as transformers computes it. Both save the tables alone."""
    packed_qkv: bool = False
    """One product gives queries, keys and values, and whoever saves one of them keeps all three."""
    weight_gradient: Literal["fused", "eager"] = "eager"
    """"fused": the product of a weight's gradient adds to what is there; "eager": it makes a new tensor first."""
    loss: Literal["evenpipe", "fp32", "bf16", "in-place", "fused", "chunked"] = "evenpipe"
    """Output layer and loss: "evenpipe" are the S, C and T of this library; the others are what the frameworks have:
    logits in fp32 and the framework's cross-entropy, the same in bf16, vocabulary-parallel in place, one fused kernel
    that keeps bf16 logits, and a head and loss in chunks that are computed again."""

    def __post_init__(self) -> None:
        for name, accepted in _CHOICES.items():
            if getattr(self, name) not in accepted:
                raise InputError(f"kernels: {name} is {getattr(self, name)!r}, expected {' or '.join(accepted)}")


_CHOICES = {
    "attention": ("sdpa", "flash", "eager"),
    "norm": ("fused", "eager"),
    "activation": ("fused", "eager"),
    "rotary": ("fused", "eager"),
    "weight_gradient": ("fused", "eager"),
    "loss": ("evenpipe", "fp32", "bf16", "in-place", "fused", "chunked"),
}

_FUSED = Kernels(attention="flash", norm="fused", activation="fused", rotary="fused")

PRESETS = {
    "transformers": Kernels(),
    "fused": _FUSED,
    "megatron": replace(_FUSED, weight_gradient="fused", loss="in-place"),
    "transformer-engine": replace(_FUSED, weight_gradient="fused", loss="fused"),
}
"""By name: the modules of transformers as `evenpipe train` runs them; the same with fused kernels; what Megatron-LM
runs (`gradient_accumulation_fusion` is its default), and with Transformer Engine and its fused cross-entropy."""
