"""Parameters and states of a GPU: against real modules, published counts and the table of bytes per parameter."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from families import NAMED, tiny_config
from llamas import llama
from torch import nn

from evenpipe.errors import InputError
from evenpipe.memory.framework import EVENPIPE, MEGATRON
from evenpipe.memory.optimizers import trained_tensor
from evenpipe.memory.parameters import Held, Parameters
from evenpipe.memory.states import SINGLE, Dtypes, state_bytes
from evenpipe.model import build_stage, describe
from evenpipe.model.placement import TensorPlacement
from evenpipe.optimizers.held import HeldParameter
from evenpipe.runtime.accounting import ByteCounter
from evenpipe.tensor.check import cut_of_model
from evenpipe.train.optimization import make_optimizer
from evenpipe.train.run_sections import OptimizerConfig

ENDS = {"is_first": False, "is_last": False}


@pytest.fixture(scope="module")
def llama_8b() -> Parameters:
    return Parameters(llama())


def test_llama_8b_has_as_many_parameters_as_published(llama_8b: Parameters) -> None:
    """8 030 261 248, the model card's 8.03 B."""
    layers = llama_8b.stage(0, 32, 1, is_first=True, is_last=True)
    assert layers.elements + llama_8b.vocabulary(128256, 128256, one_matrix=False).elements == 8_030_261_248


CUT = ("llama", "phi3", "gpt_neox", "starcoder2", "gpt2", "olmo2", "bloom")
"""Families in one process of several tensor ranks; bloom's attention is not cut."""
HOLDERS = [*((family, 1) for family in NAMED), ("llama", 4), *((family, 2) for family in CUT)]


def test_a_stage_holds_what_its_module_holds(sample) -> None:
    """On the first of its tensor ranks; `shared` are the parameters whose gradients are summed over ranks."""
    wrong = []
    for family, ranks in sample(HOLDERS, 6):
        description = describe(tiny_config(family))
        cut = cut_of_model(description, ranks, check=False) if ranks > 1 else None
        for first, last in ((0, 2), (1, 3), (2, 4)):
            ends = {"is_first": first == 0, "is_last": last == 4}
            held, alone, shared = {}, set(), 0
            for layer in range(first, last) if cut else ():
                held |= cut.placements(description, layer, 0, ranks)
                alone |= cut.alone(description, layer)
            stage = build_stage(description, first, last, **ends, held=held, tensor_ranks=ranks)
            sizes = {name: parameter.numel() for name, parameter in stage.named_parameters()}
            for name, size in sizes.items():
                places = math.prod(each.parts for each in held[name].cuts) if name in held else 1
                shared += size * places if places < ranks and name not in alone else 0
            counted = Parameters(description).stage(first, last, ranks, **ends, cut=cut)
            if (counted.elements, counted.tensors, counted.shared) != (sum(sizes.values()), len(sizes), shared):
                wrong.append((family, ranks, first, counted, shared))
    assert wrong == []


# --- tensor parallelism of other frameworks ---------------------------------------------------------------------------


def test_llama_is_cut_by_the_formula(llama_8b: Parameters) -> None:
    """Reference, 3.1: n (2h(a + max(k, t)) d + 3hf) / t + 2h per layer. Each rank has at least one head of keys."""
    h, f, a, k, d = 4096, 14336, 32, 8, 128
    for tp in (1, 2, 4, 8, 32):
        layer = (2 * h * a * d + 2 * h * d * max(k, tp) + 3 * h * f) // tp + 2 * h
        assert llama_8b.stage(0, 3, tp, **ENDS).elements == 3 * layer, tp
    for tp in (3, 5):
        with pytest.raises(InputError, match=f"tp is {tp}; it must be a divisor of the model's 32 attention heads"):
            llama_8b.check(tp)


# Family -> what is cut by columns and what by rows, written down from the papers and code of Megatron-LM.
CUTS = {
    "llama": ("q_proj k_proj v_proj gate_proj up_proj", "o_proj down_proj"),
    "gemma2": ("q_proj k_proj v_proj gate_proj up_proj", "o_proj down_proj"),
    "phi3": ("qkv_proj gate_up_proj", "o_proj down_proj"),
    "gpt_neox": ("query_key_value dense_h_to_4h", "dense dense_4h_to_h"),
    "starcoder2": ("q_proj k_proj v_proj c_fc", "o_proj c_proj"),
    "phi": ("q_proj k_proj v_proj fc1", "dense fc2"),
    "bloom": ("query_key_value dense_h_to_4h", "dense dense_4h_to_h"),
    "gpt2": ("c_attn c_fc", "c_proj"),  # has no plan and is cut by its structure
}


def test_families_are_cut_as_megatron_cuts_them() -> None:
    for family, (columns, rows) in CUTS.items():
        description, expected = describe(tiny_config(family)), 0
        for name, parameter in description.layer(1).named_parameters():
            *_, module, kind = name.split(".")
            is_cut = module in columns.split() or (module in rows.split() and kind == "weight")
            expected += parameter.numel() // (2 if is_cut else 1)
        assert Parameters(description).stage(1, 2, 2, **ENDS).elements == expected, family


# --- bytes per parameter ----------------------------------------------------------------------------------------------

N = 9_600_000
HELD = Held(elements=N, tensors=1, optimized=trained_tensor((N,), matrix=False), largest=100_000)
D = 8
BF16_GRADIENTS = Dtypes(gradients="bf16")
FP16 = Dtypes(compute="fp16", gradients="fp16")

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
    (Dtypes(masters="bf16", moments="bf16"), 0, 2 + 4 + 4),
]


