"""The communicators of a pipeline and of its replicas, and messages outside of programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from evenpipe.communication.calls import ROOM, gather_calls, gather_numbers, row_of, row_of_scalar
from evenpipe.communication.communicator import Communicator
from evenpipe.communication.communicators import Communicators
from evenpipe.communication.messages import broadcast_value
from evenpipe.communication.nccl import NcclOptions
from evenpipe.errors import InputError
from evenpipe.parallel.grid import AXES, COPIES, EXPERT_COPIES, Grid
from evenpipe.parallel.running import Running
from evenpipe.processes.watch import Watch
from evenpipe.work import Done, Work

Item = TypeVar("Item")


class Groups:
    """The lines and groups of the grid that communicate, named after their axes, and "everyone". Created collectively,
    on every process.

    Programs run along a line "pp": there is one for each replica, piece of its sequences, and tensor rank. By default a
    process has four communicators on its line (`schedule.SHARING`), one for each other axis, one of all processes, and
    one more where rows are cut along several axes: vocabulary rows over devices and tensor ranks, rows of other
    parameters over replicas and tensor ranks. Processes with the same parameters are in the order of their ranks, as
    FSDP2 numbers them; all others are in the order of the grid: by replica, by device, by piece, then by tensor rank.
    """

    def __init__(
        self,
        grid: Grid,
        program: Mapping[str, Sequence[int]],
        *,
        tied: tuple[int, int] | None,
        vocabulary: bool,
        sharded: bool,
        timeout_seconds: float,
        torch_device: torch.device,
        watch: Watch,
        nccl: NcclOptions | None = None,
    ) -> None:
        """
        Args:
            program: the devices of each communicator of the program.
            vocabulary: whether all devices share the rows of the vocabulary layers.
            sharded: whether parameters are sharded by rows over replicas.
            tied: the two devices that both hold the tied matrix, if there are two.
            nccl: as for `Communicators`.
        """
        self._grid = grid
        self.torch_device = torch_device
        self.running = Running()
        """The current pass, for exchanges inside passes."""
        self._streaming: str | None = None
        """The public method whose stream is being consumed."""
        self._over: dict[frozenset[str], Communicator] = {}
        self.communicators: Communicators | None = None
        """All communicators, including those of the programs; None for a single process."""
        self.line: Communicator | None = None
        """The devices of the pipeline: a communicator of the program, if one has all of them; None for a single
        device."""
        self.context: Communicator | None = None
        """The processes of this device that share every sequence; None for a single one."""
        self.tensor: Communicator | None = None
        """The tensor ranks of this device; None for a single one."""
        self.replicas: Communicator | None = None
        """The processes with the same parameters, over replicas and pieces of sequences; None for a single one."""
        self.experts: Communicator | None = None
        """The members of this process's expert group; None for a single one."""
        self.expert_replicas: Communicator | None = None
        """The processes of `replicas` that hold the same experts, if members share them; None for a single one."""
        self.shared: Communicator | None = None
        """The tensor ranks of this device that hold the same rows of the parameters common to all tensor ranks."""
        self.everyone: Communicator | None = None
        """All processes; None for a single one."""
        self.tied: Communicator | None = None
        """The two processes of the first and last device that hold the same rows, if a matrix is held twice."""
        if len(grid.ranks) == 1:
            return
        devices, lines = grid.size("pp"), grid.groups("pp")
        listed: list[tuple[str, Sequence[Sequence[int]]]] = []
        line_name = None
        if devices > 1:
            transfers = sorted(program.items())
            listed += [(name, [[line[device] for device in members] for line in lines]) for name, members in transfers]
            line_name = next((name for name, members in transfers if tuple(members) == tuple(range(devices))), "pp")
            if line_name == "pp":
                listed.append((line_name, lines))
        groups = self._by_axes(vocabulary=vocabulary, sharded=sharded)
        listed += [
            (name, rank_groups) for name, rank_groups in self._with_the_same_rows(tied, sharded=sharded) if rank_groups
        ]
        context_groups = grid.groups("cp")
        if self._long(COPIES) == {"cp"} and any(list(ranks) != sorted(ranks) for ranks in context_groups):
            listed.append(("context", context_groups))  # on all devices in the order of the pieces
        listed += groups.values()
        everyone = next((name for name, rank_groups in groups.values() if grid.ranks in rank_groups), "everyone")
        if everyone == "everyone":
            listed.append((everyone, [grid.ranks]))
        communicators = self.communicators = Communicators(
            listed, timeout_seconds=timeout_seconds, torch_device=torch_device, watch=watch, nccl=nccl
        )
        by_name = {communicator.name: communicator for communicator in communicators}
        self._over = {axes: by_name[name] for axes, (name, _) in groups.items()}
        if line_name is not None:
            self.line = by_name[line_name]
            self._over.setdefault(frozenset({"pp"}), self.line)
        self.everyone = by_name[everyone]
        self._position_of = {member: position for position, member in enumerate(self.everyone.members)}
        self.replicas = self.over(*COPIES)
        self.experts, self.expert_replicas = by_name.get("experts"), by_name.get("expert replicas")
        self.context, self.tensor = by_name.get("context", self.over("cp")), self.over("tp")
        self.tied = by_name.get("tied")
        self.shared = by_name.get("shared", self.tensor)
        communicators.warm_up()

    def _by_axes(self, *, vocabulary: bool, sharded: bool) -> dict[frozenset[str], tuple[str, list[tuple[int, ...]]]]:
        """Return the name and members of the groups over each set of axes."""
        grid = self._grid
        groups: dict[frozenset[str], tuple[str, list[tuple[int, ...]]]] = {}
        rows = (("pp", "tp") if vocabulary and grid.size("tp") > 1 else (), ("tp", *COPIES) if sharded else ())
        for axes in (COPIES, ("tp",), ("cp",), *rows):
            long = self._long(axes)
            if long:
                name, rank_groups = (
                    " x ".join(axis for axis in axes if axis in long),
                    grid.groups(*(axis for axis in AXES if axis in long)),
                )
                groups.setdefault(
                    long, (name, [tuple(sorted(ranks)) for ranks in rank_groups] if axes == COPIES else rank_groups)
                )
        if grid.size("ep") > 1:
            groups[frozenset({"ep"})] = ("experts", grid.groups("ep"))
            if self._long(EXPERT_COPIES):
                rank_groups = [tuple(sorted(ranks)) for ranks in grid.groups(*EXPERT_COPIES)]
                groups[self._long(EXPERT_COPIES)] = ("expert replicas", rank_groups)
        return groups

    def _with_the_same_rows(
        self, tied: tuple[int, int] | None, *, sharded: bool
    ) -> Iterator[tuple[str, list[tuple[int, ...]]]]:
        """Yield the pairs "tied", and the groups "shared" of tensor ranks if they differ from those of a pipeline."""
        grid = self._grid

        def with_same_rows(devices_and_ranks: Iterable[tuple[int, int]]) -> Iterable[tuple[int, ...]]:
            """Group the processes of these (device, tensor rank) pairs that hold the same rows of the same parameters.
            With shards over replicas these have the same position, and may be in different pipelines."""
            return zip(
                *(sorted(grid.group(*COPIES, pp=device, tp=rank)) for device, rank in devices_and_ranks), strict=True
            )

        devices, ranks = range(grid.size("pp")), range(grid.size("tp"))
        if tied is not None:
            yield "tied", [pair for rank in ranks for pair in with_same_rows((device, rank) for device in tied)]
        if sharded and len(ranks) > 1:
            mates = [mates for device in devices for mates in with_same_rows((device, rank) for rank in ranks)]
            if set(mates) != set(grid.groups("tp")):
                yield "shared", mates

    def over(self, *axes: str) -> Communicator | None:
        """Return the communicator of processes that differ from this one only along these axes; None without any."""
        long = self._long(axes)
        if axes != COPIES and long == self._long(AXES):  # copies have their own order
            return self.everyone
        return self._over.get(long)

    def _long(self, axes: Iterable[str]) -> frozenset[str]:
        return frozenset(axis for axis in axes if self._grid.size(axis) > 1)

    def close(self) -> None:
        """Destroy the communicators, when no operation is pending. Collective."""
        if self.communicators is not None:
            self.communicators.close()

    # --- the beginning of public methods -------------------------------------------------------------------------

    def check_same_call(self, name: str) -> None:
        """Begin a public method that every process must call. Collective over everyone.

        Raises:
            InputError: on every process, if processes call different methods. On this one, if it has left a stream of
                tensors before its end, while others are still sending.
        """
        self.begin(name, [], f"the call of {name}", "")

    def begin(self, name: str, numbers: list[int], label: str, needed_by: str) -> list[list[int]]:
        """As `agree`; return on every process the numbers of all processes, in the order of the grid. Collective over
        everyone.

        Args:
            numbers: int64, the same count on all processes, at most `ROOM`.
            label, needed_by: what this wait is for, and what needs it, for error messages.
        """
        if self.everyone is None:
            return [numbers]
        table = self._exchange(name, row_of(name, numbers, self.torch_device), label, needed_by)
        return self._in_order(table[:, : len(numbers)].tolist())

    def gather(self, numbers: list[int], label: str, needed_by: str) -> list[list[int]]:
        """Return int64 numbers of all processes, in the order of the grid; each gives the same count. No public method
        may begin with this. Collective over everyone."""
        table = gather_numbers(self.everyone, numbers, label, needed_by, self.torch_device)
        return table if self.everyone is None else self._in_order(table)

    def sum(self, name: str, number: Tensor, *axes: str) -> Tensor:
        """As `agree`; return the sum of an fp64 scalar over these axes. It is bitwise identical on every process, since
        all add in the same order."""
        if self.everyone is None:
            return number
        table = self._exchange(name, row_of_scalar(name, number), "the norm of all gradients", "the optimizer")
        positions = sorted(self._position_of[rank] for rank in self._grid.group(*axes))
        return table[positions, 0].view(torch.float64).sum().to(number.device)

    def stream(self, name: str, items: Iterator[Item]) -> Iterator[Item]:
        """Iterate over items that all processes exchange, for a public method that each of them must call and exhaust.
        Before the first item, as `agree`."""
        self.check_same_call(name)
        self._streaming = None if self.everyone is None else name
        try:
            yield from items
        except Exception:  # not GeneratorExit: when a generator is abandoned, others may still send
            self._streaming = None
            raise
        self._streaming = None

    def _exchange(self, name: str, row: Tensor, label: str, needed_by: str) -> Tensor:
        """Return the rows of everyone, [members, ROOM] int64 on the host."""
        assert self.everyone is not None
        if self._streaming is not None:
            raise InputError(f"{name}: {self._streaming} was left before its end; expected it to be exhausted first")
        return gather_calls(self.everyone, row, label, needed_by)

    def _in_order(self, table: list[list[int]]) -> list[list[int]]:
        """Return the rows of everyone, in the order of the grid."""
        return [table[self._position_of[rank]] for rank in self._grid.ranks]

    # --- messages ------------------------------------------------------------------------------------------------

    def from_the_first(self, text: str | None, label: str, called: str = "from_the_first") -> str | None:
        """Return the text of the very first process on all processes. Collective over everyone.

        called: as for `agree`, the public method that begins with this call.
        """
        if self.everyone is None:
            return text
        with self.everyone.waiting(label):
            received: str | None = broadcast_value(text, self.everyone.members[0], self.everyone.group, called)
        return received

    def numbers(self, numbers: Sequence[float], called: str = "gather_numbers") -> list[list[float]]:
        """Return the numbers of each process, pipeline by pipeline, on every process. Collective over everyone.

        called: as for `agree`, the public method that begins with this call.

        Raises InputError as `agree`, and if processes give different counts of numbers.
        """
        label, needed_by = "figures of all devices", "the caller"
        bits = torch.tensor(numbers, dtype=torch.float64).view(torch.int64).tolist()
        fits = len(bits) < ROOM
        rows = self.begin(called, [len(bits), *(bits if fits else ())], label, needed_by)
        counts = [count for count, *_ in rows]
        if len(set(counts)) > 1:
            raise InputError(f"{called}: {counts} numbers on the processes; expected equally many on all of them")
        table = [row for _, *row in rows] if fits else self.gather(bits, label, needed_by)
        return torch.tensor(table, dtype=torch.int64).view(torch.float64).tolist()

    def broadcast(self, tensor: Tensor, label: str, needed_by: str) -> None:
        """Send the tensor of each replica's first process into the tensors of its other processes, axis by axis.
        Collective over the replica; on a GPU the host does not wait."""
        lines, grid = {"pp": self.line, "cp": self.context, "tp": self.tensor}, self._grid
        for axis, communicator in lines.items():
            later = [*lines][[*lines].index(axis) + 1 :]
            if communicator is not None and not any(map(grid.coordinate, later)):
                communicator.broadcast(tensor, grid.at(**{axis: 0}), label).wait(needed_by)

    # --- results of the output layer ---------------------------------------------------------------------------------

    def share(self, value: Tensor | None, source: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Work:
        """Share a tensor of device `source`, which all its tensor ranks have, with the whole pipeline."""
        if self.line is None:
            return Done(value)
        tensor = torch.empty(shape, dtype=dtype, device=self.torch_device) if value is None else value.contiguous()
        handle = self.line.broadcast(tensor, self._grid.at(pp=source), "the loss")
        return handle.returning(tensor, "the caller")

    def total(self, tensor: Tensor, label: str) -> Work:
        """Return the sum of a tensor over everyone, on all processes; the given tensor is overwritten."""
        return (
            Done(tensor)
            if self.everyone is None
            else self.everyone.all_reduce(tensor, label).returning(tensor, "the caller")
        )

    def share_sum(self, value: Tensor | None, source: int, dtype: torch.dtype) -> Work:
        """Share the sum over pipelines of a scalar of device `source` with everyone: all processes gather and add the
        same values."""
        assert self.everyone is not None
        number = torch.zeros((), dtype=dtype, device=self.torch_device) if value is None else value.contiguous()
        handle = self.everyone.all_gather(number, "the loss of all replicas")
        rows = [self._position_of[rank] for rank in self._grid.group(*COPIES, pp=source, tp=0)]
        return handle.returning(handle.result, "the caller", lambda table: table[rows].sum(0))
