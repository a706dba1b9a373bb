"""What is lost if orders are arranged by other times than those that passes take?

    python benchmarks/arrangement.py [--models llama-3.1-8b ...] [--devices 8 ...] [--schedules zbv ...] [--output FILE]

Llama 3.1 with 8B, 70B and 405B parameters on H100, microbatches of one sequence of 8,192 tokens, four per device:
steps of all families of schedules, in all vocabulary modes, are simulated with the pass times of the data sheet (bf16,
transformers' modules, hops across nodes), in three orders:

    flops    arranged by FLOPs, as on unknown hardware: F = I = W, and transfers take no time
    now      arranged as `evenpipe plan` and runs on this GPU arrange them: by the times, rounded (`FINE`)
    own      arranged by the very times that are simulated

Printed is by how much the first two are longer than the shortest of the three, in percent, the worst of all models, and
the most activations in flight on a device, which differ by one at most, but for zb-auto and gpipe, which have no limit.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from provenance import write
from transformers import AutoConfig

from evenpipe.costs.hardware import find_hardware
from evenpipe.costs.timed_model import pass_costs
from evenpipe.model import describe
from evenpipe.plan.configuration_search import head_layers
from evenpipe.plan.problem import Problem, problem_of
from evenpipe.plan.splits import splits
from evenpipe.recipe.recipe import Recipe
from evenpipe.schedule import MODES, SCHEDULES
from evenpipe.schedule.registry import options_of
from evenpipe.simulate import simulate

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "models"
MODELS = ("llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b")
DEVICES = (8, 16, 32)
FAMILIES = tuple(name for name in SCHEDULES if not name.startswith("po-"))
"""Without those that copy activations to the host, whose order depends on memory."""
SEQUENCE, PER_DEVICE = 8192, 4
"""Tokens of a microbatch, and microbatches per device."""


def problem(model: str, devices: int) -> Problem:
    """A pipeline of all devices."""
    values = json.loads((EXAMPLES / f"{model}.json").read_text(encoding="utf-8"))
    return problem_of(
        describe(AutoConfig.for_model(**values)),
        find_hardware("H100-80G"),
        gpus=devices,
        sequence=SEQUENCE,
        sequences_per_step=PER_DEVICE * devices,
    )


def steps(given: Problem, schedules: Sequence[str], modes: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Steps in the three orders."""
    devices = given.gpus
    layout = Recipe.of(pp=devices, microbatches=PER_DEVICE * devices, sequence_length=SEQUENCE)
    head = head_layers(given, layout)
    for schedule in schedules:
        options = (("stages_per_device", 2),) if "stages_per_device" in options_of(schedule) else ()
        shape = given.programs.shape(schedule, options, devices)
        if shape is None or shape.placement.stages > given.layers:
            continue
        for mode in modes:
            recipe = replace(
                layout,
                schedule=schedule,
                schedule_options=options,
                vocabulary=mode,
                layers_per_stage=splits(given, layout, shape, mode, head)[0],
            )
            costs = pass_costs(given, recipe, shape.placement)
            orders = {
                "flops": replace(given, arranged_by="flops").programs.of(recipe, recipe.microbatches),
                "now": given.programs.of(recipe, recipe.microbatches),
                "own": given.programs.of(replace(recipe, costs=costs), recipe.microbatches),
            }
            timelines = {name: simulate(program, costs).timeline for name, (_, program) in orders.items()}
            yield {
                "devices": devices,
                "schedule": schedule,
                "mode": mode,
                "seconds": {name: one.makespan for name, one in timelines.items()},
                "in_flight": {name: max(one.peak_in_flight) for name, one in timelines.items()},
            }


def loss(one: dict[str, Any], name: str) -> float:
    """By how much a step is longer than in the best of the orders, in percent."""
    return 100 * (one["seconds"][name] / min(one["seconds"].values()) - 1)


def table(found: Sequence[dict[str, Any]]) -> str:
    """The worst losses of all models, before and now, as Markdown."""
    modes = list(dict.fromkeys(one["mode"] for one in found))
    lines = [f"| schedule | devices | {' | '.join(modes)} |", "|---" * (2 + len(modes)) + "|"]
    for schedule, devices in dict.fromkeys((one["schedule"], one["devices"]) for one in found):
        own = [one for one in found if (one["schedule"], one["devices"]) == (schedule, devices)]
        cells = []
        for mode in modes:
            those = [one for one in own if one["mode"] == mode]
            cells.append(" / ".join(f"{max(loss(one, name) for one in those):.1f}" for name in ("flops", "now")))
        lines.append(f"| {schedule} | {devices} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--devices", nargs="+", type=int, default=DEVICES, metavar="P")
    parser.add_argument("--schedules", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="all figures")
    given = parser.parse_args()
    found: list[dict[str, Any]] = []
    for devices in given.devices:
        for model in given.models:
            for one in steps(problem(model, devices), given.schedules, given.modes):
                found.append({"model": model, **one})
                losses = f"flops {loss(one, 'flops'):6.2f} %   now {loss(one, 'now'):6.2f} %"
                in_flight = one["in_flight"]
                print(f"{model:15} {devices:3} {one['schedule']:12}{one['mode']:13} {losses}   {in_flight}", flush=True)
                if given.output is not None:
                    write(given.output, {"cases": found})
    print(f"\nLoss in percent by FLOPs / now, the worst of all models\n\n{table(found)}")


if __name__ == "__main__":
    main()
