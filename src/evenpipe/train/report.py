"""The short report at the end of a run, gathered from its processes: a table for the terminal, and report.json."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evenpipe.draw import loads_svg
from evenpipe.given import write_text
from evenpipe.runtime.pipeline import Pipeline
from evenpipe.schedule import Timeline
from evenpipe.train.files import write_json
from evenpipe.words import count

BASELINE = "first-last"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """One process in the report: a device of a replica, or a tensor rank of it."""

    device: int
    busy: float | None
    """Share of the training time (0 to 1) spent in passes; None on GPUs, whose time the host does not see."""
    peak_memory_bytes: int
    """Peak memory: allocated on a GPU, resident set of the process on the CPU."""
    layers: int
    """Number of transformer layers on the device."""
    vocabulary_rows: int
    """Number of rows of the output layer's matrix on this process."""
    stages: tuple[int, ...]
    """Numbers of the stages on the device."""
    replica: int = 0
    tensor_rank: int = 0
    context_rank: int = 0
    """Rank among the processes that share the device's layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleReport:
    """The schedule and its layout in the report."""

    name: str
    """Name or CSV file in the configuration."""
    replicas: int
    devices: int
    """Devices per replica."""
    stages: int
    microbatches: int
    """Microbatches per step and replica."""
    communicators: int
    """Communicators for the transfers of a replica."""
    in_flight: tuple[int, ...]
    """Maximum number of stage activations on each device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A simulated step in a vocabulary mode. Both predictions use the same unit of time."""

    vocabulary: str
    makespan: float
    busy: tuple[float, ...]
    """Time spent in passes, per device, in the unit of `makespan`."""
    bubble_rate: float
    """Idle share (0 to 1) of the device with the longest span."""

    @property
    def mean_busy(self) -> float:
        """Share (0 to 1) of the makespan that devices spend in passes, averaged over all devices."""
        return sum(self.busy) / (len(self.busy) * self.makespan)

    @property
    def imbalance(self) -> float:
        """Work of the busiest device divided by the mean; 1 if all do the same work."""
        return max(self.busy) * len(self.busy) / sum(self.busy)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingReport:
    """What was trained. `steps`, `tokens` and `seconds` count only since the run was last started or continued."""

    steps: int
    epoch: float
    """Passes over the training rows, including earlier starts."""
    tokens: int
    seconds: float
    loss: float
    """`StepMetrics.loss` of the last step."""
    running_mean_loss: float
    """`StepMetrics.running_mean_loss` of the last step."""
    validation_loss: float | None
    """Mean over the tokens of the validation rows with the final weights. Compare it with `loss`, not with a mean over
    many steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineReport:
    """Resources shared by the processes on the machine of the first process."""

    processes: int = 1
    threads: int = 1
    """Threads of each process for torch's operations."""
    cores: int = 1
    """Cores that these processes may use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """A finished run."""

    training: TrainingReport
    schedule: ScheduleReport
    devices: tuple[DeviceReport, ...]
    """All processes: replica by replica, in each by device, then by tensor rank."""
    prediction: Prediction
    """Prediction for the vocabulary mode of the run."""
    baseline: Prediction
    """Prediction for `first-last` with the same schedule."""
    predicted_step_seconds: float | None
    """Step time of the order with the measured time of passes, if each device had its own core and transfers took no
    time; None on a GPU, where pass times are not measured."""
    machine: MachineReport

    @property
    def predicted_speedup(self) -> float:
        """Predicted step time of the baseline divided by that of the run's mode."""
        return self.baseline.makespan / self.prediction.makespan


def measures_busy(pipeline: Pipeline) -> bool:
    """Whether a process knows how long its device computes: on a GPU, its own time is that of starting kernels."""
    return pipeline.torch_device.type == "cpu"


