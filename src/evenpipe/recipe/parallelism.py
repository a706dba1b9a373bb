"""The axes over which a run is spread, and what replicas share."""

from __future__ import annotations

import math
from dataclasses import field
from typing import Literal, get_args

from evenpipe.declaration import Declared, NonNegativeInt, PositiveInt, declare
from evenpipe.experts.overlap import ExpertOptions
from evenpipe.schedule import Program, add_sharding, check_program

DataParallel = Literal["replicate", "shard-optimizer", "shard-gradients", "shard"]

TensorOverlap = Literal["auto", "none", "ring", "fused"]

ContextExchange = Literal["auto", "keys", "heads"]

AXES = ("dp", "ep", "tp", "cp", "pp")
"""Fields of `Parallelism` that are sizes, in the order in which users see them."""

DATA_PARALLEL: tuple[DataParallel, ...] = get_args(DataParallel)
"""Kinds of data parallelism, by ZeRO level (arXiv 1910.02054): each shards more than the previous one."""


@declare()
class Parallelism(Declared):
    """Sizes of the axes. GPUs = dp * tp * cp * pp; experts are spread within dp.

    Raises InputError for a value that is not accepted; the sentence names it.
    """

    dp: PositiveInt = 1
    """Replicas, each with its own part of the batch."""
    pp: PositiveInt = 1
    """Devices of a pipeline."""
    cp: PositiveInt = 1
    """Parts of every sequence."""
    tp: PositiveInt = 1
    """Parts of every matrix, by heads and columns."""
    ep: PositiveInt = 1
    """Replicas that share the experts of a layer: a divisor of dp."""
    data_parallel: DataParallel = "replicate"
    """What is sharded over dp * cp: nothing, the optimizer's state, also gradients, or also parameters (FSDP2)."""
    dp_shard: PositiveInt | None = None
    """Of the replicas, neighbours that share what is sharded, with cp; the others have copies of it, and sum gradients
    with these (HSDP). A divisor of dp, and a multiple of ep. Default: all. Estimates and plans only."""
    reshard: bool = False
    """With data_parallel "shard": free parameters between passes and gather them again, instead of once a step. Takes
    less memory and more communication."""
    prefetch: NonNegativeInt | None = None
    """With data_parallel "shard": how many stages ahead of their use parameters are gathered (embedding and output
    layer count as stages). Default: all at the start of the step, or one with `reshard`."""
    sequence_parallel: bool = True
    """Split the tensors that tensor parallelism leaves whole (norms, residuals) along the sequence; no effect with tp =
    1."""
    context_exchange: ContextExchange = "auto"
    """With context parallelism: every attention layer gathers the keys and values of all tokens ("keys"), or exchanges
    heads for tokens ("heads"), which moves less with many ranks. "auto": "heads" if that moves less and the ranks can
    share the heads, else "keys"."""
    tensor_overlap: TensorOverlap = "auto"
    """How tensor ranks overlap the exchange of hidden states with products, in forwards and for input gradients.
    "ring": in pieces, each multiplied while the next one is transferred. "fused": torch's operations on symmetric
    memory, on GPUs that can read each other's memory. "none": before and after products. "auto": "none", until the
    others have been measured on GPUs."""

    experts: ExpertOptions = field(default_factory=ExpertOptions)
    """What runs beside the exchange of rows between experts, with `ep`."""

    def check(self) -> None:
        self.require("ep", self.dp % self.ep == 0, f"a divisor of dp, {self.dp}")
        if self.dp_shard is not None:
            sharded, divides = self.zero > 0, self.dp % self.dp_shard == 0 == self.dp_shard % self.ep
            self.require("dp_shard", sharded, 'left out with data_parallel "replicate"')
            self.require("dp_shard", divides, f"a divisor of dp, {self.dp}, and a multiple of ep, {self.ep}")
        shards, accepted = self.data_parallel == "shard", 'left out unless data_parallel is "shard"'
        self.require("reshard", shards or not self.reshard, accepted)
        self.require("prefetch", shards or self.prefetch is None, accepted)

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.dp * self.tp * self.cp * self.pp

    @property
    def replicas(self) -> int:
        """Number of ranks with the same parameters: dp * cp."""
        return self.dp * self.cp

    @property
    def shards(self) -> int:
        """Number of ranks over which parameters are sharded, if they are: dp_shard * cp."""
        return (self.dp_shard or self.dp) * self.cp

    @property
    def model_parallel(self) -> int:
        """Number of GPUs that share one copy of the model."""
        return self.tp * self.cp * self.pp

    @property
    def zero(self) -> int:
        """ZeRO level of `data_parallel`."""
        return DATA_PARALLEL.index(self.data_parallel)

    def check_runnable(self) -> None:
        """Raise InputError for options that estimates and plans support but the runtime does not yet."""
        accepted = "true, since tensor ranks share the rows of norms, too"
        self.require("sequence_parallel", self.tp == 1 or self.sequence_parallel, accepted)
        self.require("dp_shard", self.dp_shard in (None, self.dp), "left out in a run")
        self.require("data_parallel", self.data_parallel in ("replicate", "shard"), "replicate or shard in a run")


def divisor_of(context_ranks: int, tensor_ranks: int) -> int:
    """The number of which the tokens of a slice must be a multiple: each context rank has two equal chunks, and tensor
    ranks share the tokens of each."""
    return context_ranks * math.lcm(2, tensor_ranks) if context_ranks > 1 else tensor_ranks


def for_replicas(program: Program, parallelism: Parallelism, *, tied: bool) -> Program:
    """Add the passes that gather parameters and sum gradients over replicas, if the program has none; returns the same
    program if there is only one replica."""
    if parallelism.replicas == 1:
        return program
    shared = add_sharding(
        program,
        gathers=parallelism.data_parallel == "shard",
        tied=tied,
        reshard=parallelism.reshard,
        prefetch=parallelism.prefetch,
    )
    check_program(shared, experts=parallelism.ep > 1).raise_if_faulty()
    return shared
