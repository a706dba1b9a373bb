"""Answers of a `ModelSpec` in place of what probing finds, by the user and by the files of `model/families`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import (
    COMMON,
    GROUPED,
    loss_and_gradients,
    loss_and_gradients_in_stages,
    tiny_config,
    tokens_and_labels,
    whole_model,
)
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import evenpipe.model.families
from evenpipe import ModelSpec, Pipeline
from evenpipe.errors import InputError
from evenpipe.model import Description, RouterLoss, describe, gradient_errors, self_check
from evenpipe.model.families import NAMES
from evenpipe.model.fp64 import InFp64
from evenpipe.runtime.inputs import Inputs, check

ENCODER = COMMON | {"is_decoder": True, "intermediate_size": 96, "attention_probs_dropout_prob": 0.0}


def roberta() -> PreTrainedConfig:
    return transformers.RobertaConfig(**ENCODER, hidden_dropout_prob=0.0)


def falcon_h1() -> PreTrainedConfig:
    settings = GROUPED | {"embedding_multiplier": 2.5}
    return transformers.FalconH1Config(**settings, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16)


def mixtral() -> PreTrainedConfig:
    return tiny_config("mixtral", output_router_logits=True)


# --- answers that are right, and wrong --------------------------------------------------------------------------------

RIGHT: list[tuple[Callable[[], PreTrainedConfig], tuple[str, ...]]] = [
    (lambda: tiny_config("llama"), ("layers_name", "embedding_module", "head_module", "layer_argument")),
    (lambda: tiny_config("llama"), ("returns", "last_parameters")),
    (lambda: tiny_config("gpt2"), ("returns", "last_parameters", "position_rows")),
    (lambda: tiny_config("gemma2"), ("soft_cap",)),
    (lambda: tiny_config("cohere2"), ("logit_scale",)),
    (roberta, ("counts_positions", "position_rows", "last_parameters")),
    (falcon_h1, ("wants_token",)),
    (mixtral, ("router_loss",)),
]


def answer(description: Description, name: str) -> Any:
    holder = description if hasattr(description, name) else description.structure
    return getattr(holder, name)


def facts(description: Description) -> list[Any]:
    names = ("structure", "logit_scale", "soft_cap", "router_loss", "position_rows", "counts_positions", "shapes")
    return [getattr(description, name) for name in names]


def test_answers_that_probing_would_give_change_nothing() -> None:
    answered = set()
    for config, names in RIGHT:
        probed = describe(config())
        values = {name: answer(probed, name) for name in names}
        assert None not in values.values(), values
        answered |= {*names}
        given = ModelSpec(**values)
        for spec in (given, lambda config, given=given: given):
            assert facts(describe(config(), spec=spec)) == facts(probed), names
        assert facts(describe(config(), spec=ModelSpec())) == facts(probed)
    assert answered | {"adapt"} == {entry.name for entry in fields(ModelSpec)}


def raise_an_error(model: Any) -> None:
    model.decoder.layers[0].append(None)


def change_the_norm(model: Any) -> None:
    model.model.norm.variance_epsilon = 0.5


def freeze_the_norm(model: Any) -> None:
    norm = model.model.norm
    weight = norm._parameters.pop("weight")
    norm.register_buffer("weight", weight.detach())


WRONG: list[tuple[Callable[[], PreTrainedConfig], Any, str]] = [
    # that cannot be used
    (
        lambda: tiny_config("llama"),
        ModelSpec(layers_name="model.layer"),
        'spec.layers_name is "model.layer"; it must be an nn.ModuleList of LlamaForCausalLM; did you mean'
        ' "model.layers"?',
    ),
    (
        lambda: tiny_config("llama"),
        ModelSpec(embedding_module="model.embed"),
        'spec.embedding_module is "model.embed"; it must be an nn.Embedding of LlamaForCausalLM; did you mean'
        ' "model.embed_tokens"?',
    ),
    (
        lambda: tiny_config("llama"),
        ModelSpec(head_module="model.norm"),
        'spec.head_module is "model.norm"; it must be an nn.Linear of LlamaForCausalLM',
    ),
    (
        lambda: tiny_config("llama"),
        ModelSpec(layer_argument="hidden"),
        'spec.layer_argument is "hidden"; it must be one of hidden_states, attention_mask',
    ),
    (
        lambda: tiny_config("llama"),
        ModelSpec(last_parameters=("model.norm.bias",)),
        'spec.last_parameters is ["model.norm.bias"]; it must be names of parameters outside the layers; did you mean'
        ' "model.norm.weight"?',
    ),
    (
        lambda: tiny_config("llama"),
        ModelSpec(adapt=raise_an_error),
        "LlamaForCausalLM cannot be cut into stages: spec.adapt fails on it (AttributeError: ",
    ),
    (
        lambda: tiny_config("llama"),
        lambda config: config.hidden_size,
        "spec is 64; it must be a ModelSpec, or a function of the config that returns one",
    ),
    (
        lambda: tiny_config("llama", pad_token_id=None),
        ModelSpec(counts_positions=True),
        "spec.counts_positions is true; it must be false, since LlamaForCausalLM has no padding token",
    ),
    # that probing contradicts
    (lambda: tiny_config("llama"), ModelSpec(returns=2), "LlamaForCausalLM cannot be cut into stages: "),
    # that the self-check finds
    (lambda: tiny_config("llama"), ModelSpec(last_parameters=()), "differs from the whole in the loss"),
    (lambda: tiny_config("llama"), ModelSpec(logit_scale=0.5), "differs from the whole in the loss"),
    (lambda: tiny_config("llama"), ModelSpec(soft_cap=3.0), "differs from the whole in the loss"),
    (roberta, ModelSpec(counts_positions=False), "differs from the whole in the loss"),
    (mixtral, ModelSpec(router_loss=RouterLoss(0.5, 4, 2)), "its own loss is more than the cross-entropy"),
    (lambda: tiny_config("llama"), ModelSpec(adapt=change_the_norm), "differs from the whole in the loss"),
    (
        lambda: tiny_config("llama"),
        ModelSpec(adapt=freeze_the_norm),
        "differs from the whole in the parameters it has (model.norm.weight)",
    ),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_a_wrong_answer_is_refused_with_a_sentence(number: int) -> None:
    config, spec, sentence = WRONG[number]
    with pytest.raises(InputError, match=re.escape(sentence)) as caught:
        self_check(describe(config(), spec=spec))
    assert "\n" not in str(caught.value)


NOT_ACCEPTED = [
    ({"returns": -1}, "spec.returns is -1; it must be an integer of at least 0 or none"),
    ({"layers_name": 3}, "spec.layers_name is 3; it must be text or none"),
    ({"adapt": "model"}, 'spec.adapt is "model"; it must be a function of a model or none'),
    ({"router_loss": 0.1}, "spec.router_loss is 0.1; it must be a RouterLoss or none"),
    ({"logit_scale": 0}, "spec.logit_scale is 0; it must be a number above 0 or none"),
]


def test_values_that_are_not_accepted() -> None:
    for values, sentence in NOT_ACCEPTED:
        with pytest.raises(InputError, match=re.escape(sentence)):
            ModelSpec(**values)
    with pytest.raises(TypeError, match="unknown argument 'layer_name'; did you mean \"layers_name\""):
        ModelSpec(layer_name="model.layers")
    with pytest.raises(InputError, match=r"spec is ModelSpec.*; it must be left out for plain modules"):
        Pipeline(describe(tiny_config("llama")), spec=ModelSpec(returns=0))


def test_positions_beyond_the_rows_that_a_spec_says_are_refused() -> None:
    description = describe(tiny_config("llama"), spec=ModelSpec(position_rows=8))
    inputs = Inputs(torch.ones(1, 4, dtype=torch.int64), position_ids=torch.arange(5, 9)[None])
    with pytest.raises(InputError, match="position_ids run from 5 to 8; they must be 0 to 7"):
        check(inputs, microbatches=1, model=description)


# --- models that only a spec carries ----------------------------------------------------------------------------------


class TwoLists(transformers.LlamaForCausalLM):
    """Has a second list as long as that of the layers, and does not say what gives its logits."""

    def __init__(self, config):
        super().__init__(config)
        self.model.towers = nn.ModuleList(nn.Linear(8, 8) for _ in range(config.num_hidden_layers))

    def get_output_embeddings(self):
        return None


class Turned(LlamaDecoderLayer):
    """Takes hidden states in its second argument."""

    def forward(self, attention_mask=None, hidden_states=None, **others):
        return super().forward(hidden_states, attention_mask=attention_mask, **others)


class ByKeyword(transformers.LlamaForCausalLM):
    """Hands hidden states to its layers by keyword."""

    def __init__(self, config):
        super().__init__(config)
        layers = [Turned(config, index) for index in range(config.num_hidden_layers)]
        self.model.layers = nn.ModuleList(layers)
        for layer in layers:
            layer.register_forward_pre_hook(self.by_keyword, with_kwargs=True)

    @staticmethod
    def by_keyword(module, args, kwargs):
        return (), {**kwargs, "hidden_states": args[0]}


class WithTable(LlamaDecoderLayer):
    """Adds rows of a table to its hidden states."""

    def forward(self, hidden_states, rows=None, **others):
        return super().forward(hidden_states + rows, **others)


class TableForAllLayers(transformers.LlamaForCausalLM):
    """Hands rows of a frozen table to every layer."""

    def __init__(self, config):
        super().__init__(config)
        self.model.table = nn.Embedding(config.max_position_embeddings, config.hidden_size, _freeze=True)
        self.model.layers = nn.ModuleList(WithTable(config, index) for index in range(config.num_hidden_layers))
        for layer in self.model.layers:
            layer.register_forward_pre_hook(self.add_rows, with_kwargs=True)

    def add_rows(self, module, args, kwargs):
        with torch.no_grad():
            return args, {**kwargs, "rows": self.model.table(torch.arange(args[0].shape[1]))}


def keep_the_table(model: Any) -> None:
    table = model.model.table
    weight = table._parameters.pop("weight")
    table.register_buffer("weight", weight.detach())


CARRIED: list[tuple[type[PreTrainedModel], str, ModelSpec]] = [
    (TwoLists, "its output layer is NoneType", ModelSpec(layers_name="model.layers", head_module="lm_head")),
    (ByKeyword, "cannot be cut into stages", ModelSpec(layer_argument="hidden_states")),
    (TableForAllLayers, "acts on the layers or after them without a gradient", ModelSpec(adapt=keep_the_table)),
]


def with_noise(model: PreTrainedModel) -> PreTrainedModel:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.train()


def assert_equal_to_one_process(model: PreTrainedModel, description: Description) -> None:
    self_check(description)
    with InFp64():  # Mllama rounds its logits
        compare_with_one_process(model, description)


def compare_with_one_process(model: PreTrainedModel, description: Description) -> None:
    tokens, labels = tokens_and_labels(vocabulary=description.head_rows)
    tokens[0, 1] = description.vocabulary_size - 1  # perhaps a token that is only read
    loss, expected = loss_and_gradients(model, tokens, labels)
    for cuts in ([1], [2], [1, 3]):
        found_loss, found = loss_and_gradients_in_stages(description, cuts, tokens, labels)
        assert found_loss == pytest.approx(loss, rel=1e-12)
        assert found.keys() <= expected.keys()
        assert {name for name in expected if expected[name] is not None} <= found.keys()
        errors = gradient_errors({name: found.get(name) for name in expected}, expected)
        assert max(errors.values()) <= 1e-10, errors


@pytest.mark.parametrize(("model_class", "refusal", "spec"), CARRIED)
def test_a_spec_carries_what_probing_refuses(model_class: type, refusal: str, spec: ModelSpec) -> None:
    model = with_noise(model_class(tiny_config("llama")).double())
    with pytest.raises(InputError, match=refusal):
        describe(model)
    assert_equal_to_one_process(model, describe(model, spec=spec))


# --- the files of families --------------------------------------------------------------------------------------------

IMAGES = GROUPED | {"vocab_size": 251, "num_hidden_layers": 4}
OF_FAMILIES: list[tuple[str, Callable[[], PreTrainedConfig]]] = [
    ("roformer", lambda: transformers.RoFormerConfig(**ENCODER, hidden_dropout_prob=0.0, embedding_size=64)),
    ("rwkv", lambda: transformers.RwkvConfig(vocab_size=251, hidden_size=64, num_hidden_layers=4, rescale_every=2)),
    *(
        (
            "mllama_text_model",
            lambda layers=layers: transformers.MllamaTextConfig(**IMAGES, cross_attention_layers=layers),
        )
        for layers in ([1], [0, 3], [1, 2])
    ),
]


@pytest.mark.parametrize(("name", "config"), OF_FAMILIES)
def test_families_with_a_file(name: str, config: Callable[[], PreTrainedConfig]) -> None:
    config = config()
    assert config.model_type == name
    model_class = transformers.MllamaForCausalLM if name.startswith("mllama") else None
    if model_class is None:
        model = whole_model(config)
    else:
        model = with_noise(model_class(config).double())
    assert_equal_to_one_process(model, describe(model))


def test_every_file_of_a_family_is_short_and_tested() -> None:
    assert {name for name, _ in OF_FAMILIES} == NAMES
    folder = Path(evenpipe.model.families.__file__).parent
    lengths = {name: len((folder / f"{name}.py").read_text(encoding="utf-8").splitlines()) for name in NAMES}
    assert max(lengths.values()) <= 40, lengths


def test_a_users_answer_comes_before_that_of_the_file() -> None:
    config = OF_FAMILIES[0][1]()
    assert describe(config, spec=ModelSpec(returns=1)).structure.returns == 1  # beside the file's
    with pytest.raises(InputError, match="acts on the layers or after them without a gradient"):
        describe(config, spec=ModelSpec(adapt=lambda model: None))


def test_a_model_of_rwkv_is_left_as_it_is_by_a_comparison_in_evaluation() -> None:
    from evenpipe.model import check_forward

    model = whole_model(OF_FAMILIES[1][1](), dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    check_forward(describe(model))
    assert all(map(torch.equal, before.values(), model.state_dict().values()))
    assert not model.rwkv.layers_are_rescaled and "_rescale_layers" not in vars(model.rwkv)


def test_a_model_of_rwkv_with_weights_of_evaluation_is_refused() -> None:
    """Its second two layers have half their weights then; the first `rescale_every` layers have all of them."""
    config = OF_FAMILIES[1][1]()
    model, ids = whole_model(config, dtype=torch.float32), torch.arange(6).view(2, 3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.eval()(input_ids=ids)
    assert not all(map(torch.equal, before.values(), model.state_dict().values()))
    with pytest.raises(InputError, match="weights are those of evaluation, half as large every 2 layers; expected"):
        describe(model)
    model.train()(input_ids=ids)
    assert all(map(torch.equal, before.values(), model.state_dict().values())) and not describe(model).changed
    config.rescale_every = 4
    model = whole_model(config, dtype=torch.float32)
    model.eval()(input_ids=ids)
    assert not describe(model).changed
