"""The same functions on a GPU, with labels and token weights on the host. The CPU runs the test too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from vocabulary_reference import assert_close, problem, reference, sharded

from evenpipe.vocabulary import LossOptions

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
    ),
]
# Products of bf16 are written in fp32 on a GPU; on a CPU they may be rounded to bf16.
TOLERANCES = {
    torch.float64: (1e-10, 1e-10),
    torch.float32: (2e-5, 2e-5),
    torch.bfloat16: (4e-3, 2e-3),
    torch.float16: (2e-5, 2e-5),
}


@pytest.mark.parametrize("torch_device", DEVICES)
@pytest.mark.parametrize("one_barrier", [True, False], ids=["one barrier", "two barriers"])
@pytest.mark.parametrize("keep", ["probabilities", "nothing"])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    "options",
    [LossOptions(), LossOptions(label_smoothing=0.1, z_loss=1e-3, soft_cap=8.0, logit_scale=0.7)],
    ids=["plain", "everything"],
)
def test_gradients(options: LossOptions, dtype: torch.dtype, keep: str, one_barrier: bool, torch_device: str) -> None:
    inputs = problem(96, 64, 512, bias=True, ignored=(0, 50)).to(dtype)
    options = replace(options, keep=keep, rows_per_block=32)
    actual = sharded(inputs.on(torch_device), options, 3, one_barrier=one_barrier).on_host()
    assert_close(actual, reference(inputs, options), TOLERANCES[dtype][torch_device != "cpu"])
