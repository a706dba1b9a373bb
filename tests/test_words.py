"""Numbers in sentences: one of a thing is not "1 things", anywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from evenpipe import InputError, Pipeline
from evenpipe.plan.stage_costs import costs_for_stages
from evenpipe.schedule import Costs
from evenpipe.train.config_file import config_from_dict
from evenpipe.words import count, join, quoted

COUNTED = [
    (1, "layer", "", "1 layer"),
    (0, "layer", "", "0 layers"),
    (2, "microbatch", "", "2 microbatches"),
    (4, "process", "", "4 processes"),
    (3, "entry", "", "3 entries"),
    (2, "key", "", "2 keys"),
    (2000, "token", ",", "2,000 tokens"),
    (1.0, "activation", "g", "1 activation"),
    (1.5, "activation", "g", "1.5 activations"),
]


def test_numbers_lists_and_quotes() -> None:
    for number, noun, form, says in COUNTED:
        assert count(number, noun, form) == says
    joined = [join(list("abc")), join(["a"]), join([]), join(list("abcd"), 3)]
    assert joined == ["a, b and c", "a", "", "a, b and 2 more"]
    assert quoted("2F0") == "'2F0'" and quoted("x" * 5000) == f"'{'x' * 57}...'"


def pipeline(**options: Any) -> Pipeline:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = LlamaConfig(vocab_size=16, max_position_embeddings=4, **sizes)
    return Pipeline(config, self_check=False, microbatches=2, **options)


SENTENCES: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: pipeline(checkpointing=["full", "none"]),
        "checkpointing: 2 choices, expected one for each of the model's 1 layer",
    ),
    (lambda: pipeline(layers_per_stage=[1, 1]), "expected 1 number (one per stage) that add up to the model's 1 layer"),
    (
        lambda: pipeline().step(torch.zeros(1, 4).long()),
        "1 sequence, expected a multiple of the 2 microbatches",
    ),
    (lambda: costs_for_stages(Costs(F=(1.0,)), 2, 1), "costs: F has 1 number for 2 stages"),
    (lambda: config_from_dict({"pipeline": {"replicas": 2, "processes": 1}}), "a divisor of the 1 process"),
]


def test_sentences_about_one_of_a_thing() -> None:
    for call, says in SENTENCES:
        with pytest.raises(InputError) as caught:
            call()
        assert says in str(caught.value)
    assert " of 1 layer and " in repr(pipeline())
