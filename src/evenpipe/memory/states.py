"""Permanent memory of a GPU: parameters, gradients, optimizer state, for every way of sharding them.

Bytes per parameter that this module reproduces, D = replicas that shard (dp * cp):

    bf16 parameters, fp32 gradients, Adam                18          ZeRO-1  6 + 12/D
    bf16 gradients                                       16                  4 + 12/D
    fp16 parameters and gradients                        16                  4 + 12/D; in the optimizer's step 4 more
    fp32 throughout                                      16                  8 + 8/D
    ZeRO-2                                                                   2 + (g + 12)/D and two layers' gradients
    ZeRO-3 / FSDP2, masters in the optimizer                                 (2 + g + 12)/D and two whole layers
    ZeRO-3 / FSDP2, fp32 parameters that are sharded                         (4 + g + 8)/D and two whole layers
    an optimizer with configurable precision                                 parameter + gradient + (main + m + v)/D

Sources: Megatron-LM, docs/user-guide/features/dist_optimizer.md; arXiv 1910.02054 (ZeRO); `runtime/parameters.py` and
`parallel/fsdp.py` for this library's own.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

import torch

from evenpipe.parallel.fsdp import BUCKET_ELEMENTS
from evenpipe.words import refused, unknown

from .bytes import PartBytes, StateBytes
from .framework import EVENPIPE, Framework
from .kernels import check_literals
from .optimizers import Optimizer, bytes_in_step, kept_numbers, step_counters
from .parameters import Held

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes of parameters and products."""
Casts = Literal["none", "beside", "instead"]
"""As for `state_bytes`."""
STEP_COUNTER = 4
LAYOUTS = 2
"""Layouts of a weight in 8 bits: for the product of the forward, and for that of the input's gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtypes:
    """Precisions of a run, by the names in `ELEMENT_BYTES`."""

    compute: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Dtype of products and activations."""
    gradients: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Dtype of the sums over microbatches."""
    masters: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Dtype of the parameters that the optimizer updates; if equal to `compute`, there is only one set of them."""
    moments: Literal["fp32", "bf16", "fp16", "fp8"] = "fp32"
    """Dtype of Adam's two moments."""

    def __post_init__(self) -> None:
        check_literals("dtypes", self)


MIXED = Dtypes()
"""Precisions of `evenpipe train` on GPU."""
SINGLE = Dtypes(compute="fp32")
"""Precisions on CPU."""


def state_bytes(
    held: Held,
    dtypes: Dtypes = MIXED,
    framework: Framework = EVENPIPE,
    *,
    zero: int = 0,
    replicas: int = 1,
    casts: Casts = "none",
    optimizer: str = "adamw",
    offloaded: float = 0.0,
    foreach: bool = False,
) -> StateBytes:
    """Return the bytes on one GPU for the parameters `held`.

    Args:
        zero: what is sharded over `replicas`: 1: optimizer state, 2: also gradients, 3: also parameters.
        casts: whether the matrices of linear layers and experts are also kept in 8 bits ("beside" those in the compute
            dtype, or "instead" of them).
        optimizer: one of `Optimizer`; "sgd" has momentum.
        offloaded: share of the optimizer state in host memory, 0 to 1.
        foreach: whether the optimizer processes all tensors at once and needs a temporary copy of them; a fused one
            does not.

    Raises InputError for another optimizer, and for a share outside 0 to 1.
    """
    if optimizer not in get_args(Optimizer):
        raise unknown("optimizer", optimizer, get_args(Optimizer))
    if not 0 <= offloaded <= 1:
        raise refused("offloaded", offloaded, "a share between 0 and 1")
    compute, gradient = ELEMENT_BYTES[dtypes.compute], ELEMENT_BYTES[dtypes.gradients]
    master, moment = ELEMENT_BYTES[dtypes.masters], ELEMENT_BYTES[dtypes.moments]
    two_sets = dtypes.masters != dtypes.compute
    shards = replicas if zero >= 1 else 1
    parameter_shards = replicas if zero == 3 else 1

    masters_of_model = two_sets and framework.masters == "parameters"
    parameter_bytes = held.elements * (master if masters_of_model else compute)
    matrices = held.trained - held.unsplit
    if casts == "instead":
        parameter_bytes -= matrices * (compute - (ELEMENT_BYTES["fp8"] if zero == 3 else 0))
    parameters = _part(parameter_bytes, parameter_shards)
    master_element = 0
    if two_sets and not masters_of_model:
        master_element += master
    sharded, replicated = kept_numbers(optimizer, held.optimized)
    state = _part(held.trained * master_element + sharded * moment, shards) + replicated * moment
    step_peak = _part(held.trained * master, shards) if foreach else 0
    if dtypes.gradients == "fp16":  # the loss scale is removed from a copy in fp32
        step_peak += _part(held.trained * ELEMENT_BYTES["fp32"], shards)
    optimizer_peak = bytes_in_step(optimizer, held.optimized, master=master, shards=parameter_shards)
    step_peak = max(step_peak, optimizer_peak)
    counters = step_counters(optimizer, held.optimized) * framework.step_counters
    state = round(state * (1 - offloaded)) + STEP_COUNTER * counters

    gradients = _part(held.trained * gradient, replicas if zero >= 2 else 1)
    copies = held.elements * compute if masters_of_model else 0
    if casts != "none":
        copies += LAYOUTS * matrices * ELEMENT_BYTES["fp8"]
    unsharded = 0
    if zero == 3 and replicas > 1:
        copies = 0
        if not framework.follows_program:
            unsharded = 2 * held.largest * (compute + gradient)
    elif zero == 2 and replicas > 1:
        unsharded = 2 * held.largest * gradient
    return StateBytes(
        parameters=parameters,
        gradients=gradients,
        optimizer=state,
        copies=copies,
        unsharded=unsharded,
        summing_peak=held.shared * gradient,
        step_peak=step_peak,
    )


