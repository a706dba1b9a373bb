"""The router loss: its numbers, losses that are refused, and its gradients across stages."""

from __future__ import annotations

import functools

import pytest
import transformers
from families import EXPERTS, GROUPED, tiny_config
from transformers.models.mixtral import modeling_mixtral

import evenpipe.model.stage as stage_file
from evenpipe.errors import InputError
from evenpipe.model import RouterLoss, describe, self_check

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
REFUSED = [
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
    for source, sentence in REFUSED:
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
