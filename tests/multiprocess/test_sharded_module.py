"""Parameters in shards over replicas: what W adds after the backward is not lost. tests/fuzz trains with shards."""

from __future__ import annotations

import torch
import torch.distributed as dist
from harness import GROUP_TIMEOUT, run_processes
from torch import nn

from evenpipe.communication.communicators import Communicators
from evenpipe.parallel import ShardedModule


def in_two_passes() -> None:
    """The trap: I ends the backward, and FSDP2's own hooks would reduce before W has added the weight gradients.

    bf16 products, fp32 sums over microbatches and over replicas, of values that bf16 sums would round away.
    """
    everyone = range(dist.get_world_size())
    shards = Communicators([("dp", everyone)], timeout_seconds=GROUP_TIMEOUT.total_seconds())["dp"]
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
