"""The pool of host memory, and errors of activations on the host.

`tests/multiprocess` compares bits and memory of runs with activations on the host.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenpipe.errors import InputError, RunError
from evenpipe.host.offload import Activations, activations_engine
from evenpipe.host.pool import SLAB, FileSlab, HostPool, Slot, carve
from evenpipe.recipe.offload import PAGE, OffloadOptions

# --- the pool ---------------------------------------------------------------------------------------------------


class NoSlab:
    def __init__(self, size: int) -> None:
        self.size = size


def test_slots_never_overlap_and_come_back(sample) -> None:
    for seed, powers in sample(itertools.product(range(20), (False, True)), 4):
        chance, pool = random.Random(seed), HostPool(NoSlab, powers=powers)
        taken: list[Slot] = []
        for _ in range(400):
            if taken and chance.random() < 0.48:
                pool.give(taken.pop(chance.randrange(len(taken))))
            else:
                slot = pool.take(chance.choice([1, PAGE, PAGE + 1, 3 * PAGE, chance.randint(1, SLAB // 4)]))
                assert slot is not None
                assert slot.offset % PAGE == slot.size % PAGE == 0
                assert slot.offset + slot.size <= pool.slabs[slot.slab].size
                for other in taken:
                    apart = other.offset + other.size <= slot.offset or slot.offset + slot.size <= other.offset
                    assert other.slab != slot.slab or apart
                taken.append(slot)
            assert pool.used == sum(slot.size for slot in taken) <= pool.most_used
        for slot in taken:
            pool.give(slot)
        slabs = pool.size
        for slab in list(pool.slabs):  # everything is in one piece again
            assert pool.take(slab.size) is not None
        assert pool.size == slabs


def test_the_same_sizes_find_the_same_memory_and_no_more_than_allowed() -> None:
    pool = HostPool(NoSlab)
    for _ in range(5):
        for slot in [pool.take(size) for size in (SLAB // 3, SLAB // 3, 5 * PAGE, SLAB)]:
            assert slot is not None
            pool.give(slot)
    assert pool.size == 2 * SLAB
    limited = HostPool(NoSlab, 10 * PAGE)
    first, second = limited.take(6 * PAGE), limited.take(4 * PAGE)
    assert first is not None and second is not None and limited.take(1) is None
    assert limited.size == 10 * PAGE
    limited.give(first)
    assert limited.take(6 * PAGE) is not None


def test_sizes_of_new_slabs() -> None:
    """Powers of two, which torch's allocator does not round up: what the pool counts is what there is."""
    for seed in range(10):
        chance = random.Random(seed)
        limit = chance.randint(1, 4 * SLAB)
        pool = HostPool(NoSlab, limit, powers=True)
        for _ in range(60):
            pool.take(chance.choice([1, PAGE, chance.randint(1, SLAB), chance.randint(1, 3 * SLAB)]))
        sizes = [slab.size for slab in pool.slabs]
        assert all(size & (size - 1) == 0 for size in sizes)
        assert pool.most_used <= pool.size == sum(sizes) <= limit


def test_things_are_carved_out_of_slabs_and_lie_beside_each_other() -> None:
    mib = 2**20
    for sizes, expected in (((), []), ((640,) * 20, [8192, 4096, 2048]), ((1024, 1), [1024, 1])):
        assert carve([size * mib for size in sizes])[0] == [size * mib for size in expected]
    for seed in range(20):
        chance = random.Random(seed)
        sizes = [int(2 ** chance.uniform(0, 30)) for _ in range(chance.randint(1, 60))]
        slabs, slots = carve(sizes)
        ends = [0] * len(slabs)
        for slot in sorted(slots, key=lambda slot: slot.offset):
            assert slot.offset == ends[slot.slab]
            ends[slot.slab] += slot.size
        assert all(0 <= slot.size - size < PAGE for slot, size in zip(slots, sizes, strict=True))
        assert all(size & (size - 1) == 0 and end <= size < 2 * end for end, size in zip(ends, slabs, strict=True))


