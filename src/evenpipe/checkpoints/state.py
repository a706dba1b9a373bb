"""The tensors of this process in a checkpoint: their keys, and their destinations when they are loaded.

Keys: `parameters.<name>` and `optimizer.<state>.<name>`, with Hugging Face names, without numbers of groups or
processes. Rows (of a vocabulary matrix over the pipeline, of any parameter over replicas) and optimizer state of their
shape are wrapped as DTensors here; other tensors are plain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from evenpipe.checkpoints.agreement import Team
from evenpipe.checkpoints.manifest import Manifest, TensorEntry
from evenpipe.communication.messages import dtype_name
from evenpipe.errors import InputError
from evenpipe.host.optimizer import HostAdamW
from evenpipe.optimizers.adafactor import Adafactor

PARAMETERS = "parameters."
OPTIMIZER = "optimizer."

State = dict[str, Tensor]
"""Key -> plain tensor or DTensor."""


class ParameterShard(Protocol):
    """One process's part of a parameter; `Pipeline.parameter_shards()` returns them."""

    @property
    def parameter(self) -> nn.Parameter:
        """The local part."""

    @property
    def start_row(self) -> int | None:
        """First local row if rows are spread over processes by `torch.chunk`'s rule; None: all rows are local."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""

    @property
    def saved_here(self) -> bool:
        """False for a second copy (a tied matrix on the last device, a parameter of a later replica): it is loaded, but
        another process saves it."""

    @property
    def mesh(self) -> DeviceMesh | None:
        """Processes that rows are spread over: over the first axis, and each part over the second. None: over all
        processes that save together, in the order of ranks."""


def parameter_names(manifest: Manifest) -> list[str]:
    """Return the Hugging Face names of all parameters in a checkpoint."""
    return [key.removeprefix(PARAMETERS) for key in manifest.tensors if key.startswith(PARAMETERS)]


def tensors_to_save(shards: Mapping[str, ParameterShard], optimizer: torch.optim.Optimizer | None, team: Team) -> State:
    """Return this process's part of a checkpoint. The tensors are those in use, not copies.

    Optimizer state that does not exist (before the first step, or for a frozen parameter) is not saved.

    Raises:
        InputError: state of the optimizer is neither one number nor has its parameter's rows.
    """
    layout = _Layout(team)
    owned = _owned(shards, optimizer)
    state: State = {}
    for name, shard in shards.items():
        layout.check(name, shard)
        if not shard.saved_here:
            continue
        state[PARAMETERS + name] = layout.whole(shard.parameter.detach(), shard)
        if optimizer is None or shard.parameter not in owned:
            continue
        for key, value in optimizer.state.get(shard.parameter, {}).items():
            if value is None:
                continue  # momentum_buffer of plain SGD
            if not isinstance(value, Tensor) or "." in key:
                raise InputError(
                    f"optimizer: its state {key!r} of {name!r} is {type(value).__name__}, expected a tensor"
                )
            rows = len(shard.parameter) if shard.parameter.dim() else 0
            if shard.start_row is None or _follows_rows(value.shape, rows, shard.parameter, key, optimizer):
                state[f"{OPTIMIZER}{key}.{name}"] = layout.whole(value.detach(), shard)
            elif value.numel() != 1 and not _is_same_on_all(shard.parameter, key, optimizer):
                raise InputError(
                    f"optimizer: its state {key!r} of {name!r} has shape {tuple(value.shape)}, expected {rows} rows, "
                    "as many as the process has of the parameter, or one number"
                )
            elif layout.has_first_rows(shard):  # the same on every process
                state[f"{OPTIMIZER}{key}.{name}"] = value.detach()
    return state


@dataclass(slots=True)
class LoadPlan:
    """New tensors to read into, and their destinations."""

    state: State = field(default_factory=dict)
    """Tensors to read, by key; they wrap the tensors below."""
    parameters: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    optimizer_states: list[tuple[dict[Any, Any], nn.Parameter, dict[str, Tensor]]] = field(default_factory=list)
    """The optimizer's dictionary, the parameter, its new state."""

    def put_in_place(self) -> None:
        """Overwrite the parameters in place (there may be views of them) and replace the optimizer's state."""
        with torch.no_grad():
            for parameter, fresh in self.parameters:
                parameter.copy_(fresh)
        for states, parameter, fresh_state in self.optimizer_states:
            states.pop(parameter, None)
            if fresh_state:
                states[parameter] = fresh_state


