"""The interface between the walker of a program and torch.distributed: communicators, and handles of pending
operations.

Every operation is asynchronous and returns a `Handle`. The handle owns the library's Work objects *and* the tensors
until `wait()`: gloo loses a message whose Work is dropped, and both libraries access the tensors until the wait. From
the call to the wait

- sent tensors must not be written to (they may not have been sent yet, and would arrive changed);
- received tensors must not be read.

Operations of one communicator are matched only by their order (no tags: NCCL ignores them). The caller guarantees that
order, and equal shapes and dtypes on all members; the libraries check neither. Tensors must be contiguous.

Operations use gloo for tensors on the CPU, and NCCL for tensors on a GPU that processes do not share. If the default
process group has no NCCL, because several processes share a GPU, tensors on a GPU are staged through pinned host memory
and sent by gloo. NCCL has not been run between several GPUs yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass
from itertools import accumulate
from typing import Any

import torch.distributed as dist
from torch import Tensor

from evenpipe.communication.arrivals import Arrivals
from evenpipe.communication.staging import Staging
from evenpipe.errors import RunError
from evenpipe.processes.watch import Watch

ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Names since torch 2.13, which warns about the older ones."""


@dataclass(slots=True, eq=False)
class Handle:
    """One pending operation. Keep it until `wait()` has returned."""

    communicator: Communicator
    label: str
    peers: tuple[int, ...]
    works: Sequence[dist.Work | None]
    tensors: Sequence[Tensor] = ()
    finish: Callable[[], None] | None = None
    """Called after the wait."""
    result: Any = None
    """Returned by the wait."""
    _needed_by: str = ""
    _compute: Callable[[Any], Any] | None = None

    def returning(self, result: Any, needed_by: str = "", compute: Callable[[Any], Any] | None = None) -> Handle:
        """Set the result that the wait returns, and who needs it if the wait does not say; return the handle.

        compute: called after the wait; the wait returns `compute(result)`.
        """
        self.result, self._needed_by, self._compute = result, needed_by, compute
        return self

    def wait(self, needed_by: str = "") -> Any:
        """Wait for the operation, release its tensors, and return the result; a second call only returns the result.

        With NCCL only the current stream waits, not the host.

        needed_by: text of the waiting pass, for error messages.

        Raises:
            RunError: the operation or another process failed. Names the first cause, the awaited transfer and its peer.
        """
        if not self.works:
            return self.result
        communicator, needed_by = self.communicator, needed_by or self._needed_by
        watch = communicator.watch
        if watch is not None:
            watch.begin_wait(self.label, needed_by, communicator.name, self.peers, communicator.timeout_seconds)
        try:
            for work in self.works:
                if work is not None:  # the library has nothing to do
                    work.wait()
        except RuntimeError as error:
            raise communicator.failed(error, self.label, needed_by, self.peers) from error
        if watch is not None:
            if communicator.arrivals is None:
                watch.end_wait()
            else:
                watch.end_wait_when(communicator.arrivals.mark(), communicator.timeout_seconds)
        if self.finish is not None:
            self.finish()
        self.works, self.tensors, self.finish = (), (), None
        if self._compute is not None:
            self.result, self._compute = self._compute(self.result), None
        return self.result


