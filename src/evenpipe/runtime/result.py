"""The result of a step, parts of which may still be on their way from the process that computed them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

import torch
from torch import Tensor

from evenpipe.errors import InputError
from evenpipe.runtime.recording import StepRecord
from evenpipe.words import count
from evenpipe.work import Work


@dataclass(slots=True)
class StepResult:
    """The result of a step: `tokens` and `loss` of all replicas together, the same on every process."""

    tokens: int
    """Number of valid tokens (positions with a label that counts), over all replicas."""
    seconds: float
    """Seconds of this process, from the inputs to the last wait."""
    record: StepRecord
    """The record of this process, pass by pass if requested."""
    _loss: Work = field(repr=False)
    _log_probabilities: list[Work] = field(default_factory=list, repr=False)
    _shape: tuple[int, int] = (0, 0)
    _router_loss: Work | None = field(default=None, repr=False)
    _entropy: Work | None = field(default=None, repr=False)
    _loss_factor: int = field(default=1, repr=False)
    """Means are multiplied by it."""
    _expert_load: Work | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        return f"<StepResult: loss {self.loss:.6g}, {count(self.tokens, 'valid token')}, {self.seconds:.3f} s>"

    def _repr_html_(self) -> str:
        """Return a table, for notebooks."""
        values = [f"{self.loss:.6g}", str(self.tokens), f"{self.seconds:.3f}"]
        return html_table("StepResult", ["loss", "valid tokens", "seconds"], [values])

    @property
    def loss(self) -> float:
        """Mean over the valid tokens of all replicas, with the loss options and the router loss of a mixture of
        experts. It is the loss of this step alone, even with `accumulate`; with `total_tokens` it is this step's share
        of the update's loss, and the shares of all steps add up to that loss. Reading it waits for the result."""
        loss = self._loss.wait()
        return self._loss_factor * float(loss if self._router_loss is None else loss + self._router_loss.wait())

    @property
    def router_loss(self) -> float:
        """The router loss, including its coefficient: the mean over microbatches and replicas, with `total_tokens` this
        step's share of the update's; 0 without routers."""
        return 0.0 if self._router_loss is None else self._loss_factor * float(self._router_loss.wait())

    @property
    def entropy(self) -> float:
        """Entropy of the prediction for a token, in nats: the mean over the valid tokens of all replicas; with
        `total_tokens`, this step's share of the update's mean. Only with `LossOptions(entropy=True)`; otherwise
        InputError."""
        if self._entropy is None:
            raise InputError("entropy: not computed; expected the loss option LossOptions(entropy=True)")
        return self._loss_factor * float(self._entropy.wait())

    @property
    def expert_load(self) -> Tensor:
        """Number of tokens of this step that chose each expert, over all replicas: [layers with experts, experts]
        int64, the layers as in `Pipeline.expert_layers`. Only from `step`, for models with experts; otherwise
        InputError."""
        if self._expert_load is None:
            raise InputError("expert_load: only step() gives it, for models with experts that transformers can replace")
        return self._expert_load.wait()

    @property
    def log_probabilities(self) -> Tensor:
        """Log-probability of each label of this pipeline's own batch: [batch, sequence], at position t that of label
        t + 1, or 0 if it does not count. Only from `evaluate`; otherwise InputError."""
        if not self._log_probabilities:
            raise InputError("log_probabilities: only evaluate() gives them, not step()")
        return torch.cat([chunk.wait() for chunk in self._log_probabilities]).view(self._shape)


def html_table(caption: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table of plain texts, for notebooks."""
    lines = ["".join(f"<th>{escape(text)}</th>" for text in header)]
    lines += ["".join(f"<td>{escape(text)}</td>" for text in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><caption>{escape(caption)}</caption>{body}</table>"
