"""Who trains: what a framework holds beside the tensors that the model and the schedule need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """Habits of a framework that cost memory or time. `EVENPIPE` and `MEGATRON` are the two that are known here."""

    masters: Literal["parameters", "optimizer"]
    """Where the parameters in the optimizer's precision belong: "parameters", they are the model's own and products
    read a copy; "optimizer", they are sharded with its state and the model's own are what products read."""
    vocabulary_multiple: int = 1
    """Each rank's rows of a vocabulary matrix are a multiple of this."""
    gathered_for: Literal["layer", "step"] = "layer"
    """Parameters that are sharded over replicas are whole one layer at a time, or all of them for the whole step."""
    step_counters: bool = False
    """The optimizer keeps one fp32 number per tensor."""
    placeholders: bool = False
    """Where products add to the sum of gradients themselves, autograd is handed an empty tensor in a gradient's place:
    one of each shape is kept, and one more while the output layer's gradient is added. Transformer Engine from 2.3 and
    `megatron/core/tensor_parallel/layers.py`; their part in the peak is told in SimuMax's notes on its B200 runs."""
    gathered_head: bool = False
    """The output layer gathers the sequence-parallel parts of its input, and makes the gradient of all of it."""
    holds_sent_gradient: bool = False
    """The input gradient that was sent last stays until the next microbatch's takes its place: a variable of the
    function that walks the schedule."""
    attention_copies: bool = False
    """The result of attention exists twice where a microbatch has several sequences, or where heads are exchanged for
    tokens over the context axis: as the kernel made it and as the product that follows takes it."""
    gradients_exist: bool = True
    """Sums of gradients are there when a step begins; else they are made by its first backward."""
    stops_early: bool = False
    """A checkpointed layer that runs again ends with the last tensor that its backward wants."""
    workspace: int = 0
    """Bytes of workspace for products that are allocated like tensors."""
    groups: tuple[tuple[str, ...], ...] = ()
    """Communicators beside those of the schedule's transfers, each by the axes that its members differ in."""
    transfers: bool = True
    """Transfers have communicators of their own, as the program says; else those of `groups` carry them."""


EVENPIPE = Framework(
    masters="parameters",
    gathered_for="step",
    step_counters=True,
    gradients_exist=False,
    stops_early=True,
    groups=(("dp", "cp"), ("tp",), ("cp",)),
)
"""This library: `runtime/parameters.py`, `parallel/fsdp.py`, torch's AdamW."""

MEGATRON = Framework(
    masters="optimizer",
    vocabulary_multiple=128,
    placeholders=True,
    gathered_head=True,
    holds_sent_gradient=True,
    attention_copies=True,
    workspace=32 * MIB,
    groups=(("tp",), ("pp",), ("cp",), ("dp", "cp"), ("tp", "pp"), ("dp", "tp", "cp", "pp")),
    transfers=False,
)
"""Megatron-LM with Transformer Engine: vocabulary padded by `--make-vocab-size-divisible-by` (128) times TP, a cuBLAS
workspace of 32 MiB (`get_cublas_workspace_size_bytes`, Hopper and later; 4 MiB before), groups of
`megatron/core/parallel_state.py` that a step communicates in."""

FRAMEWORKS = {"transformers": EVENPIPE, "fused": EVENPIPE, "megatron": MEGATRON, "transformer-engine": MEGATRON}
"""By the name of a preset of kernels."""
