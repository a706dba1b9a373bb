"""Whether a checkpoint's weights may go on as the model at hand, of which shapes alone say too little."""

from __future__ import annotations

from collections.abc import Mapping

from evenpipe.errors import InputError
from evenpipe.model import Description
from evenpipe.model.config_changes import config_changes
from evenpipe.runtime.checkpoints.checkpoint_folder import RUN, Checkpoint


def check_same_model(checkpoint: Checkpoint, description: Description) -> list[str]:
    """Refuses a checkpoint of a model that computes something else from the same weights. To be called before `load`.

    Args:
        checkpoint: `model_config` in its metadata is the transformers config that it was trained with, as `to_dict`
            gives it. Without one there is nothing to compare.
        description: of the model to be loaded into, such as `Pipeline.description`.

    Returns:
        A sentence for each field that differs without changing what the model computes, such as a dropout.

    Raises:
        InputError: names the first field that does change it.
    """
    before = checkpoint.metadata.get("model_config")
    if before is None or description.config is None:
        return []
    where = f"the checkpoint {str(checkpoint.path)!r}"
    if not isinstance(before, Mapping):
        raise InputError(f"model_config in {RUN} of {where} is {type(before).__name__}, but must be a table")
    try:
        changes = config_changes(before, description.config)
    except InputError as error:
        raise InputError(f"{where} was trained with {error}") from error
    for change in changes:
        if change.changes_function:
            raise InputError(
                f"the model's {change} in {where}, whose weights would compute something else; expected the model that"
                " they were trained as, or another folder for a new run"
            )
    return [f"the model's {change}" for change in changes]
