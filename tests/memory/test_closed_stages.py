"""Closed forms of whole stages: their ends, their checkpointing, and against real tensors."""

import pytest
import torch
from back_ends import PASSES, WITH_R, both
from families import NAMED, tiny_config
from torch.autograd.graph import get_gradient_edge

from evenpipe.memory.closed import ClosedForms
from evenpipe.memory.cut import Portion
from evenpipe.memory.kernels import PRESETS
from evenpipe.memory.tracker import Tracker
from evenpipe.model import build_stage, describe

FAMILIES = [*NAMED, "gpt2", "phi"]
CASES = [(torch.float32, 2, 12), (torch.bfloat16, 3, 7), (torch.bfloat16, 1, 12)]
"""dtype, sequences, tokens: the tiny configs look back on 8 tokens."""


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize(("first", "last"), [(0, 2), (2, 4)])
@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "mixtral"])
@pytest.mark.sampled(3)
def test_stages_at_the_ends(family, first, last, checkpointing):
    """What comes before the layers and after them."""
    case = (torch.bfloat16, 2, 12)
    ours, traced = both(family, PRESETS["transformers"], case, first=first, last=last, checkpointing=checkpointing)
    assert (ours.stored, ours.queued) == (traced.stored, traced.queued)
    for name in (*PASSES, *WITH_R):
        assert getattr(ours.peaks, name) == getattr(traced.peaks, name), name


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "cohere2", "gemma2", "mixtral", "olmoe"])
@pytest.mark.sampled(2)
def test_kept_under_checkpointing(family):
    for checkpointing in ("full", "selective"):
        ours, traced = both(
            family, PRESETS["transformers"], (torch.bfloat16, 2, 12), checkpointing=checkpointing, recompute=False
        )
        assert ours.stored == traced.stored, checkpointing


@pytest.mark.parametrize("case", [(torch.float32, 2, 12), (torch.bfloat16, 3, 7)], ids=str)
@pytest.mark.parametrize("checkpointing", ["full", "selective"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe", "gemma2", "mistral"])
@pytest.mark.sampled(5)
def test_peaks_under_checkpointing(family, checkpointing, case):
    ours, traced = both(family, PRESETS["transformers"], case, checkpointing=checkpointing)
    for name in (*PASSES, *WITH_R):
        assert getattr(ours.peaks, name) == getattr(traced.peaks, name), name


@pytest.mark.parametrize("family", FAMILIES)
def test_agrees_with_real_tensors(family):
    """The stage run for what it computes, on the CPU, with every storage counted: F and B, gradients there already."""
    description = describe(tiny_config(family))
    for dtype, batch, sequence in CASES:
        stage = build_stage(description, 1, 3, is_first=False, is_last=False, dtype=dtype)
        for parameter in stage.parameters():
            torch.nn.init.normal_(parameter)
            parameter.grad = torch.zeros_like(parameter)
        hidden, gradient = (torch.randn(batch, sequence, 64, dtype=dtype) for _ in range(2))
        with Tracker() as tracker:
            tracker.add(hidden, gradient, *stage.parameters(), *(one.grad for one in stage.parameters()))
            with tracker.span() as forward:
                output = stage(hidden.requires_grad_())
            edge = get_gradient_edge(output)
            size = output.nbytes
            del output
            with tracker.span() as backward:
                torch.autograd.backward((edge,), (gradient,))
        ours = ClosedForms(description).stage(
            1,
            3,
            Portion(microbatch_size=batch, sequence=sequence, element=dtype.itemsize),
            is_first=False,
            is_last=False,
        )
        # LongRoPE makes its frequencies anew: 8 numbers, twice.
        frequencies = 64 if family == "phi3" else 0
        assert forward.kept == ours.stored + size + frequencies
        assert forward.above == ours.peaks.forward + frequencies
        assert backward.above == ours.peaks.backward
