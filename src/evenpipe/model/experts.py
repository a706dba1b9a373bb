"""Finds experts that are fused into tensors [experts, ...] and run through transformers' experts interface."""

from __future__ import annotations

from torch import nn


def uses_interface(module: nn.Module) -> bool:
    """Return whether a module's forward goes through transformers' experts interface, whose decorator leaves these
    attributes."""
    marks = ("_apply_gate", "is_transposed", "has_bias", "config")
    return all(hasattr(module, name) for name in marks) and hasattr(type(module).forward, "__wrapped__")


def number_of_experts(module: nn.Module) -> int:
    """Return the length of the first axis of a module's own parameters, one entry per expert; 0 if the module does not
    use the interface, or a parameter has another first axis.

    Args:
        module: of a whole model, such as a description's skeleton.
    """
    if not uses_interface(module):
        return 0
    lengths = {parameter.shape[:1] for parameter in module.parameters(recurse=False)}
    return lengths.pop().numel() if len(lengths) == 1 else 0


def fused_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return all modules whose parameters are [experts, ...], by name."""
    return {name: module for name, module in model.named_modules() if number_of_experts(module)}
