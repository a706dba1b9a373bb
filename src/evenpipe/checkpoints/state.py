"""The tensors of this process in a checkpoint: their keys, and their destinations when they are loaded.

Keys: `parameters.<name>` and `optimizer.<state>.<name>`, with Hugging Face names, without numbers of groups or
processes. Optimizer state that is cut like its parameter has the same placement; other tensors are whole. Tensors
that belong to a process have the key `process.<rank>.<name>`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from evenpipe.checkpoints.manifest import Manifest, TensorEntry
from evenpipe.communication.messages import dtype_name
from evenpipe.errors import InputError
from evenpipe.host.optimizer import HostAdamW
from evenpipe.model.placement import Held, TensorPlacement
from evenpipe.optimizers.adafactor import Adafactor
from evenpipe.words import count

PARAMETERS = "parameters."
OPTIMIZER = "optimizer."
PROCESS = "process."

Parameters = Mapping[str, Held[nn.Parameter]]
"""This process's shards by Hugging Face name, as from `Pipeline.parameter_shards()`. First copies are saved."""
State = dict[str, Held[Tensor]]
"""By key."""


def parameter_names(manifest: Manifest) -> list[str]:
    """Return the Hugging Face names of all parameters in a checkpoint."""
    return [key.removeprefix(PARAMETERS) for key in manifest.tensors if key.startswith(PARAMETERS)]


def tensors_to_save(shards: Parameters, optimizer: torch.optim.Optimizer | None) -> State:
    """Return this process's share of a checkpoint. The tensors are those in use, not copies. Optimizer state that does
    not exist (before the first step, or for a frozen parameter) is not saved.

    Raises InputError for state of the optimizer that is neither one number nor has its parameter's rows.
    """
    owned = _owned(shards, optimizer)
    state: State = {}
    for name, shard in shards.items():
        parameter, placement = shard.tensor, shard.placement
        _check_shape(name, shard)
        if not placement.is_first_copy():
            continue
        state[PARAMETERS + name] = Held(parameter.detach(), placement)
        if optimizer is None or parameter not in owned:
            continue
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is None:
                continue  # momentum_buffer of plain SGD
            if not isinstance(value, Tensor) or "." in key:
                raise InputError(
                    f"optimizer: its state {key!r} of {name!r} is {type(value).__name__}; expected a tensor"
                )
            same_on_all = _is_same_on_all(parameter, key, optimizer)
            cut_alike = None if same_on_all else placement.of_state(value.shape)
            if placement.cuts and cut_alike is not None:
                state[f"{OPTIMIZER}{key}.{name}"] = Held(value.detach(), cut_alike)
            elif placement.cuts and value.numel() != 1 and not same_on_all:
                rows = len(parameter)
                raise InputError(
                    f"optimizer: its state {key!r} of {name!r} has shape {tuple(value.shape)}; expected"
                    f" {count(rows, 'row')}, as many as the process has of the parameter, or one number"
                )
            elif placement.is_first_part:  # the same on every process
                state[f"{OPTIMIZER}{key}.{name}"] = Held.whole(value.detach())
    return state


def process_state(tensors: Mapping[str, Tensor], rank: int) -> State:
    """Return tensors that belong to a process, as they are saved."""
    return {f"{PROCESS}{rank}.{name}": Held.whole(tensor) for name, tensor in tensors.items()}


def saved_process_state(manifest: Manifest, tensors: Mapping[str, Tensor], rank: int, processes: int) -> State:
    """Return the tensors of this process to read: saved with the same shape and dtype, by the same number of processes
    as now. The first process reads its tensors in any case."""
    saved = {key.split(".")[1] for key in manifest.tensors if key.startswith(PROCESS)}
    state = process_state(tensors, rank)
    if rank and len(saved) != processes:
        return {}
    return {key: held for key, held in state.items() if _is_saved(manifest, key, held.tensor)}


def _is_saved(manifest: Manifest, key: str, tensor: Tensor) -> bool:
    entry = manifest.tensors.get(key)
    return entry is not None and entry.shape == tuple(tensor.shape) and entry.dtype == dtype_name(tensor.dtype)


@dataclass(slots=True)
class StatePlan:
    """New tensors to read into, and their destinations."""

    state: State = field(default_factory=dict)
    """Tensors to read, by key: those of the fields below."""
    parameters: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    optimizer_states: list[tuple[dict[Any, Any], nn.Parameter, dict[str, Tensor]]] = field(default_factory=list)
    """The optimizer's dictionary, the parameter, its new state."""
    without_state: list[str] = field(default_factory=list)
    """Parameters that the optimizer trains, but for which the checkpoint has no state."""

    def put_in_place(self) -> None:
        """Overwrite the parameters in place (there may be views of them) and replace the optimizer's state."""
        with torch.no_grad():
            for parameter, fresh in self.parameters:
                parameter.copy_(fresh)
        for states, parameter, fresh_state in self.optimizer_states:
            states.pop(parameter, None)
            if fresh_state:
                states[parameter] = fresh_state