def part_bytes(
    held: Held, dtypes: Dtypes = MIXED, framework: Framework = EVENPIPE, *, zero: int = 0, replicas: int = 1
) -> PartBytes:
    """Return the bytes that UNSHARD, RESHARD and REDUCE_GRAD allocate and free for a part with the parameters `held`.

    Sharded (`parallel/fsdp.py`): gradients are copied bucket by bucket into rows for each replica; the rows, and the
    sums of this replica's rows, stay until the end of the step. Replicated (`parallel/gradients.py`): small gradients
    are copied into one bucket, larger ones are summed in place. `zero` and `replicas` as for `state_bytes`.
    """
    compute, gradient = ELEMENT_BYTES[dtypes.compute], ELEMENT_BYTES[dtypes.gradients]
    gradient_bytes = held.trained * gradient
    unsharded = PartBytes(gradients=gradient_bytes, input_gradients=held.unsplit * gradient)
    if replicas == 1 or not framework.follows_program or zero not in (0, 3):
        return unsharded
    if zero == 0:
        bucket = held.bucketed * gradient
        return replace(unsharded, reduced=gradient_bytes + bucket, reducing_peak=bucket)
    shard = _part(gradient_bytes, replicas)
    bucket = min(held.trained, BUCKET_ELEMENTS + held.optimized.largest) * gradient
    return replace(
        unsharded,
        gathered=held.elements * compute,
        gathering_peak=held.largest * compute,
        reduced=gradient_bytes + shard,
        reducing_peak=bucket + shard - _part(bucket, replicas),
    )


def both_states(first: StateBytes, second: StateBytes) -> StateBytes:
    """Return the bytes of parameters that are sharded in two ways. Temporaries of the optimizer are assumed to add
    up."""
    return StateBytes(
        **{field.name: getattr(first, field.name) + getattr(second, field.name) for field in fields(first)}
    )


def both_parts(first: PartBytes, second: PartBytes) -> PartBytes:
    """Return the bytes of a part whose parameters are sharded in two ways, which are gathered and reduced one after
    the other."""
    peaks = max(first.gathering_peak, second.gathering_peak)
    summed = None if first.reduced is None and second.reduced is None else first.summed + second.summed
    reducing = max(first.reducing_peak, first.summed - first.gradients + second.reducing_peak)
    sums = {name: getattr(first, name) + getattr(second, name) for name in ("gradients", "input_gradients", "gathered")}
    return PartBytes(**sums, gathering_peak=peaks, reduced=summed, reducing_peak=reducing)


def _part(size: int, shards: int) -> int:
    return -(-size // shards)
