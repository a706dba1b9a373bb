"""Adafactor with the factors and norms of whole matrices, even if their rows are on several processes.

Adafactor keeps only the means of rows and of columns of a matrix's second moments, and scales each update by norms of
the parameter and of the update. If the rows of a parameter are spread over processes,

    means of rows            each process computes its own
    means of columns         sums over the processes: the same on all of them
    the mean over all rows, norms of the parameter and the update   sums over the processes

with two messages per bucket of parameters. A process has whole matrices of experts, so only norms are summed for them.

Source: arXiv 1804.04235, algorithms 4 and 5, as `torch.optim.Adafactor` changes them; its state has the same shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from evenpipe.communication.calls import check_same_call
from evenpipe.communication.communicator import Communicator
from evenpipe.optimizers.held import HeldParameter, HoldsParameters, groups_by_decay, loss_of, sums

BUCKET_ELEMENTS = 1 << 24
"""Approximate elements per bucket: its parameters share messages, and their updates are in memory together."""


class Adafactor(torch.optim.Adafactor):
    """`torch.optim.Adafactor` for the parameters of a pipeline. Each step equals that of one process with the whole
    model, up to the order of summation.

    Only parameters with two or more dimensions have weight decay. `step` is collective if rows of parameters are spread
    over processes.

    Args:
        pipeline: its parameters that require a gradient are trained.
        lr: the largest relative step; an update is `lr` times the root mean square of its parameter.
        options: as of `torch.optim.Adafactor`, but `foreach`: parameters are updated one by one.

    Raises:
        ValueError: a value that torch's class refuses.
        InputError: tensor parallelism, or shared experts with rows in shards over replicas.
    """

    def __init__(
        self, pipeline: HoldsParameters, *, lr: float = 1e-2, weight_decay: float = 0.0, **options: Any
    ) -> None:
        self._held = {shard.parameter: shard for shard in pipeline.held_parameters() if shard.parameter.requires_grad}
        for held in self._held.values():
            if not held.has_rows:
                raise held.refuse("Adafactor")
        super().__init__(groups_by_decay(self._held), lr=lr, weight_decay=weight_decay, **options)

    def is_same_on_all(self, parameter: nn.Parameter, state: str) -> bool:
        """Return whether a state belongs to the whole parameter although its rows are spread."""
        return state == "step" or (state == "col_var" and parameter.dim() == 2)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the parameters. Collective if rows of parameters are spread over processes."""
        loss = loss_of(closure)
        for group in self.param_groups:
            self._init_group(group, [], [], [], [], [], [])  # makes the state of parameters with their first gradient
        for communicator, bucket in self._buckets():
            parts = [number for update in bucket for number in update.statistics()]
            totals = iter(sums(parts, communicator, "factors of the second moments"))
            squares = [update.update(next(totals), next(totals), next(totals)) for update in bucket]
            for update, square in zip(bucket, sums(squares, communicator, "norms of updates"), strict=True):
                update.apply(square)
        return loss

    def _buckets(self) -> Iterator[tuple[Communicator | None, list[_Update]]]:
        """Iterate over buckets, in the same order and with the same limits on all processes of a communicator; whole
        parameters come one by one."""
        by_communicator: dict[Communicator | None, list[_Update]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                held = self._held[parameter]
                if parameter.grad is None and held.communicator is None:
                    continue
                by_communicator.setdefault(held.communicator, []).append(
                    _Update(held, group, self.state.get(parameter, {}))
                )
        for communicator, updates in by_communicator.items():
            check_same_call(communicator, "Adafactor.step", updates[0].held.parameter.device)
            bucket: list[_Update] = []
            elements = 0
            for update in updates:
                bucket.append(update)
                elements += math.prod(update.held.shape)
                if communicator is None or elements >= BUCKET_ELEMENTS:
                    yield communicator, bucket
                    bucket, elements = [], 0
            if bucket:
                yield communicator, bucket


@dataclass(slots=True)
class _Update:
    """The update of a parameter. A parameter without a gradient contributes zeros to sums."""

    held: HeldParameter
    group: dict[str, Any]
    state: dict[str, Any]
    _direction: Tensor | None = None
    _size: Tensor | None = None
    """Root mean square of the whole parameter, before weight decay."""

    @property
    def _gradient(self) -> Tensor | None:
        gradient = self.held.parameter.grad
        return -gradient if gradient is not None and self.group["maximize"] else gradient

    @property
    def _by_rows(self) -> bool:
        """Whether processes have rows of a matrix, rather than whole matrices."""
        return len(self.held.shape) == 2 and self.held.communicator is not None

    @property
    def _new_share(self) -> float:
        """1 - beta_2 of this step; `step` has already been increased."""
        return float(self.state["step"].item() ** self.group["beta2_decay"])

    def statistics(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return sums over the local rows: squares of the parameter, means of rows, and squares by column (two empty
        tensors if the factors are whole)."""
        gradient, square = self._gradient, torch.linalg.vector_norm(self.held.parameter).square()
        if gradient is not None:
            self.state["step"] += 1
            if gradient.dim() >= 2:
                mean = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True).square_().div_(gradient.shape[-1])
                self.state["row_var"].lerp_(mean, self._new_share)
        if not self._by_rows:
            return square, square.new_empty(0), square.new_empty(0)
        if gradient is None:
            return square, torch.zeros_like(square), square.new_zeros(self.held.shape[1])
        return square, self.state["row_var"].sum(), torch.linalg.vector_norm(gradient, dim=0).square_()

    def update(self, square: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Compute the direction of the update from sums over the whole parameter; return its local sum of squares."""
        self._size = (square / math.prod(self.held.shape)).sqrt()
        gradient = self._gradient
        if gradient is None:
            return torch.zeros_like(square)
        epsilon = self.group["eps"][0]
        epsilon = torch.finfo(gradient.dtype).eps if epsilon is None else epsilon
        if gradient.dim() < 2:
            self.state["variance"].lerp_(gradient * gradient, self._new_share)
            estimate = self.state["variance"].clone()
        else:
            row_variance, column_variance = self.state["row_var"], self.state["col_var"]
            if self._by_rows:
                column_mean, mean = (columns / self.held.shape[0])[None], rows / self.held.shape[0]
            else:
                norms = torch.linalg.vector_norm(gradient, dim=-2, keepdim=True)
                column_mean, mean = norms.square_().div_(gradient.shape[-2]), row_variance.mean(dim=-2, keepdim=True)
            column_variance.lerp_(column_mean, self._new_share)
            estimate = (row_variance @ column_variance).div_(mean.clamp(min=epsilon))
        self._direction = estimate.clamp_(min=epsilon * epsilon).rsqrt_().mul_(gradient)
        return torch.linalg.vector_norm(self._direction).square()

    def apply(self, square: Tensor) -> None:
        """Change the parameter; square: sum of squares of the whole direction."""
        if self._direction is None:
            return
        assert self._size is not None
        rate, group, parameter = float(self.group["lr"]), self.group, self.held.parameter
        norm = (square / math.prod(self.held.shape)).sqrt()
        step = min(rate, 1 / math.sqrt(self.state["step"].item()))
        step = self._size.clamp(min=group["eps"][1]) * step / (norm / group["d"]).clamp(min=1.0)
        if group["weight_decay"]:
            parameter.mul_(1 - rate * group["weight_decay"])
        parameter.sub_(self._direction.mul_(step))
        self._direction = None
