"""What a live model's modules have set is carried over in every layout; what cannot be is refused on every process."""

from __future__ import annotations

import copy
import logging
from functools import partial
from typing import Any

import pytest
import reference
import torch
import transformers
from families import tiny_config, whole_model
from harness import run_processes

from evenpipe import Pipeline
from evenpipe.errors import InputError
from evenpipe.runtime import device

LAYOUTS: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b", "vocabulary": "first-last"},
    "zbv": {"schedule": "zbv", "vocabulary": "vocab-2", "checkpointing": "full"},
    "interlaced, compiled": {"schedule": "1f1b", "vocabulary": "interlaced", "compile_layers": True},
    "tensor ranks": {"tensor_parallel": 2},
    "context ranks": {"context_parallel": 2},
    "slices": {"slices": 2},
    "replicas": {"replicas": 2},
    "shards": {"replicas": 2, "data_parallel": "shard"},
}


def changed_model():
    """Return a model with other frequencies, another scale in one layer, and another one of the embeddings."""
    model = whole_model(tiny_config("granite", tied=True))
    model.model.rotary_emb.inv_freq.mul_(0.5)
    model.model.embedding_multiplier = 1.5
    model.model.layers[1].self_attn.scaling *= 0.5
    return model


def gradients_of_one_process() -> list[str]:
    device.compile_layer = partial(device.compile_layer, backend="aot_eager")
    model, faults = changed_model(), []
    data = reference.batches(model.config.vocab_size, 4, 12, 1)
    wanted = reference.train(copy.deepcopy(model), data)
    for layout, options in LAYOUTS.items():
        pipeline = Pipeline(model, microbatches=2, parameter_dtype=torch.float64, self_check=layout == "zbv", **options)
        ids, labels = data[0]
        rows = len(ids) // pipeline.replicas
        own = slice(pipeline.replica * rows, (pipeline.replica + 1) * rows)
        loss = pipeline.step(ids[own], labels[own]).loss
        gradients = pipeline.full_gradients()
        pipeline.close()
        if torch.distributed.get_rank() == 0:
            error, name = reference.worst(gradients, wanted.gradients)
            if not (loss == pytest.approx(wanted.losses[0], rel=1e-10) and error <= 1e-10):
                faults.append(f"{layout}: loss {loss} for {wanted.losses[0]}, gradient of {name} off by {error:.1e}")
    return faults


def test_every_layout_has_the_gradients_of_the_live_model() -> None:
    faults = run_processes(gradients_of_one_process, 2)[0]
    assert not faults, "\n".join(faults)


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


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def said_of_compiled_layers() -> list[str]:
    lines = Lines()
    logging.getLogger("evenpipe").addHandler(lines)
    model = whole_model(tiny_config("llama"))
    model.model.layers[2].compile()
    pipeline = Pipeline(model, parameter_dtype=torch.float64)
    pipeline.close()
    layers = [torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)]
    layers[1].compile()
    Pipeline.from_modules(torch.nn.Embedding(9, 8), layers, None, torch.nn.Linear(8, 9, bias=False)).close()
    return [line for line in lines.lines if "compile" in line]


def test_compiled_layers_are_said_once() -> None:
    first, *others = run_processes(said_of_compiled_layers, 2)
    assert first == [
        f"model: its compile() of {name} is not taken over: compile_layers=True compiles the layers of stages"
        for name in ("model.layers.2", "layers.1")
    ]
    assert others == [[]]
