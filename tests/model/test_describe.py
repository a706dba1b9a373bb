"""Descriptions of models, found by running them, and the messages for refused ones."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from families import COMMON, FAMILIES, GROUPED, PADDING, PROMISED_EXPERTS, VOCABULARY, tiny_config, whole_model
from torch import nn

from evenpipe.errors import InputError
from evenpipe.model import (
    build_stage,
    copy_parameters,
    describe,
    head_flops,
    layer_flops,
    persistent_buffers,
    self_check,
)
from evenpipe.model.logits import probe_logits


def test_facts(sample) -> None:
    for name, tied in sample(itertools.product([*FAMILIES, *PROMISED_EXPERTS, "deepseek_v3"], (False, True)), 8):
        config = tiny_config(name, tied=tied)
        before = copy.deepcopy(config.to_dict())
        description = describe(config)
        whole = whole_model(config, dtype=torch.float32)
        embedding, head = whole.get_input_embeddings(), whole.get_output_embeddings()
        assert config.to_dict() == before, "the caller's config is not touched"
        assert (description.layers, description.hidden_size, description.vocabulary_size) == (4, 64, VOCABULARY)
        assert description.tied is (embedding.weight is head.weight) is tied
        assert whole.get_parameter(description.embedding_name) is embedding.weight
        assert whole.get_parameter(description.head_name) is head.weight
        assert (description.head_bias_name is not None) == (head.bias is not None)
        assert description.padding_index == embedding.padding_idx
        assert description.maximum_length == 128
        saved = (*whole.named_parameters(), *persistent_buffers(whole))
        assert description.shapes == {key: tensor.shape for key, tensor in saved}
        assert {parameter.device.type for parameter in description.skeleton.parameters()} == {"meta"}


# config -> (takes position ids, takes a mask, rows of the position table)
TAKEN = [
    (lambda: tiny_config("llama"), (True, True, None)),
    (lambda: tiny_config("phi3"), (True, True, None)),
    (lambda: tiny_config("gpt2", max_position_embeddings=37), (True, True, 37)),
    (lambda: transformers.OPTConfig(**OPT, max_position_embeddings=50), (True, True, 50)),  # a table of 52 rows
    (lambda: tiny_config("bloom"), (False, True, None)),
    (lambda: transformers.MambaConfig(vocab_size=99, hidden_size=64, num_hidden_layers=4), (False, True, None)),
]


def test_what_the_forward_takes_beside_tokens() -> None:
    for config, (positions, mask, rows) in TAKEN:
        description = describe(config())
        assert (description.takes("position_ids"), description.takes("attention_mask")) == (positions, mask)
        assert description.position_rows == rows
    assert describe(transformers.BloomConfig(vocab_size=99, hidden_size=64, n_layer=2, n_head=4)).maximum_length is None


def test_a_forward_that_hands_everything_on_takes_what_its_parent_takes() -> None:
    class NoPositions(transformers.LlamaForCausalLM):
        def forward(self, inputs_embeds=None, attention_mask=None, use_cache=None, return_dict=None):
            return super().forward(inputs_embeds=inputs_embeds, attention_mask=attention_mask, use_cache=use_cache)

    class HandsOn(NoPositions):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    description = describe(HandsOn(tiny_config("llama")))
    assert (description.takes("position_ids"), description.takes("attention_mask")) == (False, True)


def llama_with(name: str, change: Callable[[transformers.LlamaForCausalLM], object]) -> type:
    """Return a class of models that do this to themselves when they are made."""

    class Changed(transformers.LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            change(self)

    Changed.__name__ = name
    return Changed


def double_between_layers(model) -> None:
    model.model.layers[1].register_forward_hook(lambda module, args, output: output * 2)


def run_layers_twice(model) -> None:
    forward = model.model.forward

    def twice(inputs_embeds, **arguments):
        hidden = forward(inputs_embeds=inputs_embeds, **arguments).last_hidden_state
        return forward(inputs_embeds=hidden, **arguments)

    model.model.forward = twice


def add_embeddings_to_the_last_layer(model) -> None:
    seen = []
    model.model.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model.model.norm.register_forward_pre_hook(lambda module, args: (args[0] + seen[-1],))


def use_one_layer_twice(model) -> None:
    model.model.layers[3] = model.model.layers[0]


def hand_a_trainable_tensor_to_layers(model) -> None:
    model.model.gate = nn.Parameter(torch.ones(1))
    for layer in model.model.layers:
        layer.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {**kwargs, "gate": model.model.gate * 1}), with_kwargs=True
        )


class OtherLogits(transformers.LlamaForCausalLM):
    """Squares its logits."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits**2
        return output


