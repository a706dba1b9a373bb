"""Estimates of stages with experts beside real runs of two processes: each one's peak.

Members share the experts evenly in the first test: every set of experts is chosen as often as any other. In the second
one tokens prefer experts of the first member, alike in all layers, and the skew that is measured stands for it.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import transformers
from families import EXPERTS
from harness import run_processes
from torch.distributed.device_mesh import init_device_mesh

from evenpipe import Pipeline, Recipe
from evenpipe.costs.hardware import KNOWN
from evenpipe.experts import adopt
from evenpipe.experts.layout import Exchange, Layout, spread
from evenpipe.memory.estimate import Estimate, estimate
from evenpipe.model import describe
from evenpipe.schedule import Order

PROCESSES, MICROBATCHES, SEQUENCES, TOKENS, ROWS = 2, 4, 2, 66, 1536
CPU = replace(KNOWN["H200"], name="this host", torch_device="cpu")
PREFERENCE = 0.2
"""Added to the scores, 0 to 1, of the first member's experts."""
CLOSE = 0.001
"""What is left: the numbers of tokens that choose each expert, which a step counts."""


class Counted(NamedTuple):
    """What a process has seen."""

    peak: int
    order: Order


@dataclass(frozen=True)
class Case:
    family: str
    schedule: str = "1f1b"
    checkpointing: str = "none"
    members: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        return {"dp": self.members, "pp": PROCESSES // self.members}


CASES = [
    Case("mixtral"),
    Case("mixtral", "zb-h1", "selective"),
    Case("gpt_oss", checkpointing="full"),
    Case("mixtral", members=2),
    Case("mixtral", checkpointing="selective", members=2),
    Case("gpt_oss", checkpointing="full", members=2),
]


def config(family: str) -> Any:
    class_name, settings = EXPERTS[family]
    return getattr(transformers, class_name)(**(settings | {"vocab_size": ROWS}))


def evenly(index: torch.Tensor, experts: int, exchange: Exchange) -> Layout:
    sets = torch.tensor([*itertools.combinations(range(experts), index.shape[1])])
    return spread(sets[torch.arange(len(index)) % len(sets)], experts, exchange)


def unevenly(index: torch.Tensor, experts: int, exchange: Exchange) -> Layout:
    scores = torch.rand(len(index), experts, generator=torch.Generator().manual_seed(exchange.rank))
    scores[:, : experts // exchange.size] += PREFERENCE
    return spread(scores.topk(index.shape[1]).indices, experts, exchange)


def count(cases: list[Case], route: Callable[..., Layout]) -> list[Counted]:
    with mock.patch.object(adopt, "layout_of_member", route):
        return [count_one(case) for case in cases]


def count_one(case: Case) -> Counted:
    sizes = case.sizes
    pipeline = Pipeline(
        config(case.family),
        mesh=init_device_mesh("cpu", (*sizes.values(),), mesh_dim_names=(*sizes,)),
        expert_parallel=case.members,
        schedule=case.schedule,
        vocabulary="first-last",
        microbatches=MICROBATCHES,
        checkpointing=case.checkpointing,
        sequence_length=TOKENS,
        self_check=False,
    )
    optimizer = torch.optim.AdamW(pipeline.parameters(), fused=True)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, ROWS, (MICROBATCHES * SEQUENCES, TOKENS), generator=generator)
    gc.collect()
    with pipeline.count_bytes() as counted:
        for _ in range(2):
            pipeline.step(ids)
            optimizer.step()
            pipeline.zero_grad()
    order = pipeline.order
    pipeline.close()
    return Counted(counted.peak, order)


def estimated(case: Case, order: Order, skew: float = 1.0) -> Estimate:
    return estimate(
        describe(config(case.family)),
        Recipe.of(
            **case.sizes,
            ep=case.members,
            sequence_length=TOKENS,
            microbatch_size=SEQUENCES,
            microbatches=MICROBATCHES,
            schedule=order,
            vocabulary="first-last",
            checkpointing=case.checkpointing,
        ),
        hardware=CPU,
        skew=skew,
    )


def measured_skew(case: Case) -> float:
    """The pairs of the first member over the mean."""
    text = config(case.family)
    experts, choices = text.num_local_experts, text.num_experts_per_tok
    index, first = torch.zeros(SEQUENCES * TOKENS, choices), experts // case.members
    met = 0
    for rank in range(case.members):
        member = mock.Mock(rank=rank, size=case.members)
        with mock.patch(f"{__name__}.spread", lambda chosen, *_: chosen):
            met += int((unevenly(index, experts, member) < first).sum())
    return met / index.numel()


@pytest.mark.slow
def test_estimated_peaks_are_those_counted() -> None:
    by_process = run_processes(count, PROCESSES, CASES, evenly)
    wrong = []
    for number, case in enumerate(CASES):
        found = estimated(case, by_process[0][number].order)
        for process, counted in enumerate(by_process):
            device, peak = found.devices[process % len(found.devices)], counted[number].peak
            error = device.peak_allocated / peak - 1
            print(f"{case} {process}: {device.peak_allocated} of {peak} ({error:+.3%})")
            wrong += [f"{case} {process}: {error:+.3%}"] if abs(error) > CLOSE else []
    assert not wrong


@pytest.mark.slow
def test_estimated_peaks_at_the_measured_skew_are_those_counted() -> None:
    cases = [case for case in CASES if case.members > 1]
    by_process, wrong = run_processes(count, PROCESSES, cases, unevenly), []
    for number, case in enumerate(cases):
        skew = measured_skew(case)
        assert skew > 1.2
        found = estimated(case, by_process[0][number].order, skew).devices[0].peak_allocated
        peak = by_process[0][number].peak
        print(f"{case} skew {skew:.3f}: {found} of {peak} ({found / peak - 1:+.3%})")
        wrong += [f"{case} skew {skew:.3f}: {found / peak - 1:+.3%}"] if abs(found / peak - 1) > 0.01 else []
    assert not wrong
