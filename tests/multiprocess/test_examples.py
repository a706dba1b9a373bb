"""What stands in examples/ runs as it stands; configurations with a smaller model and fewer steps. The notebook runs in
a kernel: its functions reach the processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = (
    *("training.steps=2", "checkpoint.every_steps=none", "data.corpus=python-standard-library:json"),
    *("data.sequence_length=32", "tokenizer.vocabulary_size=300", "model.config.hidden_size=16"),
    *("model.config.num_attention_heads=2", "model.config.num_key_value_heads=1", "model.config.num_hidden_layers=8"),
    *("model.config.head_dim=8", "output.tensorboard=false", "output.export=false", "model.self_check=false"),
)


def run(*arguments: object, folder: Path) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "110", "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_a_schedule_of_ones_own_in_twenty_lines(tmp_path: Path) -> None:
    printed = run(EXAMPLES / "own_schedule.py", "step.svg", folder=tmp_path)
    assert "sound; most stage activations in flight, per device: 4 4" in printed
    assert set(re.findall(r"^device (\d) .*S.*I.*T.*W", printed, re.MULTILINE)) == {"0", "1"}  # drawn in pieces
    assert (tmp_path / "step.svg").read_text().startswith("<svg")
    error = re.search(r"error of 39 gradients against one process: (\S+)", printed)
    assert error and float(error[1]) <= 1e-10
    source = (EXAMPLES / "own_schedule.py").read_text()
    function = source[source.index("def eager") : source.index("CONFIG =")].strip().splitlines()
    assert len([line for line in function if line.strip()]) <= 22  # its signature and its docstring are two of them


@pytest.mark.slow
def test_a_configuration_of_little_memory(tmp_path: Path) -> None:
    run("-m", "evenpipe.cli.main", "train", EXAMPLES / "v_half.toml", *SMALL, folder=tmp_path)
    (report,) = tmp_path.glob("runs/*/report.json")
    content = json.loads(report.read_text())
    assert (content["steps"], content["schedule"]["name"], content["schedule"]["stages"]) == (2, "v-half", 8)
    assert content["schedule"]["in_flight"] == [8] * 4  # 6 of the schedule, and one per stage for the barrier


@pytest.mark.slow
def test_the_notebook_trains_stops_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / "jupyter"))
    monkeypatch.delenv("RANK", raising=False)
    notebook = nbformat.read(EXAMPLES / "own_loop.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "outputs belong to whoever ran it"
    check = "import json; print(json.dumps(losses))"
    notebook.cells.append(nbformat.v4.new_code_cell(check))
    client = NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    client.execute()
    losses = json.loads(notebook.cells[-1].outputs[0].text)
    assert list(losses) == [str(step) for step in range(1, 21)]
    assert losses["20"] < 0.9 * losses["11"] < losses["1"]
    assert (tmp_path / "checkpoints" / "step-00000020" / "manifest.json").exists()


# --- train.slurm: one torchrun per machine, with the address of the first; srun is a stand-in -------------------------

SCRIPT = EXAMPLES / "train.slurm"
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
