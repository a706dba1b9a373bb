"""Closed forms of layers against the coefficients of the literature."""

from dataclasses import replace

import pytest
from families import NAMED

from evenpipe.memory.cut import Portion
from evenpipe.memory.kernels import PRESETS, Kernels
from evenpipe.memory.layers import LayerBytes, layer_bytes
from evenpipe.model.shape import AttentionShape, LayerShape, MlpShape, RotaryShape

FAMILIES = [*NAMED, "gpt2", "phi"]
FUSED, UNFUSED = PRESETS["fused"], replace(PRESETS["fused"], activation="eager")
BATCH, SEQUENCE = 2, 256


def llama(hidden: int, mlp: int, heads: int, key_value_heads: int) -> LayerShape:
    return LayerShape(
        hidden_size=hidden,
        attention=AttentionShape(heads=heads, key_value_heads=key_value_heads, head_size=hidden // heads),
        rotary=RotaryShape(size=hidden // heads),
        mlp=MlpShape(size=mlp, gated=True, activation="silu"),
        norms=("before attention", "before mlp"),
    )


SHAPES = [(512, 1792, 8, 2), (256, 896, 4, 1), (1024, 2816, 16, 16)]


def of(
    shape: LayerShape, kernels: Kernels = FUSED, element: int = 2, checkpointing: str = "none", **options
) -> LayerBytes:
    portion = Portion(microbatch_size=BATCH, sequence=SEQUENCE, element=element, **options)
    return layer_bytes(shape, kernels, portion, checkpointing)


def kept(layer: LayerBytes) -> int:
    """Of the layer and its input, from F to the backward."""
    return layer.saved + layer.saves_input * layer.input


def backward_peak(layer: LayerBytes) -> int:
    """Within B, of a layer that is a stage of its own."""
    return layer.peaks.backward[True, True, False, False]


def per_unit(size: int, shape: LayerShape, tp: int = 1, cp: int = 1) -> float:
    """In units of s b h / (t c)."""
    return size / (BATCH * SEQUENCE * shape.hidden_size / tp / cp)


# --- the coefficients of the literature, bf16 -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "tp", "cp"),
    [
        (sizes, tp, cp)
        for sizes in SHAPES
        for tp, cp in ((1, 1), (2, 1), (1, 2), (4, 2))
        if tp <= sizes[3]  # with fewer heads of keys and values, some are held several times
    ],
)
def test_saved_with_flash_attention(sizes, tp, cp):
    """12 + 4r + 6q fused and 12 + 4r + 8q unfused, log-sum-exp and inverse deviations beside."""
    shape = llama(*sizes)
    h, f, a, k = sizes
    r, q = k / a, f / h
    statistics = 4 * a / h + 8 / h
    for kernels, mlp in ((FUSED, 6), (UNFUSED, 8)):
        coefficient = per_unit(kept(of(shape, kernels, tp=tp, cp=cp)), shape, tp, cp)
        assert coefficient == pytest.approx(12 + 4 * r + mlp * q + statistics, abs=5e-5)


def test_figures_of_one_shape():
    shape = llama(512, 1792, 8, 2)
    assert round(per_unit(kept(of(shape)), shape), 4) == 34.0781
    assert round(per_unit(kept(of(shape, UNFUSED)), shape), 4) == 41.0781
    packed = replace(FUSED, packed_qkv=True)
    assert per_unit(kept(of(shape, packed)), shape) == pytest.approx(34.0781 + 2 + 2 / 4, abs=5e-5)


def test_published_models_without_statistics():
    """Llama 3 8B, 70B and 405B: 34.0, 33.5, 31.75 fused; 41.0, 40.5, 38.25 with the activated gate kept."""
    expected = {
        (4096, 14336, 32, 8): (34.0, 41.0),
        (8192, 28672, 64, 8): (33.5, 40.5),
        (16384, 53248, 128, 8): (31.75, 38.25),
    }
    for sizes, figures in expected.items():
        shape = llama(*sizes)
        for kernels, figure in zip((FUSED, UNFUSED), figures, strict=True):
            layer = of(shape, kernels)
            small = layer.tensors["log-sum-exp"] + layer.tensors["statistics of norms"]
            assert per_unit(kept(layer) - small, shape) == figure


def test_heads_of_keys_fewer_than_tensor_parallelism():
    """Every GPU holds a whole head of keys and values: as if there were as many as GPUs."""
    few, enough = llama(512, 1792, 8, 2), llama(512, 1792, 8, 8)
    assert of(few, tp=8).saved == of(enough, tp=8).saved


def test_without_sequence_parallelism():
    """T h (8 + (4 + 4r + 6q) / t), inverse deviations whole."""
    shape, tp = llama(512, 1792, 8, 2), 2
    r, q, tokens = 1 / 4, 3.5, BATCH * SEQUENCE
    expected = tokens * 512 * (8 + (4 + 4 * r + 6 * q) / tp) + 4 * tokens * 8 / tp + 8 * tokens
    assert kept(of(shape, tp=tp, sequence_parallel=False)) == expected


def test_eager_attention():
    """fp32 probabilities, their bf16 copy, and keys and values for every head."""
    shape = llama(512, 1792, 8, 2)
    with_squares = of(shape, replace(FUSED, attention="eager"))
    squares = BATCH * 8 * SEQUENCE**2
    others = 12 + 4 + 6 * 3.5 + 8 / 512
    assert kept(with_squares) - 6 * squares == others * BATCH * SEQUENCE * 512


def test_eager_norms_add_what_is_known():
    """Llama's norm on bf16 saves its input in fp32 and the product in bf16 in place of its input: 6 for 2."""
    shape = llama(512, 1792, 8, 2)
    more = per_unit(kept(of(shape, replace(FUSED, norm="eager"))) - kept(of(shape)), shape)
    assert more == 2 * (6 - 2)


@pytest.mark.parametrize(
    ("checkpointing", "expected"),
    [
        ("none", 12 + 1 + 21),
        ("core attention", 12 + 1 + 21),
        ("norms", 8 + 1 + 21),
        ("activation", 12 + 1 + 21 - 7),
        ("mlp", 10 + 1),
        ("attention", 6 + 21),
        ("full", 2),
    ],
)
def test_kept_when_parts_run_again(checkpointing, expected):
    shape = llama(512, 1792, 8, 2)
    layer = of(shape, checkpointing=checkpointing)
    small = sum(layer.tensors.get(name, 0) for name in ("log-sum-exp", "statistics of norms"))
    assert round(per_unit(kept(layer) - small, shape), 4) == expected


def test_what_w_needs_is_what_f_saved():
    """Inputs 6 + 2q and output gradients 6 + 4r + 4q of the seven products."""
    shape = llama(512, 1792, 8, 2)
    assert per_unit(of(shape).queued, shape) == 12 + 1 + 21


def test_working_set_of_the_backward():
    """(2 + 4q) above what is saved, reached in the backward of the gate, once weights' gradients need no room."""
    shape = llama(512, 1792, 8, 2)
    fused = of(shape, replace(FUSED, weight_gradient="fused"))
    # The output's gradient (2) is there before.
    assert per_unit(backward_peak(fused), shape) + 2 == 2 + 4 * 3.5
    again = of(shape, replace(FUSED, weight_gradient="fused"), checkpointing="full")
    small = 4 * 8 / 512 + 8 / 512
    # All of the layer but its input and the product that the backward of the gate no longer needs.
    expected = 12 + 1 + 21 - 2 + small + 4 * 3.5
    assert per_unit(backward_peak(again), shape) == pytest.approx(expected, abs=5e-5)
