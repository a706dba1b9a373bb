"""What do shards of the vocabulary gain in pipelines of 8, 16 and 32 GPUs, and what does their efficiency cost?

    python benchmarks/gpu/published_models.py --hardware A100-80G [--output FILE.json]    from data sheets
    python benchmarks/gpu/published_models.py --hardware H200 --costs FOLDER [--shards FILE.json]    from pass times

Nothing here runs on more than one device: steps of 128 microbatches are simulated, in all vocabulary modes and several
schedules, for the models of the paper on vocabulary parallelism (arXiv 2411.05288) or others, with the pass times that
pass_times.py measured on one GPU (--costs) or with those that follow from data sheets. Links between devices, eight to
a node, are always those of the data sheet of `--hardware`: their speed is assumed. So is that layers beside shards take
6.5 % longer, because collectives run beside them (`evenpipe.costs.analytic`). Orders are arranged as the runtime
arranges them, the optimizer's step is counted, memory is not looked at, nothing is computed again. Printed are

    MFU         model FLOPs (attention without its mask, as in the paper) over time and peak, and in brackets what the
                paper measured on A100
    gain        of vocab-1 and vocab-2 over redistribution with the same schedule, as throughput, beside the paper's;
                and of the best of them with any schedule over the best redistribution with any
    efficiency  of the shards' S, C and T against linear scaling, and how much longer a step takes with it than with
                linear scaling: that of the simulation, of shards.py (--shards), and of the paper for its models, there
                with its efficiency of the input embedding, too; and what then is gained over redistribution
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import published
import torch
from models import MODELS, PAPER, TOKENS
from simulated import (
    Case,
    DataSheet,
    Measured,
    fits,
    output_seconds,
    published_input_seconds,
    step_seconds,
    tries,
    with_output,
)
from timing import Results, percent, table

from evenpipe.costs.hardware import find_hardware
from evenpipe.memory.kernels import PRESETS
from evenpipe.schedule import MODES, SCHEDULES, Costs

DEFAULT_SCHEDULES = ("1f1b", "zb-h1", "interleaved", "zbv", "v-half")
SHARDED = ("vocab-1", "vocab-2")
EFFICIENCY_SCHEDULES = {1: "1f1b", 2: "v-half"}
"""By stages per device."""


def best(case: Case, schedule: str, mode: str, source: DataSheet) -> dict[str, Any]:
    """The step of the fastest way to cut the layers."""
    found = []
    for configuration, placement in tries(case, schedule, mode, source):
        costs = source.costs(case, configuration, placement)
        found.append((step_seconds(case, configuration, costs), configuration))
    seconds, configuration = min(found, key=lambda entry: entry[0])
    return {
        **case.to_dict(),
        "schedule": schedule,
        "mode": mode,
        "layers_per_stage": list(configuration.layers_per_stage),
        "seconds": seconds,
        "mfu": case.mfu(seconds),
        "paper_mfu": paper_mfu(case, schedule, mode),
    }


def paper_mfu(case: Case, schedule: str, mode: str) -> float | None:
    """What the paper measured, where it did."""
    row = published.MFU.get((schedule, case.devices, case.tokens, mode))
    if row is None or case.model not in PAPER or case.vocabulary not in published.VOCABULARIES:
        return None
    percents = row[published.VOCABULARIES.index(case.vocabulary)]
    return None if percents is None else percents / 100


# --- what follows from steps ---------------------------------------------------------------------------------


def gains(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of shards over redistribution, from all steps of one case."""

    def of(name: str, schedule: str, mode: str) -> float | None:
        return next((one[name] for one in steps if (one["schedule"], one["mode"]) == (schedule, mode)), None)

    def gain(name: str, schedule: str, mode: str) -> float | None:
        ours, theirs = of(name, schedule, mode), of(name, schedule, "redistribute")
        return None if ours is None or theirs is None else ours / theirs - 1

    def fastest(modes: Sequence[str]) -> dict[str, Any] | None:
        return max((one for one in steps if one["mode"] in modes), key=lambda one: one["mfu"], default=None)

    first = steps[0]
    schedules = dict.fromkeys(one["schedule"] for one in steps)
    redistributed, sharded = fastest(["redistribute"]), fastest(SHARDED)
    case = {name: first[name] for name in ("model", "devices", "stages_per_device", "tokens", "vocabulary")}
    return {
        **case,
        "by_schedule": {
            schedule: {
                mode: {"gain": gain("mfu", schedule, mode), "paper_gain": gain("paper_mfu", schedule, mode)}
                for mode in SHARDED
            }
            for schedule in schedules
        },
        "best_redistribution": redistributed,
        "best_shards": sharded,
        "gain": None if redistributed is None or sharded is None else sharded["mfu"] / redistributed["mfu"] - 1,
    }


