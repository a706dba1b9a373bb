"""Training frameworks: the memory that each needs besides the tensors of the model and the schedule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from evenpipe.words import refused

from .kernels import COMPILED, Kernels, kernels_named

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """Properties of a framework that cost memory or time. `FRAMEWORKS` are the known ones."""

    masters: Literal["parameters", "optimizer"]
    """Where the parameters in the optimizer's precision are: "parameters": in the model, and products read a copy;
    "optimizer": sharded with the optimizer's state, and products read the model's parameters."""
    gathers: Literal["blocks", "products"] = "products"
    """Tensor parallelism with sequence parallelism. "products": every product by columns gathers its input, and keeps
    only the local rows of input and output gradient for the weight gradient, for which both are gathered again; the
    output layer gathers its input, and computes the gradient of all rows.
    "blocks": a block gathers its input once (`tensor/gathered.py`), and is cut as derived from a small copy of the
    model (`tensor/cuts.py`); the output gradient stays whole, and so does the input of recomputed layers; the output
    layer gathers its input, and the first stage gets all rows."""
    vocabulary_multiple: int = 1
    """Each rank's rows of a vocabulary matrix are a multiple of this."""
    overlaps_tensor_ranks: bool = False
    """`tensor_overlap` = "auto" overlaps the exchange of tensor ranks with products, on GPUs of one node."""
    exchanges: Literal["whole", "stages", "layers"] = "whole"
    """The parameters and gradients that replicas gather and sum at a time: "whole": those of a device, without any
    overlap; "stages": those of a stage, overlapped with passes of other stages; "layers": those of a layer, in every
    microbatch, overlapped with other layers. With ZeRO-3 all but "stages" exchange layers."""
    follows_program: bool = False
    """UNSHARD, RESHARD and REDUCE_GRAD in the program determine when sharded parameters are whole and gradients are
    summed; otherwise parameters are whole one layer at a time."""
    saves_casts: bool = False
    """With products in fp8, a layer keeps its input in 8 bits for the weight gradient, and both layouts of every weight
    are kept for a step, since products on Hopper need the inner dimension last (docs of Transformer Engine, "Handling
    transposes"). Otherwise it keeps its input in 16 bits, and casts both again (torchao, float8/float8_linear.py)."""
    step_counters: bool = False
    """The optimizer keeps one fp32 number per tensor."""
    placeholders: bool = False
    """If products add to the sum of gradients themselves, autograd gets an empty tensor instead of a gradient: one of
    each shape is kept, and one more while the output layer's gradient is added. Transformer Engine from 2.3 and
    `megatron/core/tensor_parallel/layers.py`; SimuMax's notes on its B200 runs give their share of the peak."""
    holds_transferred: bool = False
    """Variables of the scheduling function hold a stage's input until the end of its backward, and the last sent input
    gradient until that of the next microbatch replaces it. Otherwise only the graph keeps an input, if it needs it."""
    attention_copies: bool = False
    """With several sequences per microbatch, or if heads are exchanged for tokens over the context axis, the result of
    attention exists twice: in the layouts of the kernel and of the next product."""
    gradients_exist: bool = True
    """Sums of gradients exist when a step begins; otherwise its first backward allocates them."""
    stops_early: bool = False
    """A recomputed layer stops after the last tensor that its backward needs."""
    workspace: int = 0
    """Bytes of workspace for products, allocated like tensors."""
    groups: tuple[tuple[str, ...], ...] = ()
    """Communicators besides those of the schedule's transfers, each as the axes along which its members differ."""

    @property
    def is_evenpipe(self) -> bool:
        """Whether it is this library, with any kernels."""
        return self.follows_program

    @property
    def transfers(self) -> bool:
        """Whether transfers have their own communicators, as in the program, instead of that of the pipeline."""
        return ("pp",) not in self.groups


EVENPIPE = Framework(
    masters="parameters",
    gathers="blocks",
    overlaps_tensor_ranks=True,
    exchanges="stages",
    follows_program=True,
    step_counters=True,
    gradients_exist=False,
    stops_early=True,
    workspace=64 * MIB,
    groups=(("dp", "cp"), ("tp",), ("cp",), ("dp", "pp", "cp", "tp")),
)
"""This library: `runtime/parameters.py`, `parallel/groups.py`, `parallel/fsdp.py`, `tensor`, torch's AdamW. cuBLAS has
one workspace for the forward thread and one for the backward thread, 32 MiB each from Hopper on (8 MiB before), as
measured on an H100 (`benchmarks/gpu/memory.py`)."""

MEGATRON = Framework(
    masters="optimizer",
    vocabulary_multiple=128,
    saves_casts=True,
    placeholders=True,
    holds_transferred=True,
    attention_copies=True,
    workspace=32 * MIB,
    groups=(("tp",), ("pp",), ("cp",), ("dp", "cp"), ("tp", "pp"), ("dp", "tp", "cp", "pp")),
)
"""Megatron-LM with Transformer Engine: vocabulary padded by `--make-vocab-size-divisible-by` (128) times TP, a cuBLAS
workspace of 32 MiB (`get_cublas_workspace_size_bytes`, Hopper and later; 4 MiB before), groups of
`megatron/core/parallel_state.py` that a step communicates in."""

FSDP = Framework(
    masters="parameters",
    gathers="blocks",
    exchanges="layers",
    step_counters=True,
    stops_early=True,
    workspace=64 * MIB,
    groups=(("dp", "cp"), ("tp",), ("cp",), ("pp",)),
)
"""torch's fully_shard on every layer: a layer's parameters are gathered before its forward and again before its
backward, and its gradients are reduced after it, for every microbatch (torch/distributed/fsdp/_fully_shard)."""

FRAMEWORKS = {
    "transformers": EVENPIPE,
    COMPILED: replace(EVENPIPE, overlaps_tensor_ranks=False),
    "fused": EVENPIPE,
    "megatron": MEGATRON,
    "transformer-engine": replace(MEGATRON, overlaps_tensor_ranks=True),
    "fsdp": FSDP,
}
"""By the name of a preset of kernels. Transfers between tensor ranks would end a compiled region. NVIDIA's recipes for
Transformer Engine overlap tensor ranks by default (NVIDIA/dgxc-benchmarking)."""


@cache
def kernels_and_framework(text: str) -> tuple[Kernels, Framework]:
    """Return kernels by their name and changes, as `kernels_named` does, and the framework that runs them.

    Raises InputError as `kernels_named` does, for products that add to gradients outside of Megatron-LM, and for fp8
    that the framework does not support.
    """
    name, kernels = kernels_named(text)
    framework = FRAMEWORKS[name]
    if kernels.weight_gradient == "fused" and framework.gathers == "blocks":
        raise refused("kernels: weight_gradient", "fused", "eager, or a preset of Megatron-LM's kernels")
    if kernels.products != "compute" and framework.is_evenpipe:
        alternatives = (name for name, candidate in FRAMEWORKS.items() if not candidate.is_evenpipe)
        raise refused("kernels: products", kernels.products, f"compute, or the kernels {', '.join(alternatives)}")
    if kernels.products != "compute" and framework.saves_casts and kernels.weight_gradient == "eager":
        raise refused("kernels: weight_gradient", "eager", f"fused with products={kernels.products}")
    if kernels.parameters == "cast" and (kernels.products == "compute" or not framework.saves_casts):
        raise refused("kernels: parameters", "cast", "compute, or products=fp8 with kernels of Megatron-LM")
    return kernels, framework
