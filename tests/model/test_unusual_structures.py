"""Tests structures of single families, found by running the model: cut and whole agree, or a message gives the
reason."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from families import (
    COMMON,
    GROUPED,
    PADDING,
    loss_and_gradients,
    loss_and_gradients_in_stages,
    tiny_config,
    tokens_and_labels,
)
from families import whole_model as whole
from torch import nn

from evenpipe.errors import InputError
from evenpipe.model import build_stage, describe, initialize
from evenpipe.model.description import check_compute_dtype

NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
FALCON_H1 = {
    "mamba_d_ssm": 128,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "embedding_multiplier": 2.5,
    "ssm_multipliers": [1.3, 0.7, 0.9, 1.2, 0.8],
}
# model type, settings, expected structure
FOUND = [
    ("ctrl", {"dff": 96, **NO_DROPOUT}, {"writes_to_input": True, "wants_token": None}),
    ("falcon_h1", {**GROUPED, **FALCON_H1}, {"writes_to_input": False, "wants_token": 0}),
    ("bert", {"is_decoder": True, "intermediate_size": 96, **NO_DROPOUT}, {"wants_token": None}),
]


def assert_equal_to_whole(description, **arguments) -> float:
    """Return the loss."""
    tokens, labels = tokens_and_labels()
    expected_loss, expected = loss_and_gradients(description.model, tokens, labels)
    loss, gradients = loss_and_gradients_in_stages(description, (1, 3), tokens, labels, **arguments)
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.allclose(gradients[name], gradient, rtol=1e-9, atol=1e-12), name
    return loss


@pytest.mark.parametrize(("model_type", "settings", "facts"), FOUND, ids=[row[0] for row in FOUND])
def test_what_a_forward_does_to_its_input(model_type, settings, facts) -> None:
    description = describe(whole(transformers.AutoConfig.for_model(model_type, **(COMMON | settings))))
    assert {name: getattr(description.structure, name) for name in facts} == facts
    assert_equal_to_whole(description)


ROBERTA = {"is_decoder": True, "intermediate_size": 96, "type_vocab_size": 1, **NO_DROPOUT}


def test_positions_that_are_counted_from_token_ids() -> None:
    """Use positions from token ids: from hidden states, which stages have, RoBERTa would count padding too."""
    description = describe(whole(transformers.RobertaConfig(**COMMON, **ROBERTA)))
    tokens, labels = tokens_and_labels()
    positions = description.positions_of(tokens)
    assert positions[0, :6].tolist() == [PADDING + 1, PADDING + 2, PADDING + 3, PADDING, PADDING + 4, PADDING + 5]
    loss = assert_equal_to_whole(description, position_ids=positions)
    wrong, _ = loss_and_gradients_in_stages(description, (1, 3), tokens, labels)
    assert abs(wrong - loss) > 1e-4
    others = {
        "llama": GROUPED,
        "gpt2": NO_DROPOUT,
        "bert": {"is_decoder": True, "intermediate_size": 96},
        "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    }
    for model_type, settings in others.items():
        description = describe(transformers.AutoConfig.for_model(model_type, **(COMMON | settings)))
        assert description.positions_of(torch.tensor([[5, PADDING, 7]])) is None, model_type


def test_a_bias_with_two_names_goes_by_the_first() -> None:
    """Use the first name, under which transformers saves and lists BERT's bias."""
    config = transformers.BertConfig(**COMMON, intermediate_size=96, is_decoder=True)
    description = describe(config)
    assert description.head_bias_name == "cls.predictions.bias"
    assert "cls.predictions.decoder.bias" not in description.shapes
    stage = build_stage(description, 2, 4, is_first=False, is_last=True)
    initialize(stage, description, seed=0)
    assert not any(name.endswith("predictions.bias") for name, _ in stage.named_parameters())


class FoundByTheModel(transformers.LlamaForCausalLM):
    """The rule of the model around the layers sets a buffer in them."""

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.register_buffer("factor", torch.tensor(0.1) + 0.2, persistent=False)
            layer.mlp.register_forward_pre_hook(lambda mlp, args: (args[0] * mlp.factor, *args[1:]))


