"""Shares the results of a step: the processes that computed them send them to all others."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from evenpipe.experts.load import Load
from evenpipe.parallel.groups import Groups
from evenpipe.recipe.layout import Layout
from evenpipe.runtime.batch import Batch, Microbatch
from evenpipe.runtime.recording import StepRecord
from evenpipe.runtime.result import StepResult
from evenpipe.runtime.router_loss import RouterLosses
from evenpipe.runtime.vocabulary_layers import OutputShard
from evenpipe.work import Done, Work


class Results:
    """Builds the result of each step from what the output layer and the routers have computed.

    Args:
        output: this device's rows of the output layer; None if it has none.
        router_losses: for a model with a router loss; None for other models.
        pipelines: number of pipelines, over all replicas and pieces of sequences; their losses are added.
        compute_dtype: of activations; losses are fp32, with fp64 activations fp64.
        entropy: whether the output layer computes it.
        load: counts the experts that tokens choose; None for a model without experts.
    """

    def __init__(
        self,
        output: OutputShard | None,
        router_losses: RouterLosses | None,
        groups: Groups,
        layout: Layout,
        *,
        pipelines: int,
        compute_dtype: torch.dtype,
        entropy: bool,
        load: Load | None = None,
    ) -> None:
        self._output, self._router_losses = output, router_losses
        self._groups, self._layout, self._pipelines = groups, layout, pipelines
        self._last = layout.program.placement.last_device
        self.dtype = torch.float64 if compute_dtype == torch.float64 else torch.float32
        """Of losses and token weights."""
        self._entropy, self._load = entropy, load

    def of(self, batch: Batch, record: StepRecord, started: float, loss_factor: int, *, training: bool) -> StepResult:
        """Return the result of a step that began at `started`, with means times `loss_factor`, and release the results
        that the layers hold."""
        output = self._output
        loss = self._mean(None if output is None else output.loss)
        entropy = self._mean(None if output is None else output.entropy) if self._entropy else None
        router_loss = self._router_loss()
        load = None
        if training and self._load is not None:
            load = self._groups.total(self._load.take(), "tokens by expert")
        log_probabilities = [] if training else self._log_probabilities(batch)
        if output is not None:
            output.clear()
        if self._router_losses is not None:
            self._router_losses.clear()
        return StepResult(
            batch.valid_tokens,
            time.perf_counter() - started,
            record,
            loss,
            log_probabilities,
            (batch.sequences, batch.sequence_length),
            router_loss,
            entropy,
            loss_factor,
            load,
        )

    def _log_probabilities(self, batch: Batch) -> list[Work]:
        local = None if self._output is None else self._output.log_probabilities
        shared = [
            self._share(None if local is None else local[index], (microbatch.tokens,))
            for index, microbatch in enumerate(batch.microbatches)
        ]
        if all(microbatch.row_context is None for microbatch in batch.microbatches):
            return shared
        slices = self._layout.program.slices
        return [
            Done(self._in_order(batch.microbatches[first : first + slices], shared[first : first + slices]))
            for first in range(0, len(shared), slices)
        ]

    def _in_order(self, slices: Sequence[Microbatch], shared: Sequence[Work]) -> Tensor:
        """Return the values of whole rows, assembled from all slices and each context rank's piece of them."""
        log_probabilities: Tensor | None = None
        for microbatch, values in zip(slices, shared, strict=True):
            row_context, context = microbatch.row_context, self._groups.context
            assert row_context is not None
            local = values.wait().view(microbatch.token_ids.shape)
            if log_probabilities is None:
                log_probabilities = local.new_empty((len(local), row_context.length))
            table = local.unsqueeze(0)
            if context is not None:
                label = "log-probabilities of all pieces"
                table = context.all_gather(local.contiguous(), label).wait("the caller")
            positions = row_context.keys[-table[:, 0].numel() :]  # of this slice
            log_probabilities[:, positions] = table.transpose(0, 1).flatten(1)
        assert log_probabilities is not None
        return log_probabilities.flatten()

    def _share(self, value: Tensor | None, shape: tuple[int, ...]) -> Work:
        """Share a result of the output layer. With a sharded layer all devices know it; otherwise the last stage sends
        it."""
        if self._layout.sharded:
            assert value is not None
            return Done(value)
        return self._groups.share(value, self._last, self.dtype, shape)

    def _mean(self, value: Tensor | None) -> Work:
        """Share a mean. Token weights add up to 1 over all replicas, so the mean is the sum of the replicas' losses (or
        entropies)."""
        if self._pipelines == 1:
            return self._share(value, ())
        return self._groups.share_sum(value, self._last, self.dtype)

    def _router_loss(self) -> Work | None:
        """Share the router loss, which the device of the last stage knows in every vocabulary mode."""
        if self._router_losses is None:
            return None
        value = self._router_losses.value
        if self._pipelines == 1:
            return self._groups.share(value, self._last, torch.float64, ())
        return self._groups.share_sum(value, self._last, torch.float64)
