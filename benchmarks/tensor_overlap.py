"""Steps of a pipeline over tensor ranks, with rings and without, in turns.

    python benchmarks/tensor_overlap.py [--turns 6] [--output FILE.json]     # a table: medians, and ring / none

On a CPU products and copies share the cores, so a ring can gain little there; and with fewer cores than processes the
times say nothing about transfers. It is for machines with GPUs that are not here yet, and to see that a ring costs
nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from common import Options, Results, add_arguments, option, settings_of
from transformers import LlamaConfig

from evenpipe import Pipeline, launch

OVERLAPS = ("none", "ring")
SCHEDULES = ("1f1b", "zb-h1")


@dataclass(frozen=True, kw_only=True)
class Settings(Options):
    """What is measured."""

    ranks: int = option(2, "tensor ranks of the only device")
    layers: int = option(2, "of the model")
    hidden_size: int = option(512, "of the model; heads have 64")
    tokens: int = option(256, "of a microbatch, which is one sequence")
    microbatches: int = option(4, "of a step")
    turns: int = option(6, "steps of each kind, one after the other")


def measure(settings: Settings) -> dict[str, dict[str, float]]:
    """Return seconds of the median step, by schedule and overlap, on every process."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=settings.hidden_size,
        intermediate_size=3 * settings.hidden_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.hidden_size // 64,
        num_key_value_heads=settings.hidden_size // 64,
    )
    tokens = torch.randint(0, 512, (settings.microbatches, settings.tokens))
    found: dict[str, dict[str, float]] = {}
    for schedule in SCHEDULES:
        pipelines: dict[str, Pipeline] = {
            overlap: Pipeline(
                config,
                schedule=schedule,
                microbatches=settings.microbatches,
                tp=settings.ranks,
                tensor_overlap=overlap,
                self_check=False,
            )
            for overlap in OVERLAPS
        }
        seconds: dict[str, list[float]] = {overlap: [] for overlap in OVERLAPS}
        for turn in range(settings.turns + 2):
            for overlap, pipeline in pipelines.items():
                dist.barrier()
                started = time.perf_counter()
                pipeline.step(tokens)
                dist.barrier()
                if turn >= 2:  # the first ones warm up
                    seconds[overlap].append(time.perf_counter() - started)
                pipeline.zero_grad()
        for pipeline in pipelines.values():
            pipeline.close()
        found[schedule] = {overlap: statistics.median(taken) for overlap, taken in seconds.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, Settings)
    given = parser.parse_args()
    settings = settings_of(given, Settings)
    results = Results(settings, given.output)
    found = launch(measure, settings, processes=settings.ranks, torch_device="cpu")[0]
    print(f"{'schedule':10} {'none, s':>9} {'ring, s':>9} {'ring / none':>12}")
    for schedule, seconds in found.items():
        ratio = seconds["ring"] / seconds["none"]
        results.add({"schedule": schedule, "seconds": seconds, "ratio": ratio})
        print(f"{schedule:10} {seconds['none']:9.4f} {seconds['ring']:9.4f} {ratio:12.2f}")


if __name__ == "__main__":
    main()
