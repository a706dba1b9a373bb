"""What a step leaves behind, how many buffers it receives into, and balance: bytes of tensors in real runs of several
devices, all of a second step. How many bytes there are after each item is compared with estimates
(test_estimated_memory.py). And the counter itself."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from harness import run_processes
from torch import nn
from transformers import LlamaConfig

from evenpipe import Pipeline
from evenpipe.runtime.accounting import ByteCounter
from evenpipe.schedule import Kind, Pass, Transfer, TransferKind, parts_of


@dataclass(frozen=True)
class Case:
    schedule: str
    microbatches: int = 9
    vocabulary: int = 64
    tokens: int = 32
    stages: int = 8
    """Each of one layer."""
    largest_id: int | None = None
    """Of the data; None: all of the vocabulary, equally often."""


@dataclass
class Counted:
    """What one device counted in one step."""

    parameters: int
    peak: int
    survivors: list[str]
    held: dict[int, int]
    """By the order, the most microbatches in flight in each of its stages."""
    buffers: dict[tuple[int, str], int]
    """The most receive buffers alive, by stage and direction."""


def count(case: Case) -> Counted:
    config = LlamaConfig(
        vocab_size=case.vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=case.stages,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=case.tokens,
        tie_word_embeddings=False,
    )
    pipeline = Pipeline(config, schedule=case.schedule, microbatches=case.microbatches, self_check=False)
    largest = case.vocabulary if case.largest_id is None else case.largest_id
    size = (case.microbatches, case.tokens)
    ids = torch.randint(0, largest, size, generator=torch.Generator().manual_seed(0))
    pipeline.step(ids)
    gc.collect()
    gc.disable()  # what has to wait for the collector is left over
    with pipeline.count_bytes() as counted:
        assert pipeline.step(ids).loss > 0
    row = [item for item in pipeline.layout.program.rows[pipeline.device] if isinstance(item, Pass)]
    survivors = [str(made) for made in counted.survivors()]
    found = Counted(counted.started["parameters"], counted.peak, survivors, most_held(row), receive_buffers(counted))
    gc.enable()
    pipeline.close()
    return found


def receive_buffers(counted: ByteCounter) -> dict[tuple[int, str], int]:
    def flow(item: Any) -> tuple[int, str] | None:
        kinds = (TransferKind.RECV_F, TransferKind.RECV_B)
        return (item.stage, item.kind.value) if isinstance(item, Transfer) and item.kind in kinds else None

    flows = {flow(one.item) for one in counted.items()} - {None}
    return {own: counted.most(lambda made, own=own: flow(made.item) == own).storages for own in flows}


def most_held(row: list[Pass]) -> dict[int, int]:
    now: Counter[int] = Counter()
    most: Counter[int] = Counter()
    for item in row:
        for part in parts_of(item):
            if part.stage is not None:
                now[part.stage] += {Kind.F: 1, Kind.B: -1, Kind.W: -1}.get(part.kind, 0)
                most[part.stage] = max(most[part.stage], now[part.stage])
    return dict(most)


def count_all(cases: list[Case]) -> list[Counted]:
    return [count(case) for case in cases]


def over_devices(devices: int, cases: list[Case]) -> list[list[Counted]]:
    """By case, what each device counted."""
    return [list(counted) for counted in zip(*run_processes(count_all, devices, cases), strict=True)]


BALANCED = [
    Case("v-half", vocabulary=4096, tokens=64),
    Case("v-half", vocabulary=4096, tokens=64, microbatches=11),
    Case("v-half", vocabulary=4001, tokens=64, microbatches=9, largest_id=500),  # all on the first device's shard
]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4])
def test_v_half_with_a_sharded_vocabulary_takes_the_same_memory_on_every_device(devices: int) -> None:
    """As in arXiv 2411.05288, section 6.4."""
    for case, counted in zip(BALANCED, over_devices(devices, BALANCED), strict=True):
        peaks, parameters = [one.peak for one in counted], [one.parameters for one in counted]
        assert max(peaks) <= 1.05 * min(peaks), f"{case}: {peaks}"
        assert max(parameters) <= 1.02 * min(parameters), f"{case}: {parameters}"


SHAPES = [Case("1f1b", stages=4), *(Case(name) for name in ("v-min", "v-half", "zbv", "interleaved", "zb-h2"))]


def test_a_step_leaves_nothing_and_has_no_more_receive_buffers_than_microbatches_in_flight(sample) -> None:
    """What F received is its input until the backward; what I received may be an output gradient until W. A step of
    many microbatches needs no more buffers than one of few."""
    cases = [*sample(SHAPES[1:], 1), SHAPES[0], Case("1f1b", stages=4, microbatches=24)]
    by_case = dict(zip(cases, over_devices(4, cases), strict=True))
    flows = 0
    for case, devices in by_case.items():
        held = {stage: most for counted in devices for stage, most in counted.held.items()}
        for counted in devices:
            assert counted.survivors == [], case
            for (stage, kind), most in counted.buffers.items():
                flows += 1
                text = f"{case}, {stage}{kind}: {most} buffers, {held} in flight"
                if kind == "RECV_F":
                    assert most <= held[stage - 1], text  # where they come from
                    assert most <= held[stage] + 1 or len(counted.held) > 1, text
                else:
                    assert most <= held[stage], text
    assert flows >= 6 * len(cases)
    few, many = ([counted.buffers for counted in by_case[case]] for case in cases[-2:])
    assert few == many


# --- the counter -----------------------------------------------------------------------------------------------


def test_the_counter_sees_what_is_made_in_a_backward_and_who_made_it() -> None:
    class Doubles(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            ctx.kept = value.new_ones(100)
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            gone = gradient.new_empty(1000)
            return gradient + gone.zero_().sum()

    value = torch.zeros(10, requires_grad=True)
    with ByteCounter({"mine": [value, value.view(2, 5)]}) as counted:
        output = Doubles.apply(value)
        with_graph = counted.live
        output.backward(torch.ones(10))
        del output
    assert counted.started == {"mine": 40}
    assert with_graph == 40 + 400 + 40
    assert [(made.bytes, made.operation) for made in counted.survivors()] == [(40, "aten.add.Tensor")], "the gradient"
    assert counted.most(lambda made: made.bytes == 4000) == (4000, 1)
    assert counted.peak >= with_graph + 4000 + 40
    value.grad = None
    assert counted.survivors() == [] and counted.live == 40


def test_views_count_once_and_what_grows_counts_as_it_is() -> None:
    with ByteCounter() as counted:
        whole = torch.zeros(100)
        parts = whole.split(10), whole.t(), whole.detach(), nn.Parameter(whole)
        assert counted.live == 400
        torch.ones(300, out=whole.new_empty(0))
        assert counted.peak == 1600
        whole.resize_(200)
        assert counted.live == 800
    assert len(parts) == 4


def test_storages_that_are_freed_while_their_tensors_stay_count_as_nothing_until_they_are_filled_again() -> None:
    """As FSDP2 frees and gathers parameters."""
    whole, given = torch.zeros(100), torch.ones(100)
    with ByteCounter({"whole": [whole]}) as counted:
        counted.at(Pass.parse("0RESHARD"))
        whole.untyped_storage().resize_(0)
        counted.at(Pass.parse("0F0"))
        assert counted.live == 0
        whole.untyped_storage().resize_(400)
        torch._foreach_copy_([whole], [given])
        counted.at(Pass.parse("0B0"))
        assert counted.live == 400
    assert [(str(one.item), one.after) for one in counted.items()] == [("0RESHARD", 0), ("0F0", 400), ("0B0", 400)]


def test_tensors_made_of_tensors_count_as_what_they_are_made_of() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        given = distribute_tensor(torch.zeros(10, 8), mesh, [Shard(0)])
        with ByteCounter({"given": [given]}) as counted:
            doubled = given * 2
        assert counted.started == {"given": 5 * 8 * 4}
        assert [made.bytes for made in counted.survivors()] == [5 * 8 * 4]
        assert doubled.shape == (10, 8)
    finally:
        torch.distributed.destroy_process_group()
