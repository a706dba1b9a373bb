"""All communicators of a process: created together, opened once before the first step, destroyed together."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from evenpipe.communication.arrivals import arrivals_on
from evenpipe.communication.communicator import Communicator
from evenpipe.communication.nccl import NcclOptions, without_p2p_warning
from evenpipe.communication.staging import Staging
from evenpipe.processes.watch import Watch
from evenpipe.processes.worker import bound_device

logger = logging.getLogger(__name__)

NCCL_LATER_SECONDS = 60.0
"""How far a wait must exceed its limit before NCCL itself ends the process."""


class Communicators:
    """All communicators of this process, by name.

    Creating it is collective over all processes. In a program for one device (or outside torch.distributed) every
    communicator has one member, and operations return at once.
    """

    def __init__(
        self,
        groups: Iterable[tuple[str, Sequence[Sequence[int]]]],
        *,
        timeout_seconds: float,
        torch_device: torch.device | str = "cpu",
        watch: Watch | None = None,
        nccl: NcclOptions | None = None,
    ) -> None:
        """Create the process groups of each entry, in the order of the list.

        With NCCL the groups of an entry are a single split of the default group, so the number of calls does not grow
        with the number of processes. This requires a default group that is bound to a GPU
        (`init_process_group(device_id=...)`, as `launch` and `evenpipe train` do); otherwise, and with gloo, each group
        is a call of all processes.

            groups: (name, groups of global ranks that have no member in common). Every process passes the same list in
                the same order, including groups that it does not belong to: creating a group involves all processes.
            timeout_seconds: limit of every operation. The watch finds a dead or hung process much earlier; this limit
                is for live processes that wait for each other.
        torch_device: device of the tensors.
        watch: informed of the waits of this process; finds the cause when one fails.
        nccl: options of every NCCL group.
        """
        self.torch_device = torch.device(torch_device)
        if self.torch_device == torch.device("cuda"):  # without an index: the current GPU of this process
            self.torch_device = torch.device("cuda", torch.cuda.current_device())
        rank = dist.get_rank() if dist.is_initialized() else 0
        on_gpu = self.torch_device.type == "cuda"
        by_nccl = on_gpu and dist.is_initialized() and "nccl" in dist.get_backend_config()
        staging = None
        if on_gpu and not by_nccl and dist.is_initialized():
            staging = Staging(self.torch_device)
            if rank == 0:
                logger.warning(
                    "processes share a GPU: communication goes through host memory, which is slow and meant for tests"
                )
        self._by_name: dict[str, Communicator] = {}
        nccl, groups, arrivals = nccl or NcclOptions(), list(groups), None
        if by_nccl:
            own_names = [name for name, lines in groups if any(rank in line and len(line) > 1 for line in lines)]
            multiprocessors = torch.cuda.get_device_properties(self.torch_device).multi_processor_count
            if (warning := nccl.check_channels(own_names, multiprocessors)) and rank == 0:
                logger.warning(warning)
            arrivals = arrivals_on(self.torch_device) if watch else None
            with watch.during("the making of communicators", "default", watch.others) if watch else nullcontext():
                _wait_for_all()
        # A group does not inherit the timeout of the default one. NCCL's error after the limit names no process: the
        # watch has to end the wait first.
        timeout = timedelta(seconds=timeout_seconds + (NCCL_LATER_SECONDS if by_nccl else 0.0))
        create = _group_creator(by_nccl, self.torch_device, timeout, nccl)
        with without_p2p_warning() if by_nccl else nullcontext():
            for name, lines in groups:
                members = next((tuple(line) for line in lines if rank in line), ())
                group, several = None, [list(line) for line in lines if len(line) > 1]
                if several:
                    with watch.during(f"communicator {name}", "default", watch.others) if watch else nullcontext():
                        group = create(name, several)
                if not members:
                    continue
                if watch is not None and not by_nccl and group is not None:
                    watch.check_members(group, name, members)
                self._by_name[name] = Communicator(
                    name,
                    members,
                    rank,
                    group,
                    timeout_seconds=timeout_seconds,
                    staging=staging,
                    watch=watch,
                    arrivals=arrivals,
                )

        self._stop_interrupting: Callable[[], None] | None = None
        if watch is not None and by_nccl:  # NCCL would wait until its watchdog ends the process
            self._stop_interrupting = watch.interrupt_with(self.abort)

    def __getitem__(self, name: str) -> Communicator:
        return self._by_name[name]

    def __iter__(self) -> Iterator[Communicator]:
        """Iterate over the communicators in the order of their creation."""
        return iter(self._by_name.values())

    def warm_up(self) -> None:
        """Open every connection once, one communicator after the other, in the same order on all processes.

        NCCL connects two processes at their first message, which needs both; in the middle of a step this can block
        forever. Each communicator runs one broadcast, reduce and all-gather, and sends rows from its first member to
        all others and back.
        """
        for communicator in self:
            if communicator.group is None:
                continue
            members, root = communicator.members, communicator.members[0]
            tensor = torch.zeros(1, device=self.torch_device)
            rows = torch.zeros(len(members) if communicator.rank == root else 1, device=self.torch_device)
            counts = [1] * len(members)
            for handle in (
                communicator.scatter_rows(rows, counts, root, "first rows"),
                communicator.gather_rows(rows, counts, root, "first rows back"),
                communicator.broadcast(tensor, root, "first broadcast"),
                communicator.reduce(tensor, root, "first reduce"),
                communicator.all_gather(tensor, "first all-gather"),
            ):
                handle.wait("warm-up")
            if self.torch_device.type == "cuda":
                torch.cuda.synchronize(self.torch_device)  # one communicator after the other

    def abort(self) -> None:
        """Abort all operations of this process alone: others may have died. The content of their tensors is then
        undefined. Callable on any thread, also during `close`."""
        for communicator in tuple(self):
            group = getattr(communicator, "group", None)
            if group is not None:
                with suppress(RuntimeError):  # the other groups must be aborted, too
                    group.abort()

    def close(self) -> None:
        """Destroy the groups. Every member calls this when no operation is pending."""
        if self._stop_interrupting is not None:
            self._stop_interrupting()
            self._stop_interrupting = None
        for communicator in self:
            if communicator.group is not None:
                dist.destroy_process_group(communicator.group)
                # Connections close with the last reference to the group, which is how others learn of a failure here;
                # the traceback of an exception may hold communicators for long.
                del communicator.group
        self._by_name.clear()


def _wait_for_all() -> None:
    """Return when all processes have arrived, some of which may have to load a model first.

    If the default group is bound to GPUs, each new group splits its communicator, for which NCCL needs all processes,
    and torch holds the GIL while a non-member waits (`perform_nocolor_split`), so its watch could not send heartbeats.
    During this wait it can, and afterwards no process waits longer than the creation of a group takes.
    """
    if "cpu:gloo" in dist.get_backend_config():
        dist.all_reduce(torch.zeros(1, device="cpu"))
    elif bound_device() is not None:
        dist.barrier()


_GroupCreator = Callable[[str, list[list[int]]], dist.ProcessGroup | None]
"""Creates groups from a name and their members, collectively over all processes; returns the one of this process."""


def _group_creator(by_nccl: bool, torch_device: torch.device, timeout: timedelta, nccl: NcclOptions) -> _GroupCreator:
    """Return the function that creates the groups of a name."""

    def split(name: str, lines: list[list[int]]) -> dist.ProcessGroup | None:
        """Create an NCCL communicator for each group now, instead of one for each pair at its first message."""
        return dist.split_group(
            split_ranks=lines, timeout=timeout, pg_options=nccl.of_group(name, timeout), group_desc=name, **of_nccl
        )

    def create_each(name: str, lines: list[list[int]]) -> dist.ProcessGroup | None:
        own_group, rank = None, dist.get_rank()
        for members in lines:
            options: dict[str, Any] = {"backend": "gloo"}
            if by_nccl:
                options = {"backend": "nccl", "pg_options": nccl.of_group(name, timeout), "device_id": torch_device}
            group = dist.new_group(members, timeout=timeout, group_desc=name, **options)
            own_group = group if rank in members else own_group
        return own_group

    if not by_nccl or bound_device() is None:
        return create_each
    # Since torch 2.12; before, splitting a default group for CPUs and GPUs creates gloo groups, too.
    selects = "backend" in inspect.signature(dist.split_group).parameters and "gloo" in dist.get_backend_config()
    of_nccl: dict[str, Any] = {"backend": "cuda:nccl"} if selects else {}
    return split
