"""Fresh weights are the same for every layout, and distributed as in transformers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from families import COMMON, EXPERTS, FAMILIES, GROUPED, PADDING, PROMISED_EXPERTS, build_stages, tiny_config
from torch import nn

from evenpipe.errors import InputError
from evenpipe.model import build_stage, describe, initial_rows, initialize
from evenpipe.model.structure import build_skeleton
from evenpipe.vocabulary import split

LAYOUTS = [(), (2,), (1, 3), (0, 2, 4)]


def fresh(description, cuts, seed=0, dtype=torch.float32) -> dict[str, torch.Tensor]:
    weights = {}
    for stage in build_stages(description, cuts, dtype=dtype):
        initialize(stage, description, seed)
        weights |= {name: parameter.detach() for name, parameter in stage.named_parameters()}
    return weights


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", [*FAMILIES, *PROMISED_EXPERTS, "deepseek_v3", "bert", "openai-gpt"])
def test_every_layout_starts_from_the_same_weights(name) -> None:
    """BERT has a separate head bias, and layers of the first GPT take fields of the config."""
    if name in ("bert", "openai-gpt"):
        settings = {"is_decoder": True, "intermediate_size": 96, "tie_word_embeddings": False}
        settings = settings if name == "bert" else {"n_positions": 64}
        description = describe(transformers.AutoConfig.for_model(name, **(COMMON | settings)))
    else:
        description = describe(tiny_config(name))
    whole, *others = (fresh(description, cuts) for cuts in LAYOUTS)
    assert all(weight.isfinite().all() for weight in whole.values())
    for other in others:
        assert other.keys() == whole.keys()
        assert all(torch.equal(other[key], whole[key]) for key in whole)


class WithAGain(transformers.LlamaForCausalLM):
    """The model around the layers has its own parameter, as in Zaya."""

    def __init__(self, config):
        super().__init__(config)
        self.model.gain = nn.Parameter(torch.ones(config.hidden_size))
        self.model.layers[0].register_forward_pre_hook(lambda module, args: (args[0] * self.model.gain, *args[1:]))


def _draw_the_gain(self, module) -> None:
    transformers.LlamaPreTrainedModel._init_weights(self, module)
    if hasattr(module, "gain"):
        nn.init.constant_(module.gain, 0.25)


def test_what_the_model_around_the_layers_has_of_its_own_is_drawn_by_its_rule(monkeypatch) -> None:
    description = replace(describe(WithAGain(tiny_config("llama"))), model=None)
    assert description.structure.first_parameters == ("model.gain",)
    with pytest.raises(InputError, match=r"transformers gives no fresh value to model\.gain, so WithAGain"):
        fresh(description, (2,))
    monkeypatch.setattr(transformers.LlamaModel, "_init_weights", _draw_the_gain)
    for cuts in LAYOUTS:
        weights = fresh(description, cuts)
        assert all(weight.isfinite().all() for weight in weights.values())
        assert torch.equal(weights["model.gain"], torch.full((64,), 0.25))


def test_seeds_and_names_matter_and_the_number_of_layers_does_not() -> None:
    description = describe(tiny_config("llama"))
    weights, other = fresh(description, (), seed=0), fresh(description, (), seed=1)
    first, second = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
    assert not torch.equal(weights[first], other[first]) and not torch.equal(weights[first], weights[second])
    shallow = fresh(describe(tiny_config("llama", num_hidden_layers=2)), ())
    assert all(torch.equal(shallow[key], weights[key]) for key in shallow)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [*FAMILIES, *EXPERTS])
def test_the_distribution_is_that_of_transformers(name) -> None:
    """Compare mean and spread of every parameter; from 4000 values the spread is known to a few percent."""
    _, settings = (FAMILIES | EXPERTS)[name]
    config = tiny_config(
        name, num_hidden_layers=2, **({"layer_types": settings["layer_types"][:2]} if "layer_types" in settings else {})
    )
    torch.manual_seed(3)
    whole = transformers.AutoModelForCausalLM.from_config(config)
    description = describe(config)
    found = fresh(description, (1,))
    for key in description.vocabulary_names:
        found[key] = initial_rows(description, key, 0, description.vocabulary_size, 0)
    for key, expected in whole.named_parameters():
        assert found[key].shape == expected.shape
        tolerance = 0.1 if expected.numel() >= 4000 else 0.5 if expected.numel() >= 16 else 0.99
        assert found[key].std().item() == pytest.approx(expected.std().item(), rel=tolerance, abs=1e-9), key
        spread = max(0.01, 4 * expected.std().item() / expected.numel() ** 0.5)  # wider for a mean over few values
        assert found[key].mean().item() == pytest.approx(expected.mean().item(), abs=spread), key


class LayerWithGate(transformers.models.llama.modeling_llama.LlamaDecoderLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.gate = nn.Parameter(torch.linspace(0, 1 + layer_idx, config.hidden_size))
        self.offset = nn.Buffer(torch.full((3,), 0.5 + layer_idx), persistent=False)


class LayerThatTakesMore(LayerWithGate):
    def __init__(self, config, layer_idx, surprise):
        super().__init__(config, layer_idx)
        self.offset = None


class Gated(transformers.LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.layers = nn.ModuleList(LayerWithGate(config, index) for index in range(4))


class GatedAndMore(transformers.LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.layers = nn.ModuleList(LayerThatTakesMore(config, index, surprise=1) for index in range(4))


def test_what_no_rule_covers_comes_from_the_constructor_or_is_refused() -> None:
    description = describe(Gated(tiny_config("llama")))
    stage = build_stage(description, 2, 3, is_first=False, is_last=False)
    initialize(stage, description, 0)
    assert torch.equal(stage.get_parameter("model.layers.2.gate"), torch.linspace(0, 3, 64))
    assert torch.equal(dict(stage.named_buffers())["model.layers.2.offset"], torch.full((3,), 2.5))

    description = describe(GatedAndMore(tiny_config("llama")))
    stage = build_stage(description, 2, 3, is_first=False, is_last=False)
    refused = r"no fresh value to model.layers.2.gate, so GatedAndMore cannot be built in parts"
    with pytest.raises(InputError, match=refused):
        initialize(stage, description, 0)


@pytest.mark.parametrize(("name", "tied"), [("llama", False), ("gemma2", True), ("gpt_neox", False)])
def test_rows_are_the_same_for_every_sharding(name, tied) -> None:
    description = describe(tiny_config(name, tied=tied, vocab_size=1003))
    embedding, head = (
        initial_rows(description, key, 0, 1003, seed=4) for key in (description.embedding_name, description.head_name)
    )
    assert embedding.shape == (1003, 64) and embedding.dtype == torch.float32 and not embedding.isnan().any()
    assert not torch.equal(embedding[:200], embedding[256:456]), "blocks differ"
    assert torch.equal(embedding, head) is tied
    for key, whole in ((description.embedding_name, embedding), (description.head_name, head)):
        for shards in (split(1003, parts) for parts in (2, 3, 7)):
            rows = [initial_rows(description, key, shard.start, shard.stop, seed=4) for shard in shards]
            assert torch.equal(torch.cat(rows), whole)
    assert initial_rows(description, description.embedding_name, 10, 10, 0).shape == (0, 64)


@pytest.mark.parametrize("padding", [PADDING, 300])
def test_the_padding_row_is_zero_in_the_embedding_and_only_there(padding) -> None:
    untied = describe(tiny_config("llama", pad_token_id=padding))
    rows = initial_rows(untied, untied.embedding_name, 0, 503, 0)
    assert [int(row) for row in torch.where((rows == 0).all(1))[0]] == [padding]
    assert not (initial_rows(untied, untied.head_name, 0, 503, 0) == 0).all(1).any()
    tied = describe(tiny_config("llama", pad_token_id=padding, tied=True))
    assert torch.equal(initial_rows(tied, tied.head_name, 0, 503, 0), rows), "the one matrix of a tied model"


def test_rows_that_do_not_exist_and_names_that_are_none() -> None:
    description = describe(tiny_config("phi"))
    assert torch.equal(initial_rows(description, description.head_bias_name, 100, 400, 0), torch.zeros(300))
    with pytest.raises(InputError, match=r"rows \[0, 504\) are not within the vocabulary of 503 rows"):
        initial_rows(description, description.head_name, 0, 504, 0)
    with pytest.raises(InputError, match=r"'model.norm.weight' is no vocabulary matrix of PhiForCausalLM"):
        initial_rows(description, "model.norm.weight", 0, 4, 0)


def test_large_vocabularies_are_never_drawn_whole() -> None:
    """Described with a small vocabulary, then given a skeleton with the large one."""
    config = transformers.LlamaConfig(**{**COMMON, **GROUPED, "vocab_size": 10**9})
    small = describe(transformers.LlamaConfig(**{**config.to_dict(), "vocab_size": 503}))
    description = replace(small, config=config, skeleton=build_skeleton(config, torch.float32))
    assert initial_rows(description, "model.embed_tokens.weight", 10**9 - 3, 10**9, 0).shape == (3, 64)
