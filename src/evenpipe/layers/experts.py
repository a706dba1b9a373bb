"""The split backward of experts: one more implementation for transformers' experts interface.

A layer of experts has [experts, ..., ...] matrices. Each token uses a few of them, so the rows of all tokens are sorted
by expert, and one product per expert follows:

    rows sorted by expert   0 0 0 | 1 | 3 3        ends = [3, 4, 4, 6]: of each expert's rows; expert 2 has none
    I    rows.grad[group]   = output.grad[group] matrix^T, and (rows, output.grad, ends) into the queue
    W    matrix.grad[expert] += rows[group]^T output.grad[group]     zeros for an expert without tokens

Microbatches without a split backward run as the config says ("eager", "grouped_mm", ...), unchanged. Biases of experts
wait for W like their matrices; routers are not experts, and their gradient is computed in I.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from evenpipe.layers.weight_gradients import Entry, WeightGradients, split_layers

try:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
except ImportError:  # a transformers version without the experts interface: all gradients of experts are computed in I
    ALL_EXPERTS_FUNCTIONS = None  # type: ignore[assignment]

IMPLEMENTATION = "evenpipe"
"""Name of the implementation in transformers; never written into a user's config."""


def split_experts(module: nn.Module, queue: WeightGradients) -> list[str]:
    """Let the experts of a stage take part in split backwards. Return the names of the parameters that do."""
    if ALL_EXPERTS_FUNCTIONS is None:
        return []
    ALL_EXPERTS_FUNCTIONS[IMPLEMENTATION] = run_experts
    found = [(name, part) for name, part in module.named_modules() if _is_dispatched(part)]
    for _, part in found:
        part._run_otherwise = _run_as_configured(part)  # type: ignore[assignment]
        part._weight_gradients = queue  # type: ignore[assignment]
    for _, part in found:  # experts share one config
        part.config._experts_implementation = IMPLEMENTATION  # type: ignore[union-attr]
    return [
        f"{prefix}.{name}"
        for prefix, part in found
        for name, parameter in part.named_parameters(recurse=False)
        if parameter.dim() > 1
    ]


def split_once(module: nn.Module) -> Callable[[], None]:
    """Split the next backward of a module, for the self-check: the returned function then runs its W."""
    queue = WeightGradients()
    split_experts(module, queue)
    split_layers(module, queue)
    key = (0, 0)
    queue.begin(key)

    def weight_gradients() -> None:
        queue.under_way = None
        queue.compute(key)

    return weight_gradients


def _is_dispatched(module: nn.Module) -> bool:
    """Return whether a module's forward uses the interface: transformers' decorator leaves these attributes."""
    return all(hasattr(module, name) for name in ("_apply_gate", "is_transposed", "has_bias", "config")) and hasattr(
        type(module).forward, "__wrapped__"
    )


def _run_as_configured(experts: Any) -> Callable[..., Tensor]:
    """Run the experts' original forward, by the name in the config; one product after the other if there are no grouped
    ones."""
    eager, name = type(experts).forward.__wrapped__, experts.config._experts_implementation
    configured = ALL_EXPERTS_FUNCTIONS.get_interface(name, eager)

    def run(experts: Any, hidden: Tensor, *routing: Tensor) -> Tensor:
        parameters = [one for one in experts._parameters.values() if one is not None and one.dim() == 3]
        lacking = name == "grouped_mm" and not _has_grouped(hidden, *parameters)
        return (eager if lacking else configured)(experts, hidden, *routing)

    return run


