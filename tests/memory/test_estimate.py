"""Estimates of whole runs: both back-ends, what must follow from what, and everything that a user can get wrong."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from families import GROUPED, tiny_config
from llamas import llama
from transformers import AutoConfig

from evenpipe.costs.hardware import KNOWN
from evenpipe.costs.work import layers_of
from evenpipe.errors import InputError
from evenpipe.memory.bytes import TERMS
from evenpipe.memory.estimate import DeviceEstimate, Estimate, estimate
from evenpipe.memory.framework import MEGATRON
from evenpipe.memory.kernels import PRESETS
from evenpipe.memory.model_bytes import ModelBytes
from evenpipe.memory.reserved import CUDA, HOST, process_memory, verdict_of
from evenpipe.memory.sizes import parse_size
from evenpipe.memory.states import SINGLE, Dtypes
from evenpipe.model import describe
from evenpipe.recipe.parallelism import DATA_PARALLEL, Parallelism, for_replicas
from evenpipe.recipe.recipe import Recipe, RecipeOptions
from evenpipe.schedule import plan_program

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


# --- two back-ends -------------------------------------------------------------------------------------------------

CASES = [
    # family, schedule, vocabulary, checkpointing, dtypes, kernels
    ("llama", "1f1b", "first-last", "none", SINGLE, "transformers"),
    ("qwen3", "zbv", "vocab-2", "none", SINGLE, "transformers"),
    ("gemma2", "v-half", "vocab-1", "none", Dtypes(), "transformers"),
    ("gpt_neox", "interleaved", "vocab-2", "full", SINGLE, "transformers"),
    ("gpt2", "zb-h1", "redistribute", "selective", SINGLE, "transformers"),
    *(("qwen3", "1f1b", "vocab-2", "none", Dtypes(), kernels) for kernels in PRESETS),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.sampled(3)
def test_closed_forms_and_traces_agree(case: tuple) -> None:
    """What is left is at most one tensor of hidden states within a pass, of models with 64 columns."""
    family, schedule, mode, checkpointing, dtypes, kernels = case
    closed, traced = (
        estimated(
            describe(tiny_config(family)),
            pp=2,
            sequence=64,
            microbatch_size=2,
            microbatches=6,
            schedule=schedule,
            vocabulary=mode,
            checkpointing=checkpointing,
            dtypes=dtypes,
            kernels=kernels,
            traced=back_end,
        )
        for back_end in (False, True)
    )
    assert peaks(closed) == pytest.approx(peaks(traced), rel=0.015)


def test_a_mixture_of_experts_is_estimated(sample) -> None:
    """With the kernels of others, too."""
    experts = 2 * 4 * 3 * 64 * 96  # of two layers
    mixtral = estimated(describe(tiny_config("mixtral")), pp=2, sequence=32, microbatches=4)
    assert min(device.terms["parameters"] for device in mixtral.devices) > 6 * experts
    config = tiny_config("qwen3_moe")
    config._experts_implementation = "grouped_mm"
    for kernels in sample(PRESETS, 2):
        assert min(peaks(estimated(describe(config), sequence=32, pp=2, microbatches=4, kernels=kernels))) > 0


def test_a_family_without_closed_form_is_traced() -> None:
    bloom = describe(tiny_config("bloom"))
    assert min(peaks(estimated(bloom, pp=2, sequence=32, microbatches=4))) > 0
    shared = estimated(bloom, pp=2, tp=2, sequence=32, microbatches=4)
    assert shared.devices[0].binding_event == "sums over tensor ranks"  # attention is whole on all of them
    with pytest.raises(InputError, match="cp: 2, expected 1: BloomForCausalLM takes no position ids"):
        estimated(bloom, sequence=32, cp=2)
    with pytest.raises(InputError, match="'bloom' has layers that are not known in closed form"):
        estimated(bloom, sequence=32, tp=2, kernels="megatron")


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
            assert device.peak_allocated <= device.peak_reserved <= device.process.process.most


def test_1f1b_is_a_staircase(model) -> None:
    """min(m, p - i) microbatches of a stage (reference, 3.5): each device holds one stage's activations less."""
    found = estimated(model, pp=4, sequence=4096, microbatches=8, vocabulary="first-last", kernels="megatron")
    held = [device.terms["activations"] for device in found.devices]
    stage = 8 * 4096 * 4096 * (12 + 4 * 8 / 32 + 6 * 14336 / 4096) + 8 * (4096 * 32 * 4 + 2 * 4096 * 4)
    steps = [more - less for more, less in pairwise(held)]
    assert steps[:2] == pytest.approx([stage] * 2, rel=0.01)
    assert held[0] == pytest.approx(4 * stage, rel=0.01)


