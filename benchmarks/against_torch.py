"""How fast, and in how much memory, against torch's own runtime?

    python benchmarks/against_torch.py [--schedules 1f1b zbv] [--checkpointing none full] [--output FILE.json]

torch 2.13 comes with a runtime for pipelines. Here both runtimes execute torch's own orders of Schedule1F1B,
ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble and ScheduleZBVZeroBubble: the same model with the same weights,
the embedding on the first stage, output layer and loss on the last (torch: `nn.Linear` and `cross_entropy`), the same
data, the same processes, one thread each, gloo. One step of the one follows one step of the other, in turns.

    step        median seconds of a step, the slowest process
    ratio       ours over torch's, of medians, with the bounds of 95 % of 10 000 bootstrap resamples of step pairs
    cpu         the same ratio of processor time, all threads and processes together
    tensors     the most bytes of tensors that lived at one moment, by process, and the worst ratio
    resident    the growth of resident memory by the model and its steps, in runs of their own, and the worst ratio
    gradients   largest relative difference of a parameter's gradient between the two

Full checkpointing: ours, and `gradient_checkpointing_enable` of transformers under torch's runtime.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of torch about torch

import common
import torch.distributed as dist
from common import llama, option, token_ids
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch_pipeline import TorchPipeline

from evenpipe import Pipeline, launch
from evenpipe.runtime.accounting import ByteCounter

SCHEDULES: dict[str, type] = {
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
OURS, TORCH = "evenpipe", "torch"
LIMIT = 1.02
"""What the upper bound of the ratio of step times must not exceed."""


@dataclass(frozen=True, kw_only=True)
class Settings(common.Settings):
    """What is measured."""

    vocabulary: int = option(4096, "rows of embedding and output layer")
    microbatches: int = option(8, "of a step")
    repetitions: int = option(30, "measured steps of each runtime")
    warm_up: int = option(2, "steps that do not count")


def build(runtime: str, schedule: str, checkpointing: str, settings: Settings) -> Pipeline | TorchPipeline:
    config, kind = llama(settings, settings.vocabulary), SCHEDULES[schedule]
    if runtime == TORCH:
        return TorchPipeline(
            config,
            kind,
            settings.microbatches,
            v_shaped=kind is ScheduleZBVZeroBubble,
            checkpointing=checkpointing == "full",
        )
    return Pipeline(
        config,
        schedule=kind,
        vocabulary="first-last",
        microbatches=settings.microbatches,
        activation_checkpointing=checkpointing,
        self_check=False,
    )


def parameters(arm: Pipeline | TorchPipeline) -> Iterator[tuple[str, nn.Parameter]]:
    return arm.named_parameters() if isinstance(arm, Pipeline) else arm.parameters()


def batch(settings: Settings) -> Tensor:
    return token_ids(settings, settings.vocabulary, settings.microbatches)


# --- measuring -----------------------------------------------------------------------------------------------


def measure_steps(schedule: str, checkpointing: str, settings: Settings) -> dict[str, Any]:
    """Steps in turns: seconds and processor seconds of this process; and the largest difference of a gradient."""
    arms = {name: build(name, schedule, checkpointing, settings) for name in (OURS, TORCH)}
    ids = batch(settings)
    for _ in range(settings.warm_up):
        for arm in arms.values():
            arm.zero_grad()
            arm.step(ids)
    theirs = dict(parameters(arms[TORCH]))
    differences = {
        name: float((one.grad - theirs[name].grad).norm() / theirs[name].grad.norm())
        for name, one in parameters(arms[OURS])
    }
    assert differences.keys() == theirs.keys(), "the two hold different parameters"
    gc.collect()
    gc.freeze()  # a collection in the middle of a step would be a straggler of either runtime
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    for repetition in range(settings.repetitions):
        for name in sorted(arms, reverse=bool(repetition % 2)):
            arms[name].zero_grad()
            dist.barrier()
            started, used = time.perf_counter(), time.process_time()
            arms[name].step(ids)
            used = time.process_time() - used
            dist.barrier()
            figures[name].append((time.perf_counter() - started, used))
    return {"figures": figures, "difference": max(differences.values())}


def measure_tensors(runtime: str, schedule: str, checkpointing: str, settings: Settings) -> int:
    """The most bytes of tensors alive in this process at one moment of a second step."""
    arm, ids = build(runtime, schedule, checkpointing, settings), batch(settings)
    arm.step(ids)
    gc.collect()
    if isinstance(arm, Pipeline):
        counter = arm.count_bytes()
    else:
        held = [tensor for module in arm.modules.values() for tensor in (*module.parameters(), *module.buffers())]
        gradients = [parameter.grad for _, parameter in arm.parameters()]
        # What the runtime itself holds from step to step: its buffers for messages.
        kept = [found for found in gc.get_objects() if issubclass(type(found), Tensor)]
        counter = ByteCounter({"held": held, "gradients": gradients, "runtime": kept})
    with counter:
        arm.step(ids)
    return counter.peak


def measure_resident(runtime: str, schedule: str, checkpointing: str, settings: Settings) -> int:
    """Bytes by which the resident memory of this process grew at most, over building and three steps."""
    before = _status("VmRSS")
    arm, ids = build(runtime, schedule, checkpointing, settings), batch(settings)
    for _ in range(3):
        arm.step(ids)
    return _status("VmHWM") - before


def _status(field: str) -> int:
    """A figure of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


