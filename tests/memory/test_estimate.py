"""Estimates of whole runs: what must follow from what, and everything that a user can get wrong."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from families import GROUPED, NAMED, tiny_config
from llamas import llama
from transformers import AutoConfig

from evenpipe.costs.hardware import KNOWN
from evenpipe.costs.work import layers_of
from evenpipe.errors import InputError
from evenpipe.memory.bytes import TERMS
from evenpipe.memory.estimate import DeviceEstimate, Estimate, estimate
from evenpipe.memory.kernels import PRESETS
from evenpipe.memory.model_bytes import ModelBytes
from evenpipe.memory.reserved import CUDA, HOST, process_memory, verdict_of
from evenpipe.memory.states import SINGLE
from evenpipe.model import describe
from evenpipe.recipe.parallelism import for_replicas
from evenpipe.recipe.recipe import Recipe, RecipeOptions
from evenpipe.schedule import plan_program
from evenpipe.sizes import parse_size

GIB = 2**30


def estimated(model: Any, *, sequence: int, **given: Any) -> Estimate:
    """Estimate a recipe of the given fields, with the other arguments."""
    names = {"dp", "pp", *RecipeOptions.__annotations__} & given.keys()
    options = {name: given.pop(name) for name in names}
    return estimate(model, Recipe.of(sequence_length=sequence, **options), **given)


@pytest.fixture(scope="module")
def model():
    return llama()


@pytest.fixture(scope="module")
def tiny():
    return describe(tiny_config("qwen3"))


def peaks(found: Estimate) -> list[int]:
    return [device.memory.peak for device in found.devices]


# --- models --------------------------------------------------------------------------------------------------------


def test_experts_are_estimated_however_they_run_and_are_shared(sample) -> None:
    """Experts are sharded over the same member of all groups, and a skew costs activations."""
    config = tiny_config("qwen3_moe")
    config._experts_implementation = "grouped_mm"
    for kernels in sample(PRESETS, 2):
        assert min(peaks(estimated(describe(config), sequence=32, pp=2, microbatches=4, kernels=kernels))) > 0

    def terms(**options: Any) -> dict[str, int]:
        mixtral = describe(tiny_config("mixtral"))
        return estimated(mixtral, pp=2, sequence=32, microbatches=4, **options).devices[0].terms

    elements = 4 * 3 * 64 * 96  # of one layer's experts
    for ep in (2, 4):
        alone, shared = (terms(dp=4, ep=members)["optimizer"] for members in (1, ep))
        assert alone - shared == 2 * 8 * (elements - elements // ep)
        alone, shared = (terms(dp=4, ep=members, data_parallel="shard")["optimizer"] for members in (1, ep))
        assert alone == pytest.approx(shared, abs=8)
    even, skewed = (terms(dp=2, ep=2, skew=skew) for skew in (1.0, 2.0))
    assert sum(skewed.values()) > sum(even.values())
    assert all(skewed[term] == even[term] for term in ("parameters", "gradients", "optimizer"))


def test_some_of_the_replicas_share_and_the_others_have_copies(tiny) -> None:
    options = {"sequence": 64, "microbatches": 4, "kernels": "fsdp", "data_parallel": "shard"}
    few, hybrid, all_of_them = (
        estimated(tiny, **options, **sizes).devices[0] for sizes in ({"dp": 2}, {"dp": 8, "dp_shard": 2}, {"dp": 8})
    )
    assert hybrid.terms == few.terms != all_of_them.terms
    assert hybrid.process.communicators == few.process.communicators + 1
    with pytest.raises(InputError, match="dp_shard is 2; it must be left out in a run"):
        Recipe.of(dp=8, dp_shard=2, data_parallel="shard").check_runnable()


def test_layouts_that_a_family_does_not_have_are_refused() -> None:
    bloom = describe(tiny_config("bloom"))
    shared = estimated(bloom, pp=2, tp=2, sequence=16, microbatches=4)
    assert shared.devices[0].binding_event == "sums over tensor ranks"  # attention is whole on all of them
    with pytest.raises(InputError, match="cp is 2; it must be 1: BloomForCausalLM takes no position ids"):
        estimated(bloom, sequence=32, cp=2)
    with pytest.raises(InputError, match="tp: 2, but in Megatron-LM layers cannot be shared that have self_attention"):
        estimated(bloom, sequence=32, tp=2, kernels="megatron")


def test_layers_of_every_dense_family_are_shared_as_in_megatron(sample) -> None:
    """Tensor ranks hold less than one, and with rows of their own less again."""
    for family in sample([*NAMED, "gpt2", "phi", "olmo3"], 3):
        model = describe(tiny_config(family))
        options = {"sequence": 64, "microbatches": 4, "pp": 2, "kernels": "megatron"}
        alone, whole, own = (
            peaks(estimated(model, **options, **sizes))
            for sizes in ({}, {"tp": 2, "sequence_parallel": False}, {"tp": 2})
        )
        assert all(one > two > three for one, two, three in zip(alone, whole, own, strict=True)), family


def test_layers_may_differ_in_the_sizes_of_their_heads() -> None:
    """What holds for all layers cannot be asked of such a config."""
    config = AutoConfig.for_model(
        "gemma4_text",
        **GROUPED,
        head_dim=16,
        global_head_dim=32,
        hidden_size_per_layer_input=0,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    description = describe(config)
    assert [layer.attention.query_size for layer in layers_of(description)] == [16, 32, 16, 32]
    assert estimated(description, pp=2, sequence=32, microbatches=4).devices[0].peak_allocated > 0


# --- what a peak consists of -----------------------------------------------------------------------------------------

RUNS = [
    {"schedule": "1f1b", "vocabulary": "first-last"},
    {"schedule": "zbv", "vocabulary": "vocab-2"},
    {"schedule": "interleaved", "vocabulary": "vocab-1", "kernels": "fused"},
    {"schedule": "1f1b", "vocabulary": "first-last", "kernels": "megatron"},
    {"schedule": "v-min", "vocabulary": "first-last", "kernels": "transformer-engine"},
]


def test_terms_add_up(model, sample) -> None:
    for run in sample(RUNS, 2):
        for device in estimated(model, dp=2, pp=4, data_parallel="shard-optimizer", sequence=2048, **run).devices:
            assert sum(device.terms.values()) == device.memory.peak
            assert set(device.terms) == set(TERMS) and min(device.terms.values()) >= 0
            assert device.peak_allocated - device.memory.peak < 512
            assert device.peak_allocated <= device.peak_reserved <= device.process.process.high


def test_a_program_that_is_planned_is_taken_as_it_stands(model) -> None:
    named = estimated(model, pp=4, sequence=2048, microbatches=8, schedule="zbv", vocabulary="vocab-2")
    _, program = plan_program("zbv", 4, 8, "vocab-2")
    given = estimated(model, pp=4, sequence=2048, schedule=program, vocabulary="vocab-2", layers_per_stage=[4] * 8)
    assert given.layers_per_stage == named.layers_per_stage
    assert peaks(given) == pytest.approx(peaks(named), rel=0.1)  # arranged by other costs


def test_a_given_program_gets_the_work_for_replicas(tiny) -> None:
    """As in the runtime."""
    alone = plan_program("1f1b", 2, 4, "vocab-2")[1]
    recipe = Recipe.of(dp=2, pp=2, sequence_length=64, data_parallel="shard", schedule=alone, microbatches=4)
    planned = ModelBytes(tiny).planned(recipe).program
    assert planned == for_replicas(alone, recipe.parallelism, tied=False) != alone


# --- card ------------------------------------------------------------------------------------------------------------


def test_verdicts_follow_the_range() -> None:
    process = process_memory(30 * GIB, CUDA, communicators=4)
    assert process.process.low < process.process.likely < process.process.high
    assert verdict_of(process, round(process.process.high) + 1) == "fits"
    assert verdict_of(process, round(process.process.likely)) == "at risk"
    assert verdict_of(process, round(process.process.low) - 1) == "does not fit"
    more = process_memory(30 * GIB, CUDA, communicators=5)
    assert (more.process.low - process.process.low) / 2**20 == pytest.approx(544)


def test_what_is_known_of_the_card_counts(tiny) -> None:
    """On a CPU tensors are all; a measured context takes the place of the range; without a card there is no verdict."""
    cpu = replace(KNOWN["H200"], torch_device="cpu", memory_bytes=GIB)
    found = estimated(tiny, pp=2, sequence=32, hardware=cpu)
    assert found.settings.dtypes == SINGLE and found.verdict == "fits" and found.fits
    for device in found.devices:
        assert device.process == process_memory(device.memory.peak, HOST, communicators=device.process.communicators)
        assert device.peak_allocated == device.peak_reserved == device.memory.peak
    measured = replace(KNOWN["H200"], context_bytes=500 << 20)
    plain, known = (estimated(tiny, sequence=32, hardware=card).devices[0] for card in (KNOWN["H200"], measured))
    assert round(plain.process.process.low - known.process.process.low) == 100 << 20
    assert round(plain.process.process.high - known.process.process.high) == 300 << 20
    assert plain.peak_reserved == known.peak_reserved
    unknown = estimated(tiny, sequence=32)
    assert unknown.verdict is None and unknown.fits is None and unknown.to_dict()["fits"] is None


def test_the_worst_device_decides(model) -> None:
    def of(memory: int) -> Estimate:
        return estimated(model, pp=4, sequence=4096, vocabulary="first-last", memory=memory)

    verdicts = [device.verdict for device in of(64 * GIB).devices]
    assert verdicts[0] != "fits" and of(64 * GIB).verdict == verdicts[0]
    assert of(200 * GIB).verdict == "fits"


def test_communicators(model) -> None:
    """Ours (`tests/communication/test_counts.py`) and Megatron-LM's: the groups of a step."""

    def count(**run) -> list[int]:
        found: list[DeviceEstimate] = list(estimated(model, sequence=1024, **run).devices)
        return [device.process.communicators for device in found]

    assert count(pp=4, vocabulary="first-last") == [3] * 4
    assert count(pp=4, dp=2, vocabulary="first-last") == [4] * 4
    assert count(pp=4, dp=2, tp=2, vocabulary="vocab-2") == [8] * 4
    assert count(tp=4, pp=2, dp=2, vocabulary="first-last", kernels="megatron") == [5, 5]
    assert count(vocabulary="first-last") == [0]


