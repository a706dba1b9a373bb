"""Parameters and states of a GPU: against real modules, published counts and the table of bytes per parameter."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from families import FAMILIES, NAMED, tiny_config  # type: ignore[import-not-found]
from torch import nn
from transformers import GPT2Config, LlamaConfig

from evenpipe.errors import InputError
from evenpipe.memory.framework import EVENPIPE, MEGATRON
from evenpipe.memory.optimizers import trained_tensor
from evenpipe.memory.parameters import Held, Parameters
from evenpipe.memory.states import SINGLE, Dtypes, part_bytes, state_bytes
from evenpipe.model import build_stage, describe
from evenpipe.model.placement import TensorPlacement
from evenpipe.optimizers.held import HeldParameter
from evenpipe.runtime.accounting import ByteCounter
from evenpipe.train.optimization import make_optimizer
from evenpipe.train.run_sections import OptimizerConfig

LLAMA_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    tie_word_embeddings=False,
)


@pytest.fixture(scope="module")
def llama() -> Parameters:
    return Parameters(describe(LLAMA_8B))


def whole(parameters: Parameters, tp: int = 1, rows: int = 128256) -> int:
    layers = parameters.stage(0, len(parameters.layers), tp, is_first=True, is_last=True)
    return layers.elements + parameters.vocabulary(rows // tp, rows // tp, one_matrix=False).elements


def test_llama_8b_has_as_many_parameters_as_published(llama) -> None:
    """8 030 261 248, the model card's 8.03 B."""
    assert whole(llama) == 8_030_261_248


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_holds_what_its_module_holds(name, tied) -> None:
    description = describe(tiny_config(name, tied=tied))
    parameters = Parameters(description)
    for first, last, is_first, is_last in ((0, 2, True, False), (2, 4, False, True), (1, 3, False, False)):
        stage = build_stage(description, first, last, is_first=is_first, is_last=is_last)
        held = parameters.stage(first, last, 1, is_first=is_first, is_last=is_last)
        sizes = [parameter.numel() for parameter in stage.parameters()]
        assert (held.elements, held.tensors) == (sum(sizes), len(sizes))


# --- tensor parallelism --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_llama_is_cut_by_the_formula(llama, tp) -> None:
    """Reference, 3.1: n (2h(a + max(k, t)) d + 3hf) / t + 2h per layer."""
    h, f, a, k, d = 4096, 14336, 32, 8, 128
    layer = (2 * h * a * d + 2 * h * d * max(k, tp) + 3 * h * f) // tp + 2 * h
    assert llama.stage(0, 3, tp, is_first=False, is_last=False).elements == 3 * layer


def test_each_rank_holds_a_head_of_keys_and_values_where_there_are_fewer(llama) -> None:
    layer = llama.stage(0, 1, 32, is_first=False, is_last=False).elements
    assert layer == (2 * 4096 * 4096 + 2 * 4096 * 128 * 32 + 3 * 4096 * 14336) // 32 + 2 * 4096


def reference_part(name: str, parameter: nn.Parameter, rows: tuple[str, ...], columns: tuple[str, ...], tp: int) -> int:
    module, kind = name.rsplit(".", 1)
    leaf = module.rsplit(".", 1)[-1]
    if leaf in columns or (leaf in rows and kind == "weight"):
        return parameter.numel() // tp
    return parameter.numel()


# Family -> what is cut by columns and what by rows, written down from the papers and code of Megatron-LM.
CUTS = {
    "llama": ("q_proj k_proj v_proj gate_proj up_proj", "o_proj down_proj"),
    "gemma2": ("q_proj k_proj v_proj gate_proj up_proj", "o_proj down_proj"),
    "phi3": ("qkv_proj gate_up_proj", "o_proj down_proj"),
    "gpt_neox": ("query_key_value dense_h_to_4h", "dense dense_4h_to_h"),
    "starcoder2": ("q_proj k_proj v_proj c_fc", "o_proj c_proj"),
    "phi": ("q_proj k_proj v_proj fc1", "dense fc2"),
    "bloom": ("query_key_value dense_h_to_4h", "dense dense_4h_to_h"),
}


@pytest.mark.parametrize("name", CUTS)
def test_families_are_cut_as_megatron_cuts_them(name) -> None:
    columns, rows = (tuple(words.split()) for words in CUTS[name])
    description = describe(tiny_config(name))
    layer = description.layer(1)
    wanted = sum(reference_part(key, parameter, rows, columns, 2) for key, parameter in layer.named_parameters())
    assert Parameters(description).stage(1, 2, 2, is_first=False, is_last=False).elements == wanted


def test_gpt2_has_no_plan_and_is_cut_by_its_structure() -> None:
    description = describe(GPT2Config(n_embd=64, n_head=4, n_layer=2, vocab_size=100))
    h, tp = 64, 2
    layer = (h * 3 * h + 3 * h) // tp + (h * h // tp + h) + (h * 4 * h + 4 * h) // tp + (4 * h * h // tp + h) + 4 * h
    assert Parameters(description).stage(0, 1, tp, is_first=False, is_last=False).elements == layer


