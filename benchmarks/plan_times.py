"""How long do `evenpipe plan` and `evenpipe explain` take, from the command to its end, and what is planned?

    python benchmarks/plan_times.py [--repetitions 3] [--only NAME] [--output FILE.json]

Searches without a restriction of well known models on as many H100 as such runs have, in steps of as many tokens.
Nothing is taken from earlier runs, and one process evaluates: several would trace the same stages again.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from provenance import write

import evenpipe

MODELS = Path(__file__).resolve().parent.parent / "examples" / "models"
PLANNED = (
    ("llama-3.1-8b", 8, 8192, 512),
    ("llama-3.1-70b", 64, 8192, 512),
    ("llama-3.1-405b", 512, 8192, 2048),
    ("llama-3.1-405b", 512, 131072, 128),
    ("gpt-oss-120b", 64, 4096, 2048),
    ("qwen3-235b-a22b", 256, 4096, 4096),
    ("deepseek-v3", 256, 4096, 4096),
    ("deepseek-v3", 2048, 4096, 15360),
    ("kimi-k2", 512, 4096, 8192),
)
"""Model, GPUs, tokens of a sequence, sequences of a step."""
EXPLAINED = {"qwen3-8b": 8, "llama-3.1-70b": 64, "mixtral-8x7b": 64, "qwen3-235b-a22b": 256}


def commands() -> list[list[str]]:
    """Return arguments of evenpipe."""
    plan = [
        ["plan", "--model", name, "--gpus", str(gpus), "--sequence", str(sequence), "--batch", str(batch)]
        for name, gpus, sequence, batch in PLANNED
    ]
    return plan + [["explain", name, "--gpus", str(gpus)] for name, gpus in EXPLAINED.items()]


def measured(arguments: list[str]) -> tuple[float, float, dict[str, Any]]:
    """Run evenpipe. Return the seconds, the processor seconds, and the best plan."""
    models = {path.stem: str(path) for path in MODELS.glob("*.json")}
    more = ["--no-cache", "--json", "--workers", "1"] if arguments[0] == "plan" else []
    command = [sys.executable, "-m", "evenpipe.cli.main", *(models.get(one, one) for one in arguments), *more]
    before, started = os.times(), time.perf_counter()
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    seconds, after = time.perf_counter() - started, os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return seconds, spent, _best(json.loads(said)) if more else {}


def _best(found: dict[str, Any]) -> dict[str, Any]:
    plan = found["plans"][0]
    return {
        "plan": plan["name"],
        "step_seconds": plan["seconds"],
        "utilization": plan["model_flops_utilization"],
        "most_bytes": max(device["peak_bytes"] for device in plan["devices"]),
        "layers_per_stage": plan["layers_per_stage"],
        "checkpointing": {choice: plan["checkpointing"].count(choice) for choice in set(plan["checkpointing"])},
        "limits": plan["binding"],
        "configurations": found["bounded"],
        "simulated": found["evaluated"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=3, help="of each command (default: %(default)s)")
    parser.add_argument("--only", default="", help="commands that contain this")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="cases of other commands in it stay")
    given = parser.parse_args()
    compileall.compile_dir(Path(evenpipe.__file__).parent, quiet=1)  # as when a package is installed
    cases = {}
    if given.output is not None and given.output.exists():
        cases = {case["command"]: case for case in json.loads(given.output.read_text(encoding="utf-8"))["cases"]}
    for arguments in commands():
        text = f"evenpipe {' '.join(arguments)}"
        if given.only not in text:
            continue
        runs = [measured(arguments) for _ in range(given.repetitions)]
        seconds, spent = [one for one, _, _ in runs], [one for _, one, _ in runs]
        best = runs[0][2]
        cases[text] = {"command": text, "seconds": seconds, "processor_seconds": spent, **best}
        print(
            f"{statistics.median(seconds):7.1f} s  {statistics.median(spent):7.1f} s of processors  {text}", flush=True
        )
        if best:
            most = best["most_bytes"] / 2**30
            print(f"{'':11}{best['plan']}: {best['step_seconds']:.2f} s, {most:.1f} GiB", flush=True)
        if given.output is not None:
            write(given.output, {"cases": list(cases.values())})


if __name__ == "__main__":
    main()
