"""Operations of a communicator, at one to four processes: what arrives and what travels. That many may be under way at
once, and tensors without elements, is seen in the pipelines of tests/fuzz."""

import pytest
import torch
import torch.distributed as dist
from harness import GROUP_TIMEOUT, run_processes

from evenpipe.communication.communicator import Communicator, Traffic
from evenpipe.communication.communicators import Communicators
from evenpipe.communication.staging import Staging

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


def make(groups) -> Communicators:
    return Communicators(groups, timeout_seconds=GROUP_TIMEOUT.total_seconds())


def everyone() -> Communicator:
    return make([("all", range(dist.get_world_size()))])["all"]


def values(rank: int, *shape: int, dtype=torch.float32) -> torch.Tensor:
    """A tensor that differs in every place and on every rank, exact in every dtype of the tests (bf16: up to 256)."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 50 + 50 * rank).reshape(shape).to(dtype)


# -- messages --------------------------------------------------------------------------------------


def hops_around_the_ring():
    """Every process sends three tensors to the next one and waits in another order than it posted."""
    rank, size = dist.get_rank(), dist.get_world_size()
    hops = [(f"F:{source}>{(source + 1) % size}", (source, (source + 1) % size)) for source in range(size)]
    communicators = make(hops)
    after, before = (rank + 1) % size, (rank - 1) % size
    for dtype in DTYPES:
        sent = [values(rank, 3, 2, dtype=dtype) + i for i in range(3)]
        buffers = [torch.zeros(3, 2, dtype=dtype) for _ in range(3)]
        receives = [
            communicators[f"F:{before}>{rank}"].receive(b, before, f"receive {i}") for i, b in enumerate(buffers)
        ]
        sends = [communicators[f"F:{rank}>{after}"].send(t, after, f"send {i}") for i, t in enumerate(sent)]
        for handle in (*reversed(receives), *sends):
            handle.wait()
            handle.wait()
        for i, buffer in enumerate(buffers):
            assert torch.equal(buffer, values(before, 3, 2, dtype=dtype) + i)
    moved = 3 * 6 * (4 + 8 + 2 + 8)
    assert communicators.traffic() == {
        f"F:{rank}>{after}": Traffic(messages=12, sent_bytes=moved),
        f"F:{before}>{rank}": Traffic(messages=12, received_bytes=moved),
    }


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


# -- collectives -----------------------------------------------------------------------------------


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

            output = torch.zeros(size, 4, 3, dtype=dtype)
            communicator.all_gather(output, values(rank, 4, 3, dtype=dtype), "STATISTICS0").wait("C0")
            assert torch.equal(output, torch.stack([values(r, 4, 3, dtype=dtype) for r in range(size)]))
    if size > 1:
        moved, others = 12 * (4 + 8 + 2 + 8), size - 1  # bytes of one tensor, over the dtypes
        # broadcast as root, reduce elsewhere, all-gather
        sent, received = moved * (1 + others + size), moved * (others + 1 + size * others)
        assert communicator.traffic == Traffic(3 * size * len(DTYPES), sent, received)
    else:
        assert communicator.traffic == Traffic()


def members_in_another_order_than_their_ranks():
    rank, members = dist.get_rank(), (2, 0, 1)
    communicator = make([("all", members)])["all"]
    output = torch.zeros(3, 2)
    communicator.all_gather(output, values(rank, 2), "STATISTICS0").wait()
    assert torch.equal(output, torch.stack([values(member, 2) for member in members]))
    counts = [1, 2, 3]
    rows = values(9, 6, 2) if rank == 2 else torch.zeros(counts[members.index(rank)], 2)
    communicator.scatter_rows(rows, counts, 2, "ROW_GRADIENTS0").wait()
    mine = rows[communicator.own_rows(counts)] if rank == 2 else rows
    assert torch.equal(mine, values(9, 6, 2)[communicator.own_rows(counts)])


def uneven_rows():
    for members in (0, 1, 2), (2, 0, 1), (2, 1, 0):
        for table in [[0, 3, 1], [2, 0, 0], [0, 5, 0]], [[0, 0, 0], [0, 0, 2], [0, 0, 0]]:
            exchange_rows(members, table)


def exchange_rows(members, table):
    """table: rows from each member (first axis) to each other one, by position."""
    communicator, rank = make([("all", members)])["all"], dist.get_rank()
    own, others = communicator.position, range(len(members))
    sent, received = table[own], [row[own] for row in table]
    parts = [values(rank, count, 3) + 7 * to for to, count in zip(others, sent, strict=True)]
    output = torch.zeros(sum(received), 3)
    communicator.exchange(output, torch.cat(parts), received, sent, "rows").wait()
    expected = [values(member, count, 3) + 7 * own for member, count in zip(members, received, strict=True)]
    assert torch.equal(output, torch.cat(expected))
    traffic = communicator.traffic
    assert (traffic.sent_bytes, traffic.received_bytes) == (12 * sum(sent), 12 * sum(received))


# -- rows ------------------------------------------------------------------------------------------


ROWS = {
    1: [[3], [0]],
    2: [[0, 0], [0, 4], [4, 0], [1, 2]],
    4: [[0, 0, 0, 0], [5, 0, 1, 0], [0, 7, 0, 2], [1, 1, 1, 1]],
}


def rows_there_and_back():
    """With members that have none."""
    rank, size, communicator, expected = dist.get_rank(), dist.get_world_size(), everyone(), Traffic()
    cases = [(counts, root, dtype) for counts in ROWS[size] for root in range(size) for dtype in DTYPES[:3]]
    for counts, root, dtype in cases:
        whole = values(1, sum(counts), 3, dtype=dtype)
        own = communicator.own_rows(counts)
        if rank == root:
            gathered = torch.zeros_like(whole)
            gathered[own] = whole[own]
        else:
            gathered = whole[own].clone()
        communicator.gather_rows(gathered, counts, root, "ROWS0").wait("0F0")
        scattered = whole.clone() if rank == root else torch.zeros(counts[rank], 3, dtype=dtype)
        communicator.scatter_rows(scattered, counts, root, "ROW_GRADIENTS0").wait("G0")
        if rank == root:
            assert torch.equal(gathered, whole)
            assert torch.equal(scattered, whole)
        else:
            assert torch.equal(scattered, whole[own])
        moved = (counts[rank] if rank != root else sum(counts) - counts[root]) * 3 * dtype.itemsize
        expected.messages += 2 * sum(c > 0 for i, c in enumerate(counts) if i != root and rank in (root, i))
        expected.sent_bytes += moved
        expected.received_bytes += moved
    assert communicator.traffic == expected


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
    table = torch.zeros(2, 5)
    communicator.all_gather(table, values(rank, 5), "STATISTICS0").wait()
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


# -- misuse that only we could commit, and a single process ----------------------------------------


def refusals():
    rank, communicator = dist.get_rank(), everyone()
    with pytest.raises(AssertionError, match=r"X0: the tensor \(3, 2\) is not contiguous"):
        communicator.broadcast(torch.zeros(2, 3).t(), 0, "X0")
    with pytest.raises(AssertionError, match="1RECV_F0: process 7 is not another member"):
        communicator.receive(torch.zeros(1), 7, "1RECV_F0")
    with pytest.raises(AssertionError, match="DX0: root 7 is not a member"):
        communicator.reduce(torch.zeros(1), 7, "DX0")
    with pytest.raises(AssertionError, match=r"STATISTICS0: output is \(3, 2\), expected \(2, 2\)"):
        communicator.all_gather(torch.zeros(3, 2), torch.zeros(2), "STATISTICS0")
    with pytest.raises(AssertionError, match="ROWS0: 4 rows, expected"):
        communicator.gather_rows(torch.zeros(4, 2), [1, 2] if rank else [1, 4], 0, "ROWS0")


OPERATIONS = [
    (hops_around_the_ring, (2, 3)),
    (a_handle_keeps_what_is_sent_alive, (2,)),
    (collectives, (1, 2, 3, 4)),
    (members_in_another_order_than_their_ranks, (3,)),
    (uneven_rows, (3,)),
    (rows_there_and_back, (1, 2, 4)),
    (all_operations_staged, (2,)),
    (refusals, (2,)),
]


@pytest.mark.parametrize("operation", [operation for operation, _ in OPERATIONS])
@pytest.mark.sampled(4)
def test_operations_move_what_they_should_and_count_it(operation, sample):
    for processes in sample(dict(OPERATIONS)[operation], 1):
        run_processes(operation, processes)


def test_a_single_process_needs_no_process_group():
    assert not dist.is_initialized()
    communicators = make([("X", (0,)), ("ROWS", (0,))])
    communicators.warm_up()
    tensor, output = torch.ones(3), torch.zeros(1, 3)
    communicators["X"].broadcast(tensor, 0, "X0").wait()
    communicators["X"].reduce(tensor, 0, "DX0").wait()
    communicators["X"].all_gather(output, tensor, "STATISTICS0").wait()
    communicators["ROWS"].gather_rows(tensor[:, None], [3], 0, "ROWS0").wait()
    assert torch.equal(output[0], tensor)
    assert communicators.traffic() == {"X": Traffic(), "ROWS": Traffic()}
    communicators.close()
