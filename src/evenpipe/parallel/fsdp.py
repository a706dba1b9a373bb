"""Parameters sharded over replicas: torch's FSDP2 stores and gathers them; we decide when gradients are summed.

FSDP2 reduces gradients in a hook at the end of a module's backward. With a split backward that is the end of I, before
W has added the weight gradients, and with several microbatches in flight it is not the last backward anyway. So its
hooks never run here: `fully_shard` is called on a holder that has the layers as children and whose forward is never
called. We use only its public functions:

    gather    holder.unshard()     all-gather in the compute dtype; the layers' parameters are unsharded
    ready                          waits for it
    F B I W                        as usual: gradients accumulate in the unsharded parameters, or beside them in the
                                   masters' dtype
    free      holder.reshard()     frees the unsharded parameters, not their gradients; they may be gathered again
    reduce                         reduce-scatter of the sums over microbatches
    finish                         waits for it, adds this process's rows to the gradients of the masters

The masters, which optimizer and checkpoints use, are plain tensors on the memory that FSDP2 gathers from: this
process's rows of each parameter, split over the replicas as by `torch.chunk`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, UnshardHandle, fully_shard
from torch.distributed.tensor import DTensor, Shard

from evenpipe.communication.communicator import Communicator, Handle
from evenpipe.model.placement import Cut, Held, TensorPlacement
from evenpipe.model.rules import marked
from evenpipe.parallel.gradients import AddTo, Bucket
from evenpipe.parallel.grid import COPIES, EXPERT_COPIES

BUCKET_ELEMENTS = 1 << 24
"""Approximate number of elements that are reduced together. This bounds the memory of the buffers, which is twice that
of a bucket."""


@dataclass(slots=True, eq=False)
class _Sum:
    """The unsharded sum of a gradient over microbatches."""

    dtype: torch.dtype
    """The dtype of the master."""
    grad: Tensor | None = None


@dataclass(slots=True, eq=False)
class _Sharded:
    """One parameter."""

    name: str
    master: nn.Parameter
    """This process's rows."""
    placement: TensorPlacement
    chunk: int
    """Number of rows (or entries of another dimension) of every replica except the last ones."""
    shard: nn.Parameter
    """FSDP2's shard between steps; `unsharded` has the same `requires_grad`."""
    summed: _Sum
    """The sum of gradients, if `unsharded` has another dtype than the master."""
    unsharded: nn.Parameter | None = None
    """The parameter of the layers between gather and reduce; the same object in every step."""

    @property
    def dimension(self) -> int:
        """The dimension that is cut."""
        return self.placement.cuts[0].dimension

    @property
    def size(self) -> int:
        """Number of elements of a replica's part with its padding; equal on all replicas."""
        shape = self.placement.shape
        return self.chunk * math.prod(shape[: self.dimension] + shape[self.dimension + 1 :])

    def take_gradient(self) -> Tensor | None:
        """Return the unsharded gradient of the step so far, and release it."""
        gradient, self.summed.grad = self.summed.grad, None
        if gradient is None and self.unsharded is not None:
            gradient, self.unsharded.grad = self.unsharded.grad, None
        return gradient

    def moves(self, rows: Tensor) -> Sequence[tuple[Tensor, Tensor]] | None:
        """As in `Summand`; the unsharded gradient is released."""
        gradient = self.take_gradient()
        if gradient is None:
            return None
        chunks = gradient.split(self.chunk, self.dimension) if self.chunk else ()
        return [(row[: chunk.numel()].view(chunk.shape), chunk) for row, chunk in zip(rows, chunks, strict=False)]

    def take(self, summed: Tensor) -> None:
        """Add the summed rows of this process to the gradient of the master."""
        local_rows = summed[: self.master.numel()].view(self.master.shape)
        if self.master.grad is None:
            self.master.grad = local_rows
        else:
            self.master.grad.add_(local_rows)


@dataclass(slots=True)
class _Holder:
    """The parameters of an all-gather."""

    module: FSDPModule
    gather: _AllGather
    unsharding: UnshardHandle | None = None

    def wait(self) -> None:
        if self.unsharding is not None:
            self.gather.wait()
            self.unsharding.wait()
            self.unsharding = None