class OtherHead(transformers.LlamaForCausalLM):
    """Has an output layer that normalises its weight."""

    class Head(nn.Linear):
        def forward(self, hidden):
            return nn.functional.linear(hidden, nn.functional.normalize(self.weight))

    def __init__(self, config):
        super().__init__(config)
        self.lm_head = self.Head(config.hidden_size, config.vocab_size, bias=False)


OPT = {"vocab_size": 99, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
REFUSED = [
    (llama_with("Doubling", double_between_layers), "hidden states change between layers 1 and 2"),
    (llama_with("TwiceThrough", run_layers_twice), r"calls its 4 layers in the order \[0, 1, 2, 3, 0, 1, 2, 3\]"),
    (llama_with("Skip", add_embeddings_to_the_last_layer), "uses hidden states other than the last layer's"),
    (llama_with("Shared", use_one_layer_twice), r"model\.layers\.0\.\S+ and model\.layers\.3\.\S+ are one tensor"),
    (
        llama_with("Sideways", hand_a_trainable_tensor_to_layers),
        r"receive trainable tensors besides the hidden states \(gate\)",
    ),
    (OtherLogits, "neither a positive scale nor a soft-cap"),
    (OtherHead, "its output layer is Head, not an nn.Linear"),
]


def test_models_that_cannot_be_cut_are_refused() -> None:
    for model_class, sentence in REFUSED:
        refused = rf"{model_class.__name__} cannot be cut into stages: .*{sentence}"
        with pytest.raises(InputError, match=refused) as caught:
            describe(model_class(tiny_config("llama")))
        assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def test_a_config_may_count_parts_of_its_layers() -> None:
    """Describe LongCat-Flash, whose config counts two attention blocks per layer."""
    config = transformers.AutoConfig.for_model("longcat_flash")
    assert config.num_hidden_layers == 56
    assert describe(config).layers == 28
    assert describe(transformers.OPTConfig(**OPT)).structure.layers_name == "model.decoder.layers"


def test_a_parameter_that_takes_no_part_stands_on_the_first_stage() -> None:
    """Put an unused parameter, such as an image tower's, on the first stage: it gets no gradient from text."""
    unused = llama_with("Unused", lambda model: setattr(model.model, "extra", nn.Linear(3, 3, bias=False)))
    model = unused(tiny_config("llama"))
    description = describe(model)
    assert description.structure.first_parameters == ("model.extra.weight",)
    self_check(description)
    stage = build_stage(description, 0, 2, is_first=True, is_last=False)
    copy_parameters(stage, description)
    assert torch.equal(stage.get_parameter("model.extra.weight"), model.model.extra.weight)


CONFIGS = [
    # two stacks of layers
    (lambda: transformers.AutoConfig.for_model("hrm_text"), "exactly one list of layers, "),
    (
        lambda: transformers.AutoConfig.for_model("gemma4_text", num_kv_shared_layers=2),
        r"^num_kv_shared_layers = 2 lets layers use the keys and values of others, .*: it has to be 0\.$",
    ),
    (
        lambda: transformers.AutoConfig.for_model("gemma4_text"),
        r"receive trainable tensors besides the hidden states \(per_layer_input; see .*"
        r"hidden_size_per_layer_input = 256 in its config\), and between stages only",
    ),
    (lambda: transformers.ViTConfig(), "model_type = 'vit' has no causal language model"),
    (
        lambda: transformers.LlamaConfig(**GROUPED, quantization_config={"quant_method": "fp8"}),
        "quantised weights cannot be trained",
    ),
    (lambda: transformers.OPTConfig(**OPT, layerdrop=0.1), "layerdrop = 0.1 skips layers"),
    (
        lambda: tiny_config("deepseek_v3", output_router_logits=True),
        "output_router_logits = true asks for a loss that DeepseekV3ForCausalLM cannot be trained with: transformers",
    ),
    # no models
    (lambda: nn.Linear(3, 3), r"use Pipeline.from_modules"),
    (lambda: 17, "model = 17 is neither"),
    (lambda: Path(__file__).parent, r"neither a folder with a config.json nor a model"),
]


def test_what_is_no_model_that_can_be_trained_is_refused() -> None:
    for source, sentence in CONFIGS:
        with pytest.raises(InputError, match=sentence) as caught:
            describe(source())
        assert "\n" not in str(caught.value)


def test_describing_takes_no_memory_for_weights() -> None:
    """Check that 64 GB of learned positions are never allocated, neither in the probe nor on other stages."""
    config = transformers.GPT2Config(vocab_size=503, n_embd=8192, n_layer=2, n_head=8, n_positions=10**6)
    description = describe(config)
    assert description.structure.first_parameters == ("transformer.wpe.weight",)
    middle = build_stage(description, 1, 1, is_first=False, is_last=False)
    last = build_stage(description, 2, 2, is_first=False, is_last=True)
    assert sum(parameter.numel() for stage in (middle, last) for parameter in stage.parameters()) == 2 * 8192


def test_remote_code_is_not_run_unless_asked_for(tmp_path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}'
    )
    (tmp_path / "own.py").write_text("raise SystemExit('this code was run')")
    with pytest.raises(InputError, match="trust_remote_code"):
        describe(tmp_path)