def plan_load(
    manifest: Manifest, shards: Mapping[str, ParameterShard], optimizer: torch.optim.Optimizer | None, team: Team
) -> LoadPlan:
    """Return the tensors that this process reads from a checkpoint. Memory is allocated for all except moments that the
    optimizer keeps on the host.

    Raises:
        InputError: the checkpoint lacks a parameter, or has another shape or dtype of it or of existing optimizer
            state.
    """
    layout = _Layout(team)
    saved_states = _saved_states(manifest)
    owned = _owned(shards, optimizer)
    plan = LoadPlan()
    for name, shard in shards.items():
        layout.check(name, shard)
        key = PARAMETERS + name
        entry = manifest.tensors.get(key)
        if entry is None:
            raise InputError(f"the checkpoint has no {name!r}, which the model has")
        _check_equal(repr(name), "shape", entry.shape, tuple(shard.shape))
        _check_equal(repr(name), "dtype", entry.dtype, dtype_name(shard.parameter.dtype))
        fresh = torch.empty_like(shard.parameter, requires_grad=False)
        plan.parameters.append((shard.parameter, fresh))
        plan.state[key] = layout.whole(fresh, shard)
        if optimizer is None or shard.parameter not in owned:
            continue
        existing = optimizer.state.get(shard.parameter, {})
        fresh_state: dict[str, Tensor] = {}
        for state_key, state_entry in saved_states.get(name, {}).items():
            what = f"optimizer state {state_key!r} of {name!r}"
            if isinstance(existing.get(state_key), Tensor):
                _check_equal(what, "dtype", state_entry.dtype, dtype_name(existing[state_key].dtype))
            shape = state_entry.shape
            spread = _follows_rows(shape, shard.shape[0] if shard.shape else 0, shard.parameter, state_key, optimizer)
            if spread:
                shape = (len(shard.parameter), *shape[1:])
            dtype = getattr(torch, state_entry.dtype)
            place = _place_on_host(optimizer, shard.parameter, state_key)
            if place is None:
                torch_device = _state_device(state_key, shard.parameter, owned[shard.parameter])
                fresh = torch.empty(shape, dtype=dtype, device=torch_device)
            elif not existing and place.shape == shape and place.dtype == dtype:
                fresh = place  # not used yet: nothing is lost if the load fails
            else:
                fresh = torch.empty(shape, dtype=dtype, device=place.device)
            fresh_state[state_key] = fresh
            plan.state[f"{OPTIMIZER}{state_key}.{name}"] = layout.whole(fresh, shard) if spread else fresh
        plan.optimizer_states.append((optimizer.state, shard.parameter, fresh_state))
    return plan