def test_bytes_per_parameter() -> None:
    for dtypes, zero, per_parameter in TABLE:
        state = state_bytes(HELD, dtypes, MEGATRON, zero=zero, replicas=D)
        assert state.total + state.step_peak == pytest.approx(N * per_parameter, abs=3), (dtypes, zero)
        copied = 4 if dtypes is FP16 else 0  # gradients in fp32, while no activations exist
        assert state.step_peak == pytest.approx(copied * N / (D if zero else 1), abs=3)
    offloaded = state_bytes(HELD, Dtypes(), MEGATRON, zero=1, replicas=D, offloaded=0.75)
    assert offloaded.optimizer == pytest.approx(N * 12 / D / 4, abs=1)
    with pytest.raises(InputError, match=r"offloaded is 1\.5; it must be a share between 0 and 1"):
        state_bytes(HELD, offloaded=1.5)


def test_matrices_in_8_bits_are_kept_in_two_layouts() -> None:
    """Of layers, beside the model's own or instead; replicas that share parameters make them again."""
    held = replace(HELD, unsplit=N // 4)  # as of a vocabulary matrix
    plain, beside, instead = (
        state_bytes(held, casts=casts, framework=MEGATRON) for casts in ("none", "beside", "instead")
    )
    assert (beside.copies, instead.copies) == (2 * N * 3 // 4,) * 2
    assert plain.parameters == beside.parameters == instead.parameters + 2 * N * 3 // 4
    plain, beside, instead = (
        state_bytes(held, casts=casts, framework=MEGATRON, zero=3, replicas=D)
        for casts in ("none", "beside", "instead")
    )
    assert plain == beside
    assert plain.parameters - instead.parameters == N * 3 // 4 // D


def test_parameters_that_are_sharded_themselves() -> None:
    """FSDP2: (4 + g + 8) / D, and two layers in the dtype of the products with their gradients. Ours (in `fsdp.py`)
    are in shards between steps, too; what is whole within a step comes and goes with its items."""
    fsdp2 = state_bytes(
        HELD, Dtypes(), replace(EVENPIPE, follows_program=False, step_counters=False), zero=3, replicas=D
    )
    assert fsdp2.total == pytest.approx(N * 16 / D, abs=3)
    assert fsdp2.unsharded == 2 * 100_000 * (2 + 4)
    ours = state_bytes(HELD, Dtypes(), EVENPIPE, zero=3, replicas=D)
    assert ours.total == pytest.approx(N * 16 / D + 4, abs=3)
    assert (ours.copies, ours.unsharded) == (0, 0)


def test_frozen_parameters_have_no_state() -> None:
    half = replace(HELD, optimized=trained_tensor((N // 2,), matrix=False))
    state = state_bytes(half, Dtypes(), EVENPIPE)
    assert (state.gradients, state.optimizer) == (4 * N // 2, 8 * N // 2 + 4)
    assert state.parameters + state.copies == 6 * N


@pytest.mark.parametrize("optimizer", ["adamw", "foreach", "muon", "adafactor", "sgd"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.sampled(4)
def test_state_of_every_optimizer_is_what_it_keeps(optimizer: str, family: str) -> None:
    """The trainer's optimizers, and torch's AdamW on many tensors at once, over layers and an embedding in fp32: state
    counted tensor by tensor, and what a step makes beside it."""
    description = describe(tiny_config(family))
    stage = build_stage(description, 0, 2, is_first=True, is_last=False, dtype=torch.float32)
    embedding = nn.Parameter(torch.randn(description.vocabulary_size, description.hidden_size))
    named = dict(stage.named_parameters()) | {description.embedding_name: embedding}
    for parameter in named.values():
        parameter.grad = torch.randn_like(parameter)
    held_parameters = [HeldParameter(name, one, TensorPlacement(tuple(one.shape)), None) for name, one in named.items()]
    pipeline = SimpleNamespace(
        named_parameters=named.items, held_parameters=lambda: held_parameters, description=description
    )
    foreach = optimizer == "foreach"
    name = "adamw" if foreach else optimizer
    options = {"options": {"momentum": 0.9}} if name == "sgd" else {}
    made = (
        torch.optim.AdamW(named.values(), foreach=True)
        if foreach
        else make_optimizer(pipeline, OptimizerConfig(name=name, **options))
    )
    made.step()
    state = [tensor for one in made.state.values() for tensor in one.values()]
    parameters = Parameters(description)
    held = parameters.stage(0, 2, 1, is_first=True, is_last=False)
    held += parameters.vocabulary(description.vocabulary_size, 0, one_matrix=False)
    predicted = state_bytes(held, SINGLE, EVENPIPE, optimizer=name, foreach=foreach)
    assert predicted.optimizer == sum(tensor.nbytes for tensor in state)
    sizes = sum(parameter.nbytes for parameter in named.values())
    assert (predicted.parameters, predicted.gradients, predicted.copies) == (sizes, sizes, 0)
    with ByteCounter({"there": [*named.values(), *state]}, lambda _: None) as counter:
        made.step()
    made_in_step = counter.peak - sizes - sum(tensor.nbytes for tensor in state)
    assert 0.8 * predicted.step_peak <= made_in_step <= 1.01 * predicted.step_peak  # matrices are not square
