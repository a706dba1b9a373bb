"""Dropout draws the same numbers in every layout whose microbatches have the same rows, and after a checkpoint.

The reference is transformers in one process, each of whose layers is seeded by the step's number, the microbatch and
the layer. In split and repeated forwards, schedules and replicas nothing else may be drawn."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
import torch.distributed as dist
from harness import check_cases, lines_logged, run_processes
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig

import evenpipe
from evenpipe import Pipeline
from evenpipe.errors import InputError
from evenpipe.layers.random_state import BEFORE_LAYERS, Draws, seed_of_layer
from evenpipe.model import describe
from evenpipe.model.draws import may_draw
from evenpipe.schedule import add_recompute, plan_order
from evenpipe.tensor.check import cut_of_model

VOCABULARY, MICROBATCHES, SEQUENCES, TOKENS = 97, 4, 8, 6
FP64 = torch.float64
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
CONFIGS = {
    "gpt2": GPT2Config(**SIZES, n_positions=32, embd_pdrop=0.2, resid_pdrop=0.3, attn_pdrop=0.1),  # also before layers
    "llama": LlamaConfig(**SIZES, intermediate_size=24, attention_dropout=0.4),
}


@dataclass(frozen=True)
class Case:
    family: str = "gpt2"
    processes: int = 2
    mode: str = "vocab-2"
    schedule: str = "1f1b"
    replicas: int = 1
    recomputed: bool = False
    other: tuple[tuple[str, Any], ...] = ()
    """Options of the pipeline."""

    def options(self) -> dict[str, Any]:
        order: Any = self.schedule
        if self.recomputed:

            def order(devices: int, microbatches: int) -> Any:
                return add_recompute(plan_order(self.schedule, devices, microbatches, self.mode))

        return {
            "schedule": order,
            "vocabulary": self.mode,
            "dp": self.replicas,
            "microbatches": MICROBATCHES // self.replicas,
            "parameter_dtype": FP64,
            "self_check": False,
            **dict(self.other),
        }


CASES = [
    Case(processes=1),
    Case(),
    Case(processes=3, mode="first-last"),
    Case(schedule="zb-h1", mode="vocab-1"),
    Case(schedule="zbv", recomputed=True),
    Case(other=(("activation_checkpointing", "full"),)),
    Case(schedule="zbv", other=(("activation_checkpointing", "selective"),)),
    Case(replicas=2, processes=4, schedule="zbv"),
    Case(replicas=2, other=(("data_parallel", "shard"),)),
    Case("llama", schedule="interleaved", mode="interlaced"),
    Case("llama", processes=3, mode="redistribute", other=(("activation_checkpointing", "full"),)),
    Case("modules", schedule="zbv", mode="first-last"),
]


class Layer(nn.Module):
    """Of plain modules: that it drops is seen nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16, dtype=FP64)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + nn.functional.dropout(self.linear(hidden).tanh(), 0.3, self.training)


@cache
def modules() -> nn.ModuleDict:
    torch.manual_seed(0)
    embedding, head = nn.Embedding(VOCABULARY, 16, dtype=FP64), nn.Linear(16, VOCABULARY, bias=False, dtype=FP64)
    layers = nn.Sequential(*(Layer() for _ in range(4)))
    return nn.ModuleDict({"embedding": embedding, "layers": layers, "head": head})


@cache
def described(family: str) -> Any:
    config = copy.deepcopy(CONFIGS[family])
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    return describe(AutoModelForCausalLM.from_config(config, dtype=FP64))


def pipeline_of(case: Case) -> Pipeline:
    if case.family == "modules":
        embedding, layers, head = modules().values()
        return Pipeline.from_modules(embedding, layers, None, head, **case.options())
    return Pipeline(described(case.family), **case.options())