def _set_factors(self, module) -> None:
    transformers.LlamaPreTrainedModel._init_weights(self, module)
    if isinstance(module, transformers.LlamaModel):
        for layer in (layer for layer in module.layers if "factor" in layer.mlp._buffers):
            layer.mlp.factor.copy_(torch.tensor(0.1) + 0.2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_buffers_that_the_model_gives_its_layers(dtype, monkeypatch) -> None:
    monkeypatch.setattr(transformers.LlamaModel, "_init_weights", _set_factors)
    torch.set_default_dtype(dtype)
    try:
        model = FoundByTheModel(tiny_config("llama"))
    finally:
        torch.set_default_dtype(torch.float32)
    for first, last in ((0, 2), (2, 4)):
        stage = build_stage(describe(model), first, last, is_first=first == 0, is_last=last == 4, dtype=dtype)
        for index in range(first, last):
            expected = model.model.layers[index].mlp.factor
            found = stage.get_submodule(f"model.layers.{index}.mlp").factor
            assert found.dtype == dtype and torch.equal(found, expected.to(dtype))


class TableForAllLayers(transformers.LlamaForCausalLM):
    """A model whose layers receive rows of a table without a gradient, like RoFormer's positions."""

    def __init__(self, config):
        super().__init__(config)
        self.model.table = nn.Parameter(torch.ones(config.hidden_size), requires_grad=False)
        for layer in self.model.layers:
            layer.register_forward_pre_hook(self.add_table, with_kwargs=True)

    def add_table(self, module, args, kwargs):
        return args, {**kwargs, "table": self.model.table.detach() * 2}


class OnlyWhileTraining(transformers.LlamaForCausalLM):
    """Changes the weights of all its layers in evaluation, as RWKV does."""

    def forward(self, *args, **kwargs):
        if not self.training:
            for layer in self.model.layers:
                layer.mlp.up_proj.weight.div_(2.0)
        return super().forward(*args, **kwargs)


ZAYA = {**GROUPED, "num_experts": 4, "moe_intermediate_size": 40, "router_hidden_size": 32}
OPT = {"num_hidden_layers": 4, "hidden_size": 64, "vocab_size": 99, "num_attention_heads": 4, "ffn_dim": 96}


def config_of(model_type: str, settings: dict) -> transformers.PreTrainedConfig:
    return transformers.AutoConfig.for_model(model_type, **settings)


REFUSED = [
    (
        lambda: TableForAllLayers(tiny_config("llama")),
        "TableForAllLayers cannot .*: its parameter model.table acts on the layers or after them without a gradient",
    ),
    (
        lambda: OnlyWhileTraining(tiny_config("llama")),
        r"OnlyWhileTraining cannot be cut into stages: its forward in evaluation needs more of its layers .* stops at"
        r" `layer.mlp.*\(AttributeError: .*\)",
    ),
    # Between stages travel only hidden states as wide as the embedding.
    (
        lambda: config_of("zaya", ZAYA),
        r"a second tensor on to each other \(prev_router_hidden_states\), and between stages only",
    ),
    (
        lambda: config_of("opt", {**OPT, "word_embed_proj_dim": 32}),
        r"of the shape \(2, 3, 64\), .* sequence, 32\], travel",
    ),
    (
        lambda: config_of("deepseek_v4", {**GROUPED, "o_groups": 2, "o_lora_rank": 16}),
        r"of the shape \(2, 3, 4, 64\), and between stages",
    ),
]


def test_what_stages_cannot_do_is_refused() -> None:
    for source, sentence in REFUSED:
        with pytest.raises(InputError, match=sentence) as caught:
            describe(source())
        assert "\n" not in str(caught.value)


def test_layers_that_return_fp32_are_refused_in_bf16() -> None:
    config = transformers.MambaConfig(vocab_size=99, hidden_size=64, num_hidden_layers=4)
    description = describe(config)
    check_compute_dtype(description, torch.float32)
    said = r"compute_dtype = torch.bfloat16: the layers of MambaForCausalLM return torch.float32, .*; set"
    with pytest.raises(InputError, match=rf"^{said} residual_in_fp32 to false in the model's config\.$"):
        check_compute_dtype(description, torch.bfloat16)
    config = copy.deepcopy(config)
    config.residual_in_fp32 = False
    check_compute_dtype(describe(config), torch.bfloat16)
    check_compute_dtype(describe(tiny_config("llama")), torch.bfloat16)
