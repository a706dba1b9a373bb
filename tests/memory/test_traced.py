"""The traced back-end against the same stages with real tensors: every pass, every byte."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch
import transformers
from families import EXPERTS, FAMILIES, NAMED, PROMISED_EXPERTS, tiny_config
from torch import nn
from transformers import LlamaConfig

from evenpipe.errors import InputError
from evenpipe.memory.bench import Bench
from evenpipe.memory.bytes import StageBytes
from evenpipe.memory.kernels import PRESETS
from evenpipe.memory.stretches import Profile, Stretch, joined, window
from evenpipe.memory.traced import StageTracer, kinds_of_layers
from evenpipe.memory.tracker import Tracker
from evenpipe.model import build_stage, describe, describe_modules, fill_parameters

SIZES, SEQUENCE = 2, 12
"""Sequences of a microbatch, and their tokens: longer than the windows of tiny configs."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def counted(description, first, last, choices="none", *, split=True, recompute=False, compute_dtype=torch.float32):
    """What a tracker counts of the real stage, all of its layers, with weights and values."""
    ends = {"is_first": first == 0, "is_last": last == description.layers}
    stage = build_stage(description, first, last, **ends, dtype=torch.float32, compute_dtype=compute_dtype)
    fill_parameters(stage, description, 0)
    count = last - first
    with Tracker() as tracker:
        tracker.add(*stage.parameters(), *stage.buffers())
        bench = Bench(
            stage,
            [f"{description.structure.layers_name}.{index}" for index in range(first, last)],
            [choices] * count if isinstance(choices, str) else choices,
            argument=description.structure.layer_argument,
            shape=(SIZES, SEQUENCE, description.hidden_size),
            dtype=compute_dtype,
            tracker=tracker,
        )
        return bench.trace(split=split, recompute=recompute).over(range(count))


def traced(description, first, last, choices="none", *, split=True, recompute=False, compute_dtype=torch.float32):
    tracer = StageTracer(
        description,
        microbatch_size=SIZES,
        sequence=SEQUENCE,
        compute_dtype=compute_dtype,
        backwards="both" if split else "whole",
        recompute=recompute,
    )
    every = choices if isinstance(choices, str) else (*["none"] * first, *choices)
    if not isinstance(every, str):
        every = (*every, *["none"] * (description.layers - len(every)))
    ends = {"is_first": first == 0, "is_last": last == description.layers}
    return tracer.stage(first, last, **ends, checkpointing=every)


@cache
def described(family: str):
    return describe(tiny_config(family))


def difference(one: StageBytes, other: StageBytes) -> dict[str, tuple[object, object]]:
    left, right = dataclasses.asdict(one), dataclasses.asdict(other)
    return {name: (left[name], right[name]) for name in left if left[name] != right[name]}


# --- real tensors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", NAMED)
@pytest.mark.sampled(8)
def test_every_family_allocates_what_is_traced(family: str, dtype: str) -> None:
    description = described(family)
    for first, last in ((0, 2), (2, 4)) if dtype == "fp32" else ((1, 3),):
        real = counted(description, first, last, compute_dtype=DTYPES[dtype])
        assert difference(traced(description, first, last, compute_dtype=DTYPES[dtype]), real) == {}


@pytest.mark.parametrize("choices", ["full", "selective", ("none", "full", "selective")])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
@pytest.mark.sampled(3)
def test_checkpointed_layers_allocate_what_is_traced(family: str, choices) -> None:
    description = described(family)
    assert difference(traced(description, 1, 4, choices), counted(description, 1, 4, choices)) == {}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_R_allocates_what_is_traced(family: str) -> None:
    description = described(family)
    real, found = (run(description, 1, 3, recompute=True) for run in (counted, traced))
    assert difference(found, real) == {}
    assert found.peaks.bare_forward < found.peaks.forward and found.peaks.recompute > 0


@pytest.mark.parametrize("family", ["gpt2", "phi", "bloom", "olmo3", "nanochat", "modernbert-decoder"])
@pytest.mark.sampled(2)
def test_other_families(family: str) -> None:
    description = described(family)
    for first, last in ((0, 2), (2, 4)):
        assert difference(traced(description, first, last), counted(description, first, last)) == {}


def test_plain_modules() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 40), nn.Linear(40, 16)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden + self.down(torch.relu(self.up(self.norm(hidden))))

    layers = [Block() for _ in range(6)]
    description = describe_modules(nn.Embedding(20, 16), layers, nn.LayerNorm(16), nn.Linear(16, 20))
    assert set(kinds_of_layers(description)) == {0}
    for first, last in ((0, 6), (1, 5), (5, 6)):
        assert difference(traced(description, first, last), counted(description, first, last)) == {}


