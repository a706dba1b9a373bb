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
    """Made on every process, collectively: the lines and groups of the grid that communicate, by the names of their
    axes, and "everyone".

    Programs run along a line "pp": one for each replica, piece of its sequences, and tensor rank. Processes with the
    same parameters are in the order of their ranks, as FSDP2 numbers them, all others in the order of the grid: replica
    by replica, in each by device, by piece, then by tensor rank.
    """

    def __init__(
        self,
        grid: Grid,
        program: Mapping[str, Sequence[int]],
        *,
        tied: tuple[int, int] | None,
        sharded: bool,
        timeout_seconds: float,
        torch_device: torch.device,
        watch: Watch,
        nccl: NcclOptions | None = None,
    ) -> None:
        """
        Args:
            program: devices by communicator of the program.
            sharded: whether replicas share the rows of parameters.
            tied: the two devices that both hold the matrix of a model with tied weights, if two do.
            nccl: as for `Communicators`.
        """
        self._grid = grid
        self.torch_device = torch_device
        self.running = Running()
        """For exchanges inside passes."""
        self._streaming: str | None = None
        """The public method whose items are being taken."""
        self._over: dict[frozenset[str], Communicator] = {}
        self.communicators: Communicators | None = None
        """All of them, including those of the programs; None for a single process."""
        self.pipeline: Communicator | None = None
        """All processes of this one's replica: of its devices, pieces and tensor ranks; None for a single one."""
        self.data: Communicator | None = None
        """This process in every replica; None for one replica."""
        self.context: Communicator | None = None
        """The processes of this device that share every sequence; None for one."""
        self.tensor: Communicator | None = None
        """The tensor ranks of this device; None for one."""
        self.replicas: Communicator | None = None
        """The processes with the same parameters, in all replicas and for all pieces of sequences; None for one."""
        self.experts: Communicator | None = None
        """The members of this process's expert group; None for one."""
        self.expert_replicas: Communicator | None = None
        """Those of `replicas` that hold the same experts, if members share them; None for one."""
        self.shared: Communicator | None = None
        """The tensor ranks of this device that hold the same rows of parameters which all of them hold."""
        self.everyone: Communicator | None = None
        """All processes; None for a single one."""
        self.tied: Communicator | None = None
        """The first and the last device that hold the same rows, on these two, if a matrix is held twice."""
        if len(grid.ranks) == 1:
            return
        groups, replica = self._by_axes(sharded=sharded), ("pp", "cp", "tp")
        listed: list[tuple[str, Sequence[int]]] = []
        if grid.size("pp") > 1:
            for name, those in sorted(program.items()):
                listed += [(name, [line[device] for device in those]) for line in grid.groups("pp")]
        listed += self._with_the_same_rows(tied, sharded=sharded)
        pieces = grid.groups("cp")
        if self._long(COPIES) == {"cp"} and any(list(one) != sorted(one) for one in pieces):
            listed += [("context", members) for members in pieces]  # on all devices in the order of the pieces
        listed += [(name, members) for name, found in groups.values() for members in found]
        everyone = next((name for name, found in groups.values() if grid.ranks in found), "everyone")
        if everyone == "everyone":
            listed.append((everyone, grid.ranks))
        made = self.communicators = Communicators(
            listed, timeout_seconds=timeout_seconds, torch_device=torch_device, watch=watch, nccl=nccl
        )
        by_name = {communicator.name: communicator for communicator in made}
        self._over = {axes: by_name[name] for axes, (name, _) in groups.items()}
        self.everyone = by_name[everyone]
        self._place_of = {member: place for place, member in enumerate(self.everyone.members)}
        self.pipeline, self.replicas, self.data = self.over(*replica), self.over(*COPIES), self.over("dp")
        self.experts, self.expert_replicas = by_name.get("experts"), by_name.get("expert replicas")
        self.context, self.tensor = by_name.get("context", self.over("cp")), self.over("tp")
        self.tied = by_name.get("tied")
        self.shared = by_name.get("shared", self.tensor)
        made.warm_up()

    def _by_axes(self, *, sharded: bool) -> dict[frozenset[str], tuple[str, list[tuple[int, ...]]]]:
        """Return name and members of the groups over some axes, by these axes."""
        grid = self._grid
        groups: dict[frozenset[str], tuple[str, list[tuple[int, ...]]]] = {}
        replica = ("pp", "cp", "tp")
        for axes in (COPIES, ("pp", "tp"), ("tp",), replica, ("cp",), ("dp",), ("tp", *COPIES) if sharded else ()):
            long = self._long(axes)
            if long:
                name, found = (
                    " x ".join(axis for axis in axes if axis in long),
                    grid.groups(*(axis for axis in AXES if axis in long)),
                )
                groups.setdefault(long, (name, [tuple(sorted(one)) for one in found] if axes == COPIES else found))
        if grid.size("ep") > 1:
            groups[frozenset({"ep"})] = ("experts", grid.groups("ep"))
            if self._long(EXPERT_COPIES):
                found = [tuple(sorted(one)) for one in grid.groups(*EXPERT_COPIES)]
                groups[self._long(EXPERT_COPIES)] = ("expert replicas", found)
        return groups

    def _with_the_same_rows(
        self, tied: tuple[int, int] | None, *, sharded: bool
    ) -> Iterator[tuple[str, Sequence[int]]]:
        """Yield the pairs "tied", and the tensor ranks "shared" where they are not those of one pipeline."""
        grid = self._grid

        def alike(places: Iterable[tuple[int, int]]) -> Iterable[tuple[int, ...]]:
            """Group the processes of these (device, tensor rank) that hold the same rows of the same parameters. With
            shards over replicas they are at the same position, and need not be of one pipeline."""
            return zip(*(sorted(grid.group(*COPIES, pp=device, tp=rank)) for device, rank in places), strict=True)

        devices, ranks = range(grid.size("pp")), range(grid.size("tp"))
        if tied is not None:
            yield from (("tied", pair) for rank in ranks for pair in alike((device, rank) for device in tied))
        if sharded and len(ranks) > 1:
            mates = [mates for device in devices for mates in alike((device, rank) for rank in ranks)]
            if set(mates) != set(grid.groups("tp")):
                yield from (("shared", members) for members in mates)

    def over(self, *axes: str) -> Communicator | None:
        """The communicator of the processes that differ from this one only along these axes; None if there are none."""
        long = self._long(axes)
        if axes != COPIES and long == self._long(AXES):  # copies have an order of their own
            return self.everyone
        return self._over.get(long)

    def _long(self, axes: Iterable[str]) -> frozenset[str]:
        return frozenset(axis for axis in axes if self._grid.size(axis) > 1)

    def close(self) -> None:
        """Destroy the communicators. Collective, when no operation is pending."""
        if self.communicators is not None:
            self.communicators.close()

    # --- the beginning of public methods -------------------------------------------------------------------------

    def agree(self, name: str) -> None:
        """Begin a public method that every process must call. Collective over everyone.

        Raises:
            InputError: on every process, if they were called for different methods. On this one, if it has left a
                stream of tensors before its end, which others are still sending.
        """
        self.begin(name, self.everyone, [], f"the call of {name}", "")

    def begin(
        self, name: str, communicator: Communicator | None, numbers: list[int], what: str, needed_by: str
    ) -> list[list[int]]:
        """As `agree`; return the numbers of all members of the communicator, in order, on each of them; only one's own
        without others. Collective over everyone, unless this process has no others there.

        Args:
            communicator: over the same axes on all processes.
            numbers: int64, equally many on all processes, at most `ROOM`.
            what, needed_by: description of this wait, for error messages.
        """
        if communicator is None:
            return [numbers]
        table = self._exchange(name, row_of(name, numbers, self.torch_device), what, needed_by)
        return table[self._places(communicator), : len(numbers)].tolist()

    def sum(self, name: str, number: Tensor, *axes: str) -> Tensor:
        """As `agree`; return the sum of a scalar fp64 over these axes: the same bits on every process, since all add in
        the same order."""
        if self.everyone is None:
            return number
        table = self._exchange(name, row_of_scalar(name, number), "the norm of all gradients", "the optimizer")
        communicator = self.over(*axes)
        if communicator is None:
            return number
        return table[self._places(communicator), 0].view(torch.float64).sum().to(number.device)

    def stream(self, name: str, items: Iterator[Item]) -> Iterator[Item]:
        """Iterate over items that all processes exchange, for a public method that each must call and exhaust: as
        `agree` before the first item."""
        self.agree(name)
        self._streaming = None if self.everyone is None else name
        try:
            yield from items
        except Exception:  # not the end of a generator that is left: others may still send
            self._streaming = None
            raise
        self._streaming = None

    def _exchange(self, name: str, row: Tensor, what: str, needed_by: str) -> Tensor:
        """Return the numbers of everyone, [members, ROOM] int64 on the host."""
        assert self.everyone is not None
        if self._streaming is not None:
            raise InputError(f"{name}: {self._streaming} was left before its end, expected it to be exhausted first")
        return gather_calls(self.everyone, row, what, needed_by)

    def _places(self, communicator: Communicator) -> list[int]:
        """Return the places of its members among everyone."""
        return [self._place_of[member] for member in communicator.members]

    # --- messages ------------------------------------------------------------------------------------------------

    def from_the_first(self, text: str | None, what: str, called: str = "from_the_first") -> str | None:
        """Return the value of the very first process, on all of them. Collective over everyone.

        called: as `agree`, the public method that begins with it.
        """
        if self.everyone is None:
            return text
        with self.everyone.waiting(what):
            said: str | None = broadcast_value(text, self.everyone.members[0], self.everyone.group, called)
        return said

    def numbers(self, numbers: Sequence[float], called: str = "gather_numbers") -> list[list[float]]:
        """Return the numbers of each process, pipeline by pipeline, on every process. Collective over everyone.

        called: as `agree`, the public method that begins with it.

        Raises InputError as `agree`, and if processes give different numbers of them.
        """
        what, needed_by, everyone = "figures of all devices", "the caller", self.everyone
        bits = torch.tensor(numbers, dtype=torch.float64).view(torch.int64).tolist()
        fits = len(bits) < ROOM
        rows = self.begin(called, everyone, [len(bits), *(bits if fits else ())], what, needed_by)
        counts = [count for count, *_ in rows]
        if len(set(counts)) > 1:
            raise InputError(f"{called}: {counts} numbers on the processes, expected equally many on all of them")
        table = (
            [row for _, *row in rows] if fits else gather_numbers(everyone, bits, what, needed_by, self.torch_device)
        )
        return torch.tensor(table, dtype=torch.int64).view(torch.float64).tolist()

    # --- results of the output layer ---------------------------------------------------------------------------------

    def share(self, own: Tensor | None, source: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Work:
        """Share a tensor of the pipeline's device `source` (all its tensor ranks have it) with all of the pipeline."""
        pipeline = self.over("pp", "tp")
        if pipeline is None:
            return Done(own)
        tensor = torch.empty(shape, dtype=dtype, device=self.torch_device) if own is None else own.contiguous()
        handle = pipeline.broadcast(tensor, self._grid.at(pp=source, tp=0), "the loss")
        return handle.giving(tensor, "the caller")

    def total(self, own: Tensor, what: str) -> Work:
        """Return the sum of a tensor over everyone, on all of them; the own one is lost."""
        return Done(own) if self.everyone is None else self.everyone.all_reduce(own, what).giving(own, "the caller")

    def share_sum(self, own: Tensor | None, source: int, dtype: torch.dtype) -> Work:
        """Share the sum of a scalar of every pipeline's device `source` with everyone: all gather and add the same
        values."""
        assert self.everyone is not None
        number = torch.zeros((), dtype=dtype, device=self.torch_device) if own is None else own.contiguous()
        handle = self.everyone.all_gather(number, "the loss of all replicas")
        rows = [self._place_of[rank] for rank in self._grid.group(*COPIES, pp=source, tp=0)]
        return handle.giving(handle.result, "the caller", lambda table: table[rows].sum(0))
