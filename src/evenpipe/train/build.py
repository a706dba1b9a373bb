"""Builds the pipeline of a configuration on one process, for training and for measuring."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from evenpipe.costs.hardware import Hardware, known_gpu
from evenpipe.errors import InputError
from evenpipe.model import describe
from evenpipe.processes.worker import initialise_worker
from evenpipe.recipe.recipe import Recipe
from evenpipe.runtime.pipeline import Pipeline
from evenpipe.runtime.step_plan import DTYPES
from evenpipe.train.config import Config
from evenpipe.train.model_source import pipeline_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

logger = logging.getLogger(__name__)


def build_pipeline(
    config: Config,
    tokenizer_size: int,
    end_of_text_id: int,
    torch_device: torch.device,
    **changes: Any,
) -> Pipeline:
    """Return the `Pipeline` of a configuration. Raises InputError like `Pipeline`.

    changes: arguments of `Pipeline` that override the configured ones.
    """
    model = pipeline_model(config, tokenizer_size, end_of_text_id)
    options: dict[str, Any] = {
        "recipe": _fitting(config, config.recipe(), model, torch_device),
        "loss": config.loss.options(),
        "compute_dtype": compute_dtype(config),
        "seed": config.training.seed,
        "self_check": config.model.self_check,
        "trust_remote_code": config.model.trust_remote_code,
        "torch_device": torch_device,
        "timeout_seconds": config.pipeline.timeout_seconds,
    }
    return Pipeline(model, **{**options, **changes})


def _fitting(config: Config, recipe: Recipe, model: str | PreTrainedConfig, torch_device: torch.device) -> Recipe:
    """Return the recipe with a split of layers that fits the memory of a known GPU, if its split by time does not. The
    first process makes the estimate and reports it. Collective."""
    known = known_gpu(torch.cuda.get_device_name(torch_device)) if torch_device.type == "cuda" else None
    if known is None or recipe.vocabulary != "redistribute" or recipe.devices == 1:
        return recipe
    worker, subject = initialise_worker(), "layers of each stage"
    if worker.rank == 0:
        memory = torch.cuda.get_device_properties(torch_device).total_memory
        split = split_of_run(config, recipe, model, known, memory)
        if split is not None:
            logger.warning("layers_per_stage = %s: by the estimate, the split by time does not fit", list(split))
        worker.write_once(subject, json.dumps(split))
        worker.mark(f"{subject}: known")
    worker.wait_for_mark(f"{subject}: known", f"the {subject}", "the pipeline")
    agreed = json.loads(worker.write_once(subject, "null"))
    return recipe if agreed is None else replace(recipe, layers_per_stage=tuple(agreed))


def split_of_run(
    config: Config, recipe: Recipe, model: str | PreTrainedConfig, known: Hardware, memory: int
) -> tuple[int, ...] | None:
    """Return the layers of each stage, like `split_that_fits`, for a run on GPUs with `memory` bytes; None if planning
    cannot estimate the optimizer's memory or a pipeline would refuse the configuration."""
    from evenpipe.plan.problem import problem_of_run  # only the first process should import planning
    from evenpipe.plan.splits import split_that_fits

    if config.optimizer.name != "adamw":
        return None
    try:
        description = describe(model, trust_remote_code=config.model.trust_remote_code)
        dtype = DTYPES[compute_dtype(config) or torch.bfloat16]
        problem = problem_of_run(
            description, known, recipe, memory_bytes=memory, dtype=dtype, loss=config.loss.options()
        )
        return split_that_fits(problem, recipe, config.optimizer.host_share)
    except InputError:
        return None


def compute_dtype(config: Config) -> torch.dtype | None:
    """Return the configured dtype; None lets the pipeline decide."""
    name = config.model.compute_dtype
    return None if name == "auto" else getattr(torch, name)
