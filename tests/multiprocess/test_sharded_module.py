"""Parameters in shards over replicas: FSDP2 keeps and gathers them, and what W adds after the backward is not lost."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from harness import GROUP_TIMEOUT, run_processes
from torch import Tensor, nn

from evenpipe.communication.communicator import Communicator
from evenpipe.communication.communicators import Communicators
from evenpipe.parallel import ShardedModule


class Layer(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.wide = nn.Linear(4, rows)
        self.back = nn.Linear(rows, 4, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.back(torch.tanh(self.wide(hidden)))


class Stack(nn.Module):
    """Rows that do not divide, one row, none; frozen, unused, shared by two layers."""

    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(5), Layer(7), nn.Identity(), Layer(2)])
        if shared:
            self.layers[1].wide, self.layers[1].back = self.layers[0].wide, self.layers[0].back
        self.norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.rand(1))
        self.empty = nn.Parameter(torch.rand(0, 4))
        self.unused = nn.Parameter(torch.rand(3, 4))
        self.layers[3].wide.weight.requires_grad_(False)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return self.norm(hidden) * self.scale + self.empty.sum()


def joined() -> Communicator:
    everyone = range(dist.get_world_size())
    return Communicators([("dp", everyone)], timeout_seconds=GROUP_TIMEOUT.total_seconds())["dp"]


def inputs(step: int, replica: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + replica), dtype=torch.float64)


def trained(shared: bool) -> None:
    """Two microbatches per step and three steps of AdamW, against the whole model in one process."""
    shards = joined()
    torch.manual_seed(0)
    stack = Stack(shared=shared).double()
    whole = copy.deepcopy(stack)
    sharded = ShardedModule(
        stack,
        list(stack.layers),
        shards,
        compute_dtype=torch.float64,
        what="the stack",
    )
    masters = {name: (held.tensor, held.placement.ranges(0)[0].start) for name, held in sharded}
    named = dict(whole.named_parameters())
    assert masters.keys() == named.keys()
    assert {name: held.placement.shape for name, held in sharded} == {n: tuple(p.shape) for n, p in named.items()}
    held = [[master for master, _ in masters.values()], list(named.values())]
    optimizers = [torch.optim.AdamW(parameters, lr=1e-2) for parameters in held]

    for step in range(3):
        for accumulated in range(2):
            sharded.gather()
            sharded.ready()
            for replica in range(len(shards.members)):
                for part in inputs(10 * step + accumulated, replica).chunk(2):
                    whole(part).square().sum().backward()
            for part in inputs(10 * step + accumulated, shards.position).chunk(2):
                stack(part).square().sum().backward()
            sharded.reduce()
            sharded.free()
            assert all(isinstance(one, torch.distributed.tensor.DTensor) for one in stack.parameters())
            sharded.finish()
        for name, (master, start) in masters.items():
            wanted = named[name].grad
            assert (master.grad is None) == (wanted is None), name
            if wanted is not None:
                rows = wanted[start : start + len(master)]
                assert master.grad.shape == rows.shape
                torch.testing.assert_close(master.grad, rows, rtol=1e-12, atol=1e-12)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for name, (master, start) in masters.items():
            torch.testing.assert_close(master, named[name][start : start + len(master)], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("processes", [2, 3])
def test_shards_train_as_the_whole(processes: int) -> None:
    for shared in (False, True):
        run_processes(trained, processes, shared)


def in_two_passes() -> None:
    """The trap: I ends the backward, and FSDP2's own hooks would reduce before W has added the weight gradients.

    bf16 products, fp32 sums over microbatches and over replicas, of values that bf16 sums would round away.
    """
    shards = joined()
    linear = nn.Linear(2, 3, bias=False)
    nn.init.ones_(linear.weight)
    holder = nn.ModuleList([linear])
    sharded = ShardedModule(holder, [linear], shards, compute_dtype=torch.bfloat16, what="a layer")
    ((_, held),) = sharded
    master, start = held.tensor, held.placement.ranges(0)[0].start
    sharded.gather()
    sharded.ready()
    weight = linear.weight
    assert weight.dtype == torch.bfloat16 and weight.shape == (3, 2)
    hidden = torch.ones(1, 2, dtype=torch.bfloat16, requires_grad=True)
    (hidden @ weight.detach().t()).sum().backward()  # I
    assert hidden.grad.tolist() == [[3, 3]]
    for value in (256.0, 1.0, 1.0):  # W of three microbatches: 256 + 1 is 256 in bf16
        weight.grad = torch.full((3, 2), value, dtype=torch.bfloat16)
        for hook in weight._post_accumulate_grad_hooks.values():
            hook(weight)
    assert weight.grad is None
    sharded.reduce()
    sharded.free()
    sharded.finish()
    assert master.grad.dtype == torch.float32
    assert master.grad.tolist() == [[2 * 258.0] * 2] * len(master)
    assert start + len(master) <= 3


def test_what_w_adds_after_the_backward_is_summed_in_fp32() -> None:
    run_processes(in_two_passes, 2)
