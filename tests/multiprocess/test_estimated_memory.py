"""`evenpipe estimate` beside real steps of four processes: the most bytes that each holds, and what is there after each
item of the step.

Counted are iterations of a training loop behind its first: step, AdamW, gradients dropped. An estimate is told what a
user tells it: the model, the recipe, and that it runs on a CPU. Experts are chosen evenly, as it takes them to be.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from families import EXPERTS, tiny_config
from harness import run_processes

from evenpipe import LossOptions, OffloadOptions, Pipeline, Recipe
from evenpipe.costs.hardware import KNOWN
from evenpipe.experts import adopt
from evenpipe.experts.layout import Exchange, Layout, spread
from evenpipe.memory.bytes import DeviceMemory
from evenpipe.memory.device import DeviceBytes
from evenpipe.memory.estimate import estimate
from evenpipe.memory.model_bytes import ModelBytes
from evenpipe.memory.states import SINGLE, Dtypes
from evenpipe.model import describe
from evenpipe.schedule import add_recompute, plan_order

PROCESSES, MICROBATCHES, SEQUENCES, TOKENS, ROWS, LAYERS = 4, 8, 2, 64, 1536, 8
CPU = replace(KNOWN["H200"], name="this host", torch_device="cpu")
OF_AN_ITEM = 0.01
"""Of the peak, by which what is there after an item may differ: the activations of a microbatch are 5 to 10 % of it."""
STEPS = 2
"""Of which the least counts: torch's thread for collectives may hold a message a moment after its wait is over."""


@dataclass(frozen=True)
class Case:
    schedule: str
    vocabulary: str
    recipe: dict[str, Any] = field(default_factory=dict)
    """Further options of `Recipe.of`. There are as many devices as processes are left for."""
    family: str = "llama"
    """Of `tests/model/families.py`; "llama" is one of our own."""
    tied: bool = False
    bf16: bool = False
    recompute: bool = False
    loss: LossOptions | None = None
    above: float = 0.0
    """By which the peak may be estimated too high where activations are on the host: a backward gives its input back
    before its end, and is estimated as one that does not."""

    @property
    def devices(self) -> int:
        return self.recipe.get("pp") or PROCESSES // (self._size("dp") * self._size("tp") * self._size("cp"))

    @property
    def close(self) -> float:
        """What is left of the peak: how the tokens of single microbatches fall on shards of the vocabulary; with tensor
        ranks the copy that gloo sums; of experts what a step counts of their tokens."""
        if self.family in EXPERTS:
            return 0.001
        if self._size("tp") * self._size("cp") * self._size("slices") > 1:
            return 0.01
        return 0.003 if self.bf16 or self.recompute or self.family != "llama" else 0.002

    @property
    def in_pieces(self) -> bool:
        """Whether sequences are cut: then the moment in which gradients are summed is not compared."""
        return self._size("cp") * self._size("slices") > 1

    def _size(self, name: str) -> int:
        return self.recipe.get(name, 1)


