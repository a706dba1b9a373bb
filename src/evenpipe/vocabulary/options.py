"""Options of the loss, and of the tensors that the output layer keeps between its two halves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from evenpipe.words import refused, unknown

Keep = Literal["probabilities", "nothing"]
KernelsName = Literal["auto", "torch", "triton"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """Options of the output layer. With logits y = hidden weight^T + bias, the loss of a token with label t is

        z = soft_cap tanh(logit_scale y / soft_cap)            (z = logit_scale y without a soft-cap)
        lse = log sum_j exp(z_j)
        loss = (1 - label_smoothing) (lse - z_t) + label_smoothing mean_j(lse - z_j) + z_loss lse^2

    which is `torch.nn.functional.cross_entropy(z, labels, label_smoothing=...)` plus the z-loss.
    Raises InputError if a field is out of range.
    """

    label_smoothing: float = 0.0
    """Share of the target that is spread evenly over the vocabulary, 0 to 1."""

    z_loss: float = 0.0
    """Factor on the square of the log-sum-exp (arXiv 2204.02311, section 5: 1e-4). At least 0."""

    soft_cap: float | None = None
    """Limits logits to (-soft_cap, soft_cap). Greater than 0; None: no soft-cap."""

    logit_scale: float = 1.0
    """Factor on the logits, bias included, before the soft-cap. Not 0."""

    ignore_index: int = -100
    """Tokens with this label have no loss and no gradient."""

    keep: Keep = "probabilities"
    """Kept between S and T: the exponentials, in the dtype of the hidden states ([tokens, rows of the shard]), or
    nothing, and T recomputes the logits (a third more arithmetic)."""

    rows_per_block: int | None = None
    """Tokens per block of logits in S. None: about 8 million logits per block and at least 256 tokens (512 on a
    GPU)."""

    entropy: bool = False
    """Also compute the entropy of the prediction for each token (`Combined.entropies`), without a gradient."""

    kernels: KernelsName = "auto"
    """Implementation between the matrix products: Triton's kernels, or operations of torch. "auto": Triton for tensors
    on a GPU, if it is installed."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise refused("label_smoothing", self.label_smoothing, "between 0 and 1")
        if not (math.isfinite(self.z_loss) and self.z_loss >= 0.0):
            raise refused("z_loss", self.z_loss, "at least 0")
        if self.soft_cap is not None and not (math.isfinite(self.soft_cap) and self.soft_cap > 0.0):
            raise refused("soft_cap", self.soft_cap, "greater than 0, or None for no soft-cap")
        if not math.isfinite(self.logit_scale) or self.logit_scale == 0.0:
            raise refused("logit_scale", self.logit_scale, "a finite number other than 0")
        if self.keep not in get_args(Keep):
            raise unknown("keep", self.keep, get_args(Keep))
        if self.rows_per_block is not None and self.rows_per_block < 1:
            raise refused("rows_per_block", self.rows_per_block, "at least 1, or None")
        if self.kernels not in get_args(KernelsName):
            raise unknown("kernels", self.kernels, get_args(KernelsName))

    @property
    def statistics(self) -> int:
        """Numbers per token and shard that S passes to the barrier: the k of `combine`."""
        return 3 + (2 if self.label_smoothing else 0) + (1 if self.entropy else 0)

    @property
    def needs_derivative(self) -> bool:
        """Whether the derivative of the soft-cap is needed separately, not only as a factor of the exponentials."""
        return self.soft_cap is not None and self.label_smoothing > 0.0

    @property
    def adds_constant(self) -> bool:
        """Whether label smoothing adds the same number to the gradient of every logit of a token."""
        return self.soft_cap is None and self.label_smoothing > 0.0