class ShardedModule:
    """A module whose parameters are sharded over replicas.

    Args:
        module: its parameters are on the meta device, with unsharded shapes. They are replaced by shards on
            `torch_device` that contain NaN, for the caller to fill.
        units: children (at any depth) that are gathered separately, to bound the memory of the gathering; parameters
            outside of them are gathered together.
        shards: over the replicas, in the order of their ranks: every process sends and receives shards.
        compute_dtype: of the unsharded parameters.
        label: names the module in messages.
        names: of the parameters to shard; others stay as they are. None for all of them.
        fp32_parameters: names of parameters that stay in the dtype of their masters; they are gathered separately.
        inner: cut dimension 1 where its length is divisible, instead of rows, because there are few experts.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[nn.Module],
        shards: Communicator,
        *,
        compute_dtype: torch.dtype,
        torch_device: torch.device,
        label: str,
        names: Collection[str] | None = None,
        fp32_parameters: Collection[str] = (),
        inner: bool = False,
    ) -> None:
        self._shards = shards
        self._label = label
        self._replicas = len(shards.members)
        self._module, self._inner = module, inner
        self._names = {name for name, _ in module.named_parameters()} if names is None else names
        shapes = {name: parameter.shape for name, parameter in self._named_parameters()}
        assert shards.group is not None
        mesh = DeviceMesh.from_group(shards.group, torch_device.type, mesh_dim_names=("dp",))
        cast_parameters = [parameter for name, parameter in self._named_parameters() if name not in fp32_parameters]
        kept_parameters = [parameter for name, parameter in self._named_parameters() if name in fp32_parameters]
        self._holders = [
            self._hold(unit, unit_parameters, mesh, dtype)
            for parameters, dtype in ((cast_parameters, compute_dtype), (kept_parameters, None))
            for unit, unit_parameters in _units(module, units, parameters)
        ]
        self._buckets: list[Bucket] = []
        self._parameters: list[_Sharded] = []
        for name, sharded in [*self._named_parameters()]:
            _give_memory(module, name, sharded, torch_device)
        for name, sharded in self._named_parameters():
            assert isinstance(sharded, DTensor)
            local = cast(DTensor, sharded.detach()).to_local()
            master = nn.Parameter(local, requires_grad=sharded.requires_grad)
            dimension = self._dimension(shapes[name])
            cut = Cut(EXPERT_COPIES if inner else COPIES, shards.position, self._replicas, dimension)
            placement = TensorPlacement(tuple(shapes[name]), (cut,))
            chunk = -(-shapes[name][dimension] // self._replicas)
            self._parameters.append(_Sharded(name, master, placement, chunk, sharded, _Sum(master.dtype)))

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, parameter) for name, parameter in self._module.named_parameters() if name in self._names)

    def _dimension(self, shape: Sequence[int]) -> int:
        """Return the dimension to cut; FSDP2 can cut only the first one unevenly."""
        return int(self._inner and len(shape) > 1 and shape[1] % self._replicas == 0)

    def _hold(
        self, module: nn.Module, parameters: Collection[nn.Parameter], mesh: DeviceMesh, dtype: torch.dtype | None
    ) -> _Holder:
        """dtype: of the unsharded parameters; None for that of their masters."""
        holder = _NeverCalled(module)
        fully_shard(
            holder,
            mesh=mesh,
            reshard_after_forward=False,
            mp_policy=MixedPrecisionPolicy(param_dtype=dtype),
            shard_placement_fn=lambda parameter: Shard(self._dimension(parameter.shape)),
            ignored_params={*module.parameters()} - {*parameters},
        )
        assert isinstance(holder, FSDPModule)
        gather = _AllGather(self._shards, f"parameters of {self._label}")
        holder.set_custom_all_gather(gather)  # type: ignore[arg-type]  # its base class has no public name
        return _Holder(holder, gather)

    def __iter__(self) -> Iterator[tuple[str, Held[nn.Parameter]]]:
        """Yield (name, this process's rows)."""
        return ((parameter.name, Held(parameter.master, parameter.placement)) for parameter in self._parameters)

    def follow_flags(self) -> None:
        """Make parameters trainable if their masters now are. Call it between steps, on all replicas."""
        for parameter in self._parameters:
            parameter.shard.requires_grad_(parameter.master.requires_grad)

    def begin(self) -> None:
        """Start a step: discard what a failed one has left."""
        self._buckets.clear()
        self._release()

    def gather(self) -> None:
        """Issue the all-gathers, in the same order on all replicas. Masters must not change until the step ends."""
        for holder in self._holders:
            holder.unsharding = holder.module.unshard(async_op=True)

    def ready(self) -> None:
        """Wait for the all-gathers, after which the parameters are unsharded. A second call does nothing."""
        for holder in self._holders:
            holder.wait()
        if self._parameters and self._parameters[0].unsharded is None:
            for parameter, (_, unsharded) in zip(self._parameters, self._named_parameters(), strict=True):
                parameter.unsharded = unsharded
                if unsharded.dtype != parameter.master.dtype:
                    AddTo(parameter.summed).register(unsharded.requires_grad_())
                    unsharded.requires_grad_(parameter.master.requires_grad)

    def gradient(self, name: str) -> Tensor:
        """Return the unsharded buffer that a parameter's gradients are added to, in the master's dtype, initially 0."""
        (parameter,) = (candidate for candidate in self._parameters if candidate.name == name)
        if parameter.summed.grad is None:
            parameter.summed.grad = torch.zeros(
                parameter.placement.shape, dtype=parameter.master.dtype, device=parameter.master.device
            )
        return parameter.summed.grad

    @torch.no_grad()
    def reduce(self) -> None:
        """Issue the sums over replicas after the last gradient of the step, in the same order on all of them."""
        trained = [parameter for parameter in self._parameters if parameter.master.requires_grad]
        bucket: list[_Sharded] = []
        elements = 0
        for parameter in trained:
            bucket.append(parameter)
            elements += math.prod(parameter.placement.shape)
            if elements >= BUCKET_ELEMENTS or parameter is trained[-1]:
                like, label = bucket[0].master, f"gradients of {self._label}"
                self._buckets.append(Bucket(bucket, like, self._shards, label, scatter=True))
                bucket, elements = [], 0

    def free(self) -> None:
        """Free the unsharded parameters; gradients stay until `reduce`."""
        for holder in self._holders:
            holder.wait()
            holder.module.reshard()

    def _release(self) -> None:
        """Free everything unsharded, including gradients that were not reduced."""
        self.free()
        for parameter in self._parameters:
            parameter.take_gradient()

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the sums and add them to the gradients of the masters; nothing unsharded remains."""
        for bucket in self._buckets:
            bucket.finish()
        self._buckets.clear()
        self._release()


class _AllGather:
    """FSDP2's all-gather through our communicator, whose waits are watched and whose processes may share a GPU."""

    def __init__(self, shards: Communicator, label: str) -> None:
        self._shards = shards
        self._label = label
        self._pending: Handle | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        if input_tensor.numel():
            output = output_tensor.view(group.size(), -1)
            self._pending = self._shards.all_gather(input_tensor, self._label, output)
        return self  # a non-None value tells FSDP2 not to wait itself

    def wait(self) -> None:
        if self._pending is not None:
            self._pending.wait("")
            self._pending = None


class _NeverCalled(nn.Module):
    """Holds a module whose parameters FSDP2 manages, so that its hooks never run."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.held = module


def _give_memory(module: nn.Module, name: str, parameter: nn.Parameter, torch_device: torch.device) -> None:
    """Replace a shard on the meta device with one that contains NaN; FSDP2 adds its padding after loading."""
    assert isinstance(parameter, DTensor)
    local = parameter.to_local()
    empty = DTensor.from_local(
        marked(local.shape, local.dtype, torch_device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    owner, _, key = name.rpartition(".")
    module.get_submodule(owner).load_state_dict({key: empty}, strict=False, assign=True)


def _units(
    module: nn.Module, units: Sequence[nn.Module], parameters: Collection[nn.Parameter]
) -> list[tuple[nn.Module, Collection[nn.Parameter]]]:
    """Return the modules to gather, each with the parameters that are gathered with it.

    A parameter that two units share cannot be gathered with either; then all parameters are gathered together.
    """
    all_parameters = set(parameters)
    held = [all_parameters.intersection(unit.parameters()) for unit in units]
    in_units = set[nn.Parameter]().union(*held)
    if sum(map(len, held)) != len(in_units):
        return [(module, all_parameters)]
    units_and_parameters = [*zip(units, held, strict=True), (module, all_parameters - in_units)]
    return [(unit, unit_parameters) for unit, unit_parameters in units_and_parameters if unit_parameters]