@pytest.mark.parametrize(("tp", "what"), [(3, "32 attention heads"), (5, "32 attention heads")])
def test_heads_must_divide(llama, tp, what) -> None:
    with pytest.raises(InputError, match=f"tp is {tp}, expected a divisor of the model's {what}"):
        llama.check(tp)


def test_families_are_known() -> None:
    assert set(CUTS) <= set(FAMILIES)


# --- vocabulary ----------------------------------------------------------------------------------------------------


def test_tied_rows_count_once_where_they_are_the_same() -> None:
    parameters = Parameters(describe(tiny_config("llama", tied=True)))
    assert parameters.vocabulary(100, 100, one_matrix=True).elements == 100 * 64
    assert parameters.vocabulary(100, 0, one_matrix=False).elements == 100 * 64
    assert parameters.vocabulary(0, 100, one_matrix=False).elements == 100 * 64


def test_a_bias_of_the_head_counts() -> None:
    parameters = Parameters(describe(tiny_config("phi")))
    assert parameters.vocabulary(10, 20, one_matrix=False).elements == 10 * 64 + 20 * 64 + 20


# --- bytes per parameter -------------------------------------------------------------------------------------------

N = 9_600_000
HELD = Held(elements=N, tensors=1, optimized=trained_tensor((N,), matrix=False), largest=100_000)
D = 8
BF16_GRADIENTS = Dtypes(gradients="bf16")
FP16 = Dtypes(compute="fp16", gradients="fp16")
SMALL_STATE = Dtypes(masters="bf16", moments="bf16")

# Reference, 3.2 (Megatron-LM, docs/user-guide/features/dist_optimizer.md): dtypes, ZeRO -> bytes per parameter.
TABLE = [
    (Dtypes(), 0, 18),
    (Dtypes(), 1, 6 + 12 / D),
    (BF16_GRADIENTS, 0, 16),
    (BF16_GRADIENTS, 1, 4 + 12 / D),
    (FP16, 0, 20),
    (FP16, 1, 4 + 16 / D),
    (SINGLE, 0, 16),
    (SINGLE, 1, 8 + 8 / D),
    (Dtypes(), 2, 2 + (4 + 12) / D),
    (BF16_GRADIENTS, 2, 2 + (2 + 12) / D),
    (Dtypes(), 3, (2 + 4 + 12) / D),
    (Dtypes(moments="bf16"), 1, 6 + (4 + 4) / D),
    (SMALL_STATE, 0, 2 + 4 + 4),
]


@pytest.mark.parametrize(("dtypes", "zero", "per_parameter"), TABLE)
def test_bytes_per_parameter(dtypes, zero, per_parameter) -> None:
    found = state_bytes(HELD, dtypes, MEGATRON, zero=zero, replicas=D)
    assert found.total == pytest.approx(N * per_parameter, abs=3)


def test_parameters_that_are_sharded_themselves() -> None:
    """FSDP2: (4 + g + 8) / D, and two layers in the dtype of the products with their gradients."""
    framework = replace(EVENPIPE, follows_program=False, step_counters=False)
    found = state_bytes(HELD, Dtypes(), framework, zero=3, replicas=D)
    assert found.total == pytest.approx(N * 16 / D, abs=3)
    assert found.unsharded == 2 * 100_000 * (2 + 4)


def test_between_steps_ours_are_in_shards_too() -> None:
    """`parallel/fsdp.py`: all of 4 + g + 8 between steps; what is whole within a step comes and goes with its items."""
    found = state_bytes(HELD, Dtypes(), EVENPIPE, zero=3, replicas=D)
    assert found.total == pytest.approx(N * 16 / D + 4, abs=3)
    assert (found.copies, found.unsharded) == (0, 0)


def test_what_is_whole_within_a_step() -> None:
    """Parameters in bf16, gradients in fp32 once more as rows for each replica, and the sums of this replica's rows."""
    found = part_bytes(HELD, zero=3, replicas=D)
    assert (found.gathered, found.gathering_peak, found.gradients) == (2 * N, 2 * 100_000, 4 * N)
    assert found.reduced == 4 * N + 4 * N // D
    assert found.reducing_peak == 4 * N, "all of them are one bucket"
    assert part_bytes(HELD, SINGLE, zero=3, replicas=D).gathered == 4 * N


