"""Operations of a communicator: what is sent stays until it has left, and all of it works by way of the host. That
rows and messages arrive, among any members, is seen in the pipelines of tests/fuzz."""

import pytest
import torch
import torch.distributed as dist
from harness import GROUP_TIMEOUT, run_processes

from evenpipe.communication.communicator import Communicator
from evenpipe.communication.communicators import Communicators
from evenpipe.communication.staging import Staging

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


def everyone() -> Communicator:
    groups = [("all", [range(dist.get_world_size())])]
    return Communicators(groups, timeout_seconds=GROUP_TIMEOUT.total_seconds())["all"]


def values(rank: int, *shape: int, dtype=torch.float32) -> torch.Tensor:
    """A tensor that differs in every place and on every rank, exact in every dtype of the tests (bf16: up to 256)."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 50 + 50 * rank).reshape(shape).to(dtype)


def a_handle_keeps_what_is_sent_alive():
    """The sender drops the tensors, the receiver posts late; memory freed early would be filled by other tensors."""
    communicator, rank = everyone(), dist.get_rank()
    if rank == 0:
        handles = [communicator.send(values(i, 500, 500), 1, "send") for i in range(8)]
        litter = [torch.full((500, 500), -1.0) for _ in range(16)]
        dist.barrier()
        for handle in handles:
            handle.wait()
        assert len(litter) == 16
        return
    dist.barrier()
    for i in range(8):
        buffer = torch.zeros(500, 500)
        communicator.receive(buffer, 0, "receive").wait()
        assert torch.equal(buffer, values(i, 500, 500))


def collectives():
    rank, size, communicator = dist.get_rank(), dist.get_world_size(), everyone()
    for root in range(size):
        for dtype in DTYPES:
            tensor = values(root, 4, 3, dtype=dtype) if rank == root else torch.zeros(4, 3, dtype=dtype)
            communicator.broadcast(tensor, root, "X0").wait("S0")
            assert torch.equal(tensor, values(root, 4, 3, dtype=dtype))

            scratch = values(rank, 4, 3, dtype=dtype) % 30
            communicator.reduce(scratch, root, "DX0").wait("1B0")
            if rank == root:
                assert torch.equal(scratch, sum(values(r, 4, 3, dtype=dtype) % 30 for r in range(size)))

            output = communicator.all_gather(values(rank, 4, 3, dtype=dtype), "STATISTICS0").wait("C0")
            assert torch.equal(output, torch.stack([values(r, 4, 3, dtype=dtype) for r in range(size)]))


# -- staging, with copies within the CPU in place of the GPU's ------------------------------------


class StagingOnTheCpu(Staging):
    """All of it but the two methods that touch CUDA."""

    def __init__(self) -> None:
        self.copied_out = 0

    def _host_memory(self, tensor):
        return torch.full_like(tensor, 77)

    def _copy_out(self, pairs):
        self.copied_out += len(pairs)
        for tensor, host in pairs:
            host.copy_(tensor)


def all_operations_staged():
    rank, communicator = dist.get_rank(), everyone()
    staging = communicator.staging = StagingOnTheCpu()
    other = 1 - rank
    tensor, buffer = values(rank, 5), torch.zeros(5)
    receive, send = communicator.receive(buffer, other, "receive"), communicator.send(tensor, other, "send")
    tensor.zero_()  # the copy is on its way
    receive.wait()
    send.wait()
    assert torch.equal(buffer, values(other, 5))

    x = values(1, 5) if rank == 1 else torch.zeros(5)
    communicator.broadcast(x, 1, "X0").wait()
    dx = values(rank, 5)
    communicator.reduce(dx, 1, "DX0").wait()
    table = communicator.all_gather(values(rank, 5), "STATISTICS0").wait()
    assert torch.equal(x, values(1, 5))
    assert torch.equal(dx, values(0, 5) + values(1, 5) if rank == 1 else values(0, 5))
    assert torch.equal(table, torch.stack([values(0, 5), values(1, 5)]))

    counts = [2, 3]
    rows = values(9, 5, 2) if rank == 0 else values(8, 3, 2)
    communicator.gather_rows(rows, counts, 0, "ROWS0").wait()
    if rank == 0:
        assert torch.equal(rows, torch.cat([values(9, 5, 2)[:2], values(8, 3, 2)]))
    rows = values(9, 5, 2) if rank == 0 else torch.zeros(3, 2)
    communicator.scatter_rows(rows, counts, 0, "ROW_GRADIENTS0").wait()
    assert torch.equal(rows, values(9, 5, 2) if rank == 0 else values(9, 5, 2)[2:])
    # send, reduce, all-gather, gather on both (root's own rows must survive); broadcast and scatter on their roots
    assert staging.copied_out == 4 + 1


@pytest.mark.parametrize(
    ("operation", "processes"),
    [(a_handle_keeps_what_is_sent_alive, 2), (collectives, 1), (collectives, 3), (all_operations_staged, 2)],
)
@pytest.mark.sampled(3)
def test_operations_move_what_they_should(operation, processes):
    run_processes(operation, processes)
