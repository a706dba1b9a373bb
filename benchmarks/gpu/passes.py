"""S, C and T of one shard, and E and G, on one GPU, as the runtime calls them. Other devices are played by a table of
their statistics that was computed before, so nothing is communicated."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import cached_property

import torch
from timing import Arm, Failure, Timing, medians
from torch import Tensor

from evenpipe.vocabulary import (
    Buffers,
    Combined,
    LossOptions,
    OutputState,
    Shard,
    add_row_gradients,
    backward_shard,
    combine,
    forward_shard,
    gather_rows,
    hidden_gradient,
    route,
    split,
)

LABELS = ("text", "even")
"""Ways to draw labels."""
MODES = {"vocab-2": True, "vocab-1": False}
"""Vocabulary modes with shards: have they one barrier?"""


@dataclass(frozen=True)
class Batch:
    """hidden: [tokens, hidden_size]. labels: [tokens], on the host, as in the runtime."""

    hidden: Tensor
    labels: Tensor

    @cached_property
    def on_device(self) -> Tensor:
        """The labels beside the hidden states."""
        return self.labels.to(self.hidden.device)

    @cached_property
    def weights(self) -> Tensor:
        """[tokens], which make the loss a mean."""
        valid = self.on_device != LossOptions().ignore_index
        return valid / valid.sum()


@dataclass(frozen=True)
class Output:
    """One shard of the output layer. gradient: [rows, hidden_size] fp32, which T adds to; table: [shards, tokens, .],
    the statistics of all shards, of which this one's are replaced; None for the only one."""

    weight: Tensor
    shard: Shard
    part: int
    options: LossOptions
    one_barrier: bool
    gradient: Tensor
    buffers: Buffers
    table: Tensor | None = None

    def first(self, batch: Batch) -> tuple[Tensor, OutputState]:
        """S."""
        return forward_shard(
            batch.hidden,
            self.weight,
            None,
            batch.labels,
            self.shard,
            self.options,
            self.one_barrier,
            buffers=self.buffers,
        )

    def barrier(self, batch: Batch, statistics: Tensor) -> Combined:
        """The loss, from the statistics of all shards."""
        table = statistics[None]
        if self.table is not None:
            table = self.table
            table[self.part] = statistics
        return combine(table, batch.weights, batch.on_device, self.options, self.shard.vocabulary)

    def middle(self, batch: Batch, statistics: Tensor, state: OutputState) -> tuple[Combined, Tensor]:
        """C, with one barrier: the loss and this shard's part of dX."""
        combined = self.barrier(batch, statistics)
        return combined, hidden_gradient(state, combined, self.weight)

    def second(self, state: OutputState, combined: Combined) -> Tensor | None:
        """T, behind the barrier."""
        return backward_shard(state, combined, self.weight, self.gradient)

    def all(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The losses of all tokens, and this shard's part of dX."""
        statistics, state = self.first(batch)
        if self.one_barrier:
            combined, part = self.middle(batch, statistics, state)
            self.second(state, combined)
            return combined.losses, part
        combined = self.barrier(batch, statistics)
        whole = self.second(state, combined)
        assert whole is not None
        return combined.losses, whole

    def arms(self, batches: list[Batch]) -> dict[str, Arm]:
        """S, C and T each by itself; with two barriers the barrier is part of T, and there is no C."""

        def batch(repetition: int) -> Batch:
            return batches[repetition % len(batches)]

        def after_first(repetition: int) -> tuple[Batch, Tensor, OutputState]:
            return batch(repetition), *self.first(batch(repetition))

        def after_middle(repetition: int) -> tuple[OutputState, Combined]:
            one, statistics, state = after_first(repetition)
            return state, self.middle(one, statistics, state)[0]

        def barrier_and_second(prepared: tuple[Batch, Tensor, OutputState]) -> Tensor | None:
            one, statistics, state = prepared
            return self.second(state, self.barrier(one, statistics))

        first = {"S": Arm(self.first, batch)}
        if not self.one_barrier:
            return {**first, "T": Arm(barrier_and_second, after_first)}
        return {
            **first,
            "C": Arm(lambda prepared: self.middle(*prepared), after_first),
            "T": Arm(lambda prepared: self.second(*prepared), after_middle),
        }


def output_shard(
    weight: Tensor, devices: int, mode: str, options: LossOptions, batch: Batch, *, gradient: Tensor | None = None
) -> Output:
    """The first of so many shards of the whole `weight`, with the statistics that the others have for `batch`.

    gradient: [rows, hidden_size] fp32, which others may add to as well; None: one of its own.
    """
    shards = split(weight.shape[0], devices)
    table = None
    if devices > 1:
        one_barrier = MODES[mode]
        rows = (
            forward_shard(
                batch.hidden,
                weight[shard.start : shard.stop],
                None,
                batch.labels,
                shard,
                options,
                one_barrier,
                gradients=False,
            )[0]
            for shard in shards
        )
        table = torch.stack(list(rows))
    shard = shards[0]
    if gradient is None:
        gradient = torch.zeros(shard.rows, weight.shape[1], device=weight.device)
    return Output(
        weight=weight[shard.start : shard.stop],
        shard=shard,
        part=0,
        options=options,
        one_barrier=MODES[mode],
        gradient=gradient,
        buffers=Buffers(),
        table=table,
    )


def embedding_arms(weight: Tensor, devices: int, batches: list[Batch]) -> dict[str, Arm]:
    """E and G of the first of so many devices: labels are the token ids. Routes are made before, once per step."""
    shards = split(weight.shape[0], devices)
    own = shards[0]
    rows, gradient = weight[own.start : own.stop], torch.zeros(own.rows, weight.shape[1], device=weight.device)
    routes = [route(batch.labels.clamp(min=0), shards, weight.device) for batch in batches]
    arriving = [batch.hidden[one.span(0)].contiguous() for batch, one in zip(batches, routes, strict=True)]
    places = range(len(batches))

    def place(repetition: int) -> int:
        return places[repetition % len(batches)]

    return {
        "E": Arm(lambda at: gather_rows(rows, routes[at], 0), place),
        "G": Arm(lambda at: add_row_gradients(gradient, arriving[at], routes[at], 0), place),
    }


def pass_seconds(
    weight: Tensor, devices: int, mode: str, options: LossOptions, batches: list[Batch], *, given: argparse.Namespace
) -> tuple[dict[str, Timing], dict[str, Failure]]:
    """Of S, C (only with one barrier), T, E and G of the first of so many devices."""
    output = output_shard(weight, devices, mode, options, batches[0])
    arms = {**output.arms(batches), **embedding_arms(weight, devices, batches)}
    return medians(arms, weight.device, given)


def random_batches(
    count: int,
    tokens: int,
    weight: Tensor,
    *,
    drawn: str,
    ignored: float = 0.0,
    confident: bool = False,
    seed: int = 0,
) -> list[Batch]:
    """Hidden states that give logits of unit variance with the weight of `random_weight`, and labels, of which the
    share `ignored` is left out. drawn: one of LABELS. confident: the probability of every label is about 0.99."""
    vocabulary, width = weight.shape
    generator = torch.Generator().manual_seed(seed)
    on_device = torch.Generator(weight.device).manual_seed(seed)
    found = []
    for _ in range(count):
        labels = _labels(tokens, vocabulary, drawn, generator)
        hidden = torch.randn(tokens, width, generator=on_device, device=weight.device)
        if confident:
            hidden = _towards(hidden, weight[labels.to(weight.device)].float(), vocabulary)
        labels[torch.rand(tokens, generator=generator) < ignored] = LossOptions().ignore_index
        found.append(Batch(hidden.to(weight.dtype), labels))
    return found


def _labels(tokens: int, vocabulary: int, drawn: str, generator: torch.Generator) -> Tensor:
    """Evenly, or as in text: the next more frequent token has the id before, and the law is Zipf's, 1 / (id + 1). With
    a vocabulary of 128k every twelfth token is the first then, so that many additions meet in one row of a gradient,
    and the first of 8 shards has 83 % of all labels."""
    if drawn == "even":
        return torch.randint(0, vocabulary, (tokens,), generator=generator)
    frequencies = 1 / torch.arange(1, vocabulary + 1, dtype=torch.float64)
    return torch.multinomial(frequencies, tokens, replacement=True, generator=generator)


def _towards(hidden: Tensor, targets: Tensor, vocabulary: int) -> Tensor:
    """`hidden` moved along the rows of its labels until their logit is c = log(99) + the log-sum-exp of the others,
    which grows with c: log V + (1 + c²/width) / 2, as the variance of their logits does."""
    width = hidden.shape[1]
    least = torch.tensor(99.0 * vocabulary).log().item() + 0.5
    logit = width * (1 - max(0.0, 1 - 2 * least / width) ** 0.5)
    now = (hidden * targets).sum(1, keepdim=True)
    return hidden + (logit - now) / targets.square().sum(1, keepdim=True) * targets


def random_weight(vocabulary: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[vocabulary, width], rows of about unit length."""
    generator = torch.Generator(device).manual_seed(1)
    return (torch.randn(vocabulary, width, generator=generator, device=device) / width**0.5).to(dtype)