SHARDS, FREED = {"dp": 2, "data_parallel": "shard"}, {"dp": 2, "data_parallel": "shard", "reshard": True}
TENSOR, CONTEXT = {"tp": 2}, {"cp": 2}
HEADS = {"cp": 2, "context_exchange": "heads"}
FULL, SELECTIVE = {"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}
ALL_ON_HOST = {"offload": OffloadOptions(activations="all")}
SOME_ON_HOST = {
    "offload": OffloadOptions(
        activations="all", layers=tuple("keep" if layer in (0, 1, 4, 7) else "offload" for layer in range(LAYERS))
    )
}
SETS_OF_EXPERTS = {"sequence_length": 66}
"""So many tokens that every set of experts is chosen equally often."""

CASES = [
    *(Case(schedule, mode) for schedule in ("1f1b", "zbv", "v-half") for mode in ("first-last", "vocab-2")),
    Case("1f1b", "first-last", FULL),
    Case("1f1b", "vocab-2", FULL),
    Case("interleaved", "vocab-1", SELECTIVE),
    Case("zb-h1", "redistribute", bf16=True),
    Case("zb-h1", "redistribute", tied=True),
    Case("1f1b", "vocab-2", tied=True),
    Case("v-half", "first-last", tied=True),
    Case("zbv", "vocab-2", tied=True, bf16=True),
    Case("1f1b", "interlaced", recompute=True),
    Case("1f1b", "vocab-2", family="gemma2", tied=True),
    Case("zb-h1", "first-last", family="gpt2", tied=True),
    Case("1f1b", "vocab-1", family="phi3"),
    Case("zbv", "vocab-2", family="qwen3", bf16=True),
    # replicas
    Case("1f1b", "first-last", {"dp": 2}),
    Case("zbv", "vocab-2", {"dp": 2}, bf16=True),
    Case("v-half", "first-last", {"dp": 2}, tied=True),
    Case("1f1b", "first-last", SHARDS),
    Case("1f1b", "first-last", SHARDS | FULL | {"sequence_length": 8}),  # fullest while gradients are summed
    Case("zbv", "vocab-2", SHARDS, bf16=True),
    Case("zbv", "first-last", SHARDS, tied=True),
    Case("interleaved", "vocab-2", SHARDS | {"prefetch": 1}, tied=True),
    Case("interleaved", "first-last", FREED | {"prefetch": 0}),
    Case("zbv", "vocab-2", FREED | {"prefetch": 1}, bf16=True),
    Case("zbv", "first-last", FREED | {"prefetch": 1}, tied=True),
    Case("interleaved", "vocab-2", FREED | {"prefetch": 0}, tied=True, bf16=True),
    # activations on the host
    Case("gpipe", "first-last", ALL_ON_HOST, above=0.02),
    Case("zbv", "vocab-2", ALL_ON_HOST, tied=True, above=0.02),
    Case("interleaved", "vocab-2", ALL_ON_HOST | SELECTIVE, above=0.02),
    Case("zb-h1", "vocab-1", ALL_ON_HOST | FULL, above=0.02),
    Case("1f1b", "vocab-2", SOME_ON_HOST, above=0.02),
    Case("po-h", "first-last", above=0.02),
    Case("po-f", "vocab-2", above=0.02),
    # tensor ranks
    Case("1f1b", "first-last", TENSOR),
    Case("1f1b", "vocab-2", TENSOR),
    Case("zb-h1", "vocab-1", TENSOR),
    Case("zbv", "vocab-2", TENSOR, tied=True),
    Case("interleaved", "vocab-2", TENSOR | SELECTIVE),
    Case("1f1b", "vocab-2", TENSOR | FULL),
    Case("zb-h1", "first-last", TENSOR, bf16=True, tied=True),
    Case("1f1b", "vocab-2", TENSOR, family="qwen3", bf16=True),
    Case("zbv", "vocab-1", TENSOR, family="phi3"),
    Case("1f1b", "redistribute", TENSOR, family="gpt2", tied=True),
    Case("1f1b", "interlaced", TENSOR, recompute=True),
    Case("zb-h1", "vocab-2", {"tp": 4}),
    # sequences in pieces
    Case("1f1b", "vocab-2", CONTEXT),
    Case("1f1b", "first-last", HEADS),
    Case("1f1b", "first-last", CONTEXT | {"dp": 2}),
    Case("zb-h1", "vocab-2", CONTEXT | FULL, bf16=True),
    Case("1f1b", "vocab-2", CONTEXT, family="gemma2"),
    Case("1f1b", "vocab-2", CONTEXT, family="qwen3", bf16=True),
    Case("1f1b", "vocab-2", {"slices": 2}),
    Case("1f1b", "first-last", {"slices": 4} | FULL),
    Case("zb-h1", "vocab-1", {"slices": 4} | SELECTIVE),
    Case("1f1b", "vocab-1", {"slices": 2}, family="gpt2"),
    Case("1f1b", "interlaced", {"slices": 2}, recompute=True),
    Case("zbv", "vocab-2", CONTEXT | {"slices": 2}),
    Case("1f1b", "vocab-2", CONTEXT | {"slices": 2} | FULL, bf16=True),
    Case("1f1b", "redistribute", CONTEXT | {"slices": 2}, family="phi3"),
    Case("interleaved", "vocab-2", HEADS | {"slices": 4}),
    Case("1f1b", "vocab-2", CONTEXT | TENSOR | {"slices": 2}),
    # losses
    Case("1f1b", "vocab-2", loss=LossOptions(keep="nothing")),
    Case("1f1b", "first-last", loss=LossOptions(keep="nothing", label_smoothing=0.1)),
    Case("zb-h1", "vocab-1", loss=LossOptions(label_smoothing=0.1, z_loss=1e-4, entropy=True)),
    Case("1f1b", "vocab-2", loss=LossOptions(label_smoothing=0.1), family="gemma2"),
    # experts, of each device and shared
    Case("1f1b", "first-last", SETS_OF_EXPERTS, family="mixtral"),
    Case("zb-h1", "first-last", SETS_OF_EXPERTS | SELECTIVE, family="mixtral"),
    Case("1f1b", "first-last", SETS_OF_EXPERTS | FULL, family="gpt_oss"),
    Case("1f1b", "first-last", SETS_OF_EXPERTS | {"dp": 2, "ep": 2}, family="mixtral"),
    Case("1f1b", "first-last", SETS_OF_EXPERTS | SELECTIVE | {"dp": 2, "ep": 2}, family="mixtral"),
    Case("1f1b", "first-last", SETS_OF_EXPERTS | FULL | {"dp": 2, "ep": 2}, family="gpt_oss"),
]


def config(case: Case) -> transformers.PreTrainedConfig:
    if case.family in EXPERTS:
        class_name, settings = EXPERTS[case.family]
        return getattr(transformers, class_name)(**(settings | {"vocab_size": ROWS}))
    changes: dict[str, Any] = {"vocab_size": ROWS, "num_hidden_layers": LAYERS}
    if case.family != "llama":
        if case.family == "gemma2":
            changes["layer_types"] = ["sliding_attention", "full_attention"] * (LAYERS // 2)
        return tiny_config(case.family, tied=case.tied, **changes)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": case.tied}
    sizes = {"hidden_size": 64, "intermediate_size": 160, "max_position_embeddings": TOKENS}
    return transformers.LlamaConfig(**changes, **sizes, **heads)


def recipe_of(case: Case, **changes: Any) -> Recipe:
    sizes = {"microbatches": MICROBATCHES, "microbatch_size": SEQUENCES, "sequence_length": TOKENS}
    own = {"schedule": case.schedule, "vocabulary": case.vocabulary, "pp": case.devices}
    return Recipe.of(**sizes | own | case.recipe | changes)


# --- what is counted --------------------------------------------------------------------------------------------------


@dataclass
class Counted:
    """What one process has counted in a step."""

    device: int
    recipe: Recipe
    """With the program that ran, and the layers of its stages."""
    peak: int
    items: list[tuple[str, int]]
    """Item, and bytes after it."""
    host: int
    """The most bytes in slots on the host."""


Route = Callable[[torch.Tensor, int, Exchange], Layout]


def evenly(index: torch.Tensor, experts: int, exchange: Exchange) -> Layout:
    """Every set of experts is chosen as often as any other."""
    sets = torch.tensor([*itertools.combinations(range(experts), index.shape[1])])
    return spread(sets[torch.arange(len(index)) % len(sets)], experts, exchange)


def count(cases: list[Case], route: Route) -> list[Counted]:
    with mock.patch.object(adopt, "layout_of_member", route):
        return [count_one(case) for case in cases]


def count_one(case: Case) -> Counted:
    changes: dict[str, Any] = {}
    if case.recompute:
        order = plan_order(
            case.schedule, case.devices, MICROBATCHES, case.vocabulary, slices=case.recipe.get("slices", 1)
        )
        changes["schedule"] = add_recompute(order)
    recipe = recipe_of(case, **changes)
    compute_dtype = torch.bfloat16 if case.bf16 else None
    pipeline = Pipeline(config(case), recipe=recipe, loss=case.loss, compute_dtype=compute_dtype, self_check=False)
    optimizer = torch.optim.AdamW(pipeline.parameters(), fused=True)
    size = (MICROBATCHES * SEQUENCES, recipe.batch.sequence_length)
    ids = torch.randint(0, ROWS, size, generator=torch.Generator().manual_seed(0))
    gc.collect()
    with pipeline.count_bytes() as counted:
        for _ in range(1 + STEPS):
            pipeline.step(ids)
            optimizer.step()
            pipeline.zero_grad()
    layout, held = pipeline.layout, pipeline._executor.walker._activations
    pipeline.close()
    found = counted.items()
    each = len(found) // (1 + STEPS)
    steps = zip(*(found[begin : begin + each] for begin in range(each, len(found), each)), strict=True)
    items = [
        (str(same[0].item), *(min(getattr(one, name) for one in same) for name in ("after", "peak"))) for same in steps
    ]
    return Counted(
        pipeline.device,
        recipe_of(case, schedule=layout.program, layers_per_stage=layout.layers_per_stage),
        max(peak for _, _, peak in items),
        [(item, after) for item, after, _ in items],
        0 if held is None else held.pool.most_used,
    )


# --- what is estimated ------------------------------------------------------------------------------------------------


def estimated(case: Case, recipe: Recipe, *, skew: float = 1.0) -> list[tuple[DeviceMemory, int]]:
    """Of each device: its memory with a curve, and its bytes on the host."""
    source, dtypes = ModelBytes(describe(config(case))), Dtypes(compute="bf16") if case.bf16 else SINGLE
    found = estimate(source, recipe, hardware=CPU, dtypes=dtypes, skew=skew, loss=case.loss)
    plan, settings = source.planned(found.recipe), found.settings
    devices = []
    for number, device in enumerate(found.devices):
        memory = DeviceBytes.of(source, plan, settings, number).memory(plan, settings, number, curve=True)
        assert memory.peak == device.peak_allocated
        devices.append((memory, device.host))
    return devices


def faults_of(case: Case, counted: list[Counted]) -> list[str]:
    devices, faults = estimated(case, counted[0].recipe), []
    on_host = any(host for _, host in devices)
    for real in counted:
        memory, host = devices[real.device]
        error = memory.peak / real.peak - 1
        text = f"{case}, device {real.device}"
        print(f"{text}: {memory.peak} of {real.peak} ({error:+.3%}), {memory.binding_event}")
        above = case.above if on_host else 0.0
        if not -case.close < error < max(above, case.close):
            faults.append(f"{text}: {memory.peak} bytes estimated, {real.peak} counted ({error:+.3%})")
        if not host <= real.host <= 1.02 * host:  # in slots of whole pages
            faults.append(f"{text}: {host} bytes estimated on the host, {real.host} counted")
        if not above:
            faults += [
                f"{text}: {curve - after:+d} after {item}"
                for (item, after), curve in zip(real.items, memory.curve, strict=True)
                if abs(curve - after) > OF_AN_ITEM * real.peak and not (case.in_pieces and "REDUCE_GRAD" in item)
            ]
    return faults


def test_estimates_are_what_is_counted(sample) -> None:
    cases = sample(CASES, 1)
    faults = []
    for case, counted in zip(cases, zip(*run_processes(count, PROCESSES, cases, evenly), strict=True), strict=True):
        faults += faults_of(case, list(counted))
    assert not faults, "\n".join(faults)


# --- experts that are not chosen evenly -------------------------------------------------------------------------------

PREFERENCE = 0.2
"""Added to the scores, 0 to 1, of the first member's experts."""


def chosen_unevenly(index: torch.Tensor, experts: int, exchange: Exchange) -> torch.Tensor:
    scores = torch.rand(len(index), experts, generator=torch.Generator().manual_seed(exchange.rank))
    scores[:, : experts // exchange.size] += PREFERENCE
    return scores.topk(index.shape[1]).indices


def unevenly(index: torch.Tensor, experts: int, exchange: Exchange) -> Layout:
    return spread(chosen_unevenly(index, experts, exchange), experts, exchange)


def measured_skew(case: Case) -> float:
    """The pairs of the first of two members over the mean."""
    text = config(case)
    index = torch.zeros(SEQUENCES * recipe_of(case).batch.sequence_length, text.num_experts_per_tok)
    members = (mock.Mock(rank=rank, size=2) for rank in range(2))
    chosen = torch.cat([chosen_unevenly(index, text.num_local_experts, member) for member in members])
    return float((chosen < text.num_local_experts // 2).sum()) / index.numel()


@pytest.mark.slow
def test_estimated_peaks_at_the_measured_skew_are_those_counted() -> None:
    cases, faults = [case for case in CASES if "ep" in case.recipe], []
    for case, counted in zip(cases, zip(*run_processes(count, PROCESSES, cases, unevenly), strict=True), strict=True):
        skew = measured_skew(case)
        assert skew > 1.2
        devices = estimated(case, counted[0].recipe, skew=skew)
        for device, (memory, _) in enumerate(devices):
            peak = max(real.peak for real in counted if real.device == device)  # of the fullest member
            error = memory.peak / peak - 1
            print(f"{case}, skew {skew:.3f}, device {device}: {memory.peak} of {peak} ({error:+.3%})")
            faults += [f"{case}, skew {skew:.3f}: {error:+.3%}"] * (abs(error) > 0.01)
    assert not faults
