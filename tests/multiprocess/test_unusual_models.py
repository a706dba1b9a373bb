"""Configurations in which families do something of their own: loss and gradients are those of one process."""

from __future__ import annotations

from unittest import mock

import pytest
import reference
import torch
import transformers
from families import whole_model
from harness import run_processes
from torch.nn import functional

from evenpipe import Pipeline
from evenpipe.errors import InputError
from evenpipe.model import gradient_errors

GROUPED = {
    "vocab_size": 251,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}

# model type, settings beside the common ones
CLIPPED = [  # the outputs of its biased linear layers are clamped in place
    ("olmo", {"clip_qkv": 0.2, "attention_bias": True}),
    ("olmoe", {"clip_qkv": 0.2, "attention_bias": True, **EXPERTS}),
]
PER_LAYER = {  # the heads of layers with full attention are larger and fewer share keys and values
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 8,
}
DIFFERING = [
    ("gemma4_text", PER_LAYER),
    (
        "gemma4_text",
        {**PER_LAYER, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 40},
    ),
]


def as_in_one_process(model_type: str, settings: dict, schedules: list[str]) -> None:
    config = transformers.AutoConfig.for_model(model_type, **(GROUPED | settings))
    config._experts_implementation = "eager"  # the grouped product of experts takes no fp64
    model = whole_model(config)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, config.vocab_size, (2, 10), generator=generator)
    losses = []
    for one in ids.split(1):  # the loss of routers is one of every microbatch
        output = model(input_ids=one, use_cache=False)
        loss = functional.cross_entropy(output.logits[0, :-1], one[0, 1:])
        if settings.get("output_router_logits"):
            loss = loss + config.router_aux_loss_coef * output.aux_loss
        losses.append(loss)
    expected = torch.stack(losses).mean()
    expected.backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for schedule in schedules:
        pipeline = Pipeline(
            model, schedule=schedule, vocabulary="vocab-2", microbatches=2, parameter_dtype=torch.float64
        )
        loss = pipeline.step(ids).loss
        assert loss == pytest.approx(expected.item(), rel=1e-10)
        gradients = pipeline.full_gradients()
        if pipeline.device == 0:
            error, parameter = reference.worst(gradients, wanted)
            assert error <= 1e-10, f"{schedule}: {parameter} {error:.1e}"
        pipeline.close()


@pytest.mark.parametrize(("model_type", "settings"), CLIPPED)
@pytest.mark.sampled(1)
def test_outputs_changed_in_place(model_type, settings) -> None:
    run_processes(as_in_one_process, 2, model_type, settings, ["zbv"])


@pytest.mark.parametrize(("model_type", "settings"), DIFFERING)
@pytest.mark.sampled(1)
def test_settings_that_differ_from_layer_to_layer(model_type, settings) -> None:
    run_processes(as_in_one_process, 2, model_type, settings, ["1f1b", "zbv"])


FOLLOWING = [  # their buffers (decays of linear attention, a mask that scores are multiplied by) have the model's dtype
    ("minimax", {"num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 8}),
    ("openai-gpt", {"n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
]


def in_bf16(model_type: str, settings: dict) -> None:
    config = transformers.AutoConfig.for_model(model_type, **(GROUPED | settings))
    errors = reference.Bf16Errors(whole_model(config, torch.float32))
    pipeline = Pipeline(whole_model(config, torch.float32), microbatches=1, compute_dtype=torch.bfloat16)
    for ids, _ in reference.batches(config.vocab_size, 4, 12, 3):
        pipeline.zero_grad()
        loss = pipeline.step(ids).loss
        gradients = pipeline.full_gradients()
        if pipeline.device == 0:
            errors.add(gradients, loss, ids)
    errors.check(model_type)


@pytest.mark.parametrize(("model_type", "settings"), FOLLOWING)
@pytest.mark.sampled(1)
def test_buffers_that_follow_the_dtype_of_the_model(model_type, settings) -> None:
    run_processes(in_bf16, 2, model_type, settings)


def with_padding_inside() -> None:
    settings = {"is_decoder": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = whole_model(transformers.AutoConfig.for_model("roberta", **(GROUPED | settings)))
    ids = torch.randint(5, 251, (2, 10), generator=torch.Generator().manual_seed(1))
    ids[0, 4] = model.config.pad_token_id
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    expected = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    expected.backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    pipeline = Pipeline(model, microbatches=2, parameter_dtype=torch.float64, self_check=False)
    assert pipeline.step(ids).loss == pytest.approx(expected.item(), rel=1e-10)
    gradients = pipeline.full_gradients()
    if pipeline.device == 0:  # a bias of keys changes no score: its gradient is zero but for rounding
        assert max(gradient_errors(gradients, wanted).values()) <= 1e-10
    pipeline.close()


def test_positions_that_a_model_counts_from_token_ids() -> None:
    run_processes(with_padding_inside, 2)


def a_self_check_that_raises() -> None:
    with (
        mock.patch("evenpipe.runtime.arguments.self_check", side_effect=ValueError("Expected a batch of 12\nnot 22")),
        pytest.raises(InputError, match=r"^Llama.* cannot be checked on .* \(ValueError: Expected a batch of 12"),
    ):
        Pipeline(transformers.LlamaConfig(**GROUPED), microbatches=1)


def test_a_self_check_that_raises_is_a_sentence_on_all_processes() -> None:
    run_processes(a_self_check_that_raises, 2)
