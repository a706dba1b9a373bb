"""Gathers the report of a run from its processes."""

from __future__ import annotations

import os
import resource

import torch

from evenpipe.runtime.pipeline import Pipeline
from evenpipe.schedule import Timeline
from evenpipe.train.report import (
    DeviceReport,
    MachineReport,
    Prediction,
    RunReport,
    ScheduleReport,
    TrainingReport,
)

BASELINE = "first-last"


def gather_report(
    pipeline: Pipeline,
    *,
    training: TrainingReport,
    schedule: str,
    busy_seconds: float,
) -> RunReport | None:
    """Return the report on the first process of the run, None on the others. Collective.

    schedule: the schedule's name in the configuration.
    busy_seconds: time that this process spent in passes.
    """
    table = pipeline.gather_numbers([busy_seconds, _peak_memory_bytes(pipeline.torch_device)])
    if pipeline.device or pipeline.replica:
        return None
    from evenpipe.plan.configuration_search import cores  # only the first process should import planning

    timeline = pipeline.predict()
    prediction = _prediction(timeline, pipeline.layout.mode)
    predicted_step_seconds = None
    if pipeline.torch_device.type == "cpu" and training.steps:
        work = sum(busy for busy, _ in table) / pipeline.replicas / training.steps
        predicted_step_seconds = prediction.makespan * work / sum(prediction.busy)
    placement = pipeline.order.placement
    return RunReport(
        training=training,
        schedule=ScheduleReport(
            name=schedule,
            replicas=pipeline.replicas,
            devices=pipeline.devices,
            stages=placement.stages,
            microbatches=pipeline.microbatches,
            communicators=len(pipeline.layout.communicators),
            in_flight=timeline.peak_in_flight,
        ),
        devices=tuple(
            DeviceReport(
                replica=process // pipeline.devices,
                device=device,
                busy=busy / training.seconds if training.seconds else 0.0,
                peak_memory_bytes=int(peak),
                stages=placement.stages_of(device),
                layers=sum(
                    last - first for first, last in (pipeline.layout.layers[s] for s in placement.stages_of(device))
                ),
                vocabulary_rows=pipeline.layout.head_shards[device * pipeline.tensor_ranks + pipeline.tensor_rank].rows,
            )
            for process, (busy, peak) in enumerate(table)
            for device in [process % pipeline.devices]
        ),
        prediction=prediction,
        baseline=_prediction(pipeline.predict(BASELINE), BASELINE),
        predicted_step_seconds=predicted_step_seconds,
        machine=MachineReport(
            processes=int(os.environ.get("LOCAL_WORLD_SIZE", "1")), threads=torch.get_num_threads(), cores=cores()
        ),
    )


def _prediction(timeline: Timeline, mode: str) -> Prediction:
    return Prediction(vocabulary=mode, makespan=timeline.makespan, busy=timeline.busy, bubble_rate=timeline.bubble_rate)


def _peak_memory_bytes(torch_device: torch.device) -> int:
    if torch_device.type == "cuda":
        return torch.cuda.max_memory_allocated(torch_device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
