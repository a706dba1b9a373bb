"""The work of a layer and of the output layer for one token, read from the shapes of their parameters.

    products     one per matrix: 2 x inputs x outputs FLOPs per token, forward; as many for dX and for dW
    attention    2 x pairs x heads x (query size + value size) FLOPs forward, counting only unmasked pairs
    streaming    norms, residual sums, activation, rotary embedding: bytes read and written
    operations   number of kernels, each of which takes at least some microseconds

Nothing here depends on the hardware; `analytic` converts the work to times.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from evenpipe.model.description import Description
from evenpipe.model.experts import fused_experts, number_of_experts
from evenpipe.model.flops import Attention, attention_of, chosen_experts, experts_of
from evenpipe.model.linear import is_linear, is_transposed


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix [inputs, outputs] that tokens are multiplied by. Each token uses `met` of `copies` equal matrices."""

    inputs: int
    outputs: int
    copies: int = 1
    met: float = 1.0

    @property
    def parameters(self) -> int:
        """Parameters of all copies."""
        return self.inputs * self.outputs * self.copies

    @property
    def flops(self) -> float:
        """FLOPs of the forward, per token."""
        return 2.0 * self.inputs * self.outputs * self.met


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWork:
    """The experts of a layer."""

    count: int
    choices: int
    """Number of experts that each token chooses."""
    width: int
    """Width of an expert."""
    gated: bool
    parameters: int
    """Parameters of all experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """One transformer layer, per token."""

    products: tuple[Product, ...]
    parameters: int
    """Number of all parameters, including norms and biases."""
    hidden_size: int
    attention: Attention
    middle: float
    """Input size of the activation in the MLP, excluding `experts`."""
    gated: bool
    norms: int
    eager_norms: int
    """Number of `norms` that transformers computes as several operations (in fp32), not as one."""
    last: Product | None = None
    """The last product, if no later operation (a norm, or the weighting of experts) saves a tensor for the backward.
    Recomputation can skip it."""
    gathered: tuple[tuple[Product, ...], ...] = field(default=(), repr=False)
    """Per block (attention, MLP), the matrices that multiply its input. Each tensor rank keeps only its rows of that
    input, and all-gathers it again for the weight gradients of these matrices. Not part of `fingerprint`."""
    eager: bool = field(default=False, repr=False)
    """transformers computes attention on whole sequences without a fused kernel, which the model does not support. Not
    part of `fingerprint`."""
    experts: ExpertWork | None = field(default=None, repr=False)
    """Experts that run as one module; their matrices are also among `products`. Not part of `fingerprint`."""

    @property
    def expert_parameters(self) -> int:
        """Parameters of `experts`."""
        return 0 if self.experts is None else self.experts.parameters

    @property
    def dense(self) -> tuple[Product, ...]:
        """Return the products that every token runs through, without those of `experts`."""
        return tuple(product for product in self.products if product.copies == 1 or self.experts is None)

    @property
    def flops(self) -> float:
        """FLOPs of products, forward, per token."""
        return sum(product.flops for product in self.products)


def layers_of(description: Description) -> tuple[LayerWork, ...]:
    """Return the work of every layer; equal layers share one object."""
    seen: dict[Any, LayerWork] = {}
    works = []
    for index in range(description.layers):
        attention = attention_of(description, index)
        key = (
            tuple((name, *parameter.shape) for name, parameter in description.layer(index).named_parameters()),
            attention,
        )
        if key not in seen:
            seen[key] = _layer(description, index, attention)
        works.append(seen[key])
    return tuple(works)


def _layer(description: Description, index: int, attention: Attention) -> LayerWork:
    module = description.layer(index)
    named = tuple(_named_products(description, index))
    products = tuple(product for _, product in named)
    names = [name for name, _ in module.named_parameters()]
    norms = [child for child in module.modules() if "norm" in type(child).__name__.lower()]
    qkv_size = attention.heads * attention.query_size + attention.key_value_size
    experts = _experts(description, index)
    outputs = sum(product.outputs * product.met for product in products if product.copies == 1 or experts is None)
    return LayerWork(
        products=products,
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        hidden_size=description.hidden_size,
        attention=attention,
        middle=max(0.0, outputs - qkv_size - 2 * description.hidden_size),
        gated=any("gate_proj" in name or "gate_up" in name for name in names),
        norms=len(norms),
        eager_norms=sum(type(norm).__name__ != "LayerNorm" for norm in norms),
        last=_last_product(module, named),
        gathered=_gathered(module, named, description.hidden_size),
        eager=description.config is not None and description.skeleton.config._attn_implementation == "eager",
        experts=experts,
    )


def _experts(description: Description, index: int) -> ExpertWork | None:
    modules = list(fused_experts(description.layer(index)).values())
    if len(modules) != 1:
        return None
    last = modules[0].get_parameter("down_proj")
    return ExpertWork(
        count=len(last),
        choices=chosen_experts(description.layer_config(index)),
        width=last[0].numel() // description.hidden_size,
        gated=bool(modules[0].has_gate),
        parameters=sum(parameter.numel() for parameter in modules[0].parameters()),
    )


FINAL_NORMS = ("post_feedforward", "post_mlp")
"""Prefixes of the names of norms that follow the last product: Gemma 2 and 3, OLMo 2, GLM 4."""


def _last_product(layer: nn.Module, products: Sequence[tuple[str, Product]]) -> Product | None:
    """Return `LayerWork.last`. MLPs run after attention, in whatever order a layer lists them."""
    has_final_norm = any("norm" in name and name.startswith(FINAL_NORMS) for name, _ in layer.named_children())
    if has_final_norm or any(product.copies > 1 for _, product in products):
        return None
    candidates = [product for name, product in products if "attn" not in name and "attention" not in name]
    return candidates[-1] if candidates else None


def _gathered(
    layer: nn.Module, products: Sequence[tuple[str, Product]], hidden_size: int
) -> tuple[tuple[Product, ...], ...]:
    """Return `LayerWork.gathered`: the linear layers of each child that take hidden states, except for the last one
    that returns them. The runtime splits no other modules, such as experts: they keep their whole input."""
    blocks: dict[str, list[tuple[str, Product]]] = {}
    for name, product in products:
        blocks.setdefault(name.partition(".")[0], []).append((name, product))
    gathered = []
    for block in blocks.values():
        wide = [name for name, product in block if product.outputs == hidden_size]
        inside = (product for name, product in block if name not in wide[-1:] and is_linear(layer.get_submodule(name)))
        gathered.append(tuple(product for product in inside if product.inputs == hidden_size))
    return tuple(block for block in gathered if block)


def _named_products(description: Description, index: int) -> Iterator[tuple[str, Product]]:
    """Return products with the name of their module within the layer."""
    experts, met = experts_of(description.layer_config(index))
    for name, module in description.layer(index).named_modules():
        fused = number_of_experts(module)
        for parameter in module.parameters(recurse=False):
            if fused and parameter.ndim == 2:  # biases
                continue
            if parameter.ndim == 3 and experts and parameter.shape[0] == experts:
                yield name, Product(parameter.shape[2], parameter.shape[1], experts, met * experts)
            elif parameter.ndim == 2:
                outputs, inputs = parameter.shape[::-1] if is_transposed(module) else parameter.shape
                yield name, Product(inputs, outputs)


# --- bytes that are read and written --------------------------------------------------------------------------


FUSIBLE = {"norm": 14, "rotary": 15, "activation": 1}
"""What frameworks may fuse, and how many more kernels each takes if not fused: counted in the forward of transformers'
Llama layer."""

FUSED_OPERATIONS = 8
"""Kernels in the forward of a layer, excluding products, if everything in `FUSIBLE` is fused."""


def operations_forward(fused: Collection[str]) -> int:
    """Return the number of kernels in the forward of a layer, excluding products. fused: some of `FUSIBLE`."""
    return FUSED_OPERATIONS + sum(kernels for name, kernels in FUSIBLE.items() if name not in fused)


def streamed_forward(work: LayerWork, element: int, fused: Collection[str]) -> float:
    """Return the bytes per token of all operations between the products of a layer, forward. fused: some of `FUSIBLE`.

    Fused, norms read and write once, the activation reads its inputs and writes one tensor, and rotary embedding reads
    and writes queries and keys. Otherwise they are counted as transformers computes them: an RMSNorm in fp32 is five
    operations, and rotary embedding splits, negates, concatenates, multiplies twice and adds.
    """
    hidden, attention = work.hidden_size, work.attention
    eager_norm = 28.0 if element == 4 else 24.0 + 4.0 * element
    eager = 0 if "norm" in fused else work.eager_norms
    norms = hidden * (eager * eager_norm + (work.norms - eager) * 2.0 * element)
    rotated = attention.heads * attention.query_size + attention.key_value_size / 2
    rotary = rotated * element * (2.0 if "rotary" in fused else 9.0)
    activation = work.middle * element * ((1.5 if "activation" in fused else 2.5) if work.gated else 2.0)
    residual = 2 * 3.0 * hidden * element
    return norms + rotary + activation + residual


CAST_BYTES = 5.0
"""Bytes that a cast to 8 bits reads and writes per element: 16 bits are read, and two layouts are written; or one
layout, after a pass for the maximum, which the preceding operation often computes."""


def cast_elements(work: LayerWork) -> tuple[float, float]:
    """Return the elements per token that the dense products read, counting an input of several products once, and those
    of the gradients of their results."""
    shared = sum((len(block) - 1) * work.hidden_size for block in work.gathered)
    return sum(product.inputs * product.met for product in work.dense) - shared, sum(
        product.outputs * product.met for product in work.dense
    )


BACKWARD_STREAMED = 1.6
"""Bytes of the backward of the operations between products, relative to the forward: a norm reads two tensors and
writes one (forward: one and one), a gated activation reads three and writes two (forward: two and one)."""

BACKWARD_OPERATIONS = 1.5
"""Kernels of their backward, relative to the forward."""

LOSS_BYTES = {
    "evenpipe": (14.0, 0.0),
    "fp32": (18.0, 22.0),
    "bf16": (6.0, 8.0),
    "in-place": (38.0, 14.0),
    "fused": (6.0, 4.0),
    "chunked": (18.0, 22.0),
}
"""Bytes per logit that the loss reads and writes besides its products, forward and backward, by `Kernels.loss`.

    evenpipe   Triton's kernels: fp32 blocks written, read twice and stored in 16 bits. On an H100, S of vocab-1 takes
               17.5 ms (benchmarks/results/gpu_pass_times_h100.json, 8192 x 128256), its product alone 10.8, these 5.9
    fp32       logits in fp32, log-softmax; its backward, and the gradient in 16 bits
    bf16       the same in 16 bits
    in-place   Megatron's vocabulary-parallel cross-entropy: to fp32, maximum, subtraction, exp, sum, division; the
               gradient in place and in 16 bits. Predicts the head of the published profile (arXiv 2411.05288, artifact,
               2048 x 256 000): forward 27.1 of 26.2 ms measured, backward 32.7 of 31.0
    fused      one kernel, logits read twice and overwritten by their gradient
    chunked    as fp32, and the logits are computed twice
"""
LOSS_BYTES_ON_A_CPU = (36.0, 4.0)
"""The same for "evenpipe" on a CPU: fp32 blocks are written, masked, reduced to their maximum, subtracted,
exponentiated, summed and stored; the backward reads them once."""
