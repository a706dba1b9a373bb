"""Closed forms of layers against the coefficients of the literature, in bf16."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evenpipe.memory.cut import Portion
from evenpipe.memory.kernels import PRESETS, Kernels
from evenpipe.memory.layers import LayerBytes, layer_bytes
from evenpipe.memory.pieces import Piece
from evenpipe.model.shape import AttentionShape, LayerShape, MlpShape, RotaryShape

FUSED, UNFUSED = PRESETS["fused"], replace(PRESETS["fused"], activation="eager")
BATCH, SEQUENCE = 2, 256
SMALL = ("log-sum-exp", "statistics of norms")


def llama(hidden: int, mlp: int, heads: int, key_value_heads: int) -> LayerShape:
    return LayerShape(
        hidden_size=hidden,
        attention=AttentionShape(heads=heads, key_value_heads=key_value_heads, head_size=hidden // heads),
        rotary=RotaryShape(size=hidden // heads),
        mlp=MlpShape(size=mlp, gated=True, activation="silu"),
        norms=("before attention", "before mlp"),
    )


SHAPES = [(512, 1792, 8, 2), (256, 896, 4, 1), (1024, 2816, 16, 16)]
SHAPE = llama(*SHAPES[0])
"""r = 1/4 and q = 3.5."""


def of(shape: LayerShape, kernels: Kernels = FUSED, checkpointing: str = "none", **options) -> LayerBytes:
    portion = Portion(microbatch_size=BATCH, sequence=SEQUENCE, element=2, **options)
    return layer_bytes(shape, kernels, portion, checkpointing)


def kept(layer: LayerBytes, *, small: bool = True) -> int:
    """Of the layer and its input, from F to the backward; without log-sum-exp and statistics of norms, if asked for."""
    return (
        layer.saved
        + layer.saves_input * layer.input
        - (0 if small else sum(layer.tensors.get(name, 0) for name in SMALL))
    )


def per_unit(size: int, shape: LayerShape = SHAPE, tp: int = 1, cp: int = 1) -> float:
    """In units of s b h / (t c)."""
    return size / (BATCH * SEQUENCE * shape.hidden_size / tp / cp)


def test_saved_with_flash_attention() -> None:
    """12 + 4r + 6q fused and 12 + 4r + 8q unfused, log-sum-exp and inverse deviations beside."""
    for sizes in SHAPES:
        shape, (h, f, a, k) = llama(*sizes), sizes
        r, q = k / a, f / h
        statistics = 4 * a / h + 8 / h
        for tp, cp in ((1, 1), (2, 1), (1, 2), (4, 2)):
            if tp > k:  # with fewer heads of keys and values, some are held several times
                continue
            for kernels, mlp in ((FUSED, 6), (UNFUSED, 8)):
                coefficient = per_unit(kept(of(shape, kernels, tp=tp, cp=cp)), shape, tp, cp)
                assert coefficient == pytest.approx(12 + 4 * r + mlp * q + statistics, abs=5e-5), (sizes, tp, cp)


def test_published_models_without_statistics() -> None:
    """Llama 3 8B, 70B and 405B: 34.0, 33.5, 31.75 fused; 41.0, 40.5, 38.25 with the activated gate kept."""
    expected = {
        (4096, 14336, 32, 8): (34.0, 41.0),
        (8192, 28672, 64, 8): (33.5, 40.5),
        (16384, 53248, 128, 8): (31.75, 38.25),
    }
    for sizes, figures in expected.items():
        shape = llama(*sizes)
        assert tuple(per_unit(kept(of(shape, kernels), small=False), shape) for kernels in (FUSED, UNFUSED)) == figures


def test_what_other_choices_keep() -> None:
    few, enough = SHAPE, llama(512, 1792, 8, 8)
    for options in ({"tp": 8}, {"piece": Piece(ends=(SEQUENCE,), ranks=8, exchange="heads")}):
        assert of(few, **options).saved == of(enough, **options).saved, "every GPU has a whole head of keys and values"
    r, q, tokens, tp = 1 / 4, 3.5, BATCH * SEQUENCE, 2
    whole_stream = kept(of(SHAPE, tp=tp, sequence_parallel=False))  # T h (8 + (4 + 4r + 6q) / t)
    assert whole_stream == tokens * 512 * (8 + (4 + 4 * r + 6 * q) / tp) + 4 * tokens * 8 / tp + 8 * tokens
    # Llama's norm on bf16 saves its input in fp32 and the product in bf16 in place of its input: 6 for 2
    assert per_unit(kept(of(SHAPE, replace(FUSED, norm="eager"))) - kept(of(SHAPE))) == 2 * (6 - 2)


def test_kept_when_parts_run_again() -> None:
    expected = {
        "none": 12 + 1 + 21,
        "core attention": 12 + 1 + 21,
        "norms": 8 + 1 + 21,
        "activation": 12 + 1 + 21 - 7,
        "mlp": 10 + 1,
        "attention": 6 + 21,
        "full": 2,
    }
    found = {name: round(per_unit(kept(of(SHAPE, checkpointing=name), small=False)), 4) for name in expected}
    assert found == expected


def test_the_backward_of_attention_holds_the_keys_of_other_context_ranks() -> None:
    """Seven ranks' keys, values and gradients of both."""
    shape = llama(512, 64, 8, 8)
    alone, shared = (
        layer_bytes(shape, FUSED, Portion(microbatch_size=2, sequence=128 * ranks, element=2, cp=ranks))
        for ranks in (1, 8)
    )
    peaks = [layer.peaks.backward[True, True, False, False] for layer in (alone, shared)]
    assert shared.saved == alone.saved and peaks[1] - peaks[0] == 7 * 4 * 2 * 128 * 512 * 2
