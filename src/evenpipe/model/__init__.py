"""Cuts a Hugging Face causal language model into stages: describe it, build a stage, load its weights, save it.

Architectures are recognised by structure and by probing; `spec.py` holds what a family or a user says instead.
`self_check` compares the cut model with the whole one before anything is trained.
"""

from __future__ import annotations

from evenpipe.model.comparison import gradient_errors, self_check
from evenpipe.model.description import Description, check_compute_dtype, describe
from evenpipe.model.edge import EdgeSpec, EdgeTensor
from evenpipe.model.export import dtypes_to_write, save_tensors, write_folder_metadata
from evenpipe.model.flops import arranging_flops, head_flops, layer_flops, training_flops
from evenpipe.model.initialization import initial_rows, initialize
from evenpipe.model.live import check_values, left_out
from evenpipe.model.live_forward import check_forward
from evenpipe.model.loading import (
    as_stored,
    copy_parameters,
    drawn_parameters,
    fill_parameters,
    fill_rows,
    live_tensor,
    load_parameters,
    load_rows,
)
from evenpipe.model.modules import ModuleStage, describe_modules
from evenpipe.model.names import disk_tensors
from evenpipe.model.origin import STORED_DTYPES, Origin, read_files, stored_dtypes
from evenpipe.model.router_loss import RouterLoss
from evenpipe.model.row_work import RowWork, slice_ends
from evenpipe.model.spec import ModelSpec, Spec
from evenpipe.model.stage import Stage, build_stage
from evenpipe.model.structure import persistent_buffers

__all__ = [
    "STORED_DTYPES",
    "Description",
    "EdgeSpec",
    "EdgeTensor",
    "ModelSpec",
    "ModuleStage",
    "Origin",
    "RouterLoss",
    "RowWork",
    "Spec",
    "Stage",
    "arranging_flops",
    "as_stored",
    "build_stage",
    "check_compute_dtype",
    "check_forward",
    "check_values",
    "copy_parameters",
    "describe",
    "describe_modules",
    "disk_tensors",
    "drawn_parameters",
    "dtypes_to_write",
    "fill_parameters",
    "fill_rows",
    "gradient_errors",
    "head_flops",
    "initial_rows",
    "initialize",
    "layer_flops",
    "left_out",
    "live_tensor",
    "load_parameters",
    "load_rows",
    "persistent_buffers",
    "read_files",
    "save_tensors",
    "self_check",
    "slice_ends",
    "stored_dtypes",
    "training_flops",
    "write_folder_metadata",
]
