"""Rerun the scripts whose figures the documentation quotes, and rewrite their files and docs/measurements.md.

    python benchmarks/figures.py [--list] [NAME ...]

NAME is a file of benchmarks/results without its ending; without names, all of them are rerun, which takes hours.
Figures that need a GPU, or root, are listed as not rerun where that is missing. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Figures:
    """A file of figures: the command that writes it, without `--output`, and roughly how long that takes."""

    command: str
    minutes: int
    needs: str = ""
    """"a GPU", or "root" for network namespaces."""

    def missing(self) -> str:
        """Return why the command cannot run on this machine; empty if it can."""
        if self.needs == "a GPU" and not torch.cuda.is_available():
            return "it needs an NVIDIA GPU"
        if self.needs == "root" and os.geteuid():
            return "it needs root, for network namespaces"
        return ""


FIGURES = {
    "against_torch": Figures("against_torch.py --repetitions 40", 60),
    "arrangement": Figures("arrangement.py", 30),
    "balance_2_cores": Figures("balance.py --schedules 1f1b --hidden-size 512 --microbatches 16", 25),
    "balance_schedules": Figures("balance.py", 60),
    "expert_exchange_2_cores": Figures("expert_exchange.py", 20),
    "expert_network_2_cores": Figures("expert_network.py", 10, needs="root"),
    "linear_cross_entropy_2_cores": Figures("linear_cross_entropy.py", 15),
    "long_sequences_2_cores": Figures("long_sequences.py --layers 2 --hidden-size 128 --rounds 2", 10),
    "measured_2_cores": Figures("measured.py --rounds 4 --profiled-steps 2 --repetitions 2", 60),
    "offload_memory": Figures("offload_memory.py", 15),
    "plan_times_2_cores": Figures("plan_times.py", 10),
    "planned_2_cores": Figures("planned.py --turns 8", 30),
    "planned_axes_2_cores": Figures("planned.py --plans axes --vocabulary 8192 --turns 3 --profiled-steps 1", 30),
    "planned_experts_2_cores": Figures("planned.py --plans experts --vocabulary 8192 --turns 3 --profiled-steps 1", 30),
    "published_models_a100": Figures("gpu/published_models.py --kernels megatron --models 4B 10B 21B 7B 30B", 10),
    "published_profile": Figures("published_profile.py", 1),
    "published_rows": Figures("published_rows.py", 3),
    "published_steps": Figures("published_steps.py", 1),
    "schedules": Figures("schedules.py", 10),
    "slow_device_2_cores": Figures("slow_device.py", 10),
    "tensor_overlap_2_cores": Figures("tensor_overlap.py", 5),
    "tensor_ranks_2_cores": Figures("tensor_ranks.py", 10),
    "gpu_memory_h100": Figures("gpu/memory.py", 5, needs="a GPU"),
    "gpu_offload_h100": Figures("offload_gpu.py", 5, needs="a GPU"),
    "gpu_one_h100": Figures("gpu/one_gpu.py", 5, needs="a GPU"),
    "gpu_output_layer_h100": Figures("gpu/output_layer.py --shapes 4096x4096x128256 --logits random", 3, needs="a GPU"),
    "gpu_pass_times_h100": Figures("gpu/pass_times.py --costs runs/costs --models Llama-3-8B", 5, needs="a GPU"),
    "gpu_planned_steps_h100": Figures("gpu/planned_steps.py", 3, needs="a GPU"),
    "gpu_products_h100": Figures("gpu/products.py --tokens 2048 4096 8192", 3, needs="a GPU"),
    "gpu_shards_h100": Figures("gpu/shards.py --shapes 4096x4096x128256", 3, needs="a GPU"),
    "gpu_test": Figures("../tests/gpu/run_gpu.py", 5, needs="a GPU"),
}


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--list", action="store_true", help="show the commands instead of running them")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - FIGURES.keys()):
        parser.error(f"NAME is {', '.join(unknown)}; it must be some of {', '.join(FIGURES)}")
    failed = []
    for name in options.names or FIGURES:
        figures = FIGURES[name]
        path = RESULTS / f"{name}.json"
        missing = figures.missing()
        print(
            f"{name}: {f'not rerun, {missing}' if missing else f'{figures.command}, {figures.minutes} minutes'}",
            flush=True,
        )
        if missing or options.list:
            continue
        script, *arguments = shlex.split(figures.command)
        command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments, "--output", str(path)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode:
            failed.append(name)
    if not options.list:
        subprocess.run([sys.executable, str(ROOT / "tools" / "measurements_page.py")], check=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
