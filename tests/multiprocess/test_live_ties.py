"""The vocabulary matrices of a live model are tied if they are one tensor, whatever its config says."""

from __future__ import annotations

import copy
import json

import pytest
import reference
import torch
import transformers
from families import tiny_config, whole_model
from harness import run_processes

from evenpipe import Pipeline
from evenpipe.errors import InputError
from evenpipe.memory.estimate import estimate
from evenpipe.model import describe, describe_modules
from evenpipe.recipe.recipe import Recipe


def tied_by_hand():
    model = whole_model(tiny_config("llama"))
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def untied_by_hand():
    model = whole_model(tiny_config("llama", tied=True))
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    return model


def gradients_of_one_process(make, folder) -> None:
    model = make()
    data = reference.batches(model.config.vocab_size, 4, 10, 3)
    wanted = reference.train(copy.deepcopy(model), data)
    for mode in ("first-last", "vocab-2"):
        pipeline = Pipeline(
            model, vocabulary=mode, microbatches=2, parameter_dtype=torch.float64, self_check=mode == "vocab-2"
        )
        optimizer = reference.adamw(list(pipeline.parameters()))
        for number, batch in enumerate(data):
            pipeline.zero_grad()
            loss = pipeline.step(*batch).loss
            assert loss == pytest.approx(wanted.losses[number], rel=1e-10)
            if number == 0:
                gradients = pipeline.full_gradients()
            optimizer.step()
        weights = pipeline.full_state_dict()
        if pipeline.device == 0:
            assert reference.worst(gradients, wanted.gradients)[0] <= 1e-10
            assert reference.worst(weights, wanted.weights)[0] <= 1e-8
        pipeline.save_pretrained(folder)
        pipeline.close()


@pytest.mark.parametrize(("make", "tied"), [(tied_by_hand, True), (untied_by_hand, False)])
@pytest.mark.sampled(1)
def test_a_model_trains_and_is_saved_as_it_is(make, tied, tmp_path) -> None:
    run_processes(gradients_of_one_process, 2, make, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is tied


@pytest.mark.parametrize(("make", "tied"), [(tied_by_hand, True), (untied_by_hand, False)])
def test_an_estimate_counts_the_matrices_that_there_are(make, tied) -> None:
    said = {
        one: estimate(describe(tiny_config("llama", tied=one)), Recipe.of(pp=2, sequence_length=16))
        for one in (True, False)
    }
    found = estimate(describe(make()), Recipe.of(pp=2, sequence_length=16))
    assert found.devices == said[tied].devices and found.devices != said[not tied].devices


def share(model, name: str, other: str) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, model.get_parameter(other))


def share_memory(model, name: str, other: str) -> None:
    model.get_parameter(name).data = model.get_parameter(other).data


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FIRST, LAST = "model.layers.0.self_attn.o_proj.weight", "model.layers.3.self_attn.o_proj.weight"
ONE_TENSOR = [
    (share, LAST, FIRST),
    (share_memory, LAST, FIRST),
    (share_memory, HEAD, EMBEDDING),
    (share, "model.norm.weight", "model.layers.0.input_layernorm.weight"),
]


@pytest.mark.parametrize(("how", "name", "other"), ONE_TENSOR)
def test_other_shared_parameters_of_a_live_model_are_refused(how, name, other) -> None:
    model = whole_model(tiny_config("llama"))
    how(model, name, other)
    with pytest.raises(InputError, match=r"its parameters (.*) and (.*) are one tensor"):
        describe(model)


class AlwaysTied(transformers.LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.lm_head.weight = self.model.embed_tokens.weight


def test_a_tie_that_a_config_cannot_undo_is_refused() -> None:
    model = AlwaysTied(tiny_config("llama"))
    describe(model)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with pytest.raises(InputError, match="its output layer are two tensors, and one in a AlwaysTied "):
        describe(model)


def test_layers_that_share_a_parameter_make_no_pipeline_of_modules() -> None:
    layer = torch.nn.Linear(8, 8)
    with pytest.raises(InputError, match=r"its parameters layers\.0\.weight and layers\.2\.weight are one tensor"):
        describe_modules(
            torch.nn.Embedding(9, 8), [layer, torch.nn.Linear(8, 8), layer], None, torch.nn.Linear(8, 9, bias=False)
        )


def test_a_layer_may_use_a_parameter_twice_but_not_the_same_memory_twice() -> None:
    twice, other = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    ends = torch.nn.Embedding(9, 8), torch.nn.Linear(8, 9, bias=False)
    layers = [torch.nn.Sequential(twice, torch.nn.GELU(), twice), other]
    describe_modules(ends[0], layers, None, ends[1])
    same_memory = torch.nn.Linear(8, 8)
    same_memory.weight = torch.nn.Parameter(twice.weight.detach())
    with pytest.raises(InputError, match=r"layers\.0\.0\.weight and layers\.0\.1\.weight are one tensor"):
        describe_modules(ends[0], [torch.nn.Sequential(twice, same_memory), other], None, ends[1])
