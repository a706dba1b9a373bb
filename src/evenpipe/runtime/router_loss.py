"""The router loss of a mixture of experts across stages: a few numbers in every hop.

    F    totals of earlier layers ---> [2E+1] fp32 ---> totals with this stage's layers, sent with the output
    F    of the last stage: the loss of this microbatch, and its gradient
    B, I gradient                    ---> [E] fp32    ---> into this stage's backward, sent with the input's gradient

Each microbatch has its own loss, like each batch in transformers; a step's loss is their mean.
`evenpipe.model.router_loss` has the formulas, and why these numbers suffice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from evenpipe.communication.communicator import Communicator
from evenpipe.model import EdgeTensor, RouterLoss
from evenpipe.runtime.batch import Microbatch
from evenpipe.schedule import Program


class RouterLosses:
    """One device's part of the loss. The walker sends the numbers with the hidden states and with their gradient.

    Args:
        replicas: number of replicas, over which the loss is averaged.
        tensor_ranks: number of processes per device: each routes all tokens, and has its share of the gradient.
        context: of the processes that share every sequence: each routes its own tokens. None for a single process.
    """

    def __init__(
        self,
        loss: RouterLoss,
        *,
        replicas: int,
        torch_device: torch.device,
        tensor_ranks: int = 1,
        context: Communicator | None = None,
    ) -> None:
        self._loss, self._context = loss, context
        self.totals_form = EdgeTensor("router totals", (2 * loss.experts + 1,), torch.float32)
        """What is sent with the hidden states."""
        self.gradient_form = EdgeTensor("router gradient", (loss.experts,), torch.float32)
        """What is sent with their gradient."""
        self._replicas, self._tensor_ranks = replicas, tensor_ranks
        self._torch_device = torch_device
        self.accumulate = 1
        """Number of steps whose gradients are accumulated before an update."""
        self._totals: Tensor | None = None
        self._gradient: Tensor | None = None
        self._last_gradients: dict[int, Tensor] = {}
        """For each unit, the gradient of the last stage, kept from its F to its B or I."""
        self._earlier: dict[int, Tensor] = {}
        """For each microbatch, the totals of its slices so far: the loss is that of whole sequences."""
        self.value: Tensor | None = None
        """On the last stage's device, fp64: this step's loss times its coefficient and its share of the mean over
        replicas and accumulated steps."""

    def begin(self, program: Program) -> None:
        """Start a step."""
        self._share = 1.0 / (program.microbatches * self._replicas * self.accumulate)
        self._last_stage, self._slices = program.placement.last_stage, program.slices
        self._gradients = not program.forward_only
        self.clear()

    def clear(self) -> None:
        """Release the loss of the last step, and its inputs."""
        self._totals = self._gradient = self.value = None
        self._last_gradients.clear()
        self._earlier.clear()

    @property
    def left(self) -> tuple[int, ...]:
        """Return units whose gradient has not been used, and microbatches whose loss is incomplete."""
        return *self._last_gradients, *self._earlier

    def before_forward(self, totals: Tensor | None = None) -> None:
        """Prepare F. totals: of earlier stages; None for the first stage."""
        self._totals = self._loss.start(self._torch_device) if totals is None else totals

    def after_forward(self, stage: int, unit: int) -> tuple[Tensor, ...]:
        """Return the totals to send on; on the last stage, compute the loss and return nothing."""
        totals, self._totals = self._totals, None
        assert totals is not None
        if stage < self._last_stage:
            return (totals,)
        microbatch, index = divmod(unit, self._slices)
        if index:
            totals = totals + self._earlier.pop(microbatch)
        if index < self._slices - 1:
            self._earlier[microbatch] = totals
            return ()
        pieces = 1
        if self._context is not None:
            pieces = len(self._context.members)
            self._context.all_reduce(totals, "totals of routers").wait("the loss of routers")
        value = self._loss.value(totals).double() * (self._loss.coefficient * self._share / pieces)  # all have it
        self.value = value if self.value is None else self.value + value
        if self._gradients:
            gradient = self._loss.gradient(totals, self._share / self._tensor_ranks)
            first = microbatch * self._slices
            self._last_gradients.update(dict.fromkeys(range(first, first + self._slices), gradient))
        return ()

    def before_backward(self, unit: int, gradient: Tensor | None = None) -> Tensor:
        """Prepare B or I. Return the gradient to send on. gradient: of the next stage; None for the last one."""
        self._gradient = self._last_gradients.pop(unit) if gradient is None else gradient
        return self._gradient

    def call(
        self, stage: int, module: Callable[..., Any], inputs: Sequence[Tensor], microbatch: Microbatch
    ) -> tuple[Tensor, ...]:
        """Run a stage's forward, in F or R. The gradient enters the backward through the returned hidden states."""
        logits: list[Tensor] = []
        hidden, *other_outputs = microbatch.through(stage, module, inputs, router_logits=logits)
        earlier = self._loss.start(self._torch_device) if self._totals is None else self._totals
        totals, probabilities = self._loss.add(earlier, logits, microbatch.attention_mask)
        if self._totals is not None:  # F already has the values: R needs only the graph
            self._totals = totals
        if probabilities.requires_grad:
            hidden = _Joined.apply(hidden, probabilities, self)
        return hidden, *other_outputs

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