def run_experts(experts: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run every token through its experts, and add their weighted outputs.

    Args:
        experts: transformers' module; the interface's functions are called with it.
        hidden: [tokens, hidden_size].
        top_k_index: [tokens, choices], the experts of each token.
        top_k_weights: [tokens, choices].

    Returns: [tokens, hidden_size].
    """
    compiling = torch.compiler.is_compiling()  # checked first: the answer changes from pass to pass
    if compiling or not experts._weight_gradients.takes(hidden):
        return experts._run_otherwise(experts, hidden, top_k_index, top_k_weights)
    tokens, choices = top_k_index.shape
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    count = getattr(experts, first).shape[0]
    expert_of_row, order = torch.sort(top_k_index.reshape(-1))  # as in transformers: sums in the same order
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=order.device)
    every = torch.arange(count, device=order.device)
    groups = (expert_of_row, torch.searchsorted(expert_of_row, every, right=True, out_int32=True))

    rows = _GroupedLinear.apply(hidden[order // choices], (experts, first), groups)
    rows = experts._apply_gate(rows) if experts.has_gate else experts.act_fn(rows)
    rows = _GroupedLinear.apply(rows, (experts, "down_proj"), groups)
    if getattr(experts, "has_post_expert_norm", False):
        rows = experts.post_expert_norm(rows)
    by_token = rows[place].view(tokens, choices, -1)
    return (by_token * top_k_weights.unsqueeze(-1)).sum(dim=1).to(hidden.dtype)


Groups = tuple[Tensor, Tensor]
"""Expert of each row, sorted: [rows] int64; end of each expert's rows: [experts] int32."""


class _GroupedLinear(torch.autograd.Function):
    """Multiply each row by its expert's matrix. The parameters stay outside of autograd, as in `weight_gradients`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, which: tuple[Any, str], groups: Groups) -> Tensor:
        experts, matrices, bias = _parameters(which)
        ctx.which, ctx.groups = which, groups
        if matrices.requires_grad:
            ctx.save_for_backward(rows)
        output = grouped_product(rows, matrices if experts.is_transposed else matrices.mT, groups[1])
        return output if bias is None else output + bias[groups[0]]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        experts, matrices, bias = _parameters(ctx.which)
        saved = ctx.saved_tensors  # read once: under checkpointing each read recomputes a tensor
        rows = saved[0].detach() if saved else None
        gradient, (expert_of_row, ends) = gradient.detach(), ctx.groups
        transposed, with_bias = experts.is_transposed, bias is not None and bias.requires_grad

        def gradients() -> tuple[Tensor, ...]:
            found = []
            if rows is not None:
                found.append(grouped_outer(rows, gradient, ends) if transposed else grouped_outer(gradient, rows, ends))
            if with_bias:
                found.append(functional.one_hot(expert_of_row, ends.numel()).to(gradient.dtype).t() @ gradient)
            return tuple(found)

        parameters = [
            one for one, taken in ((matrices, rows is not None), (bias, with_bias)) if one is not None and taken
        ]
        if parameters:
            experts._weight_gradients.add(Entry(tuple(parameters), gradients))
        return grouped_product(gradient, matrices.mT if transposed else matrices, ends), None, None


def _parameters(which: tuple[Any, str]) -> tuple[Any, nn.Parameter, nn.Parameter | None]:
    """Yield the experts, their matrices, and their biases."""
    experts, name = which
    return experts, getattr(experts, name), getattr(experts, f"{name}_bias") if experts.has_bias else None


def grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Return [rows, a] x [experts, a, b] -> [rows, b]: every row times its expert's matrix."""
    if _has_grouped(rows, matrices):
        return functional.grouped_mm(rows, matrices, offs=ends)
    output = rows.new_empty(rows.shape[0], matrices.shape[2])
    for expert, (start, end) in enumerate(_spans(ends)):
        torch.mm(rows[start:end], matrices[expert], out=output[start:end])
    return output


def grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Return [rows, a] and [rows, b] -> [experts, a, b]: left^T right over each expert's rows, zeros for experts
    without rows."""
    if _has_grouped(left, right):
        return functional.grouped_mm(left.t(), right, offs=ends)
    output = left.new_zeros(ends.numel(), left.shape[1], right.shape[1])
    for expert, (start, end) in enumerate(_spans(ends)):
        if start < end:
            torch.mm(left[start:end].t(), right[start:end], out=output[expert])
    return output


def _spans(ends: Tensor) -> list[tuple[int, int]]:
    """Waits for the device: only used without grouped products."""
    stops = ends.tolist()
    return list(zip([0, *stops], stops, strict=False))


def _has_grouped(*tensors: Tensor) -> bool:
    """Return whether torch can multiply groups of these rows and matrices at once. Not in fp64, and only rows of whole
    16 bytes; on a GPU from compute capability 8.0 on."""
    if not hasattr(functional, "grouped_mm") or any(tensor.dtype == torch.float64 for tensor in tensors):
        return False
    sizes = [size for tensor in tensors for size in tensor.shape[1:]]
    if any(size * tensors[0].element_size() % 16 for size in sizes):
        return False
    return not tensors[0].is_cuda or torch.cuda.get_device_capability(tensors[0].device) >= (8, 0)
