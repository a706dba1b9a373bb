"""The model that a command is about: a hub name, a folder or a config file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from evenpipe.errors import InputError

if TYPE_CHECKING:
    from evenpipe.model import Description


def read_model(text: str) -> Description:
    """The model that `--model` names, without its weights. Raises InputError for what is no causal language model."""
    from evenpipe.model import describe

    if Path(text).suffix == ".json" and not Path(text).is_file():
        raise InputError(f"--model is '{text}', but there is no such file")
    return describe(text)
