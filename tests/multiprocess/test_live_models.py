"""A live model trains as it is, in every layout: with what its modules have set and with the ties that it has, whatever
its config says. What cannot be carried over is refused on every process."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
import transformers
from families import tiny_config, whole_model
from harness import lines_logged, run_processes
from torch import nn
from transformers import PreTrainedModel

from evenpipe import Pipeline, Recipe
from evenpipe.errors import InputError
from evenpipe.layers import compilation
from evenpipe.memory.estimate import estimate
from evenpipe.model import describe, describe_modules

LAYOUTS: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b", "vocabulary": "first-last"},
    "zbv": {"schedule": "zbv", "vocabulary": "vocab-2", "activation_checkpointing": "full"},
    "interlaced, compiled": {"schedule": "1f1b", "vocabulary": "interlaced", "compile_layers": True},
    "tensor ranks": {"tp": 2},
    "context ranks": {"cp": 2},
    "slices": {"slices": 2},
    "replicas": {"dp": 2},
    "shards": {"dp": 2, "data_parallel": "shard"},
}


def changed() -> PreTrainedModel:
    """Return a model with other frequencies, another scale in one layer, and another one of the embeddings."""
    model = whole_model(tiny_config("granite", tied=True))
    model.model.rotary_emb.inv_freq.mul_(0.5)
    model.model.embedding_multiplier = 1.5
    model.model.layers[1].self_attn.scaling *= 0.5
    return model


def tied_by_hand() -> PreTrainedModel:
    model = whole_model(tiny_config("llama"))
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def untied_by_hand() -> PreTrainedModel:
    model = whole_model(tiny_config("llama", tied=True))
    model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))
    return model


def faults_of_layouts(make: Callable[[], PreTrainedModel], layouts: list[str], folder: Path) -> list[str]:
    compilation.compile_layer = partial(compilation.compile_layer, backend="aot_eager")
    model, faults = make(), []
    ((ids, labels),) = reference.batches(model.config.vocab_size, 4, 12, 1)
    wanted = reference.train(copy.deepcopy(model), [(ids, labels)])
    for layout in layouts:
        options = {"microbatches": 2, "parameter_dtype": torch.float64, "self_check": layout == "zbv"}
        pipeline = Pipeline(model, **options | LAYOUTS[layout])
        rows = len(ids) // pipeline.replicas
        own = slice(pipeline.replica * rows, (pipeline.replica + 1) * rows)
        loss = pipeline.step(ids[own], labels[own]).loss
        gradients = pipeline.full_gradients()
        pipeline.save_pretrained(folder)
        pipeline.close()
        if torch.distributed.get_rank() == 0:
            error, name = reference.worst(gradients, wanted.gradients)
            if not (loss == pytest.approx(wanted.losses[0], rel=1e-10) and error <= 1e-10):
                faults.append(f"{layout}: loss {loss} for {wanted.losses[0]}, gradient of {name} off by {error:.1e}")
    return faults


@pytest.mark.parametrize(
    ("make", "layouts", "tied"),
    [(changed, list(LAYOUTS), True), (tied_by_hand, ["1f1b", "zbv"], True), (untied_by_hand, ["1f1b", "zbv"], False)],
)
@pytest.mark.sampled(1)
def test_every_layout_has_the_gradients_of_the_live_model(make, layouts, tied, tmp_path: Path, sample) -> None:
    faults = run_processes(faults_of_layouts, 2, make, sample(layouts, 2), tmp_path)[0]
    assert not faults, "\n".join(faults)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is tied
    if make is not changed:  # an estimate, too, counts the matrices that there are
        recipe = Recipe.of(pp=2, sequence_length=16)
        by_config = {one: estimate(describe(tiny_config("llama", tied=one)), recipe).devices for one in (True, False)}
        assert estimate(describe(make()), recipe).devices == by_config[tied] != by_config[not tied]


# --- refusals ---------------------------------------------------------------------------------------------------------


class Scaled(transformers.models.llama.modeling_llama.LlamaMLP):
    def __init__(self, config) -> None:
        super().__init__(config)
        self._factors = [1.0]

    def forward(self, hidden):
        return self._factors[0] * super().forward(hidden)


class ScaledModel(transformers.LlamaForCausalLM):
    def __init__(self, config) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = Scaled(config)


def refusals() -> list[str]:
    """Return the sentences on a hook, and on a number that only the forward of the first process shows."""
    model, sentences = ScaledModel(tiny_config("llama")), []
    handle = model.model.layers[1].mlp.register_forward_hook(print)
    for _ in range(2):
        with pytest.raises(InputError) as refused:
            Pipeline(model)
        sentences.append(str(refused.value))
        handle.remove()
        if torch.distributed.get_rank() == 0:
            model.model.layers[1].mlp._factors[0] = 2.0
    return sentences


def test_what_cannot_be_carried_over_is_refused_on_every_process() -> None:
    for hook, number in run_processes(refusals, 2):
        assert hook.startswith("model: model.layers.1.mlp has a forward hook (print)")
        assert number.startswith("model: model.layers.1.mlp computes something else than in a ScaledModel")


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FIRST, LAST = "model.layers.0.self_attn.o_proj.weight", "model.layers.3.self_attn.o_proj.weight"
SHARED = [
    # two parameters, and whether they are one, or two with the memory of one
    (LAST, FIRST, True),
    (LAST, FIRST, False),
    (HEAD, EMBEDDING, False),
    ("model.norm.weight", "model.layers.0.input_layernorm.weight", True),
]


def test_other_shared_parameters_of_a_live_model_are_refused() -> None:
    for name, other, is_one in SHARED:
        model = whole_model(tiny_config("llama"))
        if is_one:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, model.get_parameter(other))
        else:
            model.get_parameter(name).data = model.get_parameter(other).data
        with pytest.raises(InputError, match=r"its parameters (.*) and (.*) are one tensor"):
            describe(model)


class AlwaysTied(transformers.LlamaForCausalLM):
    def __init__(self, config) -> None:
        super().__init__(config)
        self.lm_head.weight = self.model.embed_tokens.weight


def test_a_tie_that_a_config_cannot_undo_is_refused() -> None:
    model = AlwaysTied(tiny_config("llama"))
    describe(model)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    with pytest.raises(InputError, match="its output layer are two tensors, and one in a AlwaysTied "):
        describe(model)


def test_a_layer_may_use_a_parameter_twice_but_layers_share_none() -> None:
    ends = nn.Embedding(9, 8), nn.Linear(8, 9, bias=False)
    twice, other, same_memory = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
    same_memory.weight = nn.Parameter(twice.weight.detach())
    describe_modules(ends[0], [nn.Sequential(twice, nn.GELU(), twice), other], None, ends[1])
    for layers, names in (
        ([nn.Sequential(twice, same_memory), other], r"layers\.0\.0\.weight and layers\.0\.1\.weight"),
        ([twice, other, twice], r"layers\.0\.weight and layers\.2\.weight"),
    ):
        with pytest.raises(InputError, match=f"{names} are one tensor"):
            describe_modules(ends[0], layers, None, ends[1])


# --- what is said -----------------------------------------------------------------------------------------------------


def not_taken_over() -> list[str]:
    """Return the warnings about hooks and compiled layers of live models, and of models without any."""

    def modules() -> tuple[nn.Embedding, list[nn.Module], None, nn.Linear]:
        return nn.Embedding(9, 8), [nn.Linear(8, 8), nn.Linear(8, 8)], None, nn.Linear(8, 9)

    llama, plain = whole_model(tiny_config("llama")), modules()
    llama.get_parameter(EMBEDDING).register_hook(lambda gradient: 0 * gradient)
    llama.model.layers[2].compile()
    for parameter in plain[1][1].parameters():
        parameter.register_post_accumulate_grad_hook(print)
    plain[1][1].compile()
    with lines_logged() as said:
        Pipeline(llama, parameter_dtype=torch.float64, self_check=False).close()
        Pipeline.from_modules(*plain).close()
        Pipeline.from_modules(*modules()).close()
    return said


def test_hooks_and_compiled_layers_are_said_once() -> None:
    first, *others = run_processes(not_taken_over, 2)
    hooks, compiled = ([line for line in first if word in line] for word in ("hook", "compile"))
    assert hooks == [
        f"gradient hooks of the model are not taken over, from {names}: register them on the parameters that"
        " pipeline.named_parameters() yields"
        for names in (EMBEDDING, "layers.1.weight and layers.1.bias")
    ]
    assert compiled == [
        f"model: its compile() of {name} is not taken over: compile_layers=True compiles the layers of stages"
        for name in ("model.layers.2", "layers.1")
    ]
    assert not any("hook" in line or "compile" in line for said in others for line in said)