# --- forwards and backwards -------------------------------------------------------------------------------------


@pytest.fixture
def engine() -> Iterator[Callable[..., Activations]]:
    """Makes engines of some options."""
    with ExitStack() as stack:

        def made(**options: Any) -> Activations:
            activations = activations_engine(OffloadOptions(**options), torch.device("cpu"))
            stack.callback(activations.copies.close)
            return activations

        yield made


def stage() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)) for _ in range(3)))


def forward(module: nn.Module, activations: Activations, microbatch: int = 0) -> Tensor:
    hidden = torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(1))
    with activations.saving((0, microbatch), module.parameters()):
        return module(hidden)


def test_a_saved_tensor_that_is_changed_in_place_is_noticed(engine) -> None:
    """Before O, and before its use."""
    activations = engine()
    for smallest, late in ((activations.smallest_bytes, False), (1, True)):
        activations.smallest_bytes = smallest
        hidden, weight = torch.randn(64, 64), torch.randn(64, 64, requires_grad=True)
        with activations.saving((0, 0), []):
            product = hidden @ weight
        hidden.add_(1)
        with pytest.raises(RuntimeError, match="changed in place"):
            product.sum().backward() if late else activations.offload((0, 0))
        activations.clear()


def test_no_room_is_an_error_or_what_does_not_fit_stays(engine) -> None:
    activations = engine(host_memory=4 * PAGE)
    output = forward(stage(), activations)
    with pytest.raises(RunError, match=r"the host has no room for \d+ bytes of stage 0, microbatch 0"):
        activations.offload((0, 0))
    assert activations.pool.used == 0
    activations.clear()

    activations, kept, plain = engine(host_memory=40 * PAGE, when_full="keep"), stage(), stage()
    output = forward(kept, activations)
    activations.offload((0, 0))
    assert 0 < activations.pool.used <= 40 * PAGE
    for move in (activations.give_back, activations.load, activations.ready):
        move((0, 0))
    output.square().sum().backward()
    forward(plain, engine()).square().sum().backward()
    for ours, theirs in zip(kept.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_a_step_that_failed_leaves_nothing(engine) -> None:
    activations = engine()
    moves = [activations.offload, activations.give_back, activations.load]
    outputs = []
    for microbatch in range(4):
        outputs.append(forward(stage(), activations, microbatch))
        for move in moves[:microbatch]:
            move((0, microbatch))
    assert activations.left and activations.pool.used
    activations.clear()
    assert activations.left == () and activations.pool.used == 0


# --- options ----------------------------------------------------------------------------------------------------


def test_wrong_options(tmp_path: Path) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        (
            {"activations": "some"},
            'offload.activations is "some"; it must be "scheduled", "none", "free", "all" or number above 0',
        ),
        ({"activations": -1.0}, "offload.activations is -1.0; it must be"),
        ({"when_full": "wait"}, 'offload.when_full is "wait"; it must be one of error, keep'),
        ({"streams": 3}, "offload.streams is 3; it must be 1 or 2"),
        ({"host_memory": 100}, "offload.host_memory is 100; it must be a number of bytes, at least 4096"),
        (
            {"layers": ("keep",) * 3},
            'offload.layers is ["keep", "keep", "keep"]; it must be one choice, or one for each of',
        ),
        ({"layers": "drop"}, 'offload.layers is "drop"; it must be "offload", "keep" or a list of them'),
    ]
    for options, sentence in refused:
        with pytest.raises(InputError, match=re.escape(sentence)):
            OffloadOptions(**options).of_layers(2)
    with pytest.raises(InputError, match=r"offload.directory: .*nowhere', no file of 4096 bytes can be made there"):
        FileSlab(PAGE, tmp_path / "nowhere")
    assert OffloadOptions().of_layers(2) == ("offload", "offload")
    assert OffloadOptions(layers=("keep", "offload")).of_layers(2) == ("keep", "offload")
