"""Checkpoints of a pipeline and its optimizer: only complete ones are found, and any other layout can load them.

Users call `Pipeline.save_checkpoint`, `Pipeline.load_checkpoint` and `newest_checkpoint`.
"""

from evenpipe.checkpoints.checkpoint import load, save
from evenpipe.checkpoints.folder import Checkpoint, find_latest, newest_checkpoint, open_checkpoint, prepare_folder

__all__ = ["Checkpoint", "find_latest", "load", "newest_checkpoint", "open_checkpoint", "prepare_folder", "save"]
