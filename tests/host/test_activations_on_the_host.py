"""Activations on the host and back: the pool, the copies, and what autograd finds when it comes back."""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenpipe.errors import InputError, RunError
from evenpipe.host import offload as module
from evenpipe.host.copies import FileCopies
from evenpipe.host.offload import Activations, activations_engine, keep_on_device
from evenpipe.host.pool import SLAB, FileSlab, HostPool, Slot, carve, slab_size
from evenpipe.layers.entrance import StageGraph
from evenpipe.recipe.offload import PAGE, OffloadOptions

CPU = torch.device("cpu")
KEY = (0, 0)


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


# whether powers of two, wanted bytes, room -> bytes of a new slab
NEW_SLABS = [
    (False, PAGE, None, SLAB),
    (False, SLAB + PAGE, None, SLAB + PAGE),
    (False, PAGE, 10 * PAGE, 10 * PAGE),
    (False, 11 * PAGE, 10 * PAGE, None),
    (True, PAGE, None, SLAB),
    (True, SLAB, None, SLAB),
    (True, SLAB + PAGE, None, 2 * SLAB),
    (True, SLAB + PAGE, 2 * SLAB, 2 * SLAB),
    (True, SLAB + PAGE, 2 * SLAB - PAGE, None),
    (True, 5 * PAGE, 10 * PAGE, 8 * PAGE),
    (True, 8 * PAGE, 8 * PAGE, 8 * PAGE),
    (True, PAGE, PAGE, PAGE),
    (True, PAGE, 0, None),
]


def test_sizes_of_new_slabs() -> None:
    """Powers of two, which torch's allocator does not round up: what the pool counts is what there is."""
    for powers, wanted, room, expected in NEW_SLABS:
        assert slab_size(wanted, room, powers=powers) == expected, (powers, wanted, room)
    for seed in range(10):
        chance = random.Random(seed)
        limit = chance.randint(1, 4 * SLAB)
        pool = HostPool(NoSlab, limit, powers=True)
        for _ in range(60):
            pool.take(chance.choice([1, PAGE, chance.randint(1, SLAB), chance.randint(1, 3 * SLAB)]))
        sizes = [slab.size for slab in pool.slabs]
        assert all(size & (size - 1) == 0 for size in sizes)
        assert pool.most_used <= pool.size == sum(sizes) <= limit


