"""The router loss across stages equals transformers' loss over all layers, bit for bit."""

from __future__ import annotations

import functools

import pytest
import torch
import transformers
from families import EXPERTS, GROUPED, PROMISED_EXPERTS, build_stages, tiny_config, tokens_and_labels, whole_model
from torch.nn import functional
from transformers.models.mixtral import modeling_mixtral

import evenpipe.model.stage as stage_file
from evenpipe.errors import InputError
from evenpipe.model import RouterLoss, copy_parameters, describe, self_check

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


MASK = torch.tensor([[1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 8 + [0] * 4])  # padding and a hole
CASES = [(name, (1, 3), MASK) for name in WITH] + [(name, (1, 3), None) for name in PROMISED_EXPERTS]
CASES += [("mixtral", cuts, MASK) for cuts in ((2, 2), (0, 4), (), (1, 2, 3))]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "cuts", "mask"), CASES)
def test_stages_give_the_value_and_the_gradients_of_the_whole(name, mask, cuts) -> None:
    whole = whole_model(with_loss(name))
    description = describe(whole)
    router = description.router_loss
    tokens, _ = tokens_and_labels()

    output = whole(input_ids=tokens, attention_mask=mask, use_cache=False)
    (router.coefficient * output.aux_loss).backward()
    expected = {key: parameter.grad for key, parameter in whole.named_parameters()}

    embedding = whole.get_parameter(description.embedding_name).detach().clone().requires_grad_()
    hidden = functional.embedding(tokens, embedding, padding_idx=description.padding_index)
    totals, parts = router.start(), []
    stages = build_stages(description, cuts)
    for stage in stages:
        copy_parameters(stage, description)
        received = hidden.detach().requires_grad_() if parts else hidden
        logits: list[torch.Tensor] = []
        hidden = stage(received, attention_mask=mask, router_logits=logits)
        totals, probabilities = router.add(totals, logits, mask)
        parts.append((received, hidden, probabilities))
    assert torch.equal(router.value(totals), output.aux_loss.detach())
    gradient, travelling = router.gradient(totals, 1.0), torch.zeros_like(hidden)
    for received, sent, probabilities in reversed(parts):
        roots = [(sent, travelling), (probabilities, gradient)]
        roots = [(root, given) for root, given in roots if root.requires_grad]
        torch.autograd.backward(*zip(*roots, strict=True))
        travelling = received.grad if received.is_leaf else None
    found = {key: parameter.grad for stage in stages for key, parameter in stage.named_parameters()}
    found[description.embedding_name] = embedding.grad
    for key, gradient in expected.items():
        if gradient is not None and gradient.any():
            assert torch.equal(found[key], gradient), key


def record_without_graph(relay, index, module, args, output) -> None:
    """Compute the right value, but without gradients for the routers."""
    if relay.router_logits is not None:
        relay.router_logits.append(output[index].detach())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_the_self_check_covers_it(name, monkeypatch) -> None:
    description = describe(tiny_config(name, output_router_logits=True))  # transformers' own small coefficient
    self_check(description)
    monkeypatch.setattr(stage_file.Relay, "record_router", record_without_graph)
    with pytest.raises(InputError, match=r"differs from the whole in the gradient of \S+"):
        self_check(description)
