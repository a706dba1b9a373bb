"""The same functions on a GPU, with labels and token weights on the host. The CPU runs the test too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from vocabulary_reference import BACKWARDS, Problem, assert_close, problem, reference, sharded

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


OPTIONS = {
    "plain": LossOptions(),
    "everything": LossOptions(label_smoothing=0.1, z_loss=1e-3, soft_cap=8.0, logit_scale=0.7),
}


@pytest.mark.parametrize("torch_device", DEVICES)
def test_gradients(torch_device: str, combinations) -> None:
    for name, dtype, keep, backward in combinations(OPTIONS, TOLERANCES, ("probabilities", "nothing"), BACKWARDS):
        inputs = problem(96, 64, 512, bias=True, ignored=(0, 50)).to(dtype)
        options = replace(OPTIONS[name], keep=keep, rows_per_block=32)
        actual = sharded(inputs.on(torch_device), options, 3, backward=backward).on_host()
        assert_close(actual, reference(inputs, options), TOLERANCES[dtype][torch_device != "cpu"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_more_logits_than_32_bits_count() -> None:
    """The last tokens of 2.2 billion logits, which are beyond any 32-bit offset, beside the same tokens alone."""
    tokens, vocabulary, last = 66_000, 33_000, 64
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(tokens, 64, generator=generator, device="cuda").bfloat16()
    weight = torch.randn(vocabulary, 64, generator=generator, device="cuda").bfloat16() / 8
    labels = torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(0))
    whole = Problem(hidden, weight, None, labels, torch.ones(tokens))
    alone = Problem(hidden[-last:], weight, None, labels[-last:], torch.ones(last))
    found = sharded(whole, LossOptions(), 1)
    expected = sharded(alone, LossOptions(), 1)
    torch.testing.assert_close(found.losses[-last:], expected.losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.hidden[-last:], expected.hidden, rtol=1e-2, atol=1e-3)
