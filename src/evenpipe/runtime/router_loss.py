"""The router loss of a mixture of experts across stages: a few numbers beside every hop.

    F    totals of earlier layers ---> [2E+1] fp32 ---> totals with this stage's layers, sent on with the output
    F    of the last stage: the loss of this microbatch, and its gradient
    B, I gradient                    ---> [E] fp32    ---> into this stage's backward, sent on with the input's gradient

Each microbatch has its own loss, like each batch in transformers; a step's loss is their mean.
`evenpipe.model.router_loss` has the formulas, and why these numbers suffice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from evenpipe.model import RouterLoss
from evenpipe.runtime.batch import Microbatch
from evenpipe.schedule import Program

Key = tuple[str, int, int]

ALONG = {"F": "ROUTER_TOTALS", "B": "ROUTER_GRADIENT"}
"""Sent beside the hidden states, and beside their gradient."""


class RouterLosses:
    """One device's part, for the walker, whose tables of values store the numbers.

    Args:
        replicas: pipelines side by side, which the mean includes.
    """

    def __init__(self, loss: RouterLoss, *, replicas: int, torch_device: torch.device) -> None:
        self._loss = loss
        self._replicas = replicas
        self._torch_device = torch_device
        self.accumulate = 1
        """Number of steps whose gradients are added up before one update."""
        self._totals: Tensor | None = None
        self._gradient: Tensor | None = None
        self.value: Tensor | None = None
        """fp64, on the last stage's device: this step's loss with its coefficient, and its share of the mean over
        replicas and accumulated steps."""

    def begin(self, program: Program, put: Callable[[Key, Tensor], None], take: Callable[[Key], Tensor]) -> None:
        """Start a step.

        Args:
            put: stores a value for a later pass or a hop.
            take: takes out a value, computed here or received.
        """
        self._share = 1.0 / (program.microbatches * self._replicas * self.accumulate)
        self._last_stage = program.placement.stages - 1
        self._gradients = not program.forward_only
        self._keep, self._take = put, take
        self.clear()

    def clear(self) -> None:
        """Release the last step's loss, and its inputs."""
        self._totals = self._gradient = self.value = None

    def before_forward(self, stage: int, index: int) -> None:
        """Before F: wait for the totals of earlier stages."""
        self._totals = self._loss.start(self._torch_device) if stage == 0 else self._take((ALONG["F"], stage, index))

    def before_backward(self, stage: int, index: int) -> None:
        """Before B or I: wait for the gradient."""
        self._gradient = self._take((ALONG["B"], stage, index))
        if stage > 0:
            self._keep((ALONG["B"], stage - 1, index), self._gradient)

    def call(
        self, module: Callable[..., Tensor], stage: int, index: int, hidden: Tensor, microbatch: Microbatch
    ) -> Tensor:
        """Run a stage's forward, in F or R. The gradient enters the backward through the returned tensor."""
        logits: list[Tensor] = []
        output = module(hidden, microbatch.position_ids, microbatch.attention_mask, router_logits=logits)
        counted, self._totals = self._totals, None
        before = self._loss.start(self._torch_device) if counted is None else counted
        totals, probabilities = self._loss.add(before, logits, microbatch.attention_mask)
        if counted is not None:  # F already has the values: R needs only the graph
            self._put(totals, stage, index)
        return _Joined.apply(output, probabilities, self) if probabilities.requires_grad else output

    def _put(self, totals: Tensor, stage: int, index: int) -> None:
        if stage < self._last_stage:
            self._keep((ALONG["F"], stage + 1, index), totals)
            return
        value = self._loss.value(totals).double() * (self._loss.coefficient * self._share)
        self.value = value if self.value is None else self.value + value
        if self._gradients:
            self._keep((ALONG["B"], stage, index), self._loss.gradient(totals, self._share))

    def buffer(self, what: str) -> Tensor:
        """Return a receive buffer for the numbers beside the hidden states ("F"), or beside their gradient ("B")."""
        size = 2 * self._loss.experts + 1 if what == "F" else self._loss.experts
        return torch.empty(size, device=self._torch_device)

    def gradient(self) -> Tensor:
        assert self._gradient is not None
        return self._gradient


class _Joined(torch.autograd.Function):
    """Returns the hidden states unchanged; its backward is also that of the router's probabilities."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, probabilities: Tensor, losses: RouterLosses) -> Tensor:
        ctx.losses = losses
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, ctx.losses.gradient(), None