# --- wrong input -----------------------------------------------------------------------------------------------------

WRONG = [
    ({"sequence": 0}, "sequence_length is 0; it must be an integer of at least 1 or none"),
    ({"microbatch_size": 0}, "microbatch_size is 0"),
    ({"microbatches": 0}, "microbatches is 0"),
    ({"cp": 3}, "sequence is 64; it must be a multiple of cp = 3"),
    ({"tp": 3}, "tp is 3; it must be a divisor of the model's 4 attention heads"),
    ({"pp": 5}, "5 with 5 stages, but the model has 4 layers"),
    ({"slices": 2, "kernels": "megatron"}, "slices is 2; it must be 1 with kernels of Megatron-LM"),
    ({"slices": 80}, "sequence is 64; it must be a multiple of 1 and at least 80"),
    ({"schedule": "2f2b"}, 'schedule is "2f2b"; it must be one of gpipe'),
    ({"vocabulary": "all"}, 'vocabulary is "all"; it must be one of'),
    (
        {"kernels": "triton"},
        'kernels is "triton"; it must be one of transformers, compiled, fused, megatron, transformer-',
    ),
    ({"kernels": "fsdp,lost=fused"}, 'field is "lost"; it must be one of attention, norm, activation'),
    ({"kernels": "fsdp,loss"}, 'kernels: loss is ""; it must be evenpipe or fp32'),
    ({"kernels": "fsdp,attention=fast"}, 'kernels: attention is "fast"; it must be sdpa or fused or flash'),
    ({"kernels": "fsdp,weight_gradient=fused"}, "kernels: weight_gradient is"),
    ({"kernels": "fused,products=fp8"}, "it must be compute, or the kernels megatron, transformer-engine, fsdp"),
    ({"kernels": "megatron,products=fp8,weight_gradient=eager"}, "it must be fused with products=fp8"),
    ({"kernels": "fsdp,products=fp8,parameters=cast"}, "it must be compute, or products=fp8 with kernels of Megatron"),
    ({"kernels": "megatron,attention=unfused", "cp": 2}, "it must be fused or flash with cp = 2"),
    ({"activation_checkpointing": "some"}, 'checkpointing is "some"; it must be one of'),
    (
        {"activation_checkpointing": ["full", "none"]},
        'checkpointing is ["full", "none"]; it must be one choice, or one for each',
    ),
    ({"layers_per_stage": [1, 2]}, "layers_per_stage"),
    ({"optimizer": "lion"}, 'optimizer is "lion"; it must be one of adamw, muon, adafactor, sgd'),
    ({"dp": 2, "ep": 2}, "ep is 2; it must be 1, since Qwen3ForCausalLM has no experts"),
]
WRONG_WITH_EXPERTS = [
    ({"dp": 2, "ep": 2, "skew": 0.5}, "skew is 0.5; it must be a number of at least 1"),
    ({"dp": 8, "ep": 8}, "ep is 8; it must be at most 4, the number of experts in"),
    ({"dp": 2, "ep": 2, "kernels": "megatron", "skew": 1.5}, "skew is 1.5; it must be 1 with kernels"),
]


def test_wrong_input_is_told_in_a_sentence(tiny) -> None:
    mixtral = describe(tiny_config("mixtral"))
    for model, (wrong, sentence) in (*((tiny, row) for row in WRONG), *((mixtral, row) for row in WRONG_WITH_EXPERTS)):
        with pytest.raises(InputError, match=re.escape(sentence)):
            estimated(model, **{"sequence": 64, **wrong})
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 100}
    with pytest.raises(InputError, match="8 ranks cannot share 100 columns"):  # heads divide, columns do not
        estimated(describe(tiny_config("llama", **heads)), tp=8, sequence=32, microbatches=4)


def test_sizes() -> None:
    sizes = {"80GiB": 80 * GIB, "40 GB": 40 * 10**9, "512mib": 2**29, "1.5 TiB": 3 * 2**39}
    assert {text: parse_size(text) for text in sizes} == sizes
    for text in ("80", "GiB", "eighty GiB", "-3GiB", "80Gi", "0GiB", ""):
        with pytest.raises(InputError, match=f"gpu-memory is '{text}'"):
            parse_size(text, "gpu-memory")
