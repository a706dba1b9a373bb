"""The parameters on one device: masters for the optimizer, and copies in the compute dtype.

If both dtypes are equal, there is a single tensor. Otherwise the modules hold the copy, refreshed at the start of each
step, and every gradient is added to the master's, in the master's dtype, as soon as autograd has finished it. So no sum
over microbatches is rounded to the narrower dtype. Parameters that transformers keeps in fp32 are their own masters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn

from evenpipe.communication.communicator import Communicator
from evenpipe.model.placement import Cut
from evenpipe.model.rules import marked
from evenpipe.parallel.fsdp import ShardedModule
from evenpipe.parallel.gradients import AddTo


class Matrix:
    """Rows of a vocabulary matrix (or entries of its bias): the master, and the tensor that products read."""

    cuts: tuple[Cut, ...] = ()
    """Cuts of these rows over replicas."""

    def __init__(self, parameter: nn.Parameter, compute_dtype: torch.dtype) -> None:
        self.parameter = parameter
        self._copy = None if parameter.dtype == compute_dtype else parameter.detach().to(compute_dtype)

    @property
    def weight(self) -> Tensor:
        """Return the rows in the dtype of the products, outside autograd."""
        return self.parameter.detach() if self._copy is None else self._copy

    @property
    def trainable(self) -> bool:
        return self.parameter.requires_grad

    def gradient(self) -> Tensor:
        """Return the buffer that gradients are added to, in the master's dtype, initially zeros."""
        if self.parameter.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter)
        return self.parameter.grad

    @torch.no_grad()
    def refresh(self) -> None:
        if self._copy is not None:
            self._copy.copy_(self.parameter)


class ShardedMatrix(Matrix):
    """The same with rows also sharded over replicas: gathered only while a step needs them."""

    def __init__(
        self,
        rows: nn.Parameter,
        compute_dtype: torch.dtype,
        shards: Communicator,
        torch_device: torch.device,
        label: str,
    ) -> None:
        """
        Args:
            rows: the unsharded rows, on the meta device; see `ShardedModule`.
        """
        self._module = nn.Module()
        self._module.register_parameter("weight", rows)
        self.sharded = ShardedModule(
            self._module, [], shards, compute_dtype=compute_dtype, torch_device=torch_device, label=label
        )
        ((_, held),) = self.sharded
        self.parameter, self.cuts = held.tensor, held.placement.cuts

    @property
    def weight(self) -> Tensor:
        weight = self._module.weight
        assert isinstance(weight, Tensor)
        return weight.detach()

    def gradient(self) -> Tensor:
        return self.sharded.gradient("weight")

    def refresh(self) -> None:
        """Do nothing: gathering refreshes the rows."""


class StageParameters:
    """The parameters of a stage's module, with masters if it computes in another dtype."""

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype,
        names: Collection[str] | None = None,
        *,
        fp32_parameters: Collection[str] = (),
        torch_device: torch.device | None = None,
    ) -> None:
        """
        Args:
            names: of these parameters; None for all of the module.
            fp32_parameters: names of parameters that products read in the dtype of their masters.
            torch_device: where parameters on the meta device are allocated, filled with NaN. Whoever fills them with
                values calls `refresh`.
        """
        self._masters: dict[str, nn.Parameter] = {}
        self._copies: dict[str, nn.Parameter] = {}
        for name, original in list(module.named_parameters()):
            if names is not None and name not in names:
                continue
            parameter = original
            if original.is_meta and torch_device is not None:
                empty = marked(original.shape, original.dtype, torch_device)
                parameter = nn.Parameter(empty, requires_grad=original.requires_grad)
                _replace(module, name, parameter)
            self._masters[name] = parameter
            if parameter.dtype != compute_dtype and name not in fp32_parameters:
                copy = nn.Parameter(parameter.detach().to(compute_dtype))
                AddTo(parameter).register(copy)
                _replace(module, name, copy)
                self._copies[name] = copy
        self.follow_flags()

    def __iter__(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self._masters.items())

    @torch.no_grad()
    def refresh(self) -> None:
        if self._copies:
            names = list(self._copies)
            torch._foreach_copy_([self._copies[name] for name in names], [self._masters[name] for name in names])

    def follow_flags(self) -> None:
        """Make copies trainable if their masters now are."""
        for name, copy in self._copies.items():
            copy.requires_grad_(self._masters[name].requires_grad)


def _replace(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(path), leaf, parameter)
