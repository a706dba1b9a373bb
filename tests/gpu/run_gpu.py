"""`make gpu-test`: runs all cases of gpu_cases.py on this machine's GPU and writes down the figures; then the tests of
the vocabulary layers, whose kernels run there too.

    python tests/gpu/run_gpu.py [--output benchmarks/results/gpu_test.json]

Without a GPU it says so and ends with exit code 0.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).resolve().parent), str(ROOT / "benchmarks")]

from provenance import write  # noqa: E402

VOCABULARY = Path(__file__).resolve().parents[1] / "vocabulary"
RESULTS = ROOT / "benchmarks" / "results" / "gpu_test.json"


def no_gpu() -> str | None:
    """Why there is nothing to run on, in one sentence; None where there is a GPU."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA, so it sees no NVIDIA GPU"
    return f"torch {torch.__version__} sees no NVIDIA GPU on this machine"


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs evenpipe on this machine's GPU.")
    parser.add_argument("--output", type=Path, default=RESULTS, help=f"default {RESULTS.name} in benchmarks/results")
    parser.add_argument("--case", action="append", help="only this one; may be repeated")
    arguments = parser.parse_args()
    reason = no_gpu()
    if reason is not None:
        print(f"The GPU tests were skipped: {reason}.")
        return 0
    from gpu_cases import CASES

    versions = {
        "gpus": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    chosen = {name: CASES[name] for name in arguments.case or CASES}
    begun = time.perf_counter()
    together = results_together(chosen)
    print(f"{len(together)} cases ran in the same processes  ({time.perf_counter() - begun:.1f} s)", flush=True)
    figures, failed = {}, []
    for name, case in chosen.items():
        begun = time.perf_counter()
        try:
            results = together.get(name)
            found = case("cuda") if results is None else case.figures(results, "cuda")
            figures[name] = {"passed": True, **found}
        except Exception as error:
            traceback.print_exc()
            figures[name] = {"passed": False, "error": f"{type(error).__name__}: {error}"}
            failed.append(name)
        seconds = time.perf_counter() - begun
        print(f"{'FAILED' if name in failed else 'passed'}  {name}  ({seconds:.1f} s)  {figures[name]}", flush=True)
        write(arguments.output, {**versions, "cases": figures}, torch.device("cuda"))
    print(f"{len(figures) - len(failed)} of {len(figures)} passed; figures in {arguments.output}")
    kernels = 0 if arguments.case else test_kernels()
    return 1 if failed or kernels else 0


def results_together(cases: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """What 4 processes found in the comparisons that they share; nothing if one of them ended the processes."""
    from gpu_cases import Comparison, results_of

    shared = {name: case for name, case in cases.items() if isinstance(case, Comparison) and case.processes == 4}
    try:
        found = results_of(list(shared.values()), "cuda") if shared else []
    except Exception:
        traceback.print_exc()
        return {}
    return dict(zip(shared, found, strict=True))


def test_kernels() -> int:
    """Exit status of the tests of the vocabulary layers. Most of their time goes by compiling kernels, on the host."""
    command = [sys.executable, "-m", "pytest", "-q", VOCABULARY]
    if find_spec("xdist") is not None:
        command += ["-n", "8"]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
