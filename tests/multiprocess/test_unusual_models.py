"""Families that do something of their own: loss and gradients are those of one process.

In bf16 what transformers keeps in fp32 is fp32 here too, and buffers follow the dtype of their model: errors are no
larger than those of transformers itself, loaded by `from_pretrained(dtype=torch.bfloat16)` in one process.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import reference
import torch
import torch.distributed as dist
import transformers
from families import whole_model
from family_configs import Configuration
from harness import run_processes
from torch.nn import functional
from transformers import PreTrainedModel

from evenpipe import Pipeline
from evenpipe.errors import InputError
from evenpipe.layers import compilation
from evenpipe.model import gradient_errors
from evenpipe.model.fp64 import InFp64

GROUPED = {
    "vocab_size": 251,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
PER_LAYER = {  # the heads of layers with full attention are larger and fewer share keys and values
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 8,
}
CASES = [
    # model type, settings beside the common ones
    ("olmo", {"clip_qkv": 0.2, "attention_bias": True}),  # the outputs of biased linear layers are clamped in place
    ("olmoe", {"clip_qkv": 0.2, "attention_bias": True, "num_experts": 4, "num_experts_per_tok": 2}),
    ("gemma4_text", PER_LAYER),
    (
        "gemma4_text",
        {**PER_LAYER, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 40},
    ),
]


def compare(model: PreTrainedModel, ids: torch.Tensor, schedule: str) -> None:
    """Take a step whose microbatches are one sequence each; loss and gradients are those of one process."""
    losses = []
    for row in ids.split(1):
        logits = model(input_ids=row, use_cache=False).logits[0, :-1]
        losses.append(functional.cross_entropy(logits, row[0, 1:]))
    expected = torch.stack(losses).mean()
    expected.backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    pipeline = Pipeline(model, schedule=schedule, vocabulary="vocab-2", microbatches=2, parameter_dtype=torch.float64)
    assert pipeline.step(ids).loss == pytest.approx(expected.item(), rel=1e-10)
    gradients = pipeline.full_gradients()
    if pipeline.device == 0:  # a bias of keys may change no score: its gradient is zero but for rounding
        assert gradients.keys() == wanted.keys()
        errors = gradient_errors(gradients, wanted)
        assert max(errors.values()) <= 1e-10, errors
    pipeline.close()


def as_in_one_process(model_type: str, settings: dict[str, Any], schedule: str) -> None:
    config = transformers.AutoConfig.for_model(model_type, **(GROUPED | settings))
    config._experts_implementation = "eager"  # the grouped product of experts takes no fp64
    ids = torch.randint(0, config.vocab_size, (2, 10), generator=torch.Generator().manual_seed(1))
    compare(whole_model(config), ids, schedule)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize(("model_type", "settings"), CASES)
@pytest.mark.sampled(2)
def test_settings_of_single_families(model_type: str, settings: dict[str, Any], schedule: str) -> None:
    run_processes(as_in_one_process, 2, model_type, settings, schedule)


def with_padding_inside() -> None:
    settings = {"is_decoder": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = whole_model(transformers.AutoConfig.for_model("roberta", **(GROUPED | settings)))
    ids = torch.randint(5, 251, (2, 10), generator=torch.Generator().manual_seed(1))
    ids[0, 4] = model.config.pad_token_id
    compare(model, ids, "1f1b")


def test_positions_that_a_model_counts_from_token_ids() -> None:
    run_processes(with_padding_inside, 2)


ONLY_READ = 251
"""A token of Moshi that its output layer does not predict."""
OF_MORE_ROWS: list[dict[str, Any]] = [
    *({"vocabulary": mode} for mode in ("first-last", "redistribute", "interlaced", "vocab-1", "vocab-2")),
    {"schedule": "zbv"},
    {"tp": 2},
    {"tp": 2, "vocabulary": "first-last"},
    {"dp": 2, "data_parallel": "shard"},
]


def fewer_tokens_are_predicted_than_read(cases: list[dict[str, Any]]) -> None:
    with InFp64():  # norms of Moshi round to fp32
        compare_layouts_of_moshi(cases)


def compare_layouts_of_moshi(cases: list[dict[str, Any]]) -> None:
    model = whole_model(transformers.MoshiConfig(**GROUPED, head_dim=16, ffn_dim=96))
    ids = torch.randint(5, ONLY_READ, (2, 10), generator=torch.Generator().manual_seed(1))
    ids[0, 4] = ids[1, 0] = ONLY_READ
    labels = ids.masked_fill(ids == ONLY_READ, -100)
    logits = model(input_ids=ids, use_cache=False).logits
    expected = functional.cross_entropy(logits[:, :-1].flatten(0, 1).double(), labels[:, 1:].flatten())
    expected.backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for options in cases:
        pipeline = Pipeline(model, microbatches=2 // options.get("dp", 1), parameter_dtype=torch.float64, **options)
        own = slice(None) if "dp" not in options else slice(pipeline.replica, pipeline.replica + 1)
        assert pipeline.step(ids[own], labels[own]).loss == pytest.approx(expected.item(), rel=1e-10), options
        gradients, weights = pipeline.full_gradients(), pipeline.full_state_dict()
        if dist.get_rank() == 0:
            errors = gradient_errors(gradients, wanted)
            assert gradients.keys() == wanted.keys() and max(errors.values()) <= 1e-10, (options, errors)
            assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items()), options
        with pytest.raises(InputError, match=r"labels contains 251, a token of input_ids; each must|first process"):
            pipeline.step(ids[own])
        pipeline.close()


def test_a_vocabulary_of_which_some_tokens_are_only_read(sample) -> None:
    run_processes(fewer_tokens_are_predicted_than_read, 2, sample(OF_MORE_ROWS, 3))


def a_self_check_that_raises() -> None:
    with (
        mock.patch("evenpipe.runtime.arguments.self_check", side_effect=ValueError("Expected a batch of 12\nnot 22")),
        pytest.raises(InputError, match=r"^Llama.* cannot be checked on .* \(ValueError: Expected a batch of 12"),
    ):
        Pipeline(transformers.LlamaConfig(**GROUPED), microbatches=1)


def test_a_self_check_that_raises_is_a_sentence_on_all_processes() -> None:
    run_processes(a_self_check_that_raises, 2)


# --- in bf16 ----------------------------------------------------------------------------------------------------------

BATCHES, ROWS, TOKENS = 6, 4, 16
LAYOUTS: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b", "vocabulary": "first-last"},
    "zbv": {"schedule": "zbv", "vocabulary": "vocab-2"},
    "full checkpointing": {"schedule": "zb-h1", "activation_checkpointing": "full"},
    "selective checkpointing": {"schedule": "1f1b", "activation_checkpointing": "selective"},
    "compiled": {"schedule": "zbv", "compile_layers": True},
    "tensor ranks": {"tp": 2},
    "shards": {"dp": 2, "data_parallel": "shard", "reshard": True},
    "expert groups": {"dp": 2, "ep": 2},
    "compiled expert groups": {"dp": 2, "ep": 2, "compile_layers": True},
    "shards of expert groups": {"dp": 2, "ep": 2, "data_parallel": "shard"},
}
BF16_CASES = [
    *(("ernie4_5_moe", layout) for layout in LAYOUTS),  # routers and their biases
    ("bailing_hybrid", "zbv"),  # decays and convolutions
    ("bailing_hybrid", "shards"),
    ("bailing_hybrid", "tensor ranks"),
    ("inkling_text", "tensor ranks"),
    ("flint", "1f1b"),  # sinks of attention
    ("inkling_text", "shards"),
    ("hunyuan_v1_moe", "zbv"),  # routers that are built in fp32
]


def model_of(family: str) -> PreTrainedModel:
    """Return a model whose routers have learned biases: large ones, whose differences bf16 does not hold."""
    model = whole_model(Configuration(family).build(), torch.float32)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("correction_bias"):
                tensor.add_(8 + 0.05 * torch.randn_like(tensor))
    return model


def in_bf16(family: str, layout: str) -> None:
    exact = model_of(family)
    pipeline = Pipeline(exact, compute_dtype=torch.bfloat16, microbatches=2, self_check=False, **LAYOUTS[layout])
    errors = reference.Bf16Errors(exact)
    rows = ROWS // pipeline.replicas
    for number in range(BATCHES):
        ids = torch.randint(4, 251, (ROWS, TOKENS), generator=torch.Generator().manual_seed(number))
        own = ids[pipeline.replica * rows :][:rows]
        pipeline.zero_grad()
        log_probabilities, loss = pipeline.evaluate(own).log_probabilities, pipeline.step(own).loss
        found = pipeline.full_gradients()
        if torch.distributed.get_rank() == 0:
            errors.add(found, loss, ids, log_probabilities)
    pipeline.close()
    if torch.distributed.get_rank() == 0:
        errors.check_together(f"{family}, {layout}")


def run_cases(cases: list[tuple[str, str]]) -> list[str]:
    compilation.compile_layer = partial(compilation.compile_layer, backend="aot_eager")
    faults = []
    for family, layout in cases:
        try:
            in_bf16(family, layout)
        except AssertionError as error:
            faults.append(str(error))
    return faults


def test_they_err_no_more_than_in_one_process(sample) -> None:
    faults = run_processes(run_cases, 2, sample(BF16_CASES, 1))
    assert not any(faults), "\n".join(faults[0])


FOLLOWING = [  # their buffers (decays of linear attention, a mask that scores are multiplied by) have the model's dtype
    ("minimax", {"num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 8}),
    ("openai-gpt", {"n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
]


def each_in_bf16(model_type: str, settings: dict[str, Any]) -> None:
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
def test_buffers_that_follow_the_dtype_of_the_model(model_type: str, settings: dict[str, Any]) -> None:
    run_processes(each_in_bf16, 2, model_type, settings)
