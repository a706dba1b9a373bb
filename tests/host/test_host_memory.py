"""Memory that a process frees is still there when it takes as much again."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import sys
import torch
from evenpipe.host.memory import keep_freed_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1])

if sys.argv[1] == "kept":
    assert keep_freed_memory()
before = resident()
tensors = [torch.ones(2**21) for _ in range(8)]
while tensors:
    tensors.pop()
print(resident() - before)
"""
glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the process has another C library than glibc")


def run(program: str, *arguments: str, **changes: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.check_output(command, env=environment | changes, text=True).strip()


@pytest.mark.slow
@glibc
def test_pages_stay() -> None:
    """Eight tensors of 8 MiB have 16 384 pages."""
    assert int(run(PROGRAM, "kept")) > 16_000 and int(run(PROGRAM, "given back")) < 1000


@pytest.mark.sampled(1)
@pytest.mark.parametrize("setting", [{"MALLOC_TRIM_THRESHOLD_": "0"}, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}])
def test_settings_of_the_environment_count(setting: dict[str, str]) -> None:
    program = "from evenpipe.host.memory import keep_freed_memory; print(keep_freed_memory())"
    assert run(program, **setting) == "False"
