"""Shapes of layers as read from transformers' models, against what their code says and the parameters they hold."""

from dataclasses import replace
from operator import attrgetter

import pytest
from families import NAMED, tiny_config

from evenpipe.errors import InputError
from evenpipe.memory.closed import ClosedForms
from evenpipe.memory.cut import Portion
from evenpipe.memory.kernels import PRESETS
from evenpipe.memory.layers import layer_bytes
from evenpipe.model import describe
from evenpipe.model.shape import ExpertsShape, layer_shapes

PRE, POST = ("before attention", "before mlp"), ("after attention", "after mlp")

# family -> what differs from Llama; by hand, from the modules of transformers
DIFFERENCES = {
    "llama": {},
    "qwen2": {"attention.output_bias": False, "mlp.bias": False},
    "qwen3": {"attention.head_size": 24, "attention.query_key_norm": "head", "mlp.bias": False},
    "mistral": {"attention.bias": False, "attention.output_bias": False, "mlp.bias": False, "attention.window": 8},
    "gemma2": {
        "norms": ("before attention", "after attention", "before mlp", "after mlp"),
        "norm_style": "plus one",
        "attention.eager": True,
        "attention.soft_cap": True,
        "mlp.activation": "gelu_pytorch_tanh",
        "mlp.bias": False,
    },
    "gemma3_text": {
        "norms": ("before attention", "after attention", "before mlp", "after mlp"),
        "norm_style": "plus one",
        "attention.query_key_norm": "head",
        "mlp.activation": "gelu_pytorch_tanh",
        "attention.bias": False,
        "attention.output_bias": False,
        "mlp.bias": False,
    },
    "phi3": {
        "attention.qkv": "sliced",
        "mlp.packed_gate": True,
        "rotary.joined": True,
        "attention.bias": False,
        "attention.output_bias": False,
        "mlp.bias": False,
        "attention.window": 8,
    },
    "olmo2": {
        "norms": POST,
        "norm_style": "wide",
        "attention.query_key_norm": "whole",
        "rotary.wide_table": True,
        "mlp.bias": False,
    },
    "granite": {"scaled_residual": True, "mlp.bias": False},
    "smollm3": {"mlp.bias": False},
    "gpt_neox": {
        "norm_style": "torch",
        "attention.key_value_heads": 4,
        "mlp.gated": False,
        "mlp.activation": "gelu",
        "attention.qkv": "packed",
        "rotary.size": 4,
        "rotary.joined": True,
    },
    "cohere2": {
        "norm_style": "centred",
        "norms": ("before attention",),
        "parallel": True,
        "rotary.wide": True,
        "mlp.bias": False,
    },
    "starcoder2": {
        "norm_style": "torch",
        "mlp.gated": False,
        "mlp.activation": "gelu_pytorch_tanh",
        "attention.window": 8,
    },
    "gpt2": {
        "norm_style": "torch",
        "attention.key_value_heads": 4,
        "mlp.gated": False,
        "mlp.size": 256,
        "mlp.activation": "gelu_new",
        "attention.qkv": "packed",
        "rotary.size": 0,
        "attention.wide_softmax": False,
    },
    "phi": {
        "norm_style": "torch",
        "norms": ("before attention",),
        "parallel": True,
        "mlp.gated": False,
        "mlp.activation": "gelu_new",
        "rotary.joined": True,
        "rotary.size": 8,
    },
}
LLAMA = {
    "hidden_size": 64,
    "attention.heads": 4,
    "attention.key_value_heads": 2,
    "attention.head_size": 16,
    "mlp.size": 96,
    "mlp.gated": True,
    "mlp.activation": "silu",
    "norms": PRE,
    "norm_style": "narrow",
    "attention.query_key_norm": "none",
    "parallel": False,
    "attention.qkv": "apart",
    "mlp.packed_gate": False,
    "attention.bias": True,
    "attention.output_bias": True,
    "mlp.bias": True,
    "attention.window": None,
    "attention.eager": False,
    "attention.soft_cap": False,
    "attention.wide_softmax": True,
    "rotary.wide_table": False,
    "rotary.wide": False,
    "rotary.joined": False,
    "scaled_residual": False,
    "dropout": False,
}


