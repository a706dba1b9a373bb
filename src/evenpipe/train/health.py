"""The mark of health of a checkpoint: are the last losses within the run's own spread, and all parameters finite?

    usual     the lowest value so far of the running mean of the losses (in the first 20 steps: the running mean)
    spread    root of the mean squared distance of losses from their running mean
    limit     usual + the larger of 6 spreads and 0.5

A state is unhealthy if the mean of the last five losses is above the limit, or a parameter is not finite. A loss above
the limit does not change the usual loss and the spread, or a divergence would soon be usual; in the first 20 steps it
counts as the limit. Both means are those of `RunningMean`: plain at first, later exponential with weight 1/50.

The loss of a step is that of the weights before its update, so the losses do not reflect the last update before a
checkpoint. If all losses after the checkpoint are bad, up to an unhealthy checkpoint or the end of the run, it is
marked at that point.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from evenpipe.train.metrics import WINDOW_STEPS

JUDGED_STEPS = 5
"""Number of last losses whose mean is judged: enough that one unusual batch does not decide."""
FIRST_STEPS = 20
SPREADS = 6.0
LEAST_RISE = 0.5
"""In nats per token. A ruined model loses more; if losses hardly scatter, smaller rises are harmless."""


@dataclass(slots=True)
class Health:
    """The usual loss of a run and its spread, and its last losses. Checkpoints save the fields."""

    steps: int = 0
    """Number of losses that count."""
    mean: float = 0.0
    variance: float = 0.0
    lowest: float | None = None
    """Lowest running mean after the first steps."""
    last: list[float] = field(default_factory=list)
    above: int = 0
    """Number of last losses that were all above the limit."""

    def add(self, loss: float) -> None:
        """Add the loss of the next step, which must be finite."""
        self.last = [*self.last, loss][-JUDGED_STEPS:]
        is_above = self.is_above(loss)
        self.above = self.above + 1 if is_above else 0
        if is_above:
            if self.lowest is not None:
                return
            loss = self.limit
        self.steps += 1
        weight = 1 / min(self.steps, WINDOW_STEPS)
        distance = loss - self.mean if self.steps > 1 else 0.0
        self.variance += (distance**2 - self.variance) * weight
        self.mean += (loss - self.mean) * weight
        if self.steps >= FIRST_STEPS:
            self.lowest = self.mean if self.lowest is None else min(self.lowest, self.mean)

    @property
    def usual(self) -> float:
        """The loss to compare with."""
        return self.mean if self.lowest is None else self.lowest

    @property
    def limit(self) -> float:
        """The highest mean of the last losses of a healthy state."""
        return self.usual + max(SPREADS * math.sqrt(self.variance), LEAST_RISE)

    def is_above(self, loss: float) -> bool:
        """Return whether a loss is above the limit, or not finite."""
        return not math.isfinite(loss) or (self.steps > 0 and loss > self.limit)

    def fault(self) -> str | None:
        """Return why the state may be ruined, in words; None if the last losses are usual."""
        if not self.last or (recent := sum(self.last) / len(self.last)) <= self.limit:
            return None
        spread = math.sqrt(self.variance)
        return (
            f"the mean loss of the last {len(self.last)} steps is {recent:.3f}, and the usual loss of the run was"
            f" {self.usual:.3f} with a spread of {spread:.3f}"
        )


def are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether all numbers are finite. Needs no extra memory, because the tensors may fill a device."""
    largest = [torch.linalg.vector_norm(tensor.detach(), math.inf) for tensor in tensors if tensor.numel()]
    return not largest or bool(torch.stack([norm.float() for norm in largest]).isfinite().all())
