"""The self-check compares the cut model with the whole one: correct families pass, and wrong cuts fail.

`test_default_configs.py` runs it on configs of full size, which it makes small itself.
"""

from __future__ import annotations

import functools

import pytest
import torch
import transformers
from families import COMMON, EXPERTS, FAMILIES, GROUPED, tiny_config, whole_model
from torch import nn
from transformers.models.mixtral import modeling_mixtral

import evenpipe.model.copies as copies_file
import evenpipe.model.stage as stage_file
from evenpipe.errors import InputError
from evenpipe.experts.adopt import split_backwards
from evenpipe.model import RouterLoss, comparison, describe, self_check
from evenpipe.model.comparison import contains_cast
from evenpipe.model.fp64 import InFp64
from evenpipe.model.small_copy import SmallCopies, kinds_of_layers
from evenpipe.model.structure import layers_of


@pytest.mark.slow
def test_heads_that_do_not_fit_are_refused_as_transformers_would_in_the_first_step() -> None:
    self_check(describe(transformers.HeliumConfig()))
    description = describe(transformers.HeliumConfig(head_dim=96))
    said = r"HeliumForCausalLM does not run with this config, in transformers and uncut either \(.*modeling_helium"
    with pytest.raises(InputError, match=said):
        self_check(description)


@pytest.mark.parametrize("name", [*FAMILIES, *EXPERTS])
@pytest.mark.sampled(2)
def test_tiny_configs_pass(name) -> None:
    self_check(describe(tiny_config(name, tied=True)))


def cut_at_the_embeddings(monkeypatch) -> None:
    """Cut in the obvious but wrong way: pass received hidden states as `inputs_embeds`."""

    def forward(self, hidden, position_ids=None, attention_mask=None):
        embedded = stage_file.embed_rows(self._embedding[0], hidden) if self.is_first else hidden
        self._relay.stand_in = embedded
        try:
            self.whole(inputs_embeds=embedded, use_cache=False, attention_mask=attention_mask)
            return self._relay.result
        finally:
            self._relay.clear()

    monkeypatch.setattr(stage_file.Relay, "inject", lambda relay, module, args, kwargs: None)
    monkeypatch.setattr(stage_file.Stage, "forward", forward)


def forget_the_scale_of_the_embedding(monkeypatch) -> None:
    monkeypatch.setattr(stage_file, "embed_rows", lambda embedding, rows: rows)


def forget_the_mask(monkeypatch) -> None:
    forward = stage_file.Stage.forward
    monkeypatch.setattr(stage_file.Stage, "forward", lambda self, hidden, attention_mask=None: forward(self, hidden))


def renumber_the_layers(monkeypatch) -> None:
    """Make every stage start with layer 0 of the config."""
    build = copies_file.build_skeleton

    def renumbered(config, dtype, model_class):
        model = build(config, dtype, model_class)
        kinds = list(model.config.layer_types)
        model.config.layer_types = kinds[1:] + kinds[:1]
        return model

    monkeypatch.setattr(copies_file, "build_skeleton", renumbered)


def halve_the_gradient(monkeypatch) -> None:
    """Keep the loss, but halve the gradients of all layers."""
    forward = stage_file.Stage.forward

    def halved(self, hidden, **arguments):
        hidden = forward(self, hidden, **arguments)
        return (hidden + hidden.detach()) / 2 if self.is_last else hidden

    monkeypatch.setattr(stage_file.Stage, "forward", halved)


def fail(monkeypatch) -> None:
    def forward(self, hidden, **arguments):
        raise KeyError("position_embeddings")

    monkeypatch.setattr(stage_file.Stage, "forward", forward)