def test_all_named_families_are_there():
    assert set(NAMED) < set(DIFFERENCES)


@pytest.mark.parametrize("family", DIFFERENCES)
def test_shape_of_a_layer_that_looks_at_everything(family):
    """The second layer: in the tiny configs the first kind of attention that has no window, where there are two."""
    shape = layer_shapes(describe(tiny_config(family)))[1]
    expected = LLAMA | DIFFERENCES[family]
    found = {name: attrgetter(name)(shape) for name in expected}
    assert found == expected


@pytest.mark.parametrize("family", DIFFERENCES)
def test_matrices_are_those_of_the_skeleton(family):
    description = describe(tiny_config(family))
    for index, shape in enumerate(layer_shapes(description)):
        attention = 2 * (shape.attention.heads + shape.attention.key_value_heads) * shape.attention.head_size
        mlp = (3 if shape.mlp.gated else 2) * shape.mlp.size
        held = sum(one.numel() for one in description.layer(index).parameters() if one.dim() > 1)
        assert shape.hidden_size * (attention + mlp) == held


def test_kinds_of_layers_differ():
    by_window = [shape.attention.window for shape in layer_shapes(describe(tiny_config("qwen2")))]
    assert by_window == [8, None, 8, None]
    rotated = [shape.rotary.size for shape in layer_shapes(describe(tiny_config("smollm3")))]
    assert rotated == [16, 16, 0, 16]
    rotated = [shape.rotary.size for shape in layer_shapes(describe(tiny_config("cohere2")))]
    assert rotated == [16, 0, 16, 0]
    tables = {shape.rotary.table for shape in layer_shapes(describe(tiny_config("gemma3_text")))}
    assert tables == {"sliding_attention", "full_attention"}


def test_side_by_side_with_two_norms():
    shape = layer_shapes(describe(tiny_config("gpt_neox", use_parallel_residual=True)))[0]
    assert shape.parallel
    assert shape.norms == PRE


def test_unknown_type_is_named():
    with pytest.raises(InputError, match="model_type: 'bloom'"):
        layer_shapes(describe(tiny_config("bloom")))
    with pytest.raises(InputError, match="model_type: 'gpt_oss'"):
        layer_shapes(describe(tiny_config("gpt_oss")))


def test_experts():
    dense, mixture = (layer_shapes(describe(tiny_config("qwen3_moe")))[index].mlp for index in (1, 2))
    assert (dense.size, dense.experts) == (96, None)
    assert mixture.size == 40 and mixture.gated and not mixture.bias
    assert mixture.experts == ExpertsShape(count=5, choices=2, shares=True, narrow_weights=True)
    assert not layer_shapes(describe(tiny_config("olmoe")))[0].mlp.experts.shares
    assert not layer_shapes(describe(tiny_config("mixtral")))[0].mlp.experts.narrow_weights


@pytest.mark.parametrize(("kernels", "ranks"), [("megatron", 1), ("transformers", 2)])
def test_experts_of_other_frameworks_and_of_tensor_ranks_have_no_closed_form(kernels, ranks):
    closed, portion = ClosedForms(describe(tiny_config("mixtral"))), Portion(microbatch_size=1, sequence=8, tp=ranks)
    with pytest.raises(InputError, match="experts have no closed form"):
        closed.stage(0, 2, portion, is_first=True, is_last=False, kernels=PRESETS[kernels])


def test_what_has_no_closed_form_is_refused():
    dropped = describe(tiny_config("gpt2", resid_pdrop=0.1))
    with pytest.raises(InputError, match="dropout"):
        ClosedForms(dropped)
    shape = layer_shapes(dropped)[0]
    portion = Portion(microbatch_size=1, sequence=8)
    with pytest.raises(InputError, match="dropout"):
        layer_bytes(shape, PRESETS["fused"], portion)
    shape = layer_shapes(describe(tiny_config("llama")))[0]
    with pytest.raises(InputError, match="checkpointing: 'half'"):
        layer_bytes(shape, PRESETS["fused"], portion, "half")
    with pytest.raises(InputError, match=r"heads over tensor parallelism: 4 cannot be cut into 3"):
        layer_bytes(shape, PRESETS["fused"], replace(portion, tp=3))
