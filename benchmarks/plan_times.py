"""How long do `evenpipe plan` and `evenpipe explain` take, from the command to its end?

    python benchmarks/plan_times.py [--repetitions 3] [--output FILE.json]

Llama 3.1 with 8B, 70B and 405B parameters on 8, 64 and 1024 H100, nothing taken from earlier runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from evenpipe.runtime.trace import machine

MODELS = Path(__file__).resolve().parent.parent / "examples" / "models"
PLANNED = {"llama-3.1-8b": 8, "llama-3.1-70b": 64, "llama-3.1-405b": 1024}
EXPLAINED = {"qwen3-8b": 8, "llama-3.1-70b": 64}


def commands() -> list[list[str]]:
    """Arguments of evenpipe."""
    plan = [
        ["plan", "--model", name, "--gpus", str(gpus), "--hardware", "H100-80G", "--sequence", "8192", "--no-cache"]
        for name, gpus in PLANNED.items()
    ]
    return plan + [["explain", name, "--gpus", str(gpus)] for name, gpus in EXPLAINED.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=3, help="of each command (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE.json")
    given = parser.parse_args()
    results: dict[str, Any] = {**machine(torch.device("cpu")), "cores": os.cpu_count(), "cases": []}
    for arguments in commands():
        models = {name: str(MODELS / f"{name}.json") for name in (*PLANNED, *EXPLAINED)}
        command = [sys.executable, "-m", "evenpipe.cli.main", *(models.get(one, one) for one in arguments)]
        seconds = []
        for _ in range(given.repetitions):
            started = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            seconds.append(time.perf_counter() - started)
        text = f"evenpipe {' '.join(arguments)}"
        print(f"{statistics.median(seconds):7.1f} s  {text}", flush=True)
        results["cases"].append({"command": text, "seconds": seconds})
        if given.output is not None:
            given.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