DIFFERS = r"differs from the whole in the (loss|gradient)"
ONE = {"embedding_multiplier": 1.0}
"""Granite's default, which hides a wrong cut until it is changed."""
BROKEN = [
    ("granite", {}, cut_at_the_embeddings, DIFFERS),
    ("granite", ONE, cut_at_the_embeddings, DIFFERS),
    ("hyperclovax", {}, cut_at_the_embeddings, DIFFERS),
    ("nanochat", {}, cut_at_the_embeddings, DIFFERS),
    ("gemma3_text", {}, forget_the_scale_of_the_embedding, DIFFERS),
    ("llama", {}, forget_the_mask, DIFFERS),
    ("gemma3_text", {}, renumber_the_layers, DIFFERS),
    ("llama", {}, halve_the_gradient, r"differs from the whole in the gradient of \S+ \(relative error 5\.0e-01"),
    ("llama", {}, fail, r"cut in three, does not run \(KeyError: 'position_embeddings'\)"),
]


@pytest.mark.parametrize(("name", "changes", "wrong", "sentence"), BROKEN)
@pytest.mark.sampled(3)
def test_a_wrong_cut_is_refused(name, changes, wrong, sentence, monkeypatch) -> None:
    description = describe(tiny_config(name, **changes))
    wrong(monkeypatch)
    refused = rf"{description.architecture} cannot be trained in stages: .*{sentence}"
    with pytest.raises(InputError, match=refused) as caught:
        self_check(description)
    assert "\n" not in str(caught.value)


def test_a_long_check_says_that_it_goes_on(monkeypatch) -> None:
    description, said = describe(tiny_config("llama")), []
    monkeypatch.setattr(comparison, "SILENT_SECONDS", 600.0)
    self_check(description, say=said.append)
    assert not said
    monkeypatch.setattr(comparison, "SILENT_SECONDS", 0.0)
    self_check(description, say=said.append)
    (line,) = said
    assert line.startswith("checking on a small copy that LlamaForCausalLM gives the same gradients in stages")


class CrossingMLP(nn.Module):
    """Adds the output of the first layer's block to the last layer's, unseen by the model."""

    def __init__(self, inner, place, memory):
        super().__init__()
        self.inner, self.place, self.memory = inner, place, memory

    def forward(self, hidden):
        hidden = self.inner(hidden)
        if self.place == 0:
            self.memory["first"] = hidden
        elif self.place == 3:
            hidden = hidden + self.memory.get("first", 0.0)
        return hidden