@dataclass(eq=False)
class Communicator:
    """One process group and the operations on it, made by `Communicators`. Members, peers, roots: global ranks."""

    name: str
    members: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup | None
    _: KW_ONLY
    timeout_seconds: float
    staging: Staging | None
    watch: Watch | None
    arrivals: Arrivals | None = None
    """Arrivals of the GPU that waits instead of the host; None if waits block the host."""

    def __post_init__(self) -> None:
        self.position = self.members.index(self.rank)
        self.others = tuple(member for member in self.members if member != self.rank)
        self._by_rank = self.members == tuple(sorted(self.members))

    # -- messages ----------------------------------------------------------------------------------

    def send(self, tensor: Tensor, peer: int, label: str) -> Handle:
        """Send `tensor` to `peer`, which receives the same shape and dtype. It may be written to after the wait."""
        assert peer in self.others, f"{label}: process {peer} is not another member of {self.name} {self.members}"
        return self._start(label, (peer,), lambda host: [dist.isend(host, peer, self.group)], reads=tensor)

    def receive(self, buffer: Tensor, peer: int, label: str) -> Handle:
        """Fill `buffer` with data from `peer`. `buffer` may be read after the wait."""
        assert peer in self.others, f"{label}: process {peer} is not another member of {self.name} {self.members}"
        return self._start(label, (peer,), lambda host: [dist.irecv(host, peer, self.group)], writes=buffer)

    def shift(self, tensor: Tensor, buffer: Tensor, label: str) -> Handle:
        """Send `tensor` to the next member and fill `buffer` from the previous one; the first member follows the last.
        All members call it, with the same shape and dtype."""
        count = len(self.members)
        successor, predecessor = self.members[(self.position + 1) % count], self.members[self.position - 1]

        def start(host: Tensor, host_buffer: Tensor) -> Any:
            # As a batch: otherwise NCCL would wait for the peer of each operation in turn.
            sent = dist.P2POp(dist.isend, host, successor, self.group)
            return dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, host_buffer, predecessor, self.group)])

        return self._start(label, (predecessor, successor), start, reads=tensor, writes=buffer)

    # -- collectives: every member calls them in the same order ------------------------------------

    def broadcast(self, tensor: Tensor, root: int, label: str) -> Handle:
        """Send root's `tensor` into the `tensor` of all other members."""
        roles = {"reads": tensor} if root == self.rank else {"writes": tensor}
        return self._collective(
            label, root, lambda host: dist.broadcast(host, root, self.group, async_op=True), **roles
        )

    def reduce(self, tensor: Tensor, root: int, label: str) -> Handle:
        """Add the members' `tensor`s into root's.

        `tensor` belongs to the communicator from now on: after the wait it has the sum on root, and its content is
        destroyed on all others. Pass a scratch tensor. The sum is computed in the tensor's dtype (use fp32), and for
        three or more members in an order that the library chooses: always the same, but not that of the members.
        """
        roles = {"both": tensor} if root == self.rank else {"reads": tensor}
        return self._collective(
            label, root, lambda host: dist.reduce(host, root, group=self.group, async_op=True), **roles
        )

    def all_gather(self, tensor: Tensor, label: str, output: Tensor | None = None) -> Handle:
        """Put the `tensor` [...] of member i into row i of `output` [members, ...] (None: a new tensor), on every
        member; the wait returns `output`.

        `tensor` may be this member's row of `output`.
        """
        shape = (len(self.members), *tensor.shape)
        if output is None:
            output = tensor.new_empty(shape)
        assert output.shape == shape, f"{label}: output is {tuple(output.shape)}; expected {shape}"
        if self.group is None:
            output[0].copy_(tensor)

        def start(host: Tensor, host_output: Tensor) -> Any:
            # torch numbers the members of a group by rank, whatever their order here.
            if self._by_rank:
                return ALL_GATHER(host_output.flatten(), host.flatten(), group=self.group, async_op=True)
            rows = [host_output[self.members.index(member)] for member in sorted(self.members)]
            return dist.all_gather(rows, host, group=self.group, async_op=True)

        handle = self._collective(label, None, start, reads=tensor, writes=output)
        return handle.returning(output)

    def all_reduce(self, tensor: Tensor, label: str) -> Handle:
        """Add the members' `tensor`s, in their dtype; after the wait every member has the same sum in its `tensor`."""
        return self._collective(
            label, None, lambda host: dist.all_reduce(host, group=self.group, async_op=True), both=tensor
        )

    def reduce_scatter(self, output: Tensor, tensor: Tensor, label: str) -> Handle:
        """Add the members' `tensor`s [members, ...] in their dtype; row i of the sum goes into member i's `output`,
        which the wait returns.

        The content of `tensor` is destroyed.
        """
        if not self._by_rank:  # torch numbers the members of a group by rank
            tensor = tensor[[self.members.index(member) for member in sorted(self.members)]]
        assert tensor.shape == (len(self.members), *output.shape), f"{label}: output is {tuple(output.shape)}"
        handle = self._collective(
            label,
            None,
            lambda host, host_output: REDUCE_SCATTER(
                host_output.flatten(), host.flatten(), group=self.group, async_op=True
            ),
            reads=tensor,
            writes=output,
        )
        return handle.returning(output)

    def all_to_all(self, output: Tensor, tensor: Tensor, label: str) -> Handle:
        """Put row i of the `tensor` [members, ...] of member j into row j of the `output` of member i.

        Both may be used again after the wait.
        """
        assert tensor.shape == output.shape and len(tensor) == len(self.members), f"{label}: {tuple(tensor.shape)}"

        def start(host: Tensor, host_output: Tensor) -> Any:
            if self._by_rank:
                return dist.all_to_all_single(host_output, host, group=self.group, async_op=True)
            order = [self.members.index(member) for member in sorted(self.members)]
            return dist.all_to_all(
                [host_output[index] for index in order], [host[index] for index in order], self.group, async_op=True
            )

        return self._collective(label, None, start, reads=tensor, writes=output)

    def exchange(
        self, output: Tensor, rows: Tensor, received: Sequence[int], sent: Sequence[int], label: str
    ) -> Handle:
        """Send `sent[i]` of the `rows` [sum of sent, ...] to every other member i, and put the `received[i]` rows from
        it into the `output` [sum of received, ...]. Both are in the order of the members, and may be used again after
        the wait.

        Nothing checks that a member expects the number of rows that another one sends.
        """
        assert len(rows) == sum(sent) and len(output) == sum(received), f"{label}: {len(rows)} and {len(output)} rows"
        assert sent[self.position] == received[self.position] == 0, f"{label}: rows for itself"

        def start(host: Tensor, host_output: Tensor) -> list[Any]:
            if self._by_rank:
                sizes = list(received), list(sent)
                return [dist.all_to_all_single(host_output, host, *sizes, group=self.group, async_op=True)]
            # Gloo's other all-to-all, which takes chunks in any order, requires equal sizes.
            operations = (dist.irecv, host_output.split(list(received))), (dist.isend, host.split(list(sent)))
            messages = [
                dist.P2POp(operation, rows_of_member, member, self.group)
                for operation, chunks in operations
                for member, rows_of_member in zip(self.members, chunks, strict=True)
                if member != self.rank and len(rows_of_member)
            ]
            return dist.batch_isend_irecv(messages) if messages else []

        if self.group is None:
            return Handle(self, label, (), ())
        return self._start(label, self.others, start, reads=rows, writes=output)

    def started(self, label: str) -> Handle:
        """Return the handle of an operation of all members that torch started itself, such as a kernel that reads the
        memory of others: the watch knows of it from the wait on."""
        return Handle(self, label, self.others, (None,))

    # -- rows, with a count for each member that all know ------------------------------------------

    def gather_rows(self, rows: Tensor, counts: Sequence[int], root: int, label: str) -> Handle:
        """Bring every member's rows to root, concatenated in the order of the members.

        rows: [counts[position], ...] on a member; [sum(counts), ...] on root, with root's own rows in place
            (`rows[own_rows(counts)]`) and those of the others to be filled.
        counts: rows of each member, in the order of `members`; the same list on all. A member without rows sends no
        message.
        """
        return self._rows(rows, counts, root, label, to_root=True)

    def scatter_rows(self, rows: Tensor, counts: Sequence[int], root: int, label: str) -> Handle:
        """Send the rows of every member from root: the inverse of gather_rows, with the same shapes.

        rows: [sum(counts), ...] on root, in the order of the members; its own stay in place.
            [counts[position], ...] on the others, to be filled.
        """
        return self._rows(rows, counts, root, label, to_root=False)

    def own_rows(self, counts: Sequence[int]) -> slice:
        """Return the slice of root's tensor with this member's rows."""
        return self._row_slices(counts)[self.position]

    def _row_slices(self, counts: Sequence[int]) -> list[slice]:
        assert len(counts) == len(self.members), (
            f"{len(counts)} counts for the {len(self.members)} members of {self.name}"
        )
        return [slice(stop - count, stop) for count, stop in zip(counts, accumulate(counts), strict=True)]

    def _rows(self, rows: Tensor, counts: Sequence[int], root: int, label: str, to_root: bool) -> Handle:
        at_root = root == self.rank
        expected = sum(counts) if at_root else counts[self.position]
        assert len(rows) == expected, (
            f"{label}: {len(rows)} rows; expected {expected} (counts {list(counts)}, root {root})"
        )
        if at_root:
            slices = self._row_slices(counts)
            messages = [
                (member, rows_of_member)
                for member, rows_of_member in zip(self.members, slices, strict=True)
                if member != root and rows_of_member.start < rows_of_member.stop
            ]
        else:
            messages = [(root, slice(None))] if expected else []
        if not messages:
            return Handle(self, label, (), ())
        sends = to_root != at_root
        operation = dist.isend if sends else dist.irecv

        def start(host: Tensor) -> Any:
            # As a batch on all members, so that NCCL runs root's messages as one operation.
            return dist.batch_isend_irecv(
                [dist.P2POp(operation, host[rows_of_member], member, self.group) for member, rows_of_member in messages]
            )

        # If root receives, its own rows are in the same tensor, and a staged copy back must keep them: hence "both".
        roles = {"reads": rows} if sends else {"both": rows} if at_root else {"writes": rows}
        peers = tuple(member for member, _ in messages)
        return self._start(label, peers, start, **roles)

    # -- how an operation is started ---------------------------------------------------------------

    def _collective(self, label: str, root: int | None, start: Callable[..., dist.Work | None], **roles: Any) -> Handle:
        assert root is None or root in self.members, (
            f"{label}: root {root} is not a member of {self.name} {self.members}"
        )
        if self.group is None:
            return Handle(self, label, (), ())
        peers = self.others if root in (None, self.rank) else (root, *(peer for peer in self.others if peer != root))
        return self._start(label, peers, lambda *hosts: [start(*hosts)], **roles)

    def _start(
        self,
        label: str,
        peers: tuple[int, ...],
        start: Callable[..., list[dist.Work | None]],
        *,
        reads: Tensor | None = None,
        writes: Tensor | None = None,
        both: Tensor | None = None,
    ) -> Handle:
        """Call `start` with the tensors that are read, written, or both, in this order, or with their host copies."""
        tensors = [tensor for tensor in (reads, writes, both) if tensor is not None]
        for tensor in tensors:
            assert tensor.is_contiguous(), f"{label}: the tensor {tuple(tensor.shape)} is not contiguous"
        finish = None
        if self.staging is not None:
            tensors, finish = self.staging.to_host(reads, writes, both)
        try:
            works = start(*tensors)
        except RuntimeError as error:
            raise self.failed(error, label, "", peers) from error
        return Handle(self, label, peers, works, tensors=tensors, finish=finish)

    def waiting(self, label: str) -> AbstractContextManager[None]:
        """Announce to the watch that this process waits for the other members within the context."""
        return nullcontext() if self.watch is None else self.watch.during(label, self.name, self.others)

    def failed(self, error: RuntimeError, label: str, needed_by: str, peers: tuple[int, ...]) -> RunError:
        """Return the error to raise when an operation failed; the watch finds the cause."""
        if self.watch is not None:
            self.watch.begin_wait(label, needed_by, self.name, peers)
            return self.watch.explain(error)
        purpose = f" for {needed_by}" if needed_by else ""
        return RunError(
            f"process {self.rank}, awaiting {label}{purpose} from process {', '.join(map(str, peers))}: {error}"
        )