class _Layout:
    """Spreads rows over processes by `torch.chunk`'s rule, which DTensor assumes without a check."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._meshes: dict[tuple[DeviceMesh | None, str], DeviceMesh] = {}

    def check(self, name: str, shard: ParameterShard) -> None:
        """Assert the sizes of rows: other sizes would be saved at wrong offsets without an error."""
        parameter = shard.parameter
        if shard.start_row is None:
            assert tuple(parameter.shape) == tuple(shard.shape), f"{name}: {tuple(parameter.shape)} is not the whole"
            return
        rows, *rest = shard.shape
        start, stop = 0, rows
        for place, size in self._places(shard):
            chunk = -(-(stop - start) // size)
            start, stop = min(start + place * chunk, stop), min(start + (place + 1) * chunk, stop)
        held = (shard.start_row, tuple(parameter.shape))
        assert held == (start, (stop - start, *rest)), (
            f"{name}: process {self._team.rank} holds {held}, not {start}:{stop}"
        )

    def has_first_rows(self, shard: ParameterShard) -> bool:
        """Return whether this process is the first of those that the rows are spread over."""
        return all(place == 0 for place, _ in self._places(shard))

    def _places(self, shard: ParameterShard) -> list[tuple[int, int]]:
        """Return, for each axis that rows are spread over, the index of this process and the length."""
        if shard.mesh is None:
            return [(self._team.rank, self._team.size)]
        place = shard.mesh.get_coordinate()
        assert place is not None, "this process is not in the mesh of its rows"
        return list(zip(place, shard.mesh.mesh.shape, strict=True))

    def whole(self, local: Tensor, shard: ParameterShard) -> Tensor:
        """Return the whole tensor of which `local` has this process's rows. No communication."""
        if shard.start_row is None or (shard.mesh is None and self._team.size == 1):
            return local
        mesh = self._mesh(shard.mesh, local.device.type)
        shape = torch.Size((shard.shape[0], *local.shape[1:]))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            local.contiguous(), mesh, [Shard(0)] * mesh.ndim, run_check=False, shape=shape, stride=stride
        )

    def _mesh(self, given: DeviceMesh | None, device_type: str) -> DeviceMesh:
        """Return the mesh for tensors on devices of that type."""
        if given is not None and given.device_type == device_type:
            return given
        if (given, device_type) not in self._meshes:
            if given is None:
                assert self._team.group is not None
                mesh = DeviceMesh.from_group(self._team.group, device_type, mesh_dim_names=("pp",))
            else:
                groups = given.get_all_groups()
                mesh = DeviceMesh.from_group(
                    groups,
                    device_type,
                    mesh=given.mesh,
                    mesh_dim_names=given.mesh_dim_names,
                )
            self._meshes[given, device_type] = mesh
        return self._meshes[given, device_type]


def _owned(
    shards: Mapping[str, ParameterShard], optimizer: torch.optim.Optimizer | None
) -> dict[nn.Parameter, dict[str, Any]]:
    """Return each parameter's group in the optimizer. Raises InputError for parameters that would not be saved."""
    if optimizer is None:
        return {}
    owned = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    strangers = len(owned.keys() - {shard.parameter for shard in shards.values()})
    if strangers:
        raise InputError(f"optimizer: {strangers} of its {len(owned)} parameters are not among those of the pipeline")
    return owned


def _saved_states(manifest: Manifest) -> dict[str, dict[str, TensorEntry]]:
    """Return the entries of optimizer state by parameter name and state name."""
    states: dict[str, dict[str, TensorEntry]] = {}
    for key, entry in manifest.tensors.items():
        if key.startswith(OPTIMIZER):
            state, _, name = key.removeprefix(OPTIMIZER).partition(".")
            states.setdefault(name, {})[state] = entry
    return states


def _state_device(state: str, parameter: nn.Parameter, group: Mapping[str, Any]) -> torch.device:
    """Return the device on which torch's load_state_dict puts state: that of its parameter, or mostly the CPU for step
    counts."""
    if state == "step" and not (group.get("capturable") or group.get("fused")):
        return torch.device("cpu")
    return parameter.device


def _follows_rows(
    shape: Sequence[int], rows: int, parameter: nn.Parameter, state: str, optimizer: torch.optim.Optimizer
) -> bool:
    """Return whether state of that shape is spread over processes like the rows of its parameter."""
    if _is_same_on_all(parameter, state, optimizer):
        return False
    return len(shape) == parameter.dim() > 0 and shape[0] == rows


def _is_same_on_all(parameter: nn.Parameter, state: str, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether state of rows belongs to the whole parameter, according to the optimizer."""
    return isinstance(optimizer, Adafactor) and optimizer.is_same_on_all(parameter, state)


def _place_on_host(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, state: str) -> Tensor | None:
    """Return the host memory of state that an optimizer keeps on the host, else None."""
    return optimizer.moment_on_host(parameter, state) if isinstance(optimizer, HostAdamW) else None


def _check_equal(what: str, property_name: str, saved: Any, held: Any) -> None:
    if saved != held:
        raise InputError(f"{what} has {property_name} {saved} in the checkpoint and {held} in the model")