class Crossing(transformers.LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        memory = {}
        for place, layer in enumerate(self.model.layers):
            layer.mlp = CrossingMLP(layer.mlp, place, memory)


def forget_half_of_W(module: nn.Module):
    compute = split_backwards(module)

    def half() -> None:
        compute()
        for parameter in module.parameters():
            parameter.grad /= 2

    return half


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe"])
def test_a_backward_that_is_split_is_compared_too(name) -> None:
    description = describe(tiny_config(name))
    self_check(description, split_backwards)
    with pytest.raises(InputError, match=r"cut in three, its backward split, differs from the whole in the gradient"):
        self_check(description, forget_half_of_W)


BAMBA = {"num_key_value_heads": 2, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}


@pytest.mark.parametrize("coefficient", [0.0, 1e-5, 0.1])
@pytest.mark.sampled(1)
def test_a_loss_that_the_model_adds_to_its_cross_entropy_is_refused(coefficient) -> None:
    config = transformers.BambaConfig(
        **(COMMON | BAMBA), intermediate_size=96, attn_layer_indices=[1], z_loss_coefficient=coefficient
    )
    description = describe(config)
    if not coefficient:
        self_check(description)
        return
    said = rf"own loss is more than .* small copy\); set z_loss_coefficient \(now {coefficient}\) to 0\.0 in the model"
    with pytest.raises(InputError, match=said):
        self_check(description)


class LabelsAsTheyAre(transformers.LlamaForCausalLM):
    """Does not shift labels, as BART's decoder: a pipeline gets the same labels either way."""

    def forward(self, input_ids=None, labels=None, **arguments):
        if labels is not None:
            arguments["shift_labels"] = labels
        return super().forward(input_ids=input_ids, labels=labels, **arguments)


class LabelsOfAnotherShape(transformers.LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, **arguments):
        if labels is not None:
            raise ValueError("one label per picture is wanted")
        return super().forward(input_ids=input_ids, **arguments)


class RoundedLogits(transformers.LlamaForCausalLM):
    """Always returns fp32 logits, as Mamba and xLSTM do."""

    def forward(self, **arguments):
        output = super().forward(**arguments)
        output.logits = output.logits.float()
        return output


class NeedsItsWidth(transformers.LlamaForCausalLM):
    def __init__(self, config):
        if config.hidden_size != 8192:
            raise ValueError("hidden_size must be 8192")
        super().__init__(config)


def test_forwards_of_other_kinds(sample, monkeypatch) -> None:
    """Accept labels that are not shifted, and logits that are rounded as the whole rounds them; refuse what cannot be
    compared, and state that passes between layers unseen."""
    monkeypatch.setattr(comparison, "PARTLY_FP32", 0.0)
    for model_class in sample((LabelsAsTheyAre, RoundedLogits), 1):
        self_check(describe(model_class(tiny_config("llama"))))
    with torch.device("meta"):
        wide = NeedsItsWidth(transformers.LlamaConfig(hidden_size=8192, intermediate_size=8192, num_hidden_layers=4))
    for model, sentence in (
        (
            LabelsOfAnotherShape(tiny_config("llama")),
            r"does not run on labels .* \(ValueError: one label per picture is wanted\)",
        ),
        (wide, r"NeedsItsWidth cannot be compared .* made small \(ValueError: hidden_size"),
        (
            Crossing(tiny_config("llama")),
            r"Crossing cannot be trained in stages: .* differs from the whole in the loss",
        ),
    ):
        with pytest.raises(InputError, match=sentence):
            self_check(describe(model))


LAYER_KINDS = [
    (
        "gemma3_text",
        {"layer_types": ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] * 6},
        [0, 1, 2, 5],
    ),
    ("gemma3_text", {"layer_types": ["full_attention"] * 12}, [0, 1, 2, 3]),
    ("gemma3_text", {"layer_types": ["full_attention"] * 11 + ["sliding_attention"]}, [0, 1, 2, 11]),
    # Lists of special layers, and rules by a layer's index.
    ("bamba", {"attn_layer_indices": [9]}, [0, 1, 2, 9]),
    ("qwen3_moe", {"mlp_only_layers": [7], "num_experts": 4}, [0, 1, 2, 7]),
    ("deepseek_v3", {"first_k_dense_replace": 6}, [0, 1, 2, 3, 4, 5, 6]),
    ("jamba", {"attn_layer_period": 8, "attn_layer_offset": 6}, [0, 1, 2, 3, 4, 5, 6]),
]


def test_a_small_copy_has_a_layer_of_every_kind(sample) -> None:
    for name, settings, kept in sample(LAYER_KINDS, 2):
        description = describe(transformers.AutoConfig.for_model(name, num_hidden_layers=12, **settings))
        small = SmallCopies.of(description).plain.description
        kinds, of_small = (
            kinds_of_layers(layers_of(whole.skeleton, whole.structure.layers_name)) for whole in (description, small)
        )
        assert [[kind == other for other in of_small] for kind in of_small] == [
            [kinds[index] == kinds[other] for other in kept] for index in kept
        ], (name, settings)
        types = getattr(description.config, "layer_types", None)
        assert types is None or small.config.layer_types == [types[index] for index in kept]


