"""The axes over which a run is spread, and what replicas share."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from evenpipe.errors import InputError
from evenpipe.experts.overlap import ExpertOptions
from evenpipe.given import is_whole
from evenpipe.schedule import Program, add_sharding, check_program

DataParallel = Literal["replicate", "shard-optimizer", "shard-gradients", "shard"]

TensorOverlap = Literal["auto", "none", "ring", "fused"]

ContextExchange = Literal["auto", "keys", "heads"]

AXES = ("dp", "ep", "tp", "cp", "pp")
"""Fields of `Parallelism` that are sizes, as they are listed for people."""

DATA_PARALLEL: tuple[DataParallel, ...] = ("replicate", "shard-optimizer", "shard-gradients", "shard")
"""Kinds of data parallelism, by ZeRO's level (arXiv 1910.02054): each shards what the one before it does, and more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """Sizes of the axes. GPUs = dp * tp * cp * pp; experts are spread within dp.

    Raises InputError for a value that is not accepted; the sentence names it.
    """

    dp: int = 1
    """Replicas, each with its own part of the batch."""
    pp: int = 1
    """Devices of a pipeline."""
    cp: int = 1
    """Parts of every sequence."""
    tp: int = 1
    """Parts of every matrix, by heads and columns."""
    ep: int = 1
    """Replicas that share the experts of a layer: a divisor of dp."""
    data_parallel: DataParallel = "replicate"
    """What is sharded over dp * cp: nothing, the optimizer's state, also gradients, or also parameters (FSDP2)."""
    reshard: bool = False
    """With "shard": free parameters between passes and gather them again, instead of once a step. Less memory, more
    traffic."""
    prefetch: int | None = None
    """With "shard": how many stages (embedding and output layer count as such) ahead of their use parameters are
    gathered. None: all at the start of the step, or one with `reshard`."""
    sequence_parallel: bool = True
    """Split the tensors that tensor parallelism leaves whole (norms, residuals) along the sequence; no effect with tp =
    1."""
    context_exchange: ContextExchange = "auto"
    """With context parallelism every layer gathers the keys and values of all tokens ("keys"), or exchanges heads for
    tokens ("heads"), which moves less with many ranks. "auto": "heads" if that moves less and the ranks can share the
    heads, else "keys"."""
    tensor_overlap: TensorOverlap = "auto"
    """How tensor ranks exchange rows beside products in F and I: "ring" piece by piece around the ranks, "fused" by
    torch's operations on symmetric memory, "none" before and after. "auto": "fused" on GPUs that can, else "none"."""

    experts: ExpertOptions = field(default_factory=ExpertOptions)
    """What runs beside the exchange of rows between experts, with `ep`."""

    def __post_init__(self) -> None:
        if not isinstance(self.experts, ExpertOptions):
            raise InputError(f"experts: {self.experts!r}, expected ExpertOptions, or None")
        for name in AXES:
            size = getattr(self, name)
            if not is_whole(size) or size < 1:
                raise InputError(f"{name} is {size!r}, expected a whole number of at least 1")
        if self.dp % self.ep:
            raise InputError(f"ep is {self.ep}, expected a divisor of dp = {self.dp}")
        if not isinstance(self.reshard, bool):
            raise InputError(f"reshard is {self.reshard!r}, expected True or False")
        if self.prefetch is not None and (not is_whole(self.prefetch) or self.prefetch < 0):
            raise InputError(f"prefetch is {self.prefetch!r}, expected a whole number of at least 0, or None")
        if (self.reshard or self.prefetch is not None) and self.data_parallel != "shard":
            name = "reshard" if self.reshard else "prefetch"
            raise InputError(f"{name} is given, but data_parallel is {self.data_parallel!r}, expected 'shard' with it")
        if self.context_exchange not in get_args(ContextExchange):
            raise InputError(f"context_exchange is {self.context_exchange!r}, expected auto, keys or heads")
        if self.tensor_overlap not in get_args(TensorOverlap):
            raise InputError(
                f"tensor_overlap: {self.tensor_overlap!r}, expected one of {', '.join(get_args(TensorOverlap))}"
            )
        if self.data_parallel not in DATA_PARALLEL:
            raise InputError(
                f"data_parallel: {self.data_parallel!r}, expected 'replicate' or 'shard', or, for estimates and plans,"
                " 'shard-optimizer' or 'shard-gradients'"
            )

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.dp * self.tp * self.cp * self.pp

    @property
    def replicas(self) -> int:
        """Number of ranks with the same parameters, over which they are sharded: dp * cp."""
        return self.dp * self.cp

    @property
    def model_parallel(self) -> int:
        """Number of GPUs that share one copy of the model."""
        return self.tp * self.cp * self.pp

    @property
    def zero(self) -> int:
        """ZeRO's level of `data_parallel`."""
        return DATA_PARALLEL.index(self.data_parallel)

    def check_runnable(self) -> None:
        """Raise InputError for what estimates and plans know but the runtime does not run yet."""
        if self.tp > 1 and not self.sequence_parallel:
            raise InputError("sequence_parallel: False, expected True: tensor ranks share the rows of norms, too")
        if self.data_parallel not in ("replicate", "shard"):
            raise InputError(f"data_parallel: {self.data_parallel!r}, expected 'replicate' or 'shard'")


def divisor_of(context_ranks: int, tensor_ranks: int) -> int:
    """What the number of tokens of a slice must be a multiple of: each context rank has two equal chunks, and
    tensor ranks share the tokens of a piece."""
    return context_ranks * math.lcm(2, tensor_ranks) if context_ranks > 1 else tensor_ranks


def for_replicas(program: Program, parallelism: Parallelism, *, tied: bool) -> Program:
    """A program with the passes that gather parameters and sum gradients over replicas, where it has none; the
    same program if there are no replicas."""
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
