"""Sequences in pieces: closed forms against the reference and against the trace."""

from __future__ import annotations

import pytest
import torch
from back_ends import PASSES, WITH_R
from families import tiny_config
from transformers import LlamaConfig

from evenpipe.memory.closed import ClosedForms
from evenpipe.memory.cut import Portion
from evenpipe.memory.pieces import Piece
from evenpipe.memory.pool import Pool
from evenpipe.memory.traced import StageTracer
from evenpipe.model import describe

SEQUENCE = 24


def test_the_carry_adds_no_byte() -> None:
    """16.84 tensors [tokens, hidden size] per layer: the reference has 16.85, with tables of positions."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
    )
    forms, tokens, unit = ClosedForms(describe(config)), 512, 2 * 512 * 64 * 4
    for slices in (1, 2, 4, 8):
        ends = tuple(tokens * (index + 1) // slices for index in range(slices))
        found = [
            forms.stage(
                0,
                2,
                Portion(microbatch_size=1, sequence=tokens, piece=Piece(ends=ends, index=index)),
                is_first=False,
                is_last=False,
            )
            for index in range(slices)
        ]
        kept = sum(one.input + one.stored for one in found) + found[0].carried
        assert kept == 16.84375 * unit
        assert found[0].carried_gradients == found[0].carried * (slices > 1), "fp32 both"


PIECES = [
    ((SEQUENCE,), 2, "keys"),
    ((SEQUENCE,), 2, "heads"),
    ((14, SEQUENCE), 1, "keys"),
    ((8, 16, SEQUENCE), 1, "keys"),
    ((12, SEQUENCE), 2, "keys"),
]
CASES = [
    *(("llama", torch.float32, checkpointing, first) for checkpointing in ("none", "full") for first in (0, 2)),
    ("gpt2", torch.float32, "none", 1),
    ("llama", torch.bfloat16, "none", 1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("cut", PIECES, ids=str)
@pytest.mark.sampled(5)
def test_agrees_with_the_trace(cut, case):
    """To the byte; in I of bf16 within 2 %."""
    (ends, ranks, exchange), (family, dtype, checkpointing, first) = cut, case
    description = describe(tiny_config(family))
    how = {"is_first": first == 0, "is_last": first == 2, "checkpointing": checkpointing}
    for index in range(len(ends)):
        piece = Piece(ends=ends, index=index, ranks=ranks, exchange=exchange)
        sizes = {"microbatch_size": 2, "sequence": SEQUENCE}
        portion = Portion(element=dtype.itemsize, piece=piece, **sizes)
        ours = ClosedForms(description).stage(first, first + 2, portion, **how)
        tracer = StageTracer(
            description,
            compute_dtype=dtype,
            parameter_dtype=dtype,
            backwards="both",
            recompute=True,
            piece=piece,
            **sizes,
        )
        traced = tracer.stage(first, first + 2, **how)
        names = ("input", "output", "stored", "queued", "moved", "saves_input", "carried", "carried_gradients")
        assert [getattr(ours, name) for name in names] == [getattr(traced, name) for name in names]
        assert ours.peaks.gathered == traced.peaks.gathered
        for name in (*PASSES, *WITH_R):
            slack = 0.02 * traced.peaks.input if name == "input" and dtype == torch.bfloat16 else 0
            assert abs(getattr(ours.peaks, name) - getattr(traced.peaks, name)) <= slack, name


def test_buffers_of_another_size_are_dropped() -> None:
    pool = Pool((34, 30))
    assert pool.take(0) == ([0], [])
    pool.give(0)
    assert pool.take(2) == ([], [])
    pool.give(2)
    assert pool.take(3) == ([1], [0])
