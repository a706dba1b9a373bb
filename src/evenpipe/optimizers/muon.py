"""Muon for the matrices of layers, AdamW for everything else, with one learning rate for both.

Muon replaces the momentum of a matrix by the nearest orthogonal matrix, so all directions learn equally. This needs the
whole matrix. By the local part of a parameter:

    whole matrix of a layer           momentum -> orthogonal -> update
    rows, spread over replicas        momentum of the rows -> bf16, to one replica -> orthogonal -> rows back -> update
    stacked matrices of experts       one by one; replicas share them expert by expert, so each matrix is whole
    other parameters                  torch's AdamW, element by element

The gathered matrix is in bf16, the dtype in which orthogonalisation starts, so the result equals, bit for bit, that of
one process with the same momentum. Replicas share the work: a round has as many matrices as replicas, and each replica
orthogonalises one of them.

    round 1   rows of 3 matrices to replicas 0, 1, 2
    round 2   the same, sent while each replica orthogonalises its matrix of round 1
    round 1   rows back, update

Sources: K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024); arXiv 2502.16982,
equation 4, for a rate that fits Muon and AdamW; `torch.optim.Muon`, which has the same options.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from evenpipe.communication.calls import check_same_call
from evenpipe.optimizers.held import HeldParameter, HoldsParameters, Visit, groups_by_decay, loss_of

ELEMENTS_AT_ONCE = 1 << 26
"""Maximum elements of stacked matrices per orthogonalisation; bounds the memory of its temporaries."""
Item = TypeVar("Item")

_NO_MATRICES = (nn.Embedding, nn.Conv1d)


class Muon(torch.optim.Optimizer):
    """`torch.optim.Muon` for the matrices of a pipeline's layers, including stacked matrices of experts, and AdamW for
    the other parameters: embedding, output layer, norms, biases. Each step equals that of one process with the whole
    model.

    A matrix of a layer is a parameter with two dimensions named `weight`, except in embeddings, or a parameter with
    three dimensions (stacked matrices [rows, columns]), except in convolutions. Only parameters with two or more
    dimensions have weight decay. `step` is collective if parameters are sharded over replicas.

    Args:
        pipeline: its parameters that require a gradient are trained.
        lr: learning rate of both. With `adjust_lr_fn="match_rms_adamw"`, the default here, the update of a matrix is
            about as large as one of AdamW, so use the rate and weight decay of AdamW. torch's own default, "original",
            needs rates that are too large for AdamW.
        weight_decay: decoupled weight decay of both.
        betas, adamw_eps: options of AdamW.
        options: as for `torch.optim.Muon`.

    Raises:
        ValueError: a value that torch's classes refuse.
        InputError: tensor parallelism, or shared experts with rows in shards over replicas.
    """

    def __init__(
        self,
        pipeline: HoldsParameters,
        *,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adjust_lr_fn: str | None = "match_rms_adamw",
        **options: Any,
    ) -> None:
        self._held = {held.parameter: held for held in pipeline.held_parameters() if held.parameter.requires_grad}
        of_layer = matrices_of_layers(pipeline)
        matrices = [held.parameter for held in self._held.values() if of_layer(held)]
        for matrix in matrices:
            if not _fits(self._held[matrix]):
                raise self._held[matrix].refuse("Muon")
        chosen = set(matrices)
        remaining = [parameter for parameter in self._held if parameter not in chosen]
        options = checked_options(lr=lr, weight_decay=weight_decay, adjust_lr_fn=adjust_lr_fn, **options)
        self._adamw = torch.optim.AdamW(
            groups_by_decay(remaining), lr=lr, betas=betas, eps=adamw_eps, weight_decay=weight_decay, fused=True
        )
        groups = [{**group, "algorithm": "adamw"} for group in self._adamw.param_groups]
        super().__init__([{**options, "params": matrices, "algorithm": "muon"}, *groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the parameters. Collective if parameters are sharded over replicas."""
        loss = loss_of(closure)
        for group in self.param_groups:
            if group["algorithm"] == "muon":
                trained = [parameter for parameter in group["params"] if parameter.grad is not None]
                self._step_spread([parameter for parameter in trained if self._is_spread(parameter)], group)
                for parameter in trained:
                    if not self._is_spread(parameter):
                        self._step_whole(parameter, group)
        self._adamw.param_groups = [group for group in self.param_groups if group["algorithm"] == "adamw"]
        self._adamw.state = self.state
        self._adamw.step()
        return loss

    def _is_spread(self, parameter: nn.Parameter) -> bool:
        """Return whether other processes have rows of the same matrix."""
        held = self._held[parameter]
        return held.communicator is not None and len(held.shape) == 2

    def _momentum(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
        """Update the local momentum with this gradient; return it in bf16."""
        gradient, state, momentum = parameter.grad, self.state[parameter], group["momentum"]
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        return (gradient.lerp(buffer, momentum) if group["nesterov"] else buffer).bfloat16()

    def _step_whole(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        shape = parameter.shape if parameter.dim() == 3 else (1, *parameter.shape)
        momentum = self._momentum(parameter, group).view(shape)
        rate = self._decay(parameter, group)
        count = max(1, ELEMENTS_AT_ONCE // max(1, math.prod(shape[1:])))
        for some, update in zip(parameter.view(shape).split(count), momentum.split(count), strict=True):
            some.add_(orthogonalise(update, **_of_orthogonalisation(group)), alpha=-rate)

    def _step_spread(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Update spread matrices in rounds of matrices with similar work, the most work first."""
        if not parameters:
            return
        communicator = self._held[parameters[0]].communicator
        assert communicator is not None
        check_same_call(communicator, "Muon.step", parameters[0].device)
        members = len(communicator.members)
        ordered = sorted(
            parameters, key=lambda matrix: -math.prod(self._held[matrix].shape) * min(self._held[matrix].shape)
        )
        rounds = (
            [
                (parameter, Visit(self._momentum(parameter, group), self._held[parameter], host))
                for host, parameter in enumerate(ordered[first : first + members])
            ]
            for first in range(0, len(ordered), members)
        )
        for visits in _one_ahead(rounds):
            for parameter, visit in visits:
                arrived = visit.arrived()
                if visit.is_here:
                    visit.go_back(orthogonalise(arrived[None], **_of_orthogonalisation(group))[0])
                else:
                    visit.go_back(torch.empty_like(parameter, dtype=torch.bfloat16))
            for parameter, visit in visits:
                rate = self._decay(parameter, group)
                parameter.add_(visit.rows(), alpha=-rate)

    def _decay(self, parameter: nn.Parameter, group: dict[str, Any]) -> float:
        """Decay a parameter, and return the rate of its update, both by the rules of `torch.optim.Muon`."""
        rate = float(group["lr"])
        parameter.mul_(1 - rate * group["weight_decay"])
        return rate * _scale(self._held[parameter].shape, group["adjust_lr_fn"])


def checked_options(**options: Any) -> dict[str, Any]:
    """Return the options of `torch.optim.Muon` with its defaults. Raises ValueError for options that it refuses."""
    checked = dict(torch.optim.Muon([nn.Parameter(torch.empty(0, 0))], **options).defaults)
    orthogonalise(torch.zeros(1, 1, 1), **_of_orthogonalisation(checked))  # torch checks the others in the first step
    return checked


def _fits(held: HeldParameter) -> bool:
    """Return whether this process has whole matrices, or rows of one that are next to each other."""
    cuts = held.placement.cuts
    if len(held.shape) == 3:
        return not any(cut.dimension for cut in cuts)
    return held.has_rows and len(cuts) <= 1 and not any(cut.segments for cut in cuts)


def matrices_of_layers(pipeline: HoldsParameters) -> Callable[[HeldParameter], bool]:
    """Return a function that tells whether Muon trains a parameter."""
    skeleton, layers = pipeline.description.skeleton, f"{pipeline.description.structure.layers_name}."

    def of_layer(held: HeldParameter) -> bool:
        path, _, leaf = held.name.rpartition(".")
        return held.name.startswith(layers) and is_matrix(skeleton.get_submodule(path), leaf, len(held.shape))

    return of_layer


def is_matrix(module: nn.Module, name: str, dimensions: int) -> bool:
    """Return whether the parameter `name` of a layer's module is a matrix or several stacked ones."""
    if isinstance(module, _NO_MATRICES):
        return False
    return dimensions == 3 or (dimensions == 2 and name == "weight")


def orthogonalise(
    matrices: Tensor, *, ns_coefficients: tuple[float, float, float], ns_steps: int, eps: float
) -> Tensor:
    """Replace the singular values of matrices by values near 1, by Newton-Schulz iterations in bf16.

    Args:
        matrices: [count, rows, columns].
        ns_coefficients: a, b, c of x <- (a + b (x x^T) + c (x x^T)^2) x.
        eps: minimum of the norm that divides a matrix.

    Returns: [count, rows, columns] in bf16, for each matrix the bits of `torch.optim.Muon`.
    """
    a, b, c = ns_coefficients
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.bfloat16()
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(ns_steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _of_orthogonalisation(group: dict[str, Any]) -> dict[str, Any]:
    return {name: group[name] for name in ("ns_coefficients", "ns_steps", "eps")}


def _scale(shape: tuple[int, ...], adjust_lr_fn: str | None) -> float:
    """Return the factor between a matrix's rate and AdamW's, as in `torch.optim.Muon`."""
    rows, columns = shape[-2:]
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


def _one_ahead(begun: Iterable[list[Item]]) -> Iterator[list[Item]]:
    """Yield each item after the next one has begun too."""
    for item, _ in itertools.pairwise(itertools.chain(begun, [None])):
        assert item is not None
        yield item