def test_a_large_part_is_summed_in_several_buckets() -> None:
    size = 10**9
    held = replace(HELD, elements=size, optimized=trained_tensor((size // 8, 8), matrix=False))
    held = replace(held, optimized=replace(held.optimized, largest=10**7))
    bucket = (1 << 24) + 10**7
    found = part_bytes(held, zero=3, replicas=D)
    assert found.reducing_peak == pytest.approx(4 * bucket + 4 * (size - bucket) / D, abs=8)


def test_replicas_with_all_parameters_copy_only_small_gradients(llama) -> None:
    """Llama's norms; matrices are summed in place."""
    found = part_bytes(llama.stage(0, 3, 1, is_first=False, is_last=False), replicas=D)
    assert found.gathered == 0
    assert found.reduced is not None and found.reduced - found.gradients == found.reducing_peak == 3 * 2 * 4096 * 4


@pytest.mark.parametrize(("framework", "zero"), [(MEGATRON, 0), (MEGATRON, 3), (EVENPIPE, 1), (EVENPIPE, 2)])
def test_items_for_replicas_hold_nothing_where_formulas_count_all(framework, zero) -> None:
    found = part_bytes(HELD, framework=framework, zero=zero, replicas=D)
    assert (found.gathered, found.gathering_peak, found.reduced, found.reducing_peak) == (0, 0, None, 0)


def test_offloaded_state_is_not_on_the_card() -> None:
    found = state_bytes(HELD, Dtypes(), MEGATRON, zero=1, replicas=D, offloaded=0.75)
    assert found.optimizer == pytest.approx(N * 12 / D / 4, abs=1)
    with pytest.raises(InputError, match=r"offloaded is 1\.5, expected a share between 0 and 1"):
        state_bytes(HELD, offloaded=1.5)


def test_frozen_parameters_have_no_state() -> None:
    half = replace(HELD, optimized=trained_tensor((N // 2,), matrix=False))
    found = state_bytes(half, Dtypes(), EVENPIPE)
    assert (found.gradients, found.optimizer) == (4 * N // 2, 8 * N // 2 + 4)
    assert found.parameters + found.copies == 6 * N


@pytest.mark.parametrize("foreach", [False, True])
def test_against_a_real_optimizer(foreach) -> None:
    """torch's AdamW on fp32 parameters of a real layer: state counted tensor by tensor."""
    description = describe(tiny_config("qwen3"))
    stage = build_stage(description, 0, 2, is_first=True, is_last=False, dtype=torch.float32)
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(stage.parameters(), fused=not foreach, foreach=foreach)
    optimizer.step()
    counted = sum(
        tensor.numel() * tensor.element_size()
        for state in optimizer.state.values()
        for tensor in state.values()
        if isinstance(tensor, torch.Tensor)
    )
    held = Parameters(description).stage(0, 2, 1, is_first=True, is_last=False)
    found = state_bytes(held, SINGLE, EVENPIPE, foreach=foreach)
    assert found.optimizer == counted
    sizes = math.fsum(4 * parameter.numel() for parameter in stage.parameters())
    assert (found.parameters, found.gradients, found.copies) == (sizes, sizes, 0)
    assert found.step_peak == (sizes if foreach else 0)


OPTIMIZERS = {
    "adamw": OptimizerConfig(),
    "muon": OptimizerConfig(name="muon"),
    "adafactor": OptimizerConfig(name="adafactor"),
    "sgd": OptimizerConfig(name="sgd", options={"momentum": 0.9}),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_state_of_every_optimizer_is_what_it_keeps(optimizer: str, family: str) -> None:
    """The trainer's optimizers over layers and an embedding in fp32: state counted tensor by tensor, and what a step
    makes beside it."""
    description = describe(tiny_config(family))
    stage = build_stage(description, 0, 2, is_first=True, is_last=False, dtype=torch.float32)
    embedding = nn.Parameter(torch.randn(description.vocabulary_size, description.hidden_size))
    named = dict(stage.named_parameters()) | {description.embedding_name: embedding}
    for parameter in named.values():
        parameter.grad = torch.randn_like(parameter)
    pipeline = SimpleNamespace(
        named_parameters=named.items,
        held_parameters=lambda: [
            HeldParameter(name, one, TensorPlacement(tuple(one.shape)), None) for name, one in named.items()
        ],
        description=description,
    )
    made = make_optimizer(pipeline, OPTIMIZERS[optimizer])
    made.step()
    counted = sum(tensor.nbytes for state in made.state.values() for tensor in state.values())
    parameters = Parameters(description)
    held = parameters.stage(0, 2, 1, is_first=True, is_last=False)
    held += parameters.vocabulary(description.vocabulary_size, 0, one_matrix=False)
    found = state_bytes(held, SINGLE, EVENPIPE, optimizer=optimizer)
    assert found.optimizer == counted
    there = [*named.values(), *(tensor for state in made.state.values() for tensor in state.values())]
    with ByteCounter({"there": there}, lambda _: None) as counter:
        made.step()
    made_in_step = counter.peak - sum(tensor.nbytes for tensor in there)
    assert 0.8 * found.step_peak <= made_in_step <= 1.01 * found.step_peak  # matrices are not square
