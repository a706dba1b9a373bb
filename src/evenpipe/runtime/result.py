"""What a step yields, some of it still on its way from the process that made it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

import torch
from torch import Tensor

from evenpipe.errors import InputError
from evenpipe.runtime.communication import Handle
from evenpipe.runtime.recording import StepRecord


class Shared:
    """A tensor that is on its way from the process that made it; every process has it after `value()`.

    Or parts of it from several processes, one per row: then it is the sum of the rows named in `summed`.
    """

    def __init__(self, tensor: Tensor, handle: Handle | None, summed: Sequence[int] | None = None) -> None:
        self._tensor = tensor
        self._handle = handle
        self._summed = summed

    def value(self) -> Tensor:
        if self._handle is not None:
            self._handle.wait("the caller")
        return self._tensor if self._summed is None else self._tensor[list(self._summed)].sum(0)


@dataclass(slots=True)
class StepResult:
    """What a step yields: `tokens` and `loss` of all replicas together, the same on every process."""

    tokens: int
    """Valid tokens, positions with a label that counts, of all replicas."""
    seconds: float
    """Of this process, from the inputs to the last wait."""
    record: StepRecord
    """What this process did, pass by pass where asked for."""
    _loss: Shared = field(repr=False)
    _log_probabilities: list[Shared] = field(default_factory=list, repr=False)
    _shape: tuple[int, int] = (0, 0)
    _router_loss: Shared | None = field(default=None, repr=False)
    _entropy: Shared | None = field(default=None, repr=False)
    _accumulate: int = field(default=1, repr=False)
    """All of these count for one of so many steps: they are divided by it."""

    def __repr__(self) -> str:
        return f"<StepResult: loss {self.loss:.6g}, {self.tokens} valid tokens, {self.seconds:.3f} s>"

    def _repr_html_(self) -> str:
        """For notebooks."""
        values = [f"{self.loss:.6g}", str(self.tokens), f"{self.seconds:.3f}"]
        return html_table("StepResult", ["loss", "valid tokens", "seconds"], [values])

    @property
    def loss(self) -> float:
        """Mean over the valid tokens of all replicas, with the loss options, and what the routers of a mixture of
        experts add to it. Of this step alone, whatever it accumulates with. Reading it waits for it."""
        loss = self._loss.value()
        return self._accumulate * float(loss if self._router_loss is None else loss + self._router_loss.value())

    @property
    def router_loss(self) -> float:
        """What routers add to the loss, coefficient included: the mean over microbatches and replicas; else 0."""
        return 0.0 if self._router_loss is None else self._accumulate * float(self._router_loss.value())

    @property
    def entropy(self) -> float:
        """Of what is predicted for a token, in nats: the mean over the valid tokens of all replicas. Only with
        `LossOptions(entropy=True)`; InputError without."""
        if self._entropy is None:
            raise InputError("entropy: the pipeline's loss options leave it out, expected LossOptions(entropy=True)")
        return self._accumulate * float(self._entropy.value())

    @property
    def log_probabilities(self) -> Tensor:
        """Evaluation only, of this pipeline's own batch: [batch, sequence], at position t that of the label at t + 1, 0
        where none counts."""
        if not self._log_probabilities:
            raise InputError("log_probabilities: only evaluate() gives them, not step()")
        return torch.cat([part.value() for part in self._log_probabilities]).view(self._shape)


def html_table(caption: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for notebooks, of plain texts."""
    lines = ["".join(f"<th>{escape(text)}</th>" for text in header)]
    lines += ["".join(f"<td>{escape(text)}</td>" for text in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><caption>{escape(caption)}</caption>{body}</table>"