@cache
def described_experts(family: str):
    class_name, settings = EXPERTS[family]
    return describe(getattr(transformers, class_name)(**settings))


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((name, "bf16") for name in EXPERTS),
        *((name, dtype) for name in PROMISED_EXPERTS for dtype in ("fp32", "fp64")),
    ],
)
@pytest.mark.sampled(4)
def test_mixtures_of_experts(family: str, dtype: str) -> None:
    """In fp64 products are made expert by expert, here for experts without rows."""
    description = described_experts(family)
    real = counted(description, 1, 3, compute_dtype=DTYPES[dtype])
    assert difference(traced(description, 1, 3, compute_dtype=DTYPES[dtype]), real) == {}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("choices", ["full", "selective"])
@pytest.mark.parametrize("family", PROMISED_EXPERTS)
@pytest.mark.sampled(4)
def test_checkpointed_experts(family: str, choices: str, dtype: str) -> None:
    description, how = described_experts(family), {"compute_dtype": DTYPES[dtype]}
    assert difference(traced(description, 1, 3, choices, **how), counted(description, 1, 3, choices, **how)) == {}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.sampled(2)
def test_R_of_experts(family: str, dtype: str) -> None:
    description, how = described_experts(family), {"compute_dtype": DTYPES[dtype], "recompute": True}
    assert difference(traced(description, 1, 3, **how), counted(description, 1, 3, **how)) == {}


# --- few layers for many --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "choices"), [(1, "none"), (3, "none"), (4, "full"), (6, "none")])
@pytest.mark.sampled(2)
def test_layers_that_are_alike_are_traced_once(layers: int, choices: str) -> None:
    """At most three run, for any number of layers."""
    description = describe(tiny_config("llama", num_hidden_layers=layers + 2))
    for first, last in ((0, layers), (2, layers + 2)):
        real = counted(description, first, last, choices)
        assert difference(traced(description, first, last, choices), real) == {}


