"""Settings of an optimizer and a scheduler, as JSON: learning rates, other options of groups, counters.

An optimizer's groups differ between processes, because each has different parameters. So options are saved by parameter
name, and a group gets back the options of its parameters in any layout. A scheduler keeps lists with one
entry per group, so it requires the same number of groups on every process, counting empty ones; its state is then
identical everywhere.

    {"optimizer": {"type": "AdamW", "groups": [{"lr": 0.001, ...}, ...], "group_of": {"lm_head.weight": 0, ...}},
     "scheduler": {"type": "LambdaLR", "groups": 2, "state": {...}}}
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from evenpipe.errors import InputError
from evenpipe.processes.names import process
from evenpipe.words import count

_OF_THE_MACHINE = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
"""Entries of a group that are not restored: they depend on the machine and do not change the results."""

_log = logging.getLogger(__name__)


def describe_settings(optimizer: Optimizer | None, scheduler: Any, names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
    """Return the settings of this process, for `merge_settings`. Raises InputError for a value that is not JSON."""
    _check_pair(optimizer, scheduler)
    settings: dict[str, Any] = {}
    if optimizer is not None:
        settings["type"] = _kind(optimizer)
        settings["groups"] = [
            {
                "options": {
                    name: _to_json(value, f"optimizer: {name!r} of a group")
                    for name, value in group.items()
                    if name not in _OF_THE_MACHINE
                },
                "parameters": [names[parameter] for parameter in group["params"]],
            }
            for group in optimizer.param_groups
        ]
    if scheduler is not None:
        settings["scheduler"] = type(scheduler).__name__
        settings["state"] = _to_json(scheduler.state_dict(), "scheduler: its state")
    return settings


def merge_settings(by_rank: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the settings of all processes, by rank, into those of a checkpoint. Raises InputError if there is a
    scheduler, but processes have different numbers of groups."""
    settings: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    group_of: dict[str, int] = {}
    for rank_settings in by_rank:
        for index, group in enumerate(rank_settings.get("groups", [])):
            options = group["options"]
            if index >= len(groups) or options not in groups:
                groups.append(options)
                number = len(groups) - 1
            else:
                number = index if groups[index] == options else groups.index(options)
            group_of |= dict.fromkeys(group["parameters"], number)
        if "type" in rank_settings:
            settings["optimizer"] = {"type": rank_settings["type"], "groups": groups, "group_of": group_of}
    scheduled = [(rank, rank_settings) for rank, rank_settings in enumerate(by_rank) if "scheduler" in rank_settings]
    for rank, rank_settings in scheduled:
        first_rank, first = scheduled[0]
        if len(rank_settings["groups"]) != len(first["groups"]):
            raise InputError(
                f"scheduler: the optimizer has {count(len(first['groups']), 'group')} on {process(first_rank)} and"
                f" {len(rank_settings['groups'])} on {process(rank)}; expected the same number on every process, with"
                " empty ones"
            )
        settings["scheduler"] = {"type": first["scheduler"], "groups": len(first["groups"]), "state": first["state"]}
    return settings


def plan_settings(
    settings: Mapping[str, Any],
    optimizer: Optimizer | None,
    scheduler: Any,
    names: Mapping[nn.Parameter, str],
    *,
    where: str,
) -> Callable[[], None]:
    """Check the settings of a checkpoint (`where`, in words) for an optimizer and a scheduler; return a function that
    applies them. Raises InputError if it has another optimizer or scheduler, or none, or other groups."""
    _check_pair(optimizer, scheduler)
    groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
    saved, saved_scheduler = settings.get("optimizer"), settings.get("scheduler")
    if optimizer is not None and saved is not None:
        if saved["type"] != _kind(optimizer):
            raise InputError(
                f"optimizer: it is {_kind(optimizer)}, but {where} was saved with {saved['type']}; expected the same"
                " one, or another folder for a new run"
            )
        for index, group in enumerate(optimizer.param_groups):
            options = _options_of_group(saved, index, [names[parameter] for parameter in group["params"]], where)
            groups.append((group, options))
    state = None if scheduler is None else _state_of_scheduler(saved_scheduler, optimizer, scheduler, where)
    if scheduler is None and optimizer is not None and saved_scheduler is not None:
        _log.warning(
            "%s contains the state of a scheduler (%s), but no scheduler is given: the learning rate does not"
            " continue the saved schedule",
            where,
            saved_scheduler["type"],
        )

    def put_in_place() -> None:
        for group, options in groups:
            for name, value in options.items():
                held = group.get(name)
                if isinstance(held, Tensor):  # a learning rate read by a compiled step
                    held.fill_(value)
                else:
                    group[name] = value
        if state is not None:
            scheduler.load_state_dict(state)

    return put_in_place


