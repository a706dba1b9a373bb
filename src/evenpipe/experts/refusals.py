"""Rejects models whose experts cannot be divided among processes, with the reason."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from evenpipe.model import Description
from evenpipe.model.experts import uses_interface
from evenpipe.words import refused


def check_experts(description: Description, ep: int) -> None:
    """Check that the experts of every layer can be divided among `ep` processes.

    Raises InputError: one sentence gives the reason, and what would be accepted.
    """
    if ep == 1:
        return
    if description.config is None:
        raise refused("ep", ep, "1: plain modules do not say which of them are experts.")
    model = description.skeleton if description.model is None else description.model
    modules = [(name, module) for name, module in model.named_modules(remove_duplicate=False) if uses_interface(module)]
    reason = next(_reasons(modules), None)
    if reason is not None:
        raise refused("ep", ep, f"1, since {description.architecture} {reason}.")
    fewest, name = min((len(module.get_parameter("down_proj")), name) for name, module in modules)
    if ep > fewest:
        raise refused("ep", ep, f"at most {fewest}, the number of experts in {name} of {description.architecture}.")


def _reasons(modules: list[tuple[str, nn.Module]]) -> Iterator[str]:
    """Yield reasons why the experts of a model cannot be divided; `modules`: all that use the interface, by name."""
    if not modules:
        yield "has no experts that run through transformers' experts interface"
    holder: dict[int, str] = {}
    for name, module in modules:
        if getattr(module, "has_post_expert_norm", False):
            yield f"normalises what every expert returns ({name}), between its matrices and the router's weights"
        parameters = dict(module.named_parameters())
        expected = _names(module)
        if parameters.keys() != expected:
            yield (
                f"has the parameters {', '.join(sorted(parameters))} in {name}, and experts that are shared have"
                f" {', '.join(sorted(expected))}"
            )
        experts = len(parameters["down_proj"])
        for key, parameter in parameters.items():
            wide = 2 if key.endswith("_bias") else 3
            if parameter.dim() != wide or len(parameter) != experts:
                shape = f"[{experts}, {'out' if wide == 2 else 'rows, columns'}]"
                yield f"has {name}.{key} of the shape {list(parameter.shape)}, and experts that are shared have {shape}"
            if id(parameter) in holder:
                yield f"has the same experts in {holder[id(parameter)]} and {name}"
        holder |= {id(parameter): name for parameter in parameters.values()}


def _names(module: nn.Module) -> set[str]:
    """Return the expected names of the parameters of experts."""
    matrices = {"gate_up_proj" if module.has_gate else "up_proj", "down_proj"}
    return matrices | {f"{name}_bias" for name in matrices} if module.has_bias else matrices