def gather_report(
    pipeline: Pipeline, *, training: TrainingReport, schedule: str, busy_seconds: float, peak_memory_bytes: int
) -> RunReport | None:
    """Return the report on the first process of the run, None on the others. Collective.

    schedule: the schedule's name in the configuration.
    busy_seconds: time that this process spent in passes.
    peak_memory_bytes: `PeakMemory.of_run` of this process.
    """
    table = pipeline.gather_numbers([busy_seconds, peak_memory_bytes])
    if not pipeline.feeds or pipeline.replica:
        return None
    from evenpipe.plan.configuration_search import cores  # only the first process should import planning

    timeline = pipeline.predict()
    prediction = _prediction(timeline, pipeline.layout.mode)
    predicted_step_seconds = None
    if measures_busy(pipeline) and training.steps:
        work = sum(busy for busy, _ in table) / (len(table) // pipeline.devices) / training.steps
        predicted_step_seconds = prediction.makespan * work / sum(prediction.busy)
    placement, ranks = pipeline.order.placement, pipeline.tensor_ranks
    sharing = pipeline.context_ranks * ranks  # processes of a device
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
                replica=process // (pipeline.devices * sharing),
                device=device,
                tensor_rank=process % ranks,
                context_rank=process % sharing // ranks,
                busy=(busy / training.seconds if training.seconds else 0.0) if measures_busy(pipeline) else None,
                peak_memory_bytes=int(peak),
                stages=placement.stages_of(device),
                layers=sum(pipeline.layout.layers_per_stage[stage] for stage in placement.stages_of(device)),
                vocabulary_rows=pipeline.layout.head_shards[device * ranks + process % ranks].rows,
            )
            for process, (busy, peak) in enumerate(table)
            for device in [process // sharing % pipeline.devices]
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


def report_text(report: RunReport) -> str:
    """Return the report for the terminal."""
    training = report.training
    speed = training.tokens / training.seconds if training.seconds > 0 else 0.0
    loss = f"loss {training.loss:.3f} in the last step"
    if training.validation_loss is not None:
        loss += f", {training.validation_loss:.3f} in validation"
    rows: list[tuple[str, ...]] = [
        ("device", "busy", "peak memory", "stages", "layers", "in flight", "vocabulary rows")
    ]
    rows += [
        (
            str(device.device),
            "-" if device.busy is None else f"{100 * device.busy:.1f} %",
            bytes_text(device.peak_memory_bytes),
            " ".join(map(str, device.stages)),
            str(device.layers),
            str(report.schedule.in_flight[device.device]),
            f"{device.vocabulary_rows:,}",
        )
        for device in report.devices
    ]
    for name in ("tensor_rank", "context_rank"):
        if any(getattr(device, name) for device in report.devices):
            numbers = [name.replace("_", " "), *(str(getattr(device, name)) for device in report.devices)]
            rows = [(row[0], number, *row[1:]) for number, row in zip(numbers, rows, strict=True)]
    if report.schedule.replicas > 1:
        numbers = ["replica", *(str(device.replica) for device in report.devices)]
        rows = [(number, *row) for number, row in zip(numbers, rows, strict=True)]
    lines = [
        f"{count(training.steps, 'step', ',')} to epoch {training.epoch:.2f}, {count(training.tokens, 'token', ',')}"
        f" in {training.seconds:.1f} s ({speed:,.0f} tokens/s); {loss}",
        _schedule_line(report),
        *_table(rows),
        *_step_lines(report),
        *_vocabulary_lines(report),
    ]
    return "\n".join(lines)


def write_report(report: RunReport, path: Path) -> None:
    """Write report.json: the fields of `RunReport`, with those of `training` and `machine` beside the others, and the
    predicted speed-up."""
    content: dict[str, Any] = asdict(report)
    training, machine = content.pop("training"), content.pop("machine")
    write_json(path, {**training, **content, **machine, "predicted_speedup": report.predicted_speedup})


def write_loads(load: Tensor, layers: Sequence[str], path: Path) -> None:
    """Draw the tokens of every expert in a step.

    load: [layers, experts]. layers: names of their modules in the model.
    """
    numbers = [re.search(r"\.(\d+)\.", name) for name in layers]
    names = [name if number is None else f"layer {number[1]}" for name, number in zip(layers, numbers, strict=True)]
    rows = zip(names if len(set(names)) == len(names) else layers, load.tolist(), strict=True)
    write_text(path, loads_svg(dict(rows), title="Tokens of every expert in the last logged step"))


def bytes_text(count: int) -> str:
    """Return, for example, `512 B` or `1.5 GiB`."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def _schedule_line(report: RunReport) -> str:
    schedule = report.schedule
    each = schedule.stages // schedule.devices
    stages = f"{count(schedule.stages, 'stage')} on {count(schedule.devices, 'device')}"
    if schedule.stages == each * schedule.devices and each > 1:
        stages += f" ({each} each)"
    replicas = "" if schedule.replicas == 1 else f", {schedule.replicas} replicas"
    return (
        f"schedule {schedule.name}: {stages}{replicas}, {count(schedule.microbatches, 'microbatch')}, "
        f"{count(schedule.communicators, 'communicator')}; predicted busy {100 * report.prediction.mean_busy:.1f} %"
    )


def _step_lines(report: RunReport) -> list[str]:
    training, machine, predicted = report.training, report.machine, report.predicted_step_seconds
    if not training.steps or predicted is None:
        return []
    took = training.seconds / training.steps
    line = f"a step took {took:.3f} s; {predicted:.3f} s are predicted from the devices' own work in this order"
    if machine.processes * machine.threads > machine.cores:
        each = "" if machine.threads == 1 else f" of {machine.threads} threads"
        minimum_seconds = predicted * report.prediction.mean_busy * machine.processes / machine.cores
        line += (
            f" with a core each, but {count(machine.processes, 'process')}{each} share {count(machine.cores, 'core')}, "
            f"on which that work alone takes {minimum_seconds:.3f} s"
        )
    elif took > predicted:
        line += "; the rest is transfers, the optimizer, and other programs on these cores"
    return [line]


def _vocabulary_lines(report: RunReport) -> list[str]:
    ran, baseline = report.prediction, report.baseline
    if ran.vocabulary == baseline.vocabulary:
        busiest = f"the busiest device has {baseline.imbalance:.2f} times the mean work"
        return [f"vocabulary {ran.vocabulary}: embedding and output layer on the first and last device; {busiest}"]
    return [
        f"vocabulary {ran.vocabulary}: a step is predicted to be {report.predicted_speedup:.2f} times as fast as with "
        f"{baseline.vocabulary};",
        f"the busiest device has {ran.imbalance:.2f} times the mean work instead of {baseline.imbalance:.2f}",
    ]


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
