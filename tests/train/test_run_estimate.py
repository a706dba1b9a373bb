"""Estimates of runs by their configuration: every field that changes what a step holds changes the estimate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import pytest

from evenpipe.errors import InputError
from evenpipe.memory.estimate import estimate
from evenpipe.train.config_file import apply_overrides, config_from_dict, sections
from evenpipe.train.run_estimate import EstimatedRun, estimated_run, host_remark

LLAMA = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
BASE = {
    "model": {"architecture": "llama", "config": LLAMA | {"num_key_value_heads": 2}},
    "data": {"corpus": "python-standard-library:json", "sequence_length": 64},
    "tokenizer": {"vocabulary_size": 512},
    "pipeline": {"processes": 4, "dp": 2, "microbatches": 6},
}
ALONE = """
model.architecture=mixtral model.config.num_hidden_layers=6 model.compute_dtype=float32 data.sequence_length=128
tokenizer.vocabulary_size=1024 pipeline.processes=8 pipeline.dp=1 pipeline.data_parallel=shard
pipeline.schedule=zbv pipeline.vocabulary=first-last pipeline.microbatches=1 pipeline.slices=2
pipeline.microbatch_size=2 pipeline.layers_per_stage=[1,3] pipeline.activation_checkpointing=full
pipeline.communicators=one offload.activations=all loss.label_smoothing=0.1 loss.keep=nothing loss.entropy=true
loss.kernels=torch
optimizer.name=adafactor optimizer.host_share=0.5 pipeline.compile_layers=true
"""
TOGETHER = """
pipeline.ep=2 model.architecture=mixtral
pipeline.cp=2 pipeline.processes=8
pipeline.context_exchange=heads pipeline.processes=8 pipeline.cp=2
pipeline.tp=2 pipeline.processes=8
pipeline.reshard=true pipeline.data_parallel=shard
pipeline.prefetch=0 pipeline.data_parallel=shard pipeline.schedule=interleaved pipeline.reshard=true
pipeline.stages_per_device=1 pipeline.schedule=interleaved
pipeline.group_size=3 pipeline.schedule=interleaved
pipeline.max_in_flight=1 pipeline.schedule=zb-auto
offload.layers=keep offload.activations=all
offload.host_memory=64KiB offload.activations=all
offload.when_full=keep offload.activations=all offload.host_memory=64KiB
experts.arrivals=1 model.architecture=mixtral pipeline.ep=2
optimizer.options.momentum=0.9 optimizer.name=sgd
pipeline.tensor_overlap=ring pipeline.processes=8 pipeline.tp=2
"""
"""A field with another value, and what must be set besides."""
CHANGES = [*ALONE.split(), *TOGETHER.strip().split("\n")]
ALIKE = """
model: source fresh_weights trust_remote_code self_check
data: files dataset dataset_config dataset_split corpus text_field encoding_errors documents validation_files
data: validation_split validation_fraction cache_folder
tokenizer: source end_of_text
pipeline: costs arrange nccl_high_priority nccl_channels timeout_seconds
offload: copy_time directory streams
experts: columns router_bias_rate
loss: z_loss
optimizer: learning_rate schedule warmup_steps minimum_learning_rate_ratio decay_steps decay_share betas epsilon
optimizer: weight_decay clip_norm
"""
"""Fields that change no bytes of a step, but perhaps the order of its passes, or that name another model."""
OF_RUNS = ("training", "checkpoint", "output", "sample")


def run_with(changes: Iterable[str]) -> EstimatedRun:
    return estimated_run(config_from_dict(apply_overrides(BASE, changes)), None)


def estimate_with(changes: Iterable[str]) -> dict[str, Any]:
    run = run_with(changes)
    result = estimate(run.description, run.recipe, **run.arguments)
    return {**result.to_dict(), "remarks": [*run.remarks, host_remark(result)]}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.sampled(12)
def test_what_changes_a_step_changes_the_estimate(change: str) -> None:
    _, *besides = change.split()
    assert estimate_with(change.split()) != estimate_with(besides)


def test_every_field_of_the_configuration_is_known() -> None:
    known = {change.partition("=")[0] for change in CHANGES}
    for section, _, names in (line.partition(": ") for line in ALIKE.strip().split("\n")):
        known |= {f"{section}.{name}" for name in names.split()}
    every = {f"{name}.{one.name}" for name, kind in sections().items() for one in fields(kind) if name not in OF_RUNS}
    assert {".".join(name.split(".")[:2]) for name in known} == every


def test_the_state_of_a_user_s_optimizer_is_not_known() -> None:
    with pytest.raises(InputError, match=r'optimizer.name is "own:make"; it must be one of adamw, .* for an estimate'):
        run_with(["optimizer.name=own:make"])