@pytest.mark.slow
def test_a_model_of_two_layers_is_checked_with_four() -> None:
    config = transformers.Gemma3TextConfig(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    description = describe(config)
    small = SmallCopies.of(description).plain.description
    assert small.config.layer_types == ["sliding_attention", "full_attention"] * 2
    self_check(description)


# --- the loss of routers ----------------------------------------------------------------------------------------------

LARGE = 0.5
WITHOUT = {"deepseek_v3": "transformers computes no loss of its routers"}
WITH = [name for name in EXPERTS if name not in WITHOUT]

# family -> experts, choices
NUMBERS = {"mixtral": (4, 2), "qwen3_moe": (5, 2), "olmoe": (6, 3), "gpt_oss": (4, 2), "ernie4_5_moe": (4, 2)}


def with_loss(name: str, **changes):
    return tiny_config(name, output_router_logits=True, router_aux_loss_coef=LARGE, **changes)


def test_its_numbers_are_read_from_the_forward(sample) -> None:
    for name, numbers in sample(NUMBERS.items(), 3):
        assert describe(with_loss(name)).router_loss == RouterLoss(LARGE, *numbers)
        assert describe(tiny_config(name)).router_loss is None, "transformers does not add it unless asked"


class AndSomethingElse(transformers.MixtralForCausalLM):
    def forward(self, input_ids=None, labels=None, **arguments):
        return super().forward(input_ids=input_ids, labels=labels, **arguments)


DOGE = {**GROUPED, "is_moe": True, "num_experts": 16, "output_router_logits": True}
OTHER_LOSSES = [
    *((functools.partial(with_loss, name), sentence) for name, sentence in WITHOUT.items()),
    (
        lambda: transformers.LlamaConfig(num_hidden_layers=2, output_router_logits=True),
        "output_router_logits = true asks for a loss that LlamaForCausalLM cannot",
    ),
    # routers that choose among products of two sets of keys
    (
        lambda: transformers.DogeConfig(**DOGE),
        "DogeForCausalLM cannot be trained with: its loss of the routers is another",
    ),
    (lambda: AndSomethingElse(with_loss("mixtral")), "asks for a loss that AndSomethingElse cannot be trained with"),
]


def test_other_losses_are_refused(monkeypatch) -> None:
    for source, sentence in OTHER_LOSSES:
        with pytest.raises(InputError, match=sentence):
            describe(source())
    right = modeling_mixtral.load_balancing_loss_func
    squared = functools.wraps(right)(lambda *arguments: right(*arguments) ** 2)
    monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", squared)
    with pytest.raises(InputError, match="cannot be trained with: its loss of the routers is another than Mixtral's"):
        describe(with_loss("mixtral"))


def record_without_graph(relay, index, module, args, output) -> None:
    """Compute the right value, but without gradients for the routers."""
    if relay.router_logits is not None:
        relay.router_logits.append(output[index].detach())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", WITH)
def test_the_self_check_covers_it(name, monkeypatch) -> None:
    """`tests/fuzz` compares it over processes."""
    description = describe(tiny_config(name, output_router_logits=True))  # transformers' own small coefficient
    self_check(description)
    monkeypatch.setattr(stage_file.Relay, "record_router", record_without_graph)
    with pytest.raises(InputError, match=r"differs from the whole in the gradient of \S+"):
        self_check(description)


# --- its arithmetic ---------------------------------------------------------------------------------------------------

WITHOUT_CASTS = {"gpt_neox", "starcoder2", "gpt2", "phi", "phimoe"}
"""Families that compute all in the dtype of their parameters."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", sorted((FAMILIES | EXPERTS).keys() - {"ernie4_5_moe"}))
def test_what_asks_for_fp32_gets_fp64(name) -> None:
    """Norms, softmax and routers: `x.float()`, and fp32 as an argument of any function. Ernie's routers are in fp32."""
    tokens, model = torch.arange(6).view(2, 3), whole_model(tiny_config(name))

    def casts() -> bool:
        return contains_cast(model(input_ids=tokens, use_cache=False).logits.sum())

    assert casts() is (name not in WITHOUT_CASTS)
    with InFp64():
        assert not casts()
    assert casts() is (name not in WITHOUT_CASTS)
