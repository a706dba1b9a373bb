"""Parameters in shards over replicas: torch's FSDP2 stores and gathers them, and we decide when gradients are summed.

FSDP2 reduces gradients in a hook at the end of the backward through a module. With a split backward that is the end of
I, before W has added the weight gradients, and with several microbatches in flight it is not the last backward anyway.
So its hooks never run here: `fully_shard` is called on a holder that has the layers as children and whose forward is
never called. We use only its public functions:

    gather    holder.unshard()     all-gather in the dtype of the products; the layers' parameters are whole
    ready                          waits for it
    F B I W                        as usual: gradients add up in the whole parameters, or beside them in masters' dtype
    free      holder.reshard()     frees the whole parameters, not their gradients; they may be gathered again
    reduce                         reduce-scatter of the sums over microbatches
    finish                         waits for it, adds this process's rows to the gradients of the masters

The masters, which optimizer and checkpoints use, are plain tensors that share the memory that FSDP2 gathers from: this
process's rows of each parameter, split over the replicas as by `torch.chunk`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, UnshardHandle, fully_shard
from torch.distributed.tensor import DTensor

from evenpipe.communication.communicator import Communicator, Handle
from evenpipe.model.placement import Cut, Held, TensorPlacement
from evenpipe.parallel.grid import COPIES

BUCKET_ELEMENTS = 1 << 24
"""Approximate number of elements that are reduced together: bounds the memory of the buffers, which is twice that of
one bucket."""


@dataclass(slots=True, eq=False)
class _Sharded:
    """One parameter."""

    name: str
    master: nn.Parameter
    """This process's rows."""
    placement: TensorPlacement
    chunk: int
    """Rows of every replica except the last ones."""
    shard: nn.Parameter
    """FSDP2's shard between steps; `whole` requires gradients as it does."""
    whole: nn.Parameter | None = None
    """The parameter of the layers between gather and reduce; the same object in every step."""
    gradient: Tensor | None = None
    """Sum over microbatches in the master's dtype, if `whole` has another one."""

    def add(self, whole: Tensor) -> None:
        """Add a finished gradient, converted from the computing dtype to the master's."""
        assert whole.grad is not None
        if self.gradient is None:
            self.gradient = whole.grad.to(self.master.dtype)
        else:
            self.gradient.add_(whole.grad)
        whole.grad = None

    def take_gradient(self) -> Tensor | None:
        """Return the whole gradient of the step so far, and forget it."""
        gradient, self.gradient = self.gradient, None
        if gradient is None and self.whole is not None:
            gradient, self.whole.grad = self.whole.grad, None
        return gradient


@dataclass(slots=True)
class _Reduction:
    """A reduce-scatter in progress."""

    handle: Handle
    output: Tensor
    """[elements of this process's rows, padded; then for each parameter how many replicas have a gradient]."""
    parameters: Sequence[_Sharded]
    missing: Sequence[_Sharded]


@dataclass(slots=True)
class _Holder:
    """One all-gather."""

    module: FSDPModule
    gather: _AllGather
    unsharding: UnshardHandle | None = None