def forward_of(family: str) -> tuple[nn.Module, list[nn.Module], Callable[[Tensor], Tensor]]:
    """A whole model in training mode, its layers, and what gives its logits."""
    if family == "modules":
        whole = copy.deepcopy(modules()).train()
        return whole, list(whole["layers"]), nn.Sequential(*whole.values())
    model = copy.deepcopy(described(family).model).train()
    layers = model.transformer.h if family == "gpt2" else model.model.layers
    return model, list(layers), lambda ids: model(input_ids=ids, use_cache=False).logits


@cache
def expected(family: str, number: int) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the microbatches one after the other."""
    model, layers, logits_of = forward_of(family)
    microbatch = 0
    for index, layer in enumerate(layers):

        def seed(*_: Any, index: int = index) -> None:
            torch.manual_seed(seed_of_layer(number, microbatch, index))

        layer.register_forward_pre_hook(seed)
    ids, labels = data()
    total, mean = (labels[:, 1:] != reference.IGNORE).sum(), 0.0
    for microbatch in range(MICROBATCHES):
        rows = slice(microbatch * SEQUENCES // MICROBATCHES, (microbatch + 1) * SEQUENCES // MICROBATCHES)
        torch.manual_seed(seed_of_layer(number, microbatch, BEFORE_LAYERS))
        logits, targets = logits_of(ids[rows])[:, :-1].flatten(0, 1), labels[rows, 1:].flatten()
        loss = nn.functional.cross_entropy(logits, targets, ignore_index=reference.IGNORE, reduction="sum") / total
        loss.backward()
        mean += loss.item()
    return mean, {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


@cache
def data() -> tuple[Tensor, Tensor]:
    return reference.batches(VOCABULARY, SEQUENCES, TOKENS, 1)[0]


def run_case(case: Case) -> str | None:
    """What is wrong, on the first process."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    pipeline = pipeline_of(case)
    rows = slice(pipeline.replica * SEQUENCES // case.replicas, (pipeline.replica + 1) * SEQUENCES // case.replicas)
    batch = [tensor[rows] for tensor in data()]
    torch.manual_seed(5 + rank)  # only that of the first process counts
    number = Draws.draw()
    after = torch.get_rng_state()
    torch.manual_seed(5 + rank)
    evaluated = pipeline.evaluate(*batch).loss
    loss = pipeline.step(*batch).loss
    continues = torch.equal(torch.get_rng_state(), after) or not pipeline.feeds
    gradients, evaluated_again = pipeline.full_gradients(), pipeline.evaluate(*batch).loss
    pipeline.close()
    if rank:
        return None if continues else f"{case}: generators of process {rank} do not continue"
    wanted, wanted_gradients = expected(case.family, number)
    error, name = reference.worst(gradients, wanted_gradients)
    sound = error <= 1e-10 and abs(loss / wanted - 1) <= 1e-10 and continues and evaluated == evaluated_again
    return None if sound else f"{case}: gradient {error:.1e} ({name}), loss {loss} for {wanted}, {continues}"


def run_cases(cases: list[Case]) -> list[str]:
    return [fault for case in cases if (fault := run_case(case)) is not None]


def test_every_layout_drops_what_one_process_drops(sample) -> None:
    check_cases(run_cases, sample(CASES, 3))


# --- checkpoints of loops of one's own --------------------------------------------------------------------------------


def loop(folder: Path, case: Case, until: int) -> tuple[list[float], list[float], list[str]]:
    """A loop that seeds nothing, from the newest checkpoint; losses, a number that each step draws itself, warnings."""
    pipeline = pipeline_of(case)
    optimizer = reference.adamw(pipeline.parameters())
    checkpoint = evenpipe.newest_checkpoint(folder)
    step, losses, own_numbers = 0, [], []
    torch.manual_seed(11 + (dist.get_rank() if dist.is_initialized() else 0))
    with lines_logged() as said:
        if checkpoint is not None:
            torch.manual_seed(3)  # whatever it was
            pipeline.load_checkpoint(checkpoint, optimizer)
            step = checkpoint.step
    for _ in range(step, until):
        losses.append(pipeline.step(*data()).loss)
        optimizer.step()
        optimizer.zero_grad()
        own_numbers.append(torch.rand(()).item())
    pipeline.save_checkpoint(folder, until, optimizer)
    return losses, own_numbers, [line for line in said if "dropout" in line]


def test_a_loop_that_continues_drops_what_it_would_have_dropped(tmp_path: Path) -> None:
    case = Case(schedule="zbv")
    whole = run_processes(loop, 2, tmp_path / "whole", case, 4)
    first = run_processes(loop, 2, tmp_path / "parts", case, 2)
    second = run_processes(loop, 2, tmp_path / "parts", case, 4)
    assert [a[0] + b[0] for a, b in zip(first, second, strict=True)] == [losses for losses, *_ in whole]
    assert [a[1] + b[1] for a, b in zip(first, second, strict=True)] == [numbers for _, numbers, _ in whole]
    assert len({*whole[0][0]}) == 4 and not second[0][2]


def test_and_also_in_another_layout_or_says_why_not(tmp_path: Path) -> None:
    whole = run_processes(loop, 2, tmp_path / "whole", Case(), 4)
    run_processes(loop, 2, tmp_path / "parts", Case(), 2)
    ((losses, _, said),) = run_processes(loop, 1, tmp_path / "parts", Case(processes=1), 3)
    assert losses == pytest.approx(whole[0][0][2:3], rel=1e-10) and not said
    others = Case(other=(("microbatches", 2),))
    (losses, _, said), (_, _, elsewhere) = run_processes(loop, 2, tmp_path / "parts", others, 4)
    assert losses != pytest.approx(whole[0][0][3:], rel=1e-4)
    assert said == [
        "layers with dropout draw other random numbers than in an uninterrupted run: microbatches of all replicas 2,"
        " was 4"
    ]
    assert not elsewhere
    compiled = Case(schedule="zbv", other=(("microbatches", 2), ("compile_layers", True)))
    (_, _, said), _ = run_processes(loop, 2, tmp_path / "parts", compiled, 4)
    assert [line.partition(":")[0] for line in said] == [
        "layers with dropout draw other random numbers than in an uninterrupted run",
        "compiled layers with a split backward run their first microbatch uncompiled",
    ]


# --- what is refused --------------------------------------------------------------------------------------------------


def with_budget(budget: float) -> str:
    from torch._functorch import config

    pipeline = Pipeline(described("gpt2"), compile_layers=True, microbatches=2, parameter_dtype=FP64, self_check=False)
    with config.patch(activation_memory_budget=budget), pytest.raises(InputError) as caught:
        pipeline.step(data()[0])
    assert all(parameter.grad is None for parameter in pipeline.parameters())
    return str(caught.value)


def test_a_memory_budget_of_torch_is_refused_with_compiled_layers() -> None:
    for said in run_processes(with_budget, 2, 0.5):
        assert said.startswith(
            "torch._functorch.config.activation_memory_budget is 0.5; it must be 1 with compile_layers"
        )


def test_noise_of_routers_is_refused_with_tensor_ranks() -> None:
    noisy = MixtralConfig(router_jitter_noise=0.1)
    with pytest.raises(InputError, match=r"^tp: router_jitter_noise is 0.1 in the model's config"):
        cut_of_model(describe(noisy), 2)


def test_models_that_draw_nothing_are_known() -> None:
    llama, gpt2 = CONFIGS["llama"].to_dict() | {"attention_dropout": 0.0}, {"embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"n_embd": 16, "n_head": 2, "n_layer": 2}
    draws = [*CONFIGS.values(), GPT2Config(**sizes, **gpt2, resid_pdrop=0.1)]
    draws_nothing = [LlamaConfig(**llama | {"classifier_dropout": 0.1}), GPT2Config(**sizes, **gpt2, resid_pdrop=0.0)]
    assert [may_draw(describe(config)) for config in (*draws, *draws_nothing)] == [True] * 3 + [False] * 2
