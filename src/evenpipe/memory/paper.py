"""The estimator of arXiv 2411.06465 (Fujii, Watanabe, Yokota, 2024), as its authors' code computes it, for comparison.

It covers only the first device of a pipeline and rejects more than 80 % of a GPU's memory. Formulas, conventions and
four test values: `okoge-kaz/Megatron-LM`, branch v0.9.0-tsubame, `megatron/training/theoretical_memory_usage.py` and
`tools/memory_estimate/`. Deviations of the code from an exact count are kept and marked (*).

    h hidden, f width of the MLP, a heads of queries, k of keys and values, L layers, v padded vocabulary, s sequence,
    b microbatch size, t TP, c CP, d DP, p PP
"""

from __future__ import annotations

from dataclasses import dataclass

from evenpipe.errors import InputError
from evenpipe.model import Description
from evenpipe.recipe.parallelism import Parallelism

FEASIBLE = 0.8
"""Share of a GPU's memory below which none of the paper's 454 runs failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperShape:
    """The sizes of a model in its formula."""

    hidden_size: int
    mlp_size: int
    heads: int
    key_value_heads: int
    layers: int
    vocabulary: int
    tied: bool
    gated: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperEstimate:
    """Bytes of the first device."""

    states: float
    """Parameters, gradients, optimizer."""
    activations: float

    @property
    def total(self) -> float:
        return self.states + self.activations

    def fits(self, memory: int) -> bool:
        """Return whether it fits a GPU with this many bytes, by the paper's rule."""
        return self.total <= FEASIBLE * memory


def paper_estimate(
    shape: PaperShape,
    parallelism: Parallelism,
    *,
    sequence: int,
    microbatch_size: int = 1,
    stages_per_device: int = 1,
    gradient_bytes: int = 4,
) -> PaperEstimate:
    """Return the paper's estimate, for sequence parallelism, FlashAttention and no dropout; with `zero`, states are
    sharded over DP and CP."""
    h, f, L, v = shape.hidden_size, shape.mlp_size, shape.layers, shape.vocabulary
    r = shape.key_value_heads / shape.heads
    t, p, b, s = parallelism.tp, parallelism.pp, microbatch_size, sequence / parallelism.cp
    mlp_matrices = 3 / 2 if shape.gated else 1

    layers = 2 * L * h * h * ((1 + r) + f / h * mlp_matrices + 1 / h)  # (*) norms are divided by t below
    held = (layers / p + h * v) / t
    if p == 1 and not shape.tied:  # (*) a separate last device is not considered
        held += h * v / t + h
    per_parameter = 2 + gradient_bytes + 12 / (parallelism.shards if parallelism.zero else 1)

    layer = s * b * h * (12 + 4 * r) + 8 * s * b * f  # (*) four tensors of a gated MLP, even if a kernel keeps three
    tokens = 8 * s * b * h * p  # (*) 8 bytes per token id, times h
    activations = (layer * L + tokens) / t
    if stages_per_device > 1:
        activations *= 1 + (p - 1) / (p * stages_per_device)
    if p == 1:
        activations += 4 * s * b * h * (1 + v / h) / t
    return PaperEstimate(states=held * per_parameter, activations=activations)


def paper_shape(description: Description) -> PaperShape:
    """Return the sizes in a model's config. Raises InputError if a field that the formula needs has no number."""
    layers = [description.layer_config(index) for index in range(description.layers)]

    def number(*names: str) -> int:
        for name in names:
            values = {getattr(config, name, None) for config in layers}
            value = values.pop()
            if isinstance(value, int) and not values:
                return value
        raise InputError(
            f"the paper's formula needs {names[0]}: {description.architecture}'s config has no single number for it"
        )

    heads = number("num_attention_heads")
    has_groups = any(isinstance(getattr(config, "num_key_value_heads", None), int) for config in layers)
    return PaperShape(
        hidden_size=description.hidden_size,
        mlp_size=number("intermediate_size", "n_inner"),
        heads=heads,
        key_value_heads=number("num_key_value_heads") if has_groups else heads,
        layers=description.layers,
        vocabulary=description.vocabulary_size,
        tied=description.tied,
        gated=any("gate" in name for name, _ in description.layer(0).named_parameters()),
    )