def _check_pair(optimizer: Optimizer | None, scheduler: Any) -> None:
    if scheduler is None:
        return
    if not (hasattr(scheduler, "state_dict") and hasattr(scheduler, "load_state_dict")):
        raise InputError(
            f"scheduler is {type(scheduler).__name__}; it must be one of torch.optim.lr_scheduler, or None"
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise InputError("scheduler: it schedules another optimizer; expected a scheduler of the optimizer given")


def _kind(optimizer: Optimizer) -> str:
    """Return the name of an optimizer's torch base class, which is the same with moments on the host; without such a
    class, the name of its type."""
    for kind in type(optimizer).__mro__:
        if kind.__module__.startswith("torch.optim") and kind is not Optimizer:
            return kind.__name__
    return type(optimizer).__name__


def _options_of_group(saved: Mapping[str, Any], index: int, parameters: Sequence[str], where: str) -> dict[str, Any]:
    """Return the saved options of a group's parameters, or those of the same index if the group is empty; an empty dict
    if none were saved."""
    groups = saved["groups"]
    options = {name: groups[saved["group_of"][name]] for name in parameters if name in saved["group_of"]}
    if not parameters and index < len(groups):
        options[""] = groups[index]
    if not options:
        return {}
    first = next(iter(options))
    for name, group_options in options.items():
        if group_options != options[first]:
            raise InputError(
                f"optimizer: {first!r} and {name!r} are in one group, but have different options in {where};"
                " expected the groups that they were saved in"
            )
    return {name: _from_json(value) for name, value in options[first].items()}


def _state_of_scheduler(
    saved: Mapping[str, Any] | None, optimizer: Optimizer | None, scheduler: Any, where: str
) -> dict[str, Any]:
    kind, groups = type(scheduler).__name__, 0 if optimizer is None else len(optimizer.param_groups)
    if saved is None:
        raise InputError(f"scheduler: {kind}, but {where} was saved without one")
    if saved["type"] != kind:
        raise InputError(f"scheduler: it is {kind}, but {where} was saved with {saved['type']}")
    if saved["groups"] != groups:
        raise InputError(
            f"scheduler: the optimizer has {count(groups, 'group')} here and had {saved['groups']} in {where};"
            " expected the same number, with empty ones"
        )
    state: dict[str, Any] = _from_json(saved["state"])
    return state


def _to_json(value: Any, subject: str) -> Any:
    """Return JSON that `_from_json` converts back: tables may have keys of any type, and tuples stay tuples."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_to_json(item, subject) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [_to_json(item, subject) for item in value]}
    if isinstance(value, Mapping):
        items = [[_to_json(key, subject), _to_json(item, subject)] for key, item in value.items()]
        return {"counts" if isinstance(value, Counter) else "items": items}
    raise InputError(f"{subject} is {type(value).__name__}; it must be a number, a text, or a list or table of them")


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, items),) = value.items()
    if kind == "tuple":
        return tuple(_from_json(item) for item in items)
    table = {_from_json(key): _from_json(item) for key, item in items}
    return Counter(table) if kind == "counts" else table
