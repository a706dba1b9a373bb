"""Specs of families that probing alone cannot cut: a file per model type, with `spec(config)`, and if a live model may
be unusable as it is, `check_live(model)`.

The file's name is the config's `model_type`, with underscores. Every file is tested against transformers by
tests/families.
"""

from __future__ import annotations

import pkgutil
from dataclasses import fields, replace
from importlib import import_module
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from evenpipe.model.spec import ModelSpec, Spec
from evenpipe.model.structure import first_line, uncuttable
from evenpipe.words import refused

NAMES = frozenset(file.name for file in pkgutil.iter_modules(__path__))


def answers_for(config: PreTrainedConfig, spec: Spec | None) -> ModelSpec:
    """Return the spec in the file of the config's model type, with the user's answers in place of its answers.

    Raises:
        InputError: `spec` is neither a `ModelSpec` nor a function that returns one.
    """
    file = _file_of(config)
    known: ModelSpec = ModelSpec() if file is None else file.spec(config)
    if spec is None:
        return known
    users = spec(config) if callable(spec) else spec
    if not isinstance(users, ModelSpec):
        raise refused("spec", users, "a ModelSpec, or a function of the config that returns one")
    names = [entry.name for entry in fields(users)]  # type: ignore[arg-type]
    answered = {name: getattr(users, name) for name in names if getattr(users, name) is not None}
    return replace(known, **answered)  # type: ignore[type-var]


def check_live(model: PreTrainedModel) -> None:
    """Raise InputError if a live model cannot be used as it is, according to the file of its type."""
    check = getattr(_file_of(model.config), "check_live", None)
    if check is not None:
        check(model)


def _file_of(config: PreTrainedConfig) -> Any:
    """Return the module of the config's model type; None without one."""
    name = str(config.model_type).replace("-", "_")
    return import_module(f"{__name__}.{name}") if name in NAMES else None


def adapt(model: PreTrainedModel, answers: ModelSpec) -> None:
    """Change a newly built model as `ModelSpec.adapt` says.

    Raises:
        InputError: that function fails on this model.
    """
    if answers.adapt is None:
        return
    try:
        answers.adapt(model)
    except Exception as error:  # the function is written for models of one form, and by users
        raise uncuttable(
            type(model).__name__, f"spec.adapt fails on it ({type(error).__name__}: {first_line(error)})"
        ) from error