def test_the_pool_of_a_gpu_has_powers_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PinnedSlab", NoSlab)
    monkeypatch.setattr(module, "StreamCopies", lambda pool, torch_device, streams: FileCopies(pool, streams))
    activations = activations_engine(OffloadOptions(host_memory=100 * 2**20), torch.device("cuda"))
    for size in (70 * 2**20, 62 * 2**20, 31 * 2**20, 3 * 2**20):
        activations.pool.take(size)
    assert [slab.size for slab in activations.pool.slabs] == [2**26, 2**25, 2**22]
    activations.copies.close()


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


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    slab = FileSlab(8 * PAGE, tmp_path)
    assert list(tmp_path.iterdir()) == []
    source, target = torch.randn(3 * PAGE // 4), torch.zeros(3 * PAGE // 4)
    slot = Slot(0, 2 * PAGE, 3 * PAGE)
    slab.write(slot, source.data_ptr(), 3 * PAGE)
    slab.read(slot, target.data_ptr(), 3 * PAGE)
    assert torch.equal(source, target)
    with pytest.raises(InputError, match=r"offload.directory: .*nowhere', no file of 4096 bytes can be made there"):
        FileSlab(PAGE, tmp_path / "nowhere")


# --- one forward and backward -----------------------------------------------------------------------------------


class Layer(nn.Module):
    """Aliases, views, a tensor that is saved twice, a small one, and one in another dtype."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = self.up(self.norm(hidden)).chunk(3, dim=-1)
        mixed = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        mask = mixed > 0
        return hidden + self.down((mixed * mask).double().sin().float() * q.exp().clamp(max=2))


@pytest.fixture
def activations() -> Iterator[Activations]:
    made = activations_engine(OffloadOptions(), CPU)
    yield made
    made.copies.close()


def model(layers: int = 3, width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(width) for _ in range(layers)))


def forward(
    stage: nn.Module, activations: Activations, hidden: Tensor, key: tuple[int, int] = KEY
) -> tuple[Tensor, StageGraph]:
    graph = StageGraph(torch.empty(0, requires_grad=True))
    with activations.saving(key, stage.parameters()):
        output = stage(graph.enter(hidden))
    graph.leave(output)
    return output, graph


def through_the_host(activations: Activations, after_offload: Callable[[], object] = lambda: None) -> None:
    activations.offload(KEY)
    after_offload()
    activations.give_back(KEY)
    activations.load(KEY)
    activations.ready(KEY)


def gradients_of(stage: nn.Module) -> list[Tensor]:
    gradients = [parameter.grad.clone() for parameter in stage.parameters()]
    stage.zero_grad()
    return gradients


class Expected:
    """Gradients of a stage without copies, for one input."""

    def __init__(self, stage: nn.Module, hidden: Tensor) -> None:
        leaf = hidden.clone().requires_grad_()
        stage(leaf).square().sum().backward()
        assert leaf.grad is not None
        self.stage, self.gradients, self.of_input = stage, gradients_of(stage), leaf.grad

    def check(self) -> None:
        assert all(map(torch.equal, gradients_of(self.stage), self.gradients))


def test_gradients_have_the_same_bits(activations: Activations) -> None:
    stage = model()
    for size in ((4, 32), (1, 50), (4, 32)):  # sizes change from step to step
        hidden = torch.randn(*size, 64)
        expected = Expected(stage, hidden)
        output, graph = forward(stage, activations, hidden)
        through_the_host(activations)
        of_input = graph.backward(2 * output.detach())
        expected.check()
        assert of_input is not None and torch.equal(of_input, expected.of_input)
        assert activations.left == () and activations.pool.used == 0


def test_the_device_holds_nothing_between_D_and_L(activations: Activations) -> None:
    stage = model()
    hidden = torch.randn(8, 32, 64)
    output, _ = forward(stage, activations, hidden)
    memories = [memory for memory in (reference() for reference in activations._stashes[KEY]) if memory is not None]
    storages = [weakref.ref(memory.storage) for memory in memories]
    saved = sum(memory.bytes for memory in memories)
    assert len(storages) > 20
    output = output.detach().sum() + output.mean()  # the output itself is given away
    del memories, hidden
    gc.disable()
    try:
        activations.offload(KEY)
        activations.give_back(KEY)
        assert activations.pool.used >= saved
        assert not [storage for storage in storages if storage() is not None]
    finally:
        gc.enable()
    activations.load(KEY)
    activations.ready(KEY)
    output.backward()
    assert activations.pool.used == 0


def test_what_shares_memory_shares_it_afterwards(activations: Activations) -> None:
    wide = torch.randn(64, 96, requires_grad=True)
    with activations.saving(KEY, [wide]):
        q, k = (wide * 2).chunk(2, dim=-1)
        product = q * k
    through_the_host(activations)
    node = product.grad_fn
    assert node is not None
    first, second = node._saved_self, node._saved_other
    assert first.untyped_storage()._cdata == second.untyped_storage()._cdata
    assert torch.equal(first, q) and torch.equal(second, k) and second.stride() == k.stride()


def test_parameters_and_small_tensors_stay(activations: Activations) -> None:
    stage = nn.Linear(256, 256)
    output, _ = forward(stage, activations, torch.randn(2, 256))  # 2 KiB
    assert activations._stashes[KEY] == []
    through_the_host(activations)
    output.sum().backward()


def test_a_layer_can_be_kept(activations: Activations) -> None:
    stage = model(2)
    bytes_moved = []
    for kept in (False, True):
        if kept:
            keep_on_device(stage[1], activations)
        hidden = torch.randn(4, 32, 64)
        expected = Expected(stage, hidden)
        output, _ = forward(stage, activations, hidden)
        through_the_host(activations, after_offload=lambda: bytes_moved.append(activations.pool.used))
        output.square().sum().backward()
        expected.check()
    assert bytes_moved[1] * 2 == pytest.approx(bytes_moved[0], rel=0.1)


def test_a_saved_tensor_that_is_changed_in_place_is_noticed(activations: Activations) -> None:
    """Before O, and before its use."""
    for smallest, late in ((activations.smallest_bytes, False), (1, True)):
        activations.smallest_bytes = smallest
        hidden, weight = torch.randn(64, 64), torch.randn(64, 64, requires_grad=True)
        with activations.saving(KEY, []):
            product = hidden @ weight
        hidden.add_(1)
        with pytest.raises(RuntimeError, match="changed in place"):
            product.sum().backward() if late else activations.offload(KEY)
        activations.clear()


# --- a host without room ----------------------------------------------------------------------------------------


def test_no_room_is_an_error_or_what_does_not_fit_stays() -> None:
    stage, hidden = model(), torch.randn(4, 32, 64)
    expected = Expected(stage, hidden)
    activations = activations_engine(OffloadOptions(host_memory=4 * PAGE), CPU)
    output, graph = forward(stage, activations, hidden)
    with pytest.raises(RunError, match=r"the host has no room for \d+ bytes of stage 0, microbatch 0"):
        activations.offload(KEY)
    assert activations.pool.used == 0
    activations.clear()
    activations.copies.close()
    del output, graph

    activations = activations_engine(OffloadOptions(host_memory=40 * PAGE, when_full="keep"), CPU)
    output, _ = forward(stage, activations, hidden)
    used: list[int] = []
    through_the_host(activations, after_offload=lambda: used.append(activations.pool.used))
    assert 0 < used[0] <= 40 * PAGE
    output.square().sum().backward()
    expected.check()
    activations.copies.close()


def test_a_step_that_failed_leaves_nothing(activations: Activations) -> None:
    stage, graphs = model(), []
    steps = [activations.offload, activations.give_back, activations.load]
    for microbatch in range(4):
        graphs.append(forward(stage, activations, torch.randn(4, 32, 64), (0, microbatch)))
        for step in steps[:microbatch]:
            step((0, microbatch))
    assert activations.left and activations.pool.used
    activations.clear()
    assert activations.left == () and activations.pool.used == 0


# --- options ----------------------------------------------------------------------------------------------------


def test_wrong_options() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"activations": "some"}, "offload: 'some', expected one of scheduled, none, free, all, or bytes above 0"),
        ({"activations": -1.0}, "offload: -1.0, expected one of"),
        ({"when_full": "wait"}, "offload.when_full: 'wait', expected 'error' or 'keep'"),
        ({"streams": 3}, "offload.streams: 3, expected 1 or 2"),
        ({"host_memory": 100}, "offload.host_memory: 100, expected whole bytes, at least 4096"),
        ({"layers": ("keep",)}, "offload.layers: 1 choice, expected one for each of the 2 layers"),
        ({"layers": "drop"}, "offload.layers: 'drop', expected 'offload' or 'keep'"),
    ]
    for options, sentence in refused:
        with pytest.raises(InputError, match=sentence):
            OffloadOptions(**options).of_layers(2)
    assert OffloadOptions().of_layers(2) == ("offload", "offload")
    assert OffloadOptions(layers=("keep", "offload")).of_layers(2) == ("keep", "offload")
