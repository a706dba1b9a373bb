"""A Hugging Face causal language model cut into stages: describe it, build one stage, fill in its weights, write it back.

Architectures are found by structure and by probing, never by name; `self_check` compares cut and whole before anything is trained.
"""

from __future__ import annotations

from evenpipe.model.description import Description, describe
from evenpipe.model.initialization import initial_rows, initialize
from evenpipe.model.loading import copy_parameters, fill_parameters, fill_rows, load_parameters, load_rows
from evenpipe.model.names import disk_names
from evenpipe.model.self_check import self_check
from evenpipe.model.stage import Stage, build_stage

__all__ = [
    "Description",
    "Stage",
    "build_stage",
    "copy_parameters",
    "describe",
    "disk_names",
    "fill_parameters",
    "fill_rows",
    "initial_rows",
    "initialize",
    "load_parameters",
    "load_rows",
    "self_check",
]
