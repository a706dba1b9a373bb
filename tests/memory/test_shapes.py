"""Shapes of layers as read from transformers' models, against what their code says and the parameters they hold."""

import pytest
from families import NAMED, tiny_config

from evenpipe.errors import InputError
from evenpipe.memory.closed import ClosedForms
from evenpipe.memory.kernels import PRESETS
from evenpipe.memory.layers import layer_bytes
from evenpipe.model import describe
from evenpipe.model.shape import layer_shapes

PRE, POST = ("before attention", "before mlp"), ("after attention", "after mlp")

# family -> what differs from Llama; by hand, from the modules of transformers
DIFFERENCES = {
    "llama": {},
    "qwen2": {"output_bias": False, "mlp_bias": False},
    "qwen3": {"query_size": 24, "query_key_norm": "head", "mlp_bias": False},
    "mistral": {"attention_bias": False, "output_bias": False, "mlp_bias": False, "window": 8},
    "gemma2": {
        "norms": ("before attention", "after attention", "before mlp", "after mlp"),
        "norm_style": "plus one",
        "attention": "eager",
        "soft_cap": True,
        "activation": "gelu_pytorch_tanh",
        "mlp_bias": False,
    },
    "gemma3_text": {
        "norms": ("before attention", "after attention", "before mlp", "after mlp"),
        "norm_style": "plus one",
        "query_key_norm": "head",
        "activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "output_bias": False,
        "mlp_bias": False,
    },
    "phi3": {
        "packed_qkv": True,
        "sliced_qkv": True,
        "packed_gate": True,
        "joined_rotary": True,
        "attention_bias": False,
        "output_bias": False,
        "mlp_bias": False,
        "window": 8,
    },
    "olmo2": {"norms": POST, "norm_style": "wide", "query_key_norm": "whole", "wide_table": True, "mlp_bias": False},
    "granite": {"scaled_residual": True, "mlp_bias": False},
    "smollm3": {"mlp_bias": False},
    "gpt_neox": {
        "norm": "layer",
        "norm_style": "torch",
        "key_value_heads": 4,
        "gated": False,
        "activation": "gelu",
        "packed_qkv": True,
        "rotary_size": 4,
        "joined_rotary": True,
    },
    "cohere2": {
        "norm": "layer",
        "norm_style": "centred",
        "norms": ("before attention",),
        "parallel": True,
        "wide_rotary": True,
        "mlp_bias": False,
    },
    "starcoder2": {
        "norm": "layer",
        "norm_style": "torch",
        "gated": False,
        "activation": "gelu_pytorch_tanh",
        "window": 8,
    },
    "gpt2": {
        "norm": "layer",
        "norm_style": "torch",
        "key_value_heads": 4,
        "gated": False,
        "mlp_size": 256,
        "activation": "gelu_new",
        "packed_qkv": True,
        "rotary_size": 0,
        "wide_softmax": False,
    },
    "phi": {
        "norm": "layer",
        "norm_style": "torch",
        "norms": ("before attention",),
        "parallel": True,
        "gated": False,
        "activation": "gelu_new",
        "joined_rotary": True,
        "rotary_size": 8,
    },
}
LLAMA = {
    "hidden_size": 64,
    "heads": 4,
    "key_value_heads": 2,
    "query_size": 16,
    "mlp_size": 96,
    "gated": True,
    "activation": "silu",
    "norm": "rms",
    "norms": PRE,
    "norm_style": "narrow",
    "query_key_norm": "none",
    "parallel": False,
    "packed_qkv": False,
    "sliced_qkv": False,
    "packed_gate": False,
    "attention_bias": True,
    "output_bias": True,
    "mlp_bias": True,
    "window": None,
    "experts": 0,
    "attention": "sdpa",
    "soft_cap": False,
    "wide_softmax": True,
    "wide_table": False,
    "wide_rotary": False,
    "joined_rotary": False,
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
    found = {name: getattr(shape, name) for name in expected}
    assert found == expected


@pytest.mark.parametrize("family", DIFFERENCES)
def test_matrices_are_those_of_the_skeleton(family):
    description = describe(tiny_config(family))
    for index, shape in enumerate(layer_shapes(description)):
        attention = 2 * shape.heads * shape.query_size + 2 * shape.key_value_heads * shape.query_size
        mlp = (3 if shape.gated else 2) * shape.mlp_size
        held = sum(one.numel() for one in description.layer(index).parameters() if one.dim() > 1)
        assert shape.hidden_size * (attention + mlp) == held


def test_kinds_of_layers_differ():
    by_window = [shape.window for shape in layer_shapes(describe(tiny_config("qwen2")))]
    assert by_window == [8, None, 8, None]
    rotated = [shape.rotary_size for shape in layer_shapes(describe(tiny_config("smollm3")))]
    assert rotated == [16, 16, 0, 16]
    rotated = [shape.rotary_size for shape in layer_shapes(describe(tiny_config("cohere2")))]
    assert rotated == [16, 0, 16, 0]
    tables = {shape.rotary_table for shape in layer_shapes(describe(tiny_config("gemma3_text")))}
    assert tables == {"sliding_attention", "full_attention"}


def test_side_by_side_with_two_norms():
    shape = layer_shapes(describe(tiny_config("gpt_neox", use_parallel_residual=True)))[0]
    assert shape.parallel
    assert shape.norms == PRE


def test_unknown_type_is_named():
    with pytest.raises(InputError, match="model_type: 'bloom'"):
        layer_shapes(describe(tiny_config("bloom")))
    with pytest.raises(InputError, match="model_type: 'mixtral'"):
        layer_shapes(describe(tiny_config("mixtral")))


def test_what_has_no_closed_form_is_refused():
    dropped = describe(tiny_config("gpt2", resid_pdrop=0.1))
    with pytest.raises(InputError, match="dropout"):
        ClosedForms(dropped)
    shape = layer_shapes(dropped)[0]
    sizes = {"tokens": 8, "sequence": 8, "element": 4}
    with pytest.raises(InputError, match="dropout"):
        layer_bytes(shape, PRESETS["fused"], **sizes)
    shape = layer_shapes(describe(tiny_config("llama")))[0]
    with pytest.raises(InputError, match="checkpointing: 'half'"):
        layer_bytes(shape, PRESETS["fused"], checkpointing="half", **sizes)
    with pytest.raises(InputError, match=r"heads over tensor parallelism: 4 cannot be cut into 3"):
        layer_bytes(shape, PRESETS["fused"], tp=3, **sizes)
