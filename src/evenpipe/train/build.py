"""Builds the pipeline of a configuration on one process, for training and for measuring."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from evenpipe.communication.nccl import NcclOptions
from evenpipe.host.options import OffloadOptions
from evenpipe.runtime.pipeline import Pipeline
from evenpipe.schedule.files import read_costs
from evenpipe.train.config import Config
from evenpipe.train.model_source import pipeline_model
from evenpipe.vocabulary import LossOptions


def build_pipeline(
    config: Config, tokenizer_size: int, end_of_text_id: int, torch_device: torch.device, **changes: Any
) -> Pipeline:
    """Return a `Pipeline` with the options of `config`; `changes` replace some. Raises InputError like `Pipeline`."""
    options: dict[str, Any] = {
        "schedule": config.pipeline.schedule,
        "schedule_options": config.pipeline.schedule_options,
        "vocabulary": config.pipeline.vocabulary,
        "microbatches": config.pipeline.microbatches_per_step,
        "replicas": config.pipeline.replicas,
        "data_parallel": config.pipeline.data_parallel,
        "layers_per_stage": config.pipeline.layers_per_stage,
        "checkpointing": _one_or_all(config.pipeline.checkpointing),
        "compile_layers": config.pipeline.compile_layers,
        "costs": None if config.pipeline.costs is None else read_costs(config.pipeline.costs),
        "sequence_length": config.data.sequence_length,
        "communicators": config.pipeline.communicators,
        "nccl": NcclOptions(high_priority=config.pipeline.nccl_high_priority, channels=config.pipeline.nccl_channels),
        "offload": OffloadOptions(
            activations=config.offload.activations,
            copy_time=_one_or_all(config.offload.copy_time),
            layers=_one_or_all(config.offload.layers),
            host_memory=config.offload.host_bytes,
            when_full=config.offload.when_full,
            directory=config.offload.directory,
            streams=config.offload.streams,
        ),
        "loss": LossOptions(
            label_smoothing=config.loss.label_smoothing,
            z_loss=config.loss.z_loss,
            keep=config.loss.keep,
            entropy=config.loss.entropy,
            kernels=config.loss.kernels,
        ),
        "compute_dtype": compute_dtype(config),
        "seed": config.training.seed,
        "self_check": config.model.self_check,
        "trust_remote_code": config.model.trust_remote_code,
        "torch_device": torch_device,
        "timeout_seconds": config.pipeline.timeout_seconds,
    }
    return Pipeline(pipeline_model(config, tokenizer_size, end_of_text_id), **{**options, **changes})


Choice = TypeVar("Choice", str, float)


def _one_or_all(choices: tuple[Choice, ...]) -> Choice | tuple[Choice, ...]:
    """Return the only choice, which applies to all, or one choice for each."""
    return choices[0] if len(choices) == 1 else choices


def compute_dtype(config: Config) -> torch.dtype | None:
    """Return the configured dtype; None lets the pipeline decide."""
    name = config.model.compute_dtype
    return None if name == "auto" else getattr(torch, name)