def test_a_program_that_is_planned_is_taken_as_it_stands(model) -> None:
    named = estimated(model, pp=4, sequence=2048, microbatches=8, schedule="zbv", vocabulary="vocab-2")
    _, program = plan_program("zbv", 4, 8, "vocab-2")
    given = estimated(model, pp=4, sequence=2048, schedule=program, vocabulary="vocab-2", layers_per_stage=[4] * 8)
    assert given.layers_per_stage == named.layers_per_stage
    assert peaks(given) == pytest.approx(peaks(named), rel=0.1)  # arranged by other costs


def test_a_given_program_gets_the_work_for_replicas(tiny) -> None:
    """As in the runtime; once for all numbers of replicas."""
    recipe = Recipe.of(dp=2, pp=2, microbatches=4, sequence_length=64, data_parallel="shard")
    model = ModelBytes(tiny)
    found = model.planned(recipe).program
    alone = model.planned(Recipe.of(pp=2, microbatches=4, sequence_length=64)).program
    assert found == for_replicas(alone, recipe.parallelism, tied=False) != alone
    given = replace(recipe, schedule=alone, schedule_options=())
    assert model.planned(given).program == found
    more = replace(given, parallelism=replace(given.parallelism, dp=4))
    assert model.planned(more) is model.planned(given)
    again = replace(given, parallelism=replace(given.parallelism, reshard=True))
    assert model.planned(again).program == for_replicas(alone, again.parallelism, tied=False) != found
    assert model.planned(replace(given, parallelism=Parallelism(pp=2))).program is alone


def test_uneven_layers_and_tied_weights(tiny) -> None:
    uneven = estimated(tiny, pp=2, sequence=32, layers_per_stage=(3, 1), vocabulary="first-last")
    assert [device.layers for device in uneven.devices] == [3, 1]
    parameters = []
    for tied in (False, True):
        description = describe(tiny_config("llama", tied=tied))
        found = estimated(description, pp=2, sequence=32, vocabulary="first-last", dtypes=SINGLE)
        parameters.append([device.terms["parameters"] for device in found.devices])
        sharded = estimated(description, pp=2, sequence=32, vocabulary="vocab-2", dtypes=SINGLE)
        parameters.append([device.terms["parameters"] for device in sharded.devices])
    whole, shards, tied_whole, tied_shards = parameters
    assert whole == tied_whole  # the one matrix is on both devices
    assert [more - less for more, less in zip(shards, tied_shards, strict=True)] == [252 * 64 * 4, 251 * 64 * 4]


def test_sharding_takes_what_it_says(model) -> None:
    """18, 6 + 12/8, 2 + 16/8 and 18/8 bytes for each of 8 B parameters, and what is whole for a moment."""
    elements, largest = 8_030_261_248, 128256 * 4096
    for zero, per_parameter in ((0, 18), (1, 6 + 12 / 8), (2, 2 + 16 / 8), (3, 18 / 8)):
        found = estimated(
            model,
            dp=8,
            data_parallel=DATA_PARALLEL[zero],
            sequence=1024,
            vocabulary="first-last",
            kernels="megatron",
            framework=replace(MEGATRON, vocabulary_multiple=1),
        )
        terms = found.devices[0].terms
        states = terms["parameters"] + terms["gradients"] + terms["optimizer"]
        unsharded = {2: 2 * 4, 3: 2 * (2 + 4)}.get(zero, 0) * largest
        assert states == pytest.approx(elements * per_parameter + unsharded, rel=1e-4)


