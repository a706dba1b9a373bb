"""Bytes of tensors in real runs: balanced where the paper says so, in proportion to the order, and gone after the step.

All figures are of a second step: gradients exist, and memory that is used again has been made.
"""

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
from evenpipe.runtime.accounting import ByteCounter, tensor_bytes
from evenpipe.schedule import Kind, Pass, Transfer, TransferKind, parts_of
from evenpipe.schedule.timeline import peak_activations


@dataclass(frozen=True)
class Case:
    schedule: str
    mode: str = "vocab-2"
    microbatches: int = 9
    vocabulary: int = 64
    tokens: int = 32
    stages: int = 8
    """Each of one layer."""
    largest_id: int | None = None
    """Of the data; None: all of the vocabulary, equally often."""


@dataclass
class Found:
    """What one device counted in one step."""

    parameters: int
    gradients: int
    started: int
    """Everything that was there before."""
    peak: int
    in_flight: int
    """Stage activations held at most, by the order."""
    per_stage: int
    """The most bytes that F leaves for the backward, its input included."""
    survivors: list[str]
    held: dict[int, int]
    """By the order, the most microbatches in flight in each of its stages."""
    buffers: dict[tuple[int, str], int]
    """The most receive buffers alive, by stage and direction."""


def config(case: Case) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=case.vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=case.stages,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=case.tokens,
        tie_word_embeddings=False,
    )


def count(case: Case) -> Found:
    pipeline = Pipeline(
        config(case), schedule=case.schedule, vocabulary=case.mode, microbatches=case.microbatches, self_check=False
    )
    generator = torch.Generator().manual_seed(0)
    largest = case.vocabulary if case.largest_id is None else case.largest_id
    ids = torch.randint(0, largest, (case.microbatches, case.tokens), generator=generator)
    pipeline.step(ids)
    gc.collect()
    gc.disable()  # what has to wait for the collector is left over
    with pipeline.count_bytes() as counted:
        result = pipeline.step(ids)
    assert result.loss > 0
    del result
    row = [item for item in pipeline.layout.program.rows[pipeline.device] if isinstance(item, Pass)]
    items = [one for one in counted.passes() if one.item.kind is Kind.F]
    found = Found(
        parameters=counted.started["parameters"],
        gradients=tensor_bytes(parameter.grad for parameter in pipeline.parameters()),
        started=sum(counted.started.values()),
        peak=counted.peak,
        held=most_held(row),
        in_flight=int(peak_activations(row)),
        per_stage=max(one.after - one.before for one in items) + case.tokens * 32 * 4,
        survivors=[str(made) for made in counted.survivors()],
        buffers=receive_buffers(counted),
    )
    gc.enable()
    pipeline.close()
    return found


def receive_buffers(counted: ByteCounter) -> dict[tuple[int, str], int]:
    kinds = (TransferKind.RECV_F, TransferKind.RECV_B)
    flows = {
        (item.kind, item.stage)
        for item in (one.item for one in counted.items())
        if isinstance(item, Transfer) and item.kind in kinds
    }
    return {
        (stage, kind.value): counted.most(
            lambda made, kind=kind, stage=stage: (
                isinstance(made.item, Transfer) and (made.item.kind, made.item.stage) == (kind, stage)
            )
        ).storages
        for kind, stage in flows
    }


def most_held(row: list[Pass]) -> dict[int, int]:
    now: Counter[int] = Counter()
    most: Counter[int] = Counter()
    for item in row:
        for part in parts_of(item):
            if part.stage is not None:
                now[part.stage] += {Kind.F: 1, Kind.B: -1, Kind.W: -1}.get(part.kind, 0)
                most[part.stage] = max(most[part.stage], now[part.stage])
    return dict(most)


def count_all(cases: list[Case]) -> list[Found]:
    return [count(case) for case in cases]


def over_devices(devices: int, cases: list[Case]) -> list[list[Found]]:
    """By case, what each device found."""
    return [list(found) for found in zip(*run_processes(count_all, devices, cases), strict=True)]


# --- balance: arXiv 2411.05288, section 6.4 --------------------------------------------------------------------

