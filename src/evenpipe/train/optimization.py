"""Makes the configured optimizer for the parameters of a process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from evenpipe.errors import InputError
from evenpipe.host.optimizer import HostAdamW
from evenpipe.optimizers.adafactor import Adafactor
from evenpipe.optimizers.held import groups_by_decay
from evenpipe.optimizers.muon import Muon, checked_options
from evenpipe.train.named import find_named
from evenpipe.train.run_sections import OptimizerConfig
from evenpipe.words import nearest, show

if TYPE_CHECKING:
    from collections.abc import Iterator

    from evenpipe.runtime.pipeline import Pipeline

_CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "muon": torch.optim.Muon,
    "adafactor": torch.optim.Adafactor,
    "sgd": torch.optim.SGD,
}
_FIELDS = {"lr": "learning_rate", "betas": "betas", "eps": "epsilon", "weight_decay": "weight_decay"}
"""Options of torch that have a field in the configuration."""
_OTHER_MEANING = {("muon", "eps"), ("adafactor", "eps")}
"""Options that do not correspond to these fields despite a similar name: `epsilon` is AdamW's."""
_WITHOUT = {("adafactor", "foreach")}


def make_optimizer(
    pipeline: Pipeline, config: OptimizerConfig, directory: str | Path | None = None
) -> torch.optim.Optimizer | None:
    """Return the optimizer of a process; None if the process has no trainable parameter.

    directory: directory for moments on the host if the process computes on the CPU.

    AdamW and SGD are torch's fused versions, also on the CPU: one pass over memory, and bitwise identical results if a
    parameter is cut at any multiple of the vector width.

    Raises InputError if the optimizer refuses a value, or a user's function returns another object.
    """
    trained = [(name, parameter) for name, parameter in pipeline.named_parameters() if parameter.requires_grad]
    if not trained:
        return None
    if config.is_own:
        return _own(pipeline, trained, config)
    options = {"lr": config.learning_rate, **_options(config)}
    with _refused(config):
        match config.name:
            case "muon":
                betas, epsilon = config.given("betas"), config.given("epsilon")
                decay = config.given("weight_decay")
                return Muon(pipeline, betas=betas, adamw_eps=epsilon, weight_decay=decay, **options)
            case "adafactor":
                return Adafactor(pipeline, weight_decay=config.given("weight_decay"), **options)
            case "sgd":
                return torch.optim.SGD(_groups(trained, config), **options)
        if config.host_share:
            return HostAdamW(_groups(trained, config), share=config.host_share, directory=directory, **options)
        return torch.optim.AdamW(_groups(trained, config), **options)


def check_optimizer(config: OptimizerConfig) -> None:
    """Check the optimizer before the model exists. Raises InputError for an option that it does not have, a value that
    it refuses, or an unknown function."""
    if config.is_own:
        _check_call(_own_function(config.name), [], config)
        return
    options = {"lr": config.learning_rate, **_options(config)}
    with _refused(config):
        if config.name == "muon":
            checked_options(**options)
        else:
            _CLASSES[config.name]([nn.Parameter(torch.empty(0, 0))], **options)


def rate_shares(optimizer: torch.optim.Optimizer | None, config: OptimizerConfig) -> list[float]:
    """Return each group's learning rate divided by the configured one: a user's function may set several rates."""
    groups = [] if optimizer is None else optimizer.param_groups
    return [float(group["lr"]) / config.learning_rate for group in groups]


def _groups(trained: Sequence[tuple[str, nn.Parameter]], config: OptimizerConfig) -> list[dict[str, Any]]:
    groups = groups_by_decay(parameter for _, parameter in trained)
    return [{"weight_decay": config.given("weight_decay"), **group} for group in groups if group["params"]]


def _options(config: OptimizerConfig) -> dict[str, Any]:
    """Return `optimizer.options` and the fields that are the same for all parameters, as torch's arguments."""
    kind = _CLASSES[config.name]
    known = [name for name in inspect.signature(kind).parameters if name != "params"]
    known = [name for name in known if (config.name, name) not in _WITHOUT]
    for name in config.options:
        field = None if (config.name, name) in _OTHER_MEANING else _FIELDS.get(name)
        if field is not None:
            raise InputError(f"optimizer.options.{name} is given; it must be left out: it is optimizer.{field}")
        if name not in known:
            free = [name for name in known if name not in _FIELDS or (config.name, name) in _OTHER_MEANING]
            raise InputError(
                f"{show(f'optimizer.options.{name}')[1:-1]} is no option of torch.optim.{kind.__name__}"
                f"{nearest(name, free)}; known: {', '.join(free)}"
            )
    options = _as_python(config.options)
    if config.name in ("adamw", "sgd"):
        options.setdefault("fused", not options.get("foreach"))
    if config.name == "adamw":
        options |= {"betas": config.given("betas"), "eps": config.given("epsilon")}
    return options


def _as_python(options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert lists to tuples and "none" to None, which TOML does not have."""

    def value_of(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return tuple(value_of(item) for item in value)
        return None if value == "none" else value

    return {name: value_of(value) for name, value in options.items()}


@contextmanager
def _refused(config: OptimizerConfig) -> Iterator[None]:
    """Turn torch's errors about a value into a sentence about the configuration."""
    try:
        yield
    except InputError:
        raise
    except (ValueError, TypeError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        kind = _CLASSES[config.name].__name__
        raise InputError(
            f"optimizer.options is {show(config.options)}, but torch.optim.{kind} says: {reason}"
        ) from error


# --- a user's function -----------------------------------------------------------------------------------------------


def _own(pipeline: Pipeline, trained: list[tuple[str, nn.Parameter]], config: OptimizerConfig) -> torch.optim.Optimizer:
    function = _own_function(config.name)
    _check_call(function, trained, config)
    made = function(trained, lr=config.learning_rate, **_as_python(config.options))
    where = f"optimizer.name is {show(config.name)}"
    if not isinstance(made, torch.optim.Optimizer):
        raise InputError(f"{where}, which returns {type(made).__name__}; it must return a torch.optim.Optimizer")
    if isinstance(made, torch.optim.Muon | torch.optim.Adafactor):
        held = {parameter for group in made.param_groups for parameter in group["params"]}
        spread = [entry.name for entry in pipeline.held_parameters() if entry.communicator and entry.parameter in held]
        if spread:
            kind = type(made).__name__
            raise InputError(
                f"{where}, which returns {kind}, and this process has only rows of {spread[0]}, but {kind} must see "
                f'whole matrices: optimizer.name = "{kind.lower()}" does'
            )
    return made


def _own_function(name: str) -> Callable[..., Any]:
    function = find_named("optimizer.name", name)
    if not callable(function):
        raise InputError(f"optimizer.name is {show(name)}; it must name a function")
    return function  # type: ignore[no-any-return]


def _check_call(function: Callable[..., Any], trained: Sequence[Any], config: OptimizerConfig) -> None:
    try:
        inspect.signature(function).bind(trained, lr=config.learning_rate, **config.options)
    except TypeError as error:
        raise InputError(
            f"optimizer.name is {show(config.name)}, which cannot be called with the named parameters, lr and"
            f" optimizer.options {show(config.options)}: {error}"
        ) from error
