"""What the interpreter runs a compiler must take too: every kernel is compiled for a Hopper GPU, which needs none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.mark.slow
def test_every_kernel_compiles(tmp_path: Path) -> None:
    program = Path(__file__).with_name("compile_kernels.py")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, "\n".join([*(line for line in lines if "FAILED" in line), done.stderr[-2000:]])
    kernels = {line.split()[0] for line in lines}
    assert kernels == {
        "exponentials_of_rows",
        "combine_rows",
        "hidden_gradient_of_rows",
        "scaled_rows",
        "add_label_rows",
        "logits",
    }
    assert all(line.endswith(": compiled") for line in lines)