def test_fitting_logits() -> None:
    """A positive scale and a soft-cap are found; everything else that is done to logits is refused."""
    for function, expected_scale, expected_cap in (
        (lambda z: z, 1.0, None),
        (lambda z: z / 8, 0.125, None),
        (lambda z: 30 * torch.tanh(z / 30), 1.0, 30.0),
        (lambda z: 15 * torch.tanh(z * 0.5 / 15), 0.5, 15.0),
        (lambda z: z.float() * 0.5, 0.5, None),
    ):
        scale, cap = probe_logits("Some model", function, 17)
        assert scale == pytest.approx(expected_scale, rel=1e-12) and cap == expected_cap
    for function in (
        lambda z: -z,
        lambda z: z + 1,
        lambda z: z.clamp(-30, 30),
        lambda z: torch.cat([z[..., :-1], torch.full_like(z[..., :1], -1e9)], dim=-1),  # a masked column
        lambda z: z[..., :-1],
        lambda z: z - z.logsumexp(-1, keepdim=True),  # log-probabilities
    ):
        with pytest.raises(InputError, match=r"Some model cannot be cut into stages: (what it does to )?its logits"):
            probe_logits("Some model", function, 17)


def test_arithmetic_per_layer() -> None:
    """Compare with a count by hand: Llama's seven matrices, and attention over the whole sequence or the window."""
    matrices = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96)
    assert layer_flops(describe(tiny_config("llama")), 100) == [matrices + 4 * 100 * 64] * 4
    assert layer_flops(describe(tiny_config("mistral")), 100) == [matrices + 4 * 8 * 64] * 4
    mixed = layer_flops(describe(tiny_config("olmo3")), 100)
    assert [flops - mixed[0] for flops in mixed] == [0, 4 * 92 * 64, 0, 4 * 92 * 64]
    assert head_flops(describe(tiny_config("llama"))) == 2 * VOCABULARY * 64


def test_only_the_experts_that_a_token_meets_are_counted() -> None:
    dense = transformers.MistralConfig(**GROUPED, sliding_window=None)
    experts = transformers.MixtralConfig(**GROUPED, num_local_experts=8, num_experts_per_tok=2)
    router, mlp = 2 * 8 * 64, 2 * 3 * 64 * 96
    expected = layer_flops(describe(dense), 10)[0] + mlp + router
    assert layer_flops(describe(experts), 10)[0] == expected
    # Layer 1 is dense; the layers next to it have a router and two of five experts.
    projections = 2 * (64 * 96 * 2 + 64 * 48 * 2) + 4 * 10 * 96
    sparse, mlp = 2 * 5 * 64 + 2 * (2 * 3 * 64 * 40), 2 * 3 * 64 * 96
    flops = layer_flops(describe(tiny_config("qwen3_moe")), 10)
    assert flops == [projections + one for one in (sparse, mlp, sparse, sparse)]
    # Biases of experts are not matrices.
    projections = 2 * (64 * 96 * 2 + 64 * 48 * 2) + 4 * 10 * 96
    flops = layer_flops(describe(tiny_config("gpt_oss", sliding_window=16)), 10)
    assert flops == [projections + 2 * 4 * 64 + 2 * (2 * 3 * 64 * 96)] * 4


# --- structures of single families -----------------------------------------------------------------------------------


