"""One long sequence per microbatch, cut into slices: how long does a step take, in how many bytes, and as predicted?

    python benchmarks/long_sequences.py [--tokens 16384] [--slices 1 2 4 8] [--output FILE.json]

The same model and batch with every number of slices, 1F1B with vocab-2. Costs are measured as `evenpipe profile`
measures them, with each number of slices, in the processes that then run its steps in turn. Printed are medians:

    step       seconds from the first start of a pass to the last end of one, measured and predicted from those costs
    MiB        the most bytes of tensors at one moment, of the device that holds the most, counted and estimated
    error      of the prediction, in percent of what was measured; of bytes the largest of any device

One thread per process, gloo.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
from dataclasses import dataclass, replace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import common
import torch
from common import configuration, llama, option

from evenpipe import Recipe, initialise_worker, launch
from evenpipe.compare.measured import compare
from evenpipe.costs.hardware import KNOWN
from evenpipe.memory.estimate import estimate
from evenpipe.memory.states import SINGLE
from evenpipe.model import describe
from evenpipe.schedule.trace_file import trace_from_dict, trace_to_dict
from evenpipe.train.build import build_pipeline
from evenpipe.train.profile import ALONE, measure_pipeline, profile_of, token_ids

SCHEDULE, MODE = "1f1b", "vocab-2"


@dataclass(frozen=True, kw_only=True)
class Settings(common.Settings):
    """What is measured."""

    layers: int = option(4, "of the model")
    tokens: int = option(16384, "of a microbatch, which is one sequence")
    vocabulary: int = option(4096, "rows of embedding and output layer")
    microbatches: int = option(2, "of a step")
    profiled_steps: int = option(1, "that costs are taken from, in each round")
    repetitions: int = option(1, "measured steps, in each round")
    rounds: int = option(3, "of costs and steps")


def measure(settings: Settings, slices: int) -> dict[str, Any]:
    """On every process: costs and steps in turn, then bytes."""
    device = initialise_worker().torch_device
    config = configuration(
        settings,
        settings.vocabulary,
        schedule=SCHEDULE,
        vocabulary=MODE,
        microbatches=settings.microbatches,
        slices=slices,
    )
    pipeline = build_pipeline(config, settings.vocabulary, 0, device, self_check=False)
    gc.collect()
    gc.freeze()
    profiled, traces = [], []
    for number in range(settings.rounds):
        profiled.append(measure_pipeline(pipeline, config, settings.profiled_steps, int(number == 0), (ALONE,)))
        for repetition in range(settings.repetitions):
            ids = token_ids(settings.microbatches, settings.tokens, settings.vocabulary, repetition)
            trace = pipeline.trace(pipeline.step(ids, record_passes=True))
            pipeline.zero_grad()
            if trace is not None:
                traces.append(trace_to_dict(trace))
    optimizer = torch.optim.AdamW(pipeline.parameters(), fused=True)
    with pipeline.count_bytes() as counted:
        for _ in range(2):  # from the second on, the optimizer has its state
            pipeline.step(ids)
            optimizer.step()
            pipeline.zero_grad()
    lengths = list(pipeline.slice_lengths(settings.tokens))
    return {"profiled": profiled, "traces": traces, "peak": counted.peak, "lengths": lengths}


def estimated(settings: Settings, slices: int) -> list[int]:
    """The most bytes of tensors at one moment, by device."""
    recipe = Recipe.of(
        pp=settings.processes,
        schedule=SCHEDULE,
        vocabulary=MODE,
        microbatches=settings.microbatches,
        sequence_length=settings.tokens,
        slices=slices,
    )
    hardware = replace(KNOWN["H200"], name="this host", torch_device="cpu")
    found = estimate(describe(llama(settings, settings.vocabulary)), recipe, hardware=hardware, dtypes=SINGLE)
    return [one.peak_allocated for one in found.devices]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slices", type=int, nargs="+", default=[1, 2, 4, 8])
    common.add_arguments(parser, Settings)
    given = parser.parse_args()
    settings = common.settings_of(given, Settings)
    results = common.Results(settings, given.output, schedule=SCHEDULE, vocabulary=MODE)
    print("slices   step s  predicted   error      MiB  estimated   error  tokens of each slice")
    for slices in given.slices:
        found = launch(measure, settings, slices, processes=settings.processes)
        costs = profile_of(found[0]["profiled"]).costs
        compared = [compare(trace_from_dict(trace), costs).to_dict() for trace in found[0]["traces"]]
        step, predicted = statistics.median(one["measured"] for one in compared), compared[0]["predicted"]
        peaks, expected = [one["peak"] for one in found], estimated(settings, slices)
        errors = [other / one - 1 for one, other in zip(peaks, expected, strict=True)]
        lengths = found[0]["lengths"]
        print(
            f"{slices:6}{step:9.2f}{predicted:11.2f}{100 * (predicted / step - 1):+6.1f} %{max(peaks) / 2**20:9.1f}"
            f"{max(expected) / 2**20:11.1f}{100 * max(errors, key=abs):+6.2f} %  {' '.join(map(str, lengths))}",
            flush=True,
        )
        results.add(
            {
                "slices": slices,
                "lengths": lengths,
                "step_seconds": step,
                "predicted_seconds": predicted,
                "steps": [one["measured"] for one in compared],
                "peak_bytes": peaks,
                "estimated_bytes": expected,
                "costs": costs.to_dict(),
            }
        )


if __name__ == "__main__":
    main()