def efficiencies(
    case: Case, source: DataSheet, measured: Callable[[Case, str], float | None], steps: Sequence[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """What the efficiency of shards costs, by mode, against linear scaling. steps: of the case."""
    schedule = EFFICIENCY_SCHEDULES[case.stages_per_device]
    whole = next((one for one in steps if (one["schedule"], one["mode"]) == (schedule, "redistribute")), None)
    for mode in SHARDED:
        configuration, placement = next(tries(case, schedule, mode, source))
        costs = source.costs(case, configuration, placement)
        linear = source.head_seconds(case, mode) / case.devices
        perfect = step_seconds(case, configuration, with_output(costs, linear))
        known = {
            "simulated": linear / output_seconds(costs),
            "measured": measured(case, mode),
            "paper": published.OUTPUT_EFFICIENCY.get((case.devices, case.tokens, mode)),
        }
        seconds = {
            name: step_seconds(case, configuration, shards_of(name, case, with_output(costs, linear / share)))
            for name, share in known.items()
            if share is not None
        }
        yield {
            **case.to_dict(),
            "schedule": schedule,
            "mode": mode,
            "linear_seconds": perfect,
            "efficiencies": known,
            "longer": {name: one / perfect - 1 for name, one in seconds.items()},
            "gains": {} if whole is None else {name: whole["seconds"] / one - 1 for name, one in seconds.items()},
        }


def shards_of(name: str, case: Case, costs: Costs) -> Costs:
    """`costs`, of the paper with its efficiency of the input embedding, where it is known."""
    share = published.INPUT_EFFICIENCY.get((case.devices, case.tokens))
    if name != "paper" or share is None:
        return costs
    half = published_input_seconds(case) / share / case.devices / 2
    return replace(costs, E=half, G=half)


def measured_efficiency(path: Path | None) -> Callable[[Case, str], float | None]:
    """From what shards.py wrote: that of the nearest shape with the same devices and mode."""
    rows = [] if path is None else json.loads(path.read_text(encoding="utf-8"))["cases"]
    rows = [row for row in rows if row.get("efficiency") is not None]

    def find(case: Case, mode: str) -> float | None:
        own = {"tokens": case.tokens, "hidden_size": case.model.hidden_size, "vocabulary": case.vocabulary}

        def distance(row: dict[str, Any]) -> float:
            return sum(abs(math.log(row[name] / size)) for name, size in own.items())

        alike = [row for row in rows if (row["devices"], row["mode"]) == (case.devices, mode)]
        return min(alike, key=distance)["efficiency"] if alike else None

    return find


# --- tables --------------------------------------------------------------------------------------------------


def steps_table(steps: Sequence[dict[str, Any]], vocabularies: Sequence[int]) -> str:
    """MFU by schedule and mode, a column per vocabulary."""

    def cell(one: dict[str, Any]) -> str:
        paper = one["paper_mfu"]
        return f"{100 * one['mfu']:.1f}" + ("        " if paper is None else f" ({100 * paper:5.2f})")

    rows = [["schedule", "vocabulary", *(f"{vocabulary} rows   " for vocabulary in vocabularies)]]
    for schedule, mode in dict.fromkeys((one["schedule"], one["mode"]) for one in steps):
        own = [one for one in steps if (one["schedule"], one["mode"]) == (schedule, mode)]
        rows.append([schedule, mode, *map(cell, own)])
    return table(rows)


def gains_table(found: Sequence[dict[str, Any]]) -> str:
    """Over redistribution: with one schedule, and with the best."""
    rows = [["model", "p", "tokens", "rows", "schedule", *SHARDED, "paper: vocab-1", "vocab-2", "best", "over", "gain"]]
    for one in found:
        schedule = EFFICIENCY_SCHEDULES[one["stages_per_device"]]
        own = one["by_schedule"].get(schedule, {})
        percents = [percent(own[mode][name]) if own else "-" for name in ("gain", "paper_gain") for mode in SHARDED]
        ends = [one[name] for name in ("best_shards", "best_redistribution")]
        names = ["-" if end is None else f"{end['schedule']} {end['mode']}" for end in ends]
        size = [one["model"], *(str(one[name]) for name in ("devices", "tokens", "vocabulary"))]
        rows.append([*size, schedule, *percents, *names, percent(one["gain"])])
    return table(rows)


def efficiency_table(found: Sequence[dict[str, Any]]) -> str:
    """Efficiency of shards, and how much longer a step is for it."""
    names = ("simulated", "measured", "paper")
    head = [text for name in names for text in (f"{name}", "step", "gain")]
    rows = [["model", "p", "tokens", "rows", "schedule", "mode", *head]]
    for one in found:
        size = [one["model"], *(str(one[name]) for name in ("devices", "tokens", "vocabulary"))]
        cells = [
            cell
            for name in names
            for cell in (
                percent(one["efficiencies"][name]),
                percent(one["longer"].get(name), digits=2),
                percent(one["gains"].get(name)),
            )
        ]
        rows.append([*size, one["schedule"], one["mode"], *cells])
    return table(rows)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hardware", default="A100-80G", help="its data sheet (default: %(default)s)")
    parser.add_argument("--costs", type=Path, metavar="FOLDER", help="pass times that pass_times.py measured")
    parser.add_argument("--shards", type=Path, metavar="FILE.json", help="efficiency that shards.py measured")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=[model.name for model in PAPER])
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), metavar="N", help="of a microbatch")
    parser.add_argument("--microbatches", type=int, default=published.MICROBATCHES, metavar="M", help="of a step")
    parser.add_argument("--schedules", nargs="+", choices=list(SCHEDULES), default=list(DEFAULT_SCHEDULES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument(
        "--kernels", choices=list(PRESETS), default="megatron", help="of data sheets (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="all figures")
    given = parser.parse_args()
    source = DataSheet() if given.costs is None else Measured(given.costs)
    hardware = find_hardware(given.hardware)
    title = (
        "From data-sheet figures, nothing measured"
        if given.costs is None
        else "Simulated from one GPU's pass times with assumed link speeds"
    )
    print(
        f"{title}: {hardware.name}, peak {hardware.peak('bf16') / 1e12:g} TFLOP/s, links"
        f" {hardware.inside.bandwidth / 1e9:g} GB/s inside a node of {hardware.devices_per_node} and"
        f" {hardware.across.bandwidth / 1e9:g} GB/s per device across; {given.microbatches} microbatches"
        f"{'' if given.costs else f', kernels of {given.kernels}'}.\n"
        f"In brackets what arXiv 2411.05288 measured on A100 (its MFU is a share of {published.PEAK_FLOPS / 1e12:g}"
        " TFLOP/s, where that can be checked)."
    )
    results = Results(given, torch.device("cpu"), title=title, hardware=hardware.to_dict())
    measured = measured_efficiency(given.shards)
    all_gains: list[dict[str, Any]] = []
    all_efficiencies: list[dict[str, Any]] = []
    for name in given.models:
        model = MODELS[name]
        for stages, sizes in model.devices.items():
            for devices in sizes:
                for tokens in given.tokens:
                    cases = [
                        Case(model, devices, stages, tokens, rows, given.microbatches, given.hardware, given.kernels)
                        for rows in model.vocabularies
                    ]
                    schedules = [schedule for schedule in given.schedules if fits(schedule, cases[0])]
                    if not schedules:
                        continue
                    steps = [
                        best(case, schedule, mode, source)
                        for schedule in schedules
                        for mode in given.modes
                        for case in cases
                    ]
                    print(
                        f"\n{name} ({model.layers} layers of {model.hidden_size}) on {devices} devices with"
                        f" {stages} stage{'s' if stages > 1 else ''} each, {tokens} tokens per microbatch: MFU in %"
                    )
                    print(steps_table(steps, model.vocabularies), flush=True)
                    all_gains += [
                        gains([one for one in steps if one["vocabulary"] == rows]) for rows in model.vocabularies
                    ]
                    if EFFICIENCY_SCHEDULES[stages] in schedules:
                        own = [one for one in steps if one["vocabulary"] == cases[-1].vocabulary]
                        all_efficiencies += efficiencies(cases[-1], source, measured, own)
                    for one in steps:
                        results.add({"kind": "step", **one})
    print(f"\nGain over redistribution\n{gains_table(all_gains)}")
    print(f"\nEfficiency of shards, and how much longer a step takes for it\n{efficiency_table(all_efficiencies)}")
    for kind, found in (("gain", all_gains), ("efficiency", all_efficiencies)):
        for one in found:
            results.add({"kind": kind, **one})


if __name__ == "__main__":
    main()