class ShardedModule:
    """A module whose parameters are in shards over replicas.

    Args:
        module: with its whole parameters, the same on all replicas.
        units: children (at any depth) that are gathered one by one, to bound the memory of the gathering; parameters
            outside of them are gathered together.
        shards: over the replicas, in the order of their ranks: every process gives and receives shards.
        compute_dtype: of the whole parameters.
        what: for messages.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[nn.Module],
        shards: Communicator,
        *,
        compute_dtype: torch.dtype,
        what: str,
    ) -> None:
        self._shards = shards
        self._what = what
        self._replicas = len(shards.members)
        self._compute_dtype = compute_dtype
        names = {parameter: name for name, parameter in module.named_parameters()}
        shapes = {name: parameter.shape for parameter, name in names.items()}
        assert shards.group is not None
        device_type = next((parameter.device.type for parameter in module.parameters()), "cpu")
        mesh = DeviceMesh.from_group(shards.group, device_type, mesh_dim_names=("dp",))
        self._holders = [self._hold(unit, inside, mesh) for unit, inside in _units(module, units)]
        self._reductions: list[_Reduction] = []
        self._parameters: list[_Sharded] = []
        cut = Cut(COPIES, shards.position, self._replicas)
        for name, sharded in module.named_parameters():
            assert isinstance(sharded, DTensor)
            local = cast(DTensor, sharded.detach()).to_local()
            master = nn.Parameter(local, requires_grad=sharded.requires_grad)
            placement = TensorPlacement(tuple(shapes[name]), (cut,))
            chunk = -(-shapes[name][0] // self._replicas)
            self._parameters.append(_Sharded(name, master, placement, chunk, sharded))
        self._module = module

    def _hold(self, module: nn.Module, elsewhere: Sequence[nn.Module], mesh: DeviceMesh) -> _Holder:
        holder = _NeverCalled(module)
        fully_shard(
            holder,
            mesh=mesh,
            reshard_after_forward=False,
            mp_policy=MixedPrecisionPolicy(param_dtype=self._compute_dtype),
            ignored_params={parameter for unit in elsewhere for parameter in unit.parameters()},
        )
        assert isinstance(holder, FSDPModule)
        gather = _AllGather(self._shards, f"parameters of {self._what}")
        holder.set_custom_all_gather(gather)  # type: ignore[arg-type]  # its base class has no public name
        return _Holder(holder, gather)

    def __iter__(self) -> Iterator[tuple[str, Held[nn.Parameter]]]:
        """Yield (name, this process's rows)."""
        return ((one.name, Held(one.master, one.placement)) for one in self._parameters)

    def follow_flags(self) -> None:
        """Make parameters trainable if their masters are trainable now. Between steps, on all replicas."""
        for parameter in self._parameters:
            parameter.shard.requires_grad_(parameter.master.requires_grad)

    def begin(self) -> None:
        """At the start of a step: forget what a failed one has left."""
        self._reductions.clear()
        self._let_go()

    def gather(self) -> None:
        """Issue the all-gathers, in the same order on all replicas. Masters must not change until the step is over."""
        for holder in self._holders:
            holder.unsharding = holder.module.unshard(async_op=True)

    def ready(self) -> None:
        """Wait for them: from here on the module has whole parameters. A second call does nothing."""
        for holder in self._holders:
            if holder.unsharding is not None:
                holder.gather.wait()
                holder.unsharding.wait()
                holder.unsharding = None
        if self._parameters and self._parameters[0].whole is None:
            for parameter, (_, whole) in zip(self._parameters, self._module.named_parameters(), strict=True):
                parameter.whole = whole
                if whole.dtype != parameter.master.dtype:
                    whole.requires_grad_().register_post_accumulate_grad_hook(parameter.add)
                    whole.requires_grad_(parameter.master.requires_grad)

    def gradient(self, name: str) -> Tensor:
        """Return the buffer that gradients of a parameter are added to, whole, in the master's dtype, initially 0."""
        (parameter,) = (one for one in self._parameters if one.name == name)
        if parameter.gradient is None:
            parameter.gradient = torch.zeros(
                parameter.placement.shape, dtype=parameter.master.dtype, device=parameter.master.device
            )
        return parameter.gradient

    @torch.no_grad()
    def reduce(self) -> None:
        """After the last gradient of the step: issue the sums over replicas, in the same order on all of them."""
        bucket: list[_Sharded] = []
        elements = 0
        for parameter in self._parameters:
            if not parameter.master.requires_grad:
                continue
            bucket.append(parameter)
            elements += math.prod(parameter.placement.shape)
            if elements >= BUCKET_ELEMENTS:
                self._reductions.append(self._reduce(bucket))
                bucket, elements = [], 0
        if bucket:
            self._reductions.append(self._reduce(bucket))

    def free(self) -> None:
        """Free the whole parameters; gradients stay until `reduce`."""
        for holder in self._holders:
            if holder.unsharding is not None:
                holder.gather.wait()
                holder.unsharding.wait()
                holder.unsharding = None
            holder.module.reshard()

    def _let_go(self) -> None:
        """Free everything whole, also gradients that were not reduced."""
        self.free()
        for parameter in self._parameters:
            parameter.take_gradient()

    def _reduce(self, parameters: list[_Sharded]) -> _Reduction:
        first = parameters[0].master
        sizes = [one.chunk * math.prod(one.placement.shape[1:]) for one in parameters]
        rows = torch.zeros(
            (self._replicas, sum(sizes) + len(parameters)), dtype=first.dtype, device=first.device
        )  # zeros: the padding of the last replicas' rows
        parts = rows.split([*sizes, len(parameters)], dim=1)
        counts = parts[-1]
        counts.fill_(1)
        missing = []
        for index, (parameter, part) in enumerate(zip(parameters, parts[:-1], strict=True)):
            gradient = parameter.take_gradient()
            if gradient is None:
                missing.append(parameter)
                counts[:, index] = 0
                continue
            for replica, chunk in enumerate(gradient.split(parameter.chunk) if parameter.chunk else ()):
                part[replica, : chunk.numel()].view(chunk.shape).copy_(chunk)
        output = rows.new_empty(rows.shape[1])
        handle = self._shards.reduce_scatter(output, rows, f"gradients of {self._what}")
        return _Reduction(handle, output, list(parameters), missing)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the sums and add them to the gradients of the masters; nothing stays whole.

        A parameter that no replica has a gradient for stays without one, as in one process.
        """
        for reduction in self._reductions:
            reduction.handle.wait("the optimizer")
            counts = reduction.output[-len(reduction.parameters) :]
            start = 0
            for index, parameter in enumerate(reduction.parameters):
                master = parameter.master
                summed = reduction.output[start : start + master.numel()].view(master.shape)
                start += parameter.chunk * math.prod(parameter.placement.shape[1:])
                if parameter in reduction.missing and not counts[index]:
                    continue
                if master.grad is None:
                    master.grad = summed
                else:
                    master.grad.add_(summed)
        self._reductions.clear()
        self._let_go()


class _AllGather:
    """FSDP2's all-gather, through our communicator: its waits are watched, and processes may share a GPU."""

    def __init__(self, shards: Communicator, what: str) -> None:
        self._shards = shards
        self._what = what
        self._pending: Handle | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        if input_tensor.numel():
            output = output_tensor.view(group.size(), -1)
            self._pending = self._shards.all_gather(output, input_tensor, self._what)
        return self  # a non-None value tells FSDP2 not to wait itself

    def wait(self) -> None:
        if self._pending is not None:
            self._pending.wait("")
            self._pending = None


class _NeverCalled(nn.Module):
    """Holds a module whose parameters FSDP2 manages, out of reach of its hooks."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.held = module


def _units(module: nn.Module, units: Sequence[nn.Module]) -> list[tuple[nn.Module, Sequence[nn.Module]]]:
    """Return the modules to gather, and modules in them that are gathered separately.

    A parameter that two units share cannot be gathered with either of them: then all are gathered together.
    """
    held = [set(unit.parameters()) for unit in units]
    inside = set[nn.Parameter]().union(*held)
    if sum(map(len, held)) != len(inside):
        return [(module, ())]
    found: list[tuple[nn.Module, Sequence[nn.Module]]] = [
        (unit, ()) for unit, parameters in zip(units, held, strict=True) if parameters
    ]
    return [*found, (module, units)] if set(module.parameters()) - inside else found