def plan_state(manifest: Manifest, shards: Parameters, optimizer: torch.optim.Optimizer | None) -> StatePlan:
    """Return the tensors that this process reads from a checkpoint. Memory is allocated for all except moments that the
    optimizer keeps on the host.

    Raises InputError if the checkpoint lacks a parameter, or has another shape or dtype of it or of existing state.
    """
    saved_states = _saved_states(manifest)
    owned = _owned(shards, optimizer)
    plan = StatePlan()
    for name, shard in shards.items():
        parameter = shard.tensor
        _check_shape(name, shard)
        entry = manifest.tensors.get(PARAMETERS + name)
        if entry is None:
            raise InputError(f"the checkpoint has no {name!r}, which the model has")
        _check_equal(repr(name), "shape", entry.shape, shard.placement.shape)
        _check_equal(repr(name), "dtype", entry.dtype, dtype_name(parameter.dtype))
        fresh = torch.empty_like(parameter, requires_grad=False)
        plan.parameters.append((parameter, fresh))
        plan.state[PARAMETERS + name] = Held(fresh, shard.placement)
        if optimizer is None or parameter not in owned:
            continue
        existing = optimizer.state.get(parameter, {})
        fresh_state: dict[str, Tensor] = {}
        for key, state_entry in saved_states.get(name, {}).items():
            if isinstance(existing.get(key), Tensor):
                description = f"optimizer state {key!r} of {name!r}"
                _check_equal(description, "dtype", state_entry.dtype, dtype_name(existing[key].dtype))
            same_on_all = _is_same_on_all(parameter, key, optimizer)
            cut_alike = None if same_on_all else shard.placement.of_state(state_entry.shape, whole=True)
            placement = cut_alike or TensorPlacement(state_entry.shape)
            dtype, shape = getattr(torch, state_entry.dtype), placement.local_shape
            host_moment = optimizer.moment_on_host(parameter, key) if isinstance(optimizer, HostAdamW) else None
            if host_moment is None:
                fresh = torch.empty(shape, dtype=dtype, device=_state_device(key, parameter, owned[parameter]))
            elif not existing and host_moment.shape == shape and host_moment.dtype == dtype:
                fresh = host_moment  # not used yet: nothing is lost if the load fails
            else:
                fresh = torch.empty(shape, dtype=dtype, device=host_moment.device)
            fresh_state[key] = fresh
            plan.state[f"{OPTIMIZER}{key}.{name}"] = Held(fresh, placement)
        plan.optimizer_states.append((optimizer.state, parameter, fresh_state))
        if not fresh_state and parameter.requires_grad:
            plan.without_state.append(name)
    return plan


def _check_shape(name: str, shard: Held[nn.Parameter]) -> None:
    """Assert that a shard has the size of its placement: otherwise it would silently be saved at the wrong offset."""
    held, expected = tuple(shard.tensor.shape), shard.placement.local_shape
    assert held == expected, f"{name}: this process holds {held}, not {expected} of {shard.placement}"


def _owned(shards: Parameters, optimizer: torch.optim.Optimizer | None) -> dict[nn.Parameter, dict[str, Any]]:
    """Return each parameter's group in the optimizer. Raises InputError for parameters that would not be saved."""
    if optimizer is None:
        return {}
    owned = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    strangers = len(owned.keys() - {shard.tensor for shard in shards.values()})
    if strangers:
        raise InputError(
            f"optimizer: {strangers} of its {count(len(owned), 'parameter')} are not among those of the pipeline"
        )
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
    """Return the device on which torch's load_state_dict puts state: that of its parameter, or usually the CPU for step
    counts."""
    if state == "step" and not (group.get("capturable") or group.get("fused")):
        return torch.device("cpu")
    return parameter.device


def _is_same_on_all(parameter: nn.Parameter, state: str, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether, according to the optimizer, state of a row-sharded parameter belongs to the whole parameter."""
    return isinstance(optimizer, Adafactor) and optimizer.is_same_on_all(parameter, state)


def _check_equal(description: str, property_name: str, saved: Any, held: Any) -> None:
    if saved != held:
        raise InputError(f"{description} has {property_name} {saved} in the checkpoint and {held} in the model")
