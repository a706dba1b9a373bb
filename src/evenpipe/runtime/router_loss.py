"""The router loss of a mixture of experts on its way through the stages: a few numbers beside every hop.

    F    totals of the layers before ---> [2E+1] fp32 ---> totals with this stage's layers, sent on with the output
    F    of the last stage: the loss of this microbatch, and its gradient
    B, I gradient                    ---> [E] fp32    ---> into this stage's backward, sent on with the input's gradient

The loss is one of every microbatch, as of every batch that transformers is called with; a step's is their mean. What
is computed, and why these numbers are enough: `evenpipe.model.router_loss`.
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
"""What travels beside the hidden states, and beside their gradient."""


class RouterLosses:
    """One device's part, used by the walker, in whose tables of values the numbers lie.

    Args:
        replicas: pipelines side by side, over which the mean goes too.
    """

    def __init__(self, loss: RouterLoss, *, replicas: int, torch_device: torch.device) -> None:
        self._loss = loss
        self._replicas = replicas
        self._torch_device = torch_device
        self.accumulate = 1
        """Steps whose gradients are added up before one update: of which this step's loss is one part."""
        self._totals: Tensor | None = None
        self._gradient: Tensor | None = None
        self.value: Tensor | None = None
        """fp64, on the last stage's device: this step's loss with its coefficient, and its share of the mean over
        replicas and accumulated steps."""

    def begin(self, program: Program, put: Callable[[Key, Tensor], None], take: Callable[[Key], Tensor]) -> None:
        """A step begins.

        Args:
            put: keeps what is made here for a later pass or a hop.
            take: takes a value out, made here or received.
        """
        self._share = 1.0 / (program.microbatches * self._replicas * self.accumulate)
        self._last_stage = program.placement.stages - 1
        self._gradients = not program.forward_only
        self._keep, self._take = put, take
        self.clear()

    def clear(self) -> None:
        """Lets go of the last step's loss, and of what it was made from."""
        self._totals = self._gradient = self.value = None

    def before_forward(self, stage: int, index: int) -> None:
        """F is about to run: what the stages before it counted has to be there."""
        self._totals = self._loss.start(self._torch_device) if stage == 0 else self._take((ALONG["F"], stage, index))

    def before_backward(self, stage: int, index: int) -> None:
        """B or I is about to run."""
        self._gradient = self._take((ALONG["B"], stage, index))
        if stage > 0:
            self._keep((ALONG["B"], stage - 1, index), self._gradient)

    def call(
        self, module: Callable[..., Tensor], stage: int, index: int, hidden: Tensor, microbatch: Microbatch
    ) -> Tensor:
        """A stage's forward, in F or R. The gradient enters the backward through what is returned."""
        logits: list[Tensor] = []
        output = module(hidden, microbatch.position_ids, microbatch.attention_mask, router_logits=logits)
        counted, self._totals = self._totals, None
        before = self._loss.start(self._torch_device) if counted is None else counted
        totals, probabilities = self._loss.add(before, logits, microbatch.attention_mask)
        if counted is not None:  # F: R finds the same again, and only its graph is wanted
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
        """For what is received beside the hidden states ("F"), or beside their gradient ("B")."""
        size = 2 * self._loss.experts + 1 if what == "F" else self._loss.experts
        return torch.empty(size, device=self._torch_device)

    def gradient(self) -> Tensor:
        assert self._gradient is not None
        return self._gradient


class _Joined(torch.autograd.Function):
    """The hidden states as they are; their backward is that of the router's probabilities too."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, probabilities: Tensor, losses: RouterLosses) -> Tensor:
        ctx.losses = losses
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, ctx.losses.gradient(), None
