"""Checks that a checkpoint's weights belong to the given model; equal shapes do not prove it. Also reports what
makes a resumed run differ from an uninterrupted one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evenpipe.checkpoints.folder import RUN, Checkpoint
from evenpipe.errors import InputError
from evenpipe.model import Description
from evenpipe.model.config_changes import config_changes


def check_same_model(checkpoint: Checkpoint, description: Description) -> list[str]:
    """Refuse a checkpoint of a model that computes a different function with the same weights. Call it before `load`.

    `model_config` in its metadata is the transformers config of its training; without it nothing is compared. Returns a
    sentence for each different field that does not change the model's function, such as a dropout; raises InputError
    that names the first field that does.
    """
    saved = checkpoint.metadata.get("model_config")
    if saved is None or description.config is None:
        return []
    where = f"the checkpoint {str(checkpoint.path)!r}"
    if not isinstance(saved, Mapping):
        raise InputError(f"model_config in {RUN} of {where} is {type(saved).__name__}; it must be a table")
    try:
        changes = config_changes(saved, description.config)
    except InputError as error:
        raise InputError(f"{where} was trained with {error}") from error
    for change in changes:
        if change.changes_function:
            raise InputError(
                f"the model's {change} in {where}, so its weights would compute another function; expected the model"
                " that was trained, or another folder for a new run"
            )
    return [f"the model's {change}" for change in changes]


def changes_of_draws(saved: Any, current: Mapping[str, Any]) -> list[str]:
    """Return a sentence if layers draw other random numbers than in the run that saved a checkpoint.

    saved, current: the values that the draws depend on, by name; None: an older checkpoint lacks them.
    """
    if not isinstance(saved, Mapping):
        return []
    changes = [
        f"{name} {value}, was {saved[name]}" for name, value in current.items() if saved.get(name, value) != value
    ]
    if not changes:
        return []
    return [f"layers with dropout draw other random numbers than in an uninterrupted run: {'; '.join(changes)}"]