BALANCED = [
    Case("v-half", vocabulary=4096, tokens=64),
    Case("v-half", vocabulary=4096, tokens=64, microbatches=11),
    Case("v-half", vocabulary=4001, tokens=64, microbatches=9, largest_id=500),  # all on the first device's shard
]


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.sampled(1)
def test_v_half_with_a_sharded_vocabulary_takes_the_same_memory_on_every_device(devices: int) -> None:
    for case, found in zip(BALANCED, over_devices(devices, BALANCED), strict=True):
        peaks, parameters = [one.peak for one in found], [one.parameters for one in found]
        assert max(peaks) <= 1.05 * min(peaks), f"{case}: {peaks}"
        assert max(parameters) <= 1.02 * min(parameters), f"{case}: {parameters}"


# --- activations follow the order ------------------------------------------------------------------------------

SHAPES = [Case("1f1b", stages=4), *(Case(name) for name in ("v-min", "v-half", "zbv", "interleaved", "zb-h2"))]


@pytest.fixture(scope="module")
def shapes() -> dict[str, list[Found]]:
    return dict(zip((case.schedule for case in SHAPES), over_devices(4, SHAPES), strict=True))


def activations(found: Found) -> int:
    return found.peak - found.started


def test_activations_are_those_in_flight_and_less_than_two_stages_more(shapes) -> None:
    """More: what a pass makes and drops, buffers, and what stands between S and T. Less: what I lets go of."""
    for schedule, devices in shapes.items():
        for device, found in enumerate(devices):
            stages = activations(found) / found.per_stage
            text = f"{schedule}, device {device}: {stages:.2f} stage activations, {found.in_flight} in flight"
            assert 0.85 * found.in_flight <= stages <= found.in_flight + 2, text


def test_v_schedules_trade_time_for_memory(shapes) -> None:
    """p/3 + 2, p/2 + 2 and p + 1 microbatches of two stages: 6, 8 and 10 stage activations."""
    for device in range(4):
        least, half, full = (shapes[name][device] for name in ("v-min", "v-half", "zbv"))
        for less, more in ((least, half), (half, full)):
            stages = (activations(more) - activations(less)) / more.per_stage
            assert stages == pytest.approx(2, abs=0.6), f"device {device}"


def test_1f1b_holds_less_from_device_to_device(shapes) -> None:
    held_by_device = list(map(activations, shapes["1f1b"]))
    assert held_by_device == sorted(held_by_device, reverse=True)
    assert [found.in_flight for found in shapes["1f1b"]] == [5, 4, 3, 2]


def test_no_more_receive_buffers_than_microbatches_in_flight(shapes) -> None:
    """What F received is its input until the backward; what I received may be an output gradient until W."""
    flows = 0
    for schedule, devices in shapes.items():
        held = {stage: most for found in devices for stage, most in found.held.items()}
        for found in devices:
            for (stage, kind), most in found.buffers.items():
                flows += 1
                text = f"{schedule}, {stage}{kind}: {most} buffers"
                if kind == "RECV_F":
                    assert most <= held[stage - 1], f"{text}, {held[stage - 1]} in flight where they come from"
                    assert most <= held[stage] + 1 or len(found.held) > 1, f"{text}, {held[stage]} in flight"
                else:
                    assert most <= held[stage], f"{text}, {held[stage]} in flight"
    assert flows > 30


def test_more_microbatches_take_no_more_receive_buffers(shapes) -> None:
    longer = over_devices(4, [Case("1f1b", stages=4, microbatches=24)])[0]
    assert [found.buffers for found in longer] == [found.buffers for found in shapes["1f1b"]]


# --- leftovers -------------------------------------------------------------------------------------------------


def test_nothing_that_a_step_made_outlives_it(shapes) -> None:
    assert [found.survivors for devices in shapes.values() for found in devices] == [[]] * (4 * len(shapes))


def test_gradients_take_as_much_as_parameters(shapes) -> None:
    for devices in shapes.values():
        for found in devices:
            assert found.gradients == found.parameters


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
