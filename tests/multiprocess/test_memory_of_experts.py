"""Estimates of stages with experts beside real runs of two processes: each one's peak.

Members share the experts evenly here: every set of experts is chosen as often as any other. What a real router does
beside that is the skew of `ExpertRows`.
"""

from __future__ import annotations

import gc
import itertools
from dataclasses import dataclass, replace
from typing import Any
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
from evenpipe.memory.estimate import estimate
from evenpipe.model import describe
from evenpipe.schedule import Order

PROCESSES, MICROBATCHES, SEQUENCES, TOKENS, ROWS = 2, 4, 2, 66, 1536
CPU = replace(KNOWN["H200"], name="this host", torch_device="cpu")
CLOSE = 0.001
"""What is left: the numbers of tokens that choose each expert, which a step counts."""


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


def count(cases: list[Case]) -> list[tuple[int, Order]]:
    return [count_one(case) for case in cases]


def count_one(case: Case) -> tuple[int, Order]:
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
    with mock.patch.object(adopt, "layout_of_member", evenly), pipeline.count_bytes() as counted:
        for _ in range(2):
            pipeline.step(ids)
            optimizer.step()
            pipeline.zero_grad()
    order = pipeline.order
    pipeline.close()
    return counted.peak, order


@pytest.mark.slow
def test_estimated_peaks_are_those_counted() -> None:
    by_process = run_processes(count, PROCESSES, CASES)
    wrong = []
    for number, case in enumerate(CASES):
        found = estimate(
            describe(config(case.family)),
            Recipe.of(
                **case.sizes,
                ep=case.members,
                sequence_length=TOKENS,
                microbatch_size=SEQUENCES,
                microbatches=MICROBATCHES,
                schedule=by_process[0][number][1],
                vocabulary="first-last",
                checkpointing=case.checkpointing,
            ),
            hardware=CPU,
        )
        for process, counted in enumerate(by_process):
            device = found.devices[process % len(found.devices)]
            error = device.peak_allocated / counted[number][0] - 1
            print(f"{case} {process}: {device.peak_allocated} of {counted[number][0]} ({error:+.3%})")
            wrong += [f"{case} {process}: {error:+.3%}"] if abs(error) > CLOSE else []
    assert not wrong