MIXED = [("full", "none"), ("full", "selective"), ("selective", "none", "none"), ("full", "full", "selective", "none")]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("choices", MIXED)
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "mixtral", "phi"])
@pytest.mark.sampled(8)
def test_equal_layers_of_several_choices_follow_from_those_of_one(
    family: str, choices: tuple[str, ...], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16, many layers keep an fp32 copy of their input instead of it."""
    how = {"compute_dtype": DTYPES[dtype]}
    description, runs, run = describe(tiny_config(family)), [], StageTracer._run
    assert len(set(kinds_of_layers(description))) == 1
    monkeypatch.setattr(StageTracer, "_run", lambda self, *given: runs.append(given) or run(self, *given))
    for first, last in ((0, len(choices)), (4 - len(choices), 4)):
        runs.clear()
        found = traced(description, first, last, choices, **how)
        assert len({checkpointing for _, layers, _ in runs for _, checkpointing, _ in layers}) == len(runs)
        assert difference(found, counted(description, first, last, choices, **how)) == {}


def test_a_device_without_B_runs_none() -> None:
    description, sizes = described("qwen3"), {"microbatch_size": 2, "sequence": 12}
    both, parts = (StageTracer(description, backwards=backwards, **sizes) for backwards in ("both", "split"))
    for choices in ("none", "full"):
        one, other = (
            dataclasses.asdict(tracer.stage(0, 2, is_first=True, is_last=False, checkpointing=choices))
            for tracer in (both, parts)
        )
        assert other["peaks"] == {**one["peaks"], "backward": 0, "first_backward": None}
        assert {**one, "peaks": None} == {**other, "peaks": None}


def test_layers_of_two_kinds() -> None:
    """The mask of one kind goes with its first layer: a little earlier or later than in the run that stands for all."""
    types = ["sliding_attention", "sliding_attention", "full_attention"] * 4
    description = describe(tiny_config("qwen2", num_hidden_layers=12, layer_types=types))
    assert kinds_of_layers(description) == (0, 0, 1) * 4
    real, found = counted(description, 0, 12), traced(description, 0, 12)
    assert (found.stored, found.queued, found.parameters) == (real.stored, real.queued, real.parameters)
    for name in ("forward", "backward", "input", "weight"):
        assert getattr(found.peaks, name) == pytest.approx(getattr(real.peaks, name), rel=2e-3), name


def test_a_run_has_one_for_each_place() -> None:
    assert window([0] * 9) == (0, 3, (0, 1, 1, 1, 1, 1, 1, 1, 2))
    assert window([0, 1]) == (0, 2, (0, 1))
    start, width, places = window([0, 0, 1] * 3)
    assert ([0, 0, 1] * 3)[start : start + width] == [0, 1, 0, 0, 1] and places == (0, 3, 1, 3, 3, 1, 3, 3, 4)
    assert window([0, 1, 2, 3]) == (0, 4, (0, 1, 2, 3))


def test_stretches_one_after_the_other() -> None:
    assert joined([Stretch(3, 2), Stretch(5, -1), Stretch(1, 1)]) == Stretch(7, 2)
    profile = Profile(Stretch(1, 1), (Stretch(9, 2), Stretch(4, 3)), Stretch(0, -1), backwards=True)
    layers = [profile.layers[place] for place in (0, 1, 1)]
    assert profile.over(layers) == joined([Stretch(1, 1), *[Stretch(4, 3)] * 2, Stretch(9, 2), Stretch(0, -1)])


# --- published figures ----------------------------------------------------------------------------------------------


def units(description, tokens: int, compute_dtype=torch.bfloat16, **options) -> float:
    """Stored bytes per layer in units of tokens x hidden size, its input among them: what two layers more store."""

    tracer = StageTracer(description, microbatch_size=1, sequence=tokens, compute_dtype=compute_dtype)

    def stored(layers: int) -> int:
        return tracer.stage(0, layers, is_first=False, is_last=False, **options).stored

    return (stored(3) - stored(1)) / 2 / (tokens * description.hidden_size)


def llama(layers: int = 3, hidden: int = 512, mlp: int = 1792, heads: int = 8, key_value_heads: int = 2):
    return describe(
        LlamaConfig(
            vocab_size=64,
            hidden_size=hidden,
            intermediate_size=mlp,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=key_value_heads,
            max_position_embeddings=4096,
        )
    )


def test_full_checkpointing_keeps_two_bytes_per_element() -> None:
    """The layer's input in bf16: reference table of recomputation policies."""
    assert units(llama(), 256, checkpointing="full") == pytest.approx(2, abs=1e-4)


def test_W_needs_the_inputs_and_output_gradients_of_linear_layers() -> None:
    """arXiv 2401.10241 in our queue: 12 + 4r + 6q per layer, in whatever dtype of two bytes."""

    tracer = StageTracer(llama(), microbatch_size=1, sequence=256, compute_dtype=torch.bfloat16, backwards="both")

    def queued(layers: int) -> int:
        return tracer.stage(0, layers, is_first=False, is_last=False).queued

    assert (queued(3) - queued(1)) / 2 / (256 * 512) == pytest.approx(12 + 4 / 4 + 6 * 3.5, abs=1e-9)


def test_a_model_of_eight_billion_parameters_takes_no_memory_and_little_time() -> None:
    description = llama(layers=32, hidden=4096, mlp=14336, heads=32, key_value_heads=8)
    tracer = StageTracer(description, microbatch_size=1, sequence=4096, compute_dtype=torch.bfloat16)
    found = traced_8b = tracer.stage(0, 32, is_first=True, is_last=True)
    assert (
        found.parameters.gradients
        == 4
        * sum(
            parameter.numel() for name, parameter in description.skeleton.named_parameters() if "model.layers" in name
        )
        + 4 * 4096
    )
    assert traced_8b.stored > 32 * 34 * 4096 * 4096


# --- what cannot be traced ------------------------------------------------------------------------------------------


def test_experts_are_traced_however_they_are_configured() -> None:
    """Our function runs them. A loop over experts would look at who meets whom."""
    loops, grouped = described("qwen3_moe"), described_experts("qwen3_moe")
    assert loops.config._experts_implementation == "eager" != grouped.config._experts_implementation
    assert difference(traced(loops, 1, 3), traced(grouped, 1, 3)) == {}


def test_experts_that_add_a_bias_to_a_kept_product_are_estimated() -> None:
    """transformers' own experts of gpt-oss do so in place, which torch's selective checkpointing refuses."""
    stored = {
        choice: StageTracer(
            described_experts("gpt_oss"), microbatch_size=SIZES, sequence=SEQUENCE, kernels=PRESETS["megatron"]
        ).stage(0, 2, is_first=True, is_last=False, checkpointing=choice)
        for choice in ("none", "selective", "full")
    }
    assert stored["none"].stored > stored["selective"].stored > stored["full"].stored


def test_what_asks_for_values_cannot_be_traced() -> None:
    config = transformers.JetMoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_key_value_heads=2, kv_channels=8, intermediate_size=48,
        num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    with pytest.raises(InputError, match="asks for the values of its tensors"):
        traced(describe(config), 0, 2)


def test_every_family_has_kinds() -> None:
    for family in FAMILIES:
        description = described(family)
        assert len(kinds_of_layers(description)) == description.layers
    assert kinds_of_layers(describe(tiny_config("gemma2"))) == (0, 1, 0, 1)
    assert kinds_of_layers(describe(tiny_config("smollm3"))) == (0, 0, 1, 0)


# --- the tracker ----------------------------------------------------------------------------------------------------


def test_the_tracker_counts_storages_once_and_until_they_go() -> None:
    with Tracker() as tracker:
        there = torch.zeros(25)
        with tracker.span() as outer:
            whole = torch.zeros(100)
            parts = whole.split(10), whole.t(), whole.detach()
            with tracker.span() as inner:
                more = whole + 1
                del more
            del whole, parts
    assert (inner.before, inner.above, inner.kept) == (500, 400, 0)
    assert (outer.before, outer.above, outer.kept) == (100, 800, 0)
    assert tracker.live == 100 and tracker.peak == 900
    del there
    assert tracker.live == 0


def test_the_tracker_follows_a_storage_that_grows() -> None:
    with Tracker() as tracker:
        whole = torch.zeros(10)
        torch.ones(30, out=whole.resize_(0))
        assert tracker.live == 120
    assert len(whole) == 30
    there = torch.ones(2)
    assert tracker.add(there) == 8
    del there
    assert tracker.live == 120
