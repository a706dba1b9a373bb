"""Balance: the most bytes of tensors on each of several devices in a real step. And the counter of bytes itself.

How many bytes there are after each item is compared with estimates by test_estimated_memory.py; that a step leaves
nothing, and receives into few buffers, is seen in test_schedules.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import run_processes
from torch import nn
from transformers import LlamaConfig

from evenpipe import Pipeline
from evenpipe.runtime.accounting import ByteCounter
from evenpipe.schedule import Pass

STAGES, TOKENS = 8, 64
BALANCED = [
    # microbatches, vocabulary, and the largest id in the data
    (9, 4096, 4096),
    (11, 4096, 4096),
    (9, 4001, 500),  # all on the first device's shard
]


def count(cases: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """The most bytes in the second step of each case, and those of parameters."""
    counts = []
    for microbatches, vocabulary, largest_id in cases:
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=STAGES,
            num_attention_heads=2,
            max_position_embeddings=TOKENS,
            tie_word_embeddings=False,
        )
        pipeline = Pipeline(config, schedule="v-half", microbatches=microbatches, self_check=False)
        ids = torch.randint(0, largest_id, (microbatches, TOKENS), generator=torch.Generator().manual_seed(0))
        pipeline.step(ids)
        with pipeline.count_bytes() as counted:
            pipeline.step(ids)
        counts.append((counted.peak, counted.started["parameters"]))
        pipeline.close()
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4])
def test_v_half_with_a_sharded_vocabulary_takes_the_same_memory_on_every_device(devices: int) -> None:
    """As in arXiv 2411.05288, section 6.4."""
    for case, counts in zip(BALANCED, zip(*run_processes(count, devices, BALANCED), strict=True), strict=True):
        peaks, parameters = zip(*counts, strict=True)
        assert max(peaks) <= 1.05 * min(peaks), f"{case}: {peaks}"
        assert max(parameters) <= 1.02 * min(parameters), f"{case}: {parameters}"


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