def test_positions_that_are_counted_from_token_ids() -> None:
    """From hidden states, which stages have, RoBERTa would count padding too."""
    positions = {"roberta": [PADDING + 1, PADDING, PADDING + 2], **dict.fromkeys(("llama", "gpt2", "bert", "opt"))}
    for model_type, expected in positions.items():
        settings = OPT if model_type == "opt" else COMMON | {"is_decoder": True, "intermediate_size": 96}
        description = describe(transformers.AutoConfig.for_model(model_type, **settings))
        found = description.positions_of(torch.tensor([[5, PADDING, 7]]))
        assert (None if found is None else found[0].tolist()) == expected, model_type


class TableForAllLayers(transformers.LlamaForCausalLM):
    """A model whose layers receive rows of a table without a gradient, like RoFormer's positions."""

    def __init__(self, config):
        super().__init__(config)
        self.model.table = nn.Parameter(torch.ones(config.hidden_size), requires_grad=False)
        for layer in self.model.layers:
            layer.register_forward_pre_hook(self.add_table, with_kwargs=True)

    def add_table(self, module, args, kwargs):
        return args, {**kwargs, "table": self.model.table.detach() * 2}


class Flattened(transformers.LlamaForCausalLM):
    """A model whose layers receive the tokens of all sequences one after the other."""

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.register_forward_pre_hook(self.flatten, with_kwargs=True)
        self.model.layers[-1].register_forward_hook(self.unflatten)

    def flatten(self, module, args, kwargs):
        if args[0].dim() == 3:
            self.sequences = len(args[0])
        return (args[0].flatten(0, -2), *args[1:]), kwargs

    def unflatten(self, module, args, output):
        return output.unflatten(0, (self.sequences, -1))


class OnlyWhileTraining(transformers.LlamaForCausalLM):
    """Changes the weights of all its layers in evaluation, as RWKV does."""

    def forward(self, *args, **kwargs):
        if not self.training:
            for layer in self.model.layers:
                layer.mlp.up_proj.weight.div_(2.0)
        return super().forward(*args, **kwargs)


def config_of(model_type: str, settings: dict) -> transformers.PreTrainedConfig:
    return transformers.AutoConfig.for_model(model_type, **settings)


NOT_IN_STAGES = [
    (
        lambda: TableForAllLayers(tiny_config("llama")),
        "TableForAllLayers cannot .*: its parameter model.table acts on the layers or after them without a gradient",
    ),
    (
        lambda: OnlyWhileTraining(tiny_config("llama")),
        r"OnlyWhileTraining cannot be cut into stages: its forward in evaluation needs more of its layers .* stops at"
        r" `layer.mlp.*\(AttributeError: .*\)",
    ),
    (
        lambda: Flattened(tiny_config("llama")),
        r"for 2 sequences of 3 tokens and 5 sequences of 7 tokens its layers hand on hidden states of the shapes"
        r" \(6, 64\) and \(35, 64\), and not token by token",
    ),
]


def test_what_layers_hand_on() -> None:
    """Some hidden states differ from the embedded tokens in shape, some in dtype, and some tensors come with them."""
    zaya = {"moe_intermediate_size": 32, "router_hidden_size": 8, "num_experts": 4, "num_experts_per_tok": 1}
    for model_type, settings, expected in (
        ("opt", {**OPT, "word_embed_proj_dim": 32}, "hidden [sequences, tokens, 64] {0}"),
        (
            "deepseek_v4",
            {**GROUPED, "o_groups": 2, "o_lora_rank": 16},
            "hidden [sequences, tokens, 4, 64] {0}",
        ),
        (
            "zaya",
            {**COMMON, **zaya},
            "hidden [sequences, tokens, 64] {1}, prev_router_hidden_states [sequences, tokens, 8] {0}",
        ),
    ):
        description = describe(config_of(model_type, settings))
        for dtype in (torch.bfloat16, torch.float64):
            kept = torch.promote_types(dtype, torch.float32)
            assert str(description.edge(1, dtype)) == expected.format(dtype, kept), model_type
            hidden, *_ = expected.format(dtype, kept).split(", prev_")
            assert str(description.edge(description.layers, dtype)) == hidden
            first = torch.float32 if model_type == "zaya" else dtype  # what it makes of embedded tokens is always fp32
            assert str(description.edge(0, dtype)) == hidden.replace(hidden.split("torch.")[1], str(first)[6:])
            rows = f"hidden [sequences, tokens, {description.hidden_size}] {dtype}"
            assert str(description.edge(0, dtype, outer=True)) == rows


def test_what_stages_cannot_do_is_refused() -> None:
    for source, sentence in NOT_IN_STAGES:
        with pytest.raises(InputError, match=sentence) as caught:
            describe(source())
        assert "\n" not in str(caught.value)
