"""Checkpoints of a pipeline and its optimizer: only complete ones are found, and any other layout can load them.

ParameterUse call `Pipeline.save_checkpoint`, `Pipeline.load_checkpoint` and `newest_checkpoint`.
"""

from evenpipe.checkpoints.checkpoint import load, save
from evenpipe.checkpoints.folder import (
    Checkpoint,
    ListedCheckpoint,
    abandon_later,
    find_latest,
    find_step,
    list_checkpoints,
    mark_unhealthy,
    newest_checkpoint,
    open_checkpoint,
    prepare_folder,
)

__all__ = [
    "Checkpoint",
    "ListedCheckpoint",
    "abandon_later",
    "find_latest",
    "find_step",
    "list_checkpoints",
    "load",
    "mark_unhealthy",
    "newest_checkpoint",
    "open_checkpoint",
    "prepare_folder",
    "save",
]
