"""evenpipe: pipeline-parallel training for Hugging Face language models, with nothing out of balance.

pipeline = evenpipe.Pipeline("Qwen/Qwen3-8B", schedule="1f1b", vocabulary="balanced")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from evenpipe.errors import InputError, RunError

__version__ = "0.1.0"

if TYPE_CHECKING:
    from evenpipe.checkpoints import newest_checkpoint as newest_checkpoint
    from evenpipe.communication.nccl import NcclOptions as NcclOptions
    from evenpipe.experts.overlap import ExpertOptions as ExpertOptions
    from evenpipe.host.optimizer import HostAdamW as HostAdamW
    from evenpipe.model.edge import EdgeTensor as EdgeTensor
    from evenpipe.model.linear import LinearTerm as LinearTerm
    from evenpipe.model.linear import add_term as add_term
    from evenpipe.model.spec import ModelSpec as ModelSpec
    from evenpipe.model.transform import LayerTransform as LayerTransform
    from evenpipe.optimizers.adafactor import Adafactor as Adafactor
    from evenpipe.optimizers.muon import Muon as Muon
    from evenpipe.processes.launcher import launch as launch
    from evenpipe.processes.worker import initialise_worker as initialise_worker
    from evenpipe.recipe.batch_shape import BatchShape as BatchShape
    from evenpipe.recipe.offload import OffloadOptions as OffloadOptions
    from evenpipe.recipe.parallelism import Parallelism as Parallelism
    from evenpipe.recipe.recipe import Recipe as Recipe
    from evenpipe.runtime.pipeline import Pipeline as Pipeline
    from evenpipe.runtime.result import StepResult as StepResult
    from evenpipe.train.callbacks import Callback as Callback
    from evenpipe.train.callbacks import TrainingState as TrainingState
    from evenpipe.train.start import run_training as run_training
    from evenpipe.vocabulary import LossOptions as LossOptions
    from evenpipe.vocabulary.head import linear_cross_entropy as linear_cross_entropy

_PUBLIC = {
    "Adafactor": "evenpipe.optimizers.adafactor",
    "BatchShape": "evenpipe.recipe.batch_shape",
    "Callback": "evenpipe.train.callbacks",
    "EdgeTensor": "evenpipe.model.edge",
    "ExpertOptions": "evenpipe.experts.overlap",
    "HostAdamW": "evenpipe.host.optimizer",
    "LayerTransform": "evenpipe.model.transform",
    "LinearTerm": "evenpipe.model.linear",
    "LossOptions": "evenpipe.vocabulary",
    "ModelSpec": "evenpipe.model.spec",
    "Muon": "evenpipe.optimizers.muon",
    "NcclOptions": "evenpipe.communication.nccl",
    "OffloadOptions": "evenpipe.recipe.offload",
    "Parallelism": "evenpipe.recipe.parallelism",
    "Pipeline": "evenpipe.runtime.pipeline",
    "Recipe": "evenpipe.recipe.recipe",
    "StepResult": "evenpipe.runtime.result",
    "TrainingState": "evenpipe.train.callbacks",
    "add_term": "evenpipe.model.linear",
    "initialise_worker": "evenpipe.processes.worker",
    "launch": "evenpipe.processes.launcher",
    "linear_cross_entropy": "evenpipe.vocabulary.head",
    "newest_checkpoint": "evenpipe.checkpoints",
    "run_training": "evenpipe.train.start",
}

__all__ = ["InputError", "RunError", "__version__", *_PUBLIC]  # noqa: PLE0604  (the keys are strings)


def __getattr__(name: str) -> Any:
    """Import lazily: `evenpipe.schedule` and `--help` do not need torch and transformers."""
    if name in _PUBLIC:
        from importlib import import_module

        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'evenpipe' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
