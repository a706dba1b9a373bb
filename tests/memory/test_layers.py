"""Closed forms of layers against the coefficients of the literature, in bf16."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evenpipe.memory.cut import Portion
from evenpipe.memory.kernels import PRESETS, Kernels
from evenpipe.memory.layers import LayerBytes, layer_bytes
from evenpipe.memory.operations import Operations
from evenpipe.memory.sketch import Tape
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


def test_blocks_that_gather_their_input() -> None:
    """Kept from F: (12 + 4r + 6q) / t, and where the forward is repeated the rest of both gathered inputs. Between I
    and W: 4 + (8 + 4r + 6q) / t, or less than Megatron-LM, which gathers for every product."""
    for sizes in SHAPES:
        for tp in (2, 4):
            shape, (h, f, a, k) = llama(*sizes), sizes
            r, q = max(k, tp) / a, f / h
            statistics = (4 * a / h + 8 / h) / tp
            layer, again = (of(shape, tp=tp, blocks=True, repeats=repeats) for repeats in (False, True))
            assert per_unit(kept(layer), shape) == pytest.approx((12 + 4 * r + 6 * q) / tp + statistics, abs=5e-5)
            assert per_unit(kept(again) - kept(layer), shape) == pytest.approx(4 * (1 - 1 / tp), abs=5e-5)
            assert per_unit(layer.queued, shape) == pytest.approx(4 + (8 + 4 * r + 6 * q) / tp, abs=1e-9)
    theirs, ours = (of(SHAPE, tp=2, blocks=blocks) for blocks in (False, True))
    assert per_unit(theirs.queued, tp=2) == 12 + 1 + 21
    assert theirs.saved == ours.saved and theirs.queued < ours.queued


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
    assert of(few, tp=8).saved == of(enough, tp=8).saved, "every GPU has a whole head of keys and values"
    packed = of(SHAPE, replace(FUSED, packed_qkv=True))
    assert per_unit(kept(packed, small=False)) == 34 + 2 + 2 / 4
    r, q, tokens, tp = 1 / 4, 3.5, BATCH * SEQUENCE, 2
    whole_stream = kept(of(SHAPE, tp=tp, sequence_parallel=False))  # T h (8 + (4 + 4r + 6q) / t)
    assert whole_stream == tokens * 512 * (8 + (4 + 4 * r + 6 * q) / tp) + 4 * tokens * 8 / tp + 8 * tokens
    # fp32 probabilities, their bf16 copy, and keys and values for every head
    squares = BATCH * 8 * SEQUENCE**2
    assert kept(of(SHAPE, replace(FUSED, attention="eager"))) - 6 * squares == (16 + 6 * q + 8 / 512) * tokens * 512
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


def test_working_set_of_the_backward() -> None:
    """(2 + 4q) above what is saved, reached in the backward of the gate, once weights' gradients need no room. W needs
    inputs 6 + 2q and output gradients 6 + 4r + 4q of the seven products."""
    assert per_unit(of(SHAPE).queued) == 12 + 1 + 21
    kernels = replace(FUSED, weight_gradient="fused")
    fused, again = (of(SHAPE, kernels, checkpointing) for checkpointing in ("none", "full"))
    peaks = [per_unit(layer.peaks.backward[True, True, False, False]) for layer in (fused, again)]
    assert peaks[0] + 2 == 2 + 4 * 3.5  # the output's gradient (2) is there before
    # All of the layer but its input and the product that the backward of the gate no longer needs.
    assert peaks[1] == pytest.approx(12 + 1 + 21 - 2 + 40 / 512 + 4 * 3.5, abs=5e-5)


def test_context_parallelism_holds_the_keys_of_others() -> None:
    """While attention runs: their keys and values; in its backward their gradients too."""
    peaks = {}
    for others in (0, 120):
        tape = Tape()
        hidden = tape.new(100, 4)
        hidden.node = tape.leaf()
        operations = Operations(tape)
        before = tape.meter.live
        queries, keys, values = operations.parts(hidden, [60, 20, 20])
        result = operations.flash_attention(queries, keys, values, size=60, rows=6, others=others)
        forward, root, gradients = tape.meter.peak - before, result.node, [tape.new(60, 4)]
        del result
        before = tape.meter.live
        tape.meter.reset()
        tape.backward(root, gradients)
        peaks[others] = (forward, tape.meter.peak - before)
    assert peaks[120][0] - peaks[0][0] == 120 * 4 < peaks[120][1] - peaks[0][1] <= 2 * 120 * 4