# --- figures -------------------------------------------------------------------------------------------------


def bootstrap(ours: Sequence[float], theirs: Sequence[float], resamples: int = 10_000) -> tuple[float, float, float]:
    """Ratio of medians, and the bounds of its middle 95 % over resamples of pairs."""
    generator, pairs = random.Random(0), list(zip(ours, theirs, strict=True))
    ratios = []
    for _ in range(resamples):
        drawn = generator.choices(pairs, k=len(pairs))
        ratios.append(statistics.median(a for a, _ in drawn) / statistics.median(b for _, b in drawn))
    ratios.sort()
    return (
        statistics.median(ours) / statistics.median(theirs),
        ratios[round(0.025 * resamples)],
        ratios[round(0.975 * resamples) - 1],
    )


def compare(schedule: str, checkpointing: str, settings: Settings, *, memory: bool) -> dict[str, Any]:
    def in_processes(function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return launch(function, *arguments, processes=settings.processes, torch_device="cpu")

    measured = in_processes(measure_steps, schedule, checkpointing, settings)
    found: dict[str, Any] = {
        "schedule": schedule,
        "checkpointing": checkpointing,
        "gradient_difference": max(one["difference"] for one in measured),
    }
    steps, processor = {}, {}
    for name in (OURS, TORCH):
        together = list(zip(*(one["figures"][name] for one in measured), strict=True))
        steps[name] = [max(seconds for seconds, _ in step) for step in together]
        processor[name] = [sum(used for _, used in step) for step in together]
        found[name] = {"step_seconds": statistics.median(steps[name]), "steps": steps[name]}
        found[name]["processor_seconds"] = statistics.median(processor[name])
    found["step_ratio"] = bootstrap(steps[OURS], steps[TORCH])
    found["processor_ratio"] = bootstrap(processor[OURS], processor[TORCH])
    if memory:
        for name in (OURS, TORCH):
            for field, function in (("tensor_bytes", measure_tensors), ("resident_bytes", measure_resident)):
                found[name][field] = in_processes(function, name, schedule, checkpointing, settings)
        for field in ("tensor_bytes", "resident_bytes"):
            pairs = zip(found[OURS][field], found[TORCH][field], strict=True)
            found[f"{field}_ratio"] = max(one / other for one, other in pairs)
    return found


HEADER = ("schedule", "checkpoints", "step s", "torch s", "ratio", "95 % bounds", "cpu", "tensors MiB", "torch MiB")
HEADER += ("ratio", "resident MiB", "torch MiB", "ratio", "gradients")
LINE = "{:<24}{:>12}{:>8}{:>9}{:>7}{:>15}{:>7}{:>14}{:>12}{:>7}{:>14}{:>12}{:>7}{:>11}"


def line(found: dict[str, Any]) -> str:
    ratio, low, high = found["step_ratio"]
    cells = [found["schedule"], found["checkpointing"]]
    cells += [f"{found[name]['step_seconds']:.3f}" for name in (OURS, TORCH)]
    cells += [f"{ratio:.3f}", f"{low:.3f} {high:.3f}", f"{found['processor_ratio'][0]:.3f}"]
    for field in ("tensor_bytes", "resident_bytes"):
        for name in (OURS, TORCH):
            cells.append(" ".join(f"{value / 2**20:.0f}" for value in found[name].get(field, [])))
        cells.append(f"{found[f'{field}_ratio']:.2f}" if f"{field}_ratio" in found else "")
    return LINE.format(*cells, f"{found['gradient_difference']:.0e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--checkpointing", nargs="+", choices=("none", "full"), default=["none", "full"])
    parser.add_argument("--no-memory", action="store_true", help="leave out the runs that measure memory")
    common.add_arguments(parser, Settings)
    given = parser.parse_args()
    settings = common.settings_of(given, Settings)
    results = common.Results(settings, given.output, limit=LIMIT)
    print(LINE.format(*HEADER))
    for checkpointing in given.checkpointing:
        for schedule in given.schedules:
            found = compare(schedule, checkpointing, settings, memory=not given.no_memory)
            results.add(found)
            print(line(found), flush=True)
    plain = [found for found in results.cases if found["checkpointing"] == "none"]
    if plain:
        slow = [found["schedule"] for found in plain if found["step_ratio"][2] > LIMIT]
        heavy = [
            found["schedule"]
            for found in plain
            for field in ("tensor_bytes_ratio", "resident_bytes_ratio")
            if found.get(field, 0.0) >= 1.0
        ]
        print(f"\nupper bound above {LIMIT}: {', '.join(slow) or 'none'}; no less memory: {', '.join(heavy) or 'none'}")


if __name__ == "__main__":
    main()
