"""examples/train.slurm starts one torchrun per machine, with the address of the first; srun is a stand-in."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train.slurm"
PROGRAMS = {
    # more than a pipe holds: who reads the first line only must not end the script with "broken pipe"
    "scontrol": '#!/bin/bash\n[ "$*" = "show hostnames n[1-2]" ] && printf "n%s\\n" {1..50000}\n',
    # what stands behind the options, once per machine
    "srun": '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nfor id in 0 1; do SLURM_NODEID=$id "$@"; done\n',
    "torchrun": '#!/bin/bash\necho "$GLOO_SOCKET_IFNAME $*"\n',
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "GLOO_", "NCCL_"))}
    return kept | slurm | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}


def test_each_machine_starts_torchrun_with_the_address_of_the_first(environment: dict[str, str]) -> None:
    done = subprocess.run(
        ["bash", str(SCRIPT), "my run.toml"], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        f"ib0 --nnodes 2 --node-rank {rank} --nproc-per-node 8 --master-addr n1 --master-port 29500 "
        "-m evenpipe.cli.main train my run.toml"
        for rank in (0, 1)
    ]


def test_a_job_without_a_configuration_says_so(environment: dict[str, str]) -> None:
    done = subprocess.run(["bash", str(SCRIPT)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "give a configuration" in done.stderr