def test_fewer_heads_of_keys_than_ranks(model) -> None:
    """Each of 16 ranks holds one of 8 heads; the vocabulary is padded to a multiple of 128 * 16."""
    (found,) = estimated(model, tp=16, sequence=2048, vocabulary="first-last", kernels="megatron").devices
    h, f, d, t = 4096, 14336, 128, 16
    layer = (2 * h * h + 2 * h * d * t + 3 * h * f) // t + 2 * h
    assert found.terms["parameters"] == 2 * (32 * layer + h + 2 * 129024 // t * h)


def test_checkpointing_and_offload_need_less(model) -> None:
    choices = ("none", "selective", "full")
    runs = {choice: peaks(estimated(model, sequence=4096, checkpointing=choice))[0] for choice in choices}
    assert runs["full"] < runs["selective"] < runs["none"]
    mixed = estimated(model, sequence=4096, checkpointing=["full"] * 16 + ["none"] * 16)
    assert runs["full"] < peaks(mixed)[0] < runs["none"]
    offloaded = estimated(model, sequence=4096, offloaded=1.0).devices[0]
    assert offloaded.terms["optimizer"] < 1 << 20
    foreach = estimated(model, sequence=4096, checkpointing="full", foreach=True)
    assert foreach.devices[0].binding_event == "optimizer step"


# --- card ------------------------------------------------------------------------------------------------------------


def test_verdicts_follow_the_range() -> None:
    process = process_memory(30 * GIB, CUDA, communicators=4)
    assert process.process.least < process.process.likely < process.process.most
    assert verdict_of(process, round(process.process.most) + 1) == "fits"
    assert verdict_of(process, round(process.process.likely)) == "at risk"
    assert verdict_of(process, round(process.process.least) - 1) == "does not fit"
    more = process_memory(30 * GIB, CUDA, communicators=5)
    assert (more.process.least - process.process.least) / 2**20 == pytest.approx(544)


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
    assert round(plain.process.process.least - known.process.process.least) == 100 << 20
    assert round(plain.process.process.most - known.process.process.most) == 300 << 20
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
    """Ours: one per ordered pair of neighbours and per kind of collective; Megatron-LM's: the groups of a step."""

    def count(**run) -> list[int]:
        found: list[DeviceEstimate] = list(estimated(model, sequence=1024, **run).devices)
        return [device.process.communicators for device in found]

    assert count(pp=4, vocabulary="first-last") == [2, 4, 4, 2]
    assert count(pp=4, dp=2, vocabulary="first-last") == [3, 5, 5, 3]
    assert count(tp=4, pp=2, dp=2, vocabulary="first-last", kernels="megatron") == [5, 5]
    assert count(vocabulary="first-last") == [0]


# --- wrong input -----------------------------------------------------------------------------------------------------

WRONG = [
    ({"sequence": 0}, "sequence_length: 0, expected a whole number of at least 1"),
    ({"microbatch_size": 0}, "microbatch_size: 0"),
    ({"microbatches": 0}, "microbatches: 0"),
    ({"cp": 3}, "sequence is 64, expected a multiple of cp = 3"),
    ({"tp": 3}, "tp is 3, expected a divisor of the model's 4 attention heads"),
    ({"pp": 5}, "5 with 5 stages, but the model has 4 layers"),
    ({"cp": 2, "traced": True, "kernels": "megatron"}, "traced: with cp = 2 and kernels of Megatron-LM, expected 1"),
    ({"slices": 2, "kernels": "megatron"}, "slices: 2, expected 1 with kernels of Megatron-LM"),
    ({"slices": 80}, "sequence is 64, expected a multiple of 1 and at least 80"),
    (
        {"tp": 2, "traced": True, "kernels": "megatron"},
        "traced: with tp = 2 and layers cut as in Megatron-LM, expected",
    ),
    (
        {"pp": 2, "traced": True, "kernels": "megatron", "schedule": "zb-h1", "microbatches": 4},
        "traced: kernels add weight gradients to existing ones, and the schedule has backwards split into I and W",
    ),
    ({"schedule": "2f2b"}, "schedule '2f2b' is unknown, did you mean"),
    ({"vocabulary": "all"}, "vocabulary mode 'all' is unknown"),
    ({"kernels": "triton"}, "kernels is 'triton', expected one of transformers, fused, megatron, transformer-engine"),
    ({"checkpointing": "some"}, "checkpointing: 'some', expected one of"),
    ({"checkpointing": ["full", "none"]}, "checkpointing: 2 choices, expected one for each of the model's 4 layers"),
    ({"layers_per_stage": [1, 2]}, "layers_per_stage"),
    ({"optimizer": "lion"}, "optimizer is 'lion', expected one of adamw, muon, adafactor, sgd"),
]


def test_wrong_input_is_told_in_a_sentence(tiny) -> None:
    missing = []
    for wrong, sentence in WRONG:
        with pytest.raises(InputError) as error:
            estimated(tiny, **{"sequence": 64, **wrong})
        if sentence not in str(error.value):
            missing.append((wrong, str(error.value)))
    assert missing == []
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 100}
    with pytest.raises(InputError, match="8 ranks cannot share 100 columns"):  # heads divide, columns do not
        estimated(describe(tiny_config("llama", **heads)), tp=8, sequence=32, microbatches=4)


def test_sizes() -> None:
    sizes = {"80GiB": 80 * GIB, "40 GB": 40 * 10**9, "512mib": 2**29, "1.5 TiB": 3 * 2**39}
    assert {text: parse_size(text) for text in sizes} == sizes
    for text in ("80", "GiB", "eighty GiB", "-3GiB", "80Gi", "0GiB", ""):
        with pytest.raises(InputError, match=f"gpu-memory is '{text}'"):
            parse_size(text, "gpu-memory")
