"""Triton's kernels: on a GPU, or interpreted on the CPU in fp32 and fp64. See also conftest.py."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from vocabulary_reference import BACKWARDS, KEEP, assert_close, problem, reference, sharded

from evenpipe.errors import InputError
from evenpipe.vocabulary import Buffers, LossOptions, kernels, output, split
from evenpipe.vocabulary.buffers import aligned
from evenpipe.vocabulary.kernels import choose
from evenpipe.vocabulary.targets import Targets, targets_on_device

triton_kernels = pytest.importorskip("evenpipe.vocabulary.kernels.triton_kernels", reason="Triton is not installed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMOOTHED = LossOptions(label_smoothing=0.1, rows_per_block=5, kernels="triton")
OPTIONS = {
    "plain": LossOptions(kernels="triton"),
    "smoothing": SMOOTHED,
    "soft-cap": LossOptions(soft_cap=3.0, rows_per_block=8, kernels="triton"),
    "entropy": LossOptions(entropy=True, kernels="triton"),
    "everything": replace(SMOOTHED, z_loss=1e-3, soft_cap=5.0, logit_scale=0.7, rows_per_block=8, entropy=True),
}
TOLERANCES = {torch.float64: 1e-10, torch.float32: 2e-5}


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of logits and of hidden states in several pieces, the last one not whole."""
    monkeypatch.setattr(triton_kernels, "COLUMNS_AT_ONCE", 16)
    monkeypatch.setattr(triton_kernels, "HIDDEN_AT_ONCE", 8)
    monkeypatch.setattr(triton_kernels, "TOKENS_AT_ONCE", 8)


class Padded(Buffers):
    """Rows begin where they do on a GPU, and what lies between them is NaN."""

    def take(self, rows: int, columns: int, like: Tensor, dtype: torch.dtype, *, room: int = 0) -> Tensor:
        taken = super().take(rows, columns, like, dtype, room=room)
        taken.as_strided((taken.untyped_storage().nbytes() // taken.element_size(),), (1,), 0).fill_(torch.nan)
        return taken

    @staticmethod
    def _distance(columns: int, like: Tensor) -> int:
        return aligned(columns)


@pytest.mark.usefixtures("small_tiles")
def test_gradients_of_rows_that_are_further_apart_than_they_are_long(sample) -> None:
    """Several shards, ignored tokens, more tokens of one target than are taken at once, rows that pad the
    vocabulary."""
    for name, backward, keep in sample(itertools.product(OPTIONS, BACKWARDS, KEEP), 1):
        dtype = torch.float32 if backward == "two barriers" else torch.float64
        inputs = problem(13, 12, 50, bias=True, ignored=(0, 7)).to(dtype)
        inputs.labels[2:13] = 11
        inputs.labels[7] = -100
        for kernel in ("torch", "triton"):
            options = replace(OPTIONS[name], keep=keep, kernels=kernel)
            actual = sharded(inputs.on(DEVICE), options, 3, backward=backward, padded_rows=56, buffers=Padded())
            tolerance = TOLERANCES[dtype]
            assert_close(actual, reference(inputs, options), tolerance, row_tolerance=5 * tolerance)


@pytest.mark.usefixtures("small_tiles")
def test_labels_on_the_device(sample, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for them: ignored tokens stay, marked, and what stands in their hidden states reaches nothing."""

    def find(labels: Tensor, shard: object, ignore_index: int, *_: object, **__: object) -> Targets:
        return targets_on_device(labels.to(DEVICE), shard, ignore_index)

    monkeypatch.setattr(output, "find_targets", find)
    for name, backward in sample(itertools.product(OPTIONS, BACKWARDS), 1):
        inputs = problem(9, 12, 50, bias=True, ignored=(2, 3)).to(torch.float64)
        expected = reference(inputs, OPTIONS[name])
        inputs.hidden[2] = torch.nan
        inputs.hidden[3] = torch.inf
        actual = sharded(inputs.on(DEVICE), OPTIONS[name], 2, backward=backward)
        assert_close(actual, expected, 1e-10)


def test_a_label_on_the_device_that_is_no_token() -> None:
    (shard,) = split(20, 1)
    with pytest.raises(RuntimeError, match="neither a token of the vocabulary nor ignore_index"):
        targets_on_device(torch.tensor([3, 20]), shard, -100)


# --- which version ---------------------------------------------------------------------------------------------------


def test_which_kernels_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match='kernels is "cuda"; it must be one of auto, torch, triton'):
        LossOptions(kernels="cuda")  # type: ignore[arg-type]
    for torch_device in ("cpu", "meta"):
        assert type(choose(LossOptions(), torch.zeros(1, device=torch_device))).__name__ == "Kernels"
    with monkeypatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "0")
        with pytest.raises(InputError, match=r"the tensors are on 'cpu', not on a GPU"):
            choose(LossOptions(kernels="triton"), torch.zeros(1))
    monkeypatch.setattr(kernels, "_has_triton", lambda: False)
    with pytest.raises(InputError, match='kernels is "triton", which is not installed; "auto" and "torch" work'):
        choose(LossOptions(kernels="triton"), torch.zeros(1))
    assert type(choose(LossOptions(), torch.zeros(1, device=DEVICE))).__name__ == "Kernels"


@pytest.mark.slow
def test_every_kernel_compiles(tmp_path: Path) -> None:
    """What is interpreted a compiler must take too: every kernel is compiled for a Hopper GPU, which needs none."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    program = [sys.executable, Path(__file__).with_name("compile_kernels.py")]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, "\n".join([*(line for line in lines if "FAILED" in line), done.stderr[-2000:]])
    rows = {"exponentials_of_rows", "combine_rows", "hidden_gradient_of_rows", "scaled_rows", "add_label_rows"}
    assert {line.split()[0] for line in lines} == rows | {"logits"}
    assert all(line.endswith(": compiled") for line in lines)
