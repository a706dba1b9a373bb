"""The start of a process: find the others, start the watch, open the default process group.

It is the same under torchrun and under `launch`. Outside of both, a process is alone: it has no group, and its watch
does nothing.

`launch`, the commands and `initialise_worker` take a process over for evenpipe until its end (`owner`). A `Pipeline` in
a process that evenpipe does not run only borrows a worker while the pipeline is open. Where processes meet: `store`.
"""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, distributed_c10d
from torch.distributed.rendezvous import rendezvous

from evenpipe.errors import InputError, RunError
from evenpipe.processes.bell import signals_handled
from evenpipe.processes.environment import is_single_process, rank_and_size, whole_number
from evenpipe.processes.names import processes
from evenpipe.processes.owner import Owner
from evenpipe.processes.peers import Peers
from evenpipe.processes.signs import Beat, Board, machine_id, safe_text, start_time
from evenpipe.processes.store import FolderStore, NetworkStore, Store, StoreError, StoreSilentError
from evenpipe.processes.watch import Watch

TIMEOUT_SECONDS = 1800.0
"""Default limit of a wait among live processes. Long, because one may save a checkpoint while the others wait; dead and
hung processes are found much earlier, by the watch."""

SILENCE_SECONDS = 30.0
"""Default time without a sign of life after which a process counts as dead."""

START_SECONDS = 600.0
"""How long processes may take to start: the slowest import of torch on a cold network file system, and the first use of
a GPU."""

POLL_SECONDS = 0.25

STORE_FOLDER = "EVENPIPE_STORE_FOLDER"
"""In the environment of processes that `launch` starts: the folder in which they meet."""

LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
"""Variables in which torchrun, srun and mpirun give the local rank of a process. The first one that is set counts."""


@dataclass(slots=True, eq=False)
class Worker:
    """This process of the run."""

    rank: int
    world_size: int
    torch_device: torch.device
    """Device of the tensors of this process."""
    timeout_seconds: float
    """Limit for every process group."""
    watch: Watch
    store: Store | None
    """Store for texts between processes of this run; None for a process that is alone."""
    owned: bool
    """Whether evenpipe runs this process."""
    borrowers: int = 0
    """Open pipelines of a process that is not owned."""
    at_exit: multiprocessing.util.Finalize | None = None
    _meetings: int = 0

    def mark(self, name: str) -> None:
        """Leave a mark for `wait_for_mark` on other processes. Raises StoreError if the store is lost."""
        if self.store is not None:
            with self.store.longer_limit(self.watch.silence_seconds):
                self.store.write(name, "")

    def write_once(self, name: str, text: str) -> str:
        """Return the text that the first caller gave for the name, the same on all processes. Raises StoreError if the
        store is lost."""
        if self.store is None:
            return text
        with self.store.longer_limit(self.watch.silence_seconds):
            return self.store.write_once(name, text)

    def wait_for_mark(self, name: str, label: str, needed_by: str) -> None:
        """Return when the first process has left the mark, however long its work takes.

        label, needed_by: description of this wait, for error messages.

        Raises:
            RunError: the run has failed.
            StoreError: the store is lost.
        """
        self._wait_for([name], label, needed_by, (0,), float("inf"))

    def wait_for_all(self, label: str, limit_seconds: float) -> None:
        """Return when all processes have called this equally often; a process that evenpipe runs need not wait.

        Call it before groups are created, where nothing can interrupt a wait for a process that has failed but lives.
        Raises as `wait_for_mark`.
        """
        self._meetings += 1
        marks = [f"{label} {self._meetings}/{rank}" for rank in range(self.world_size)]
        self.mark(marks[self.rank])
        if not self.owned:
            self._wait_for(marks, label, "", self.watch.others, limit_seconds)

    def _wait_for(
        self, names: Sequence[str], label: str, needed_by: str, peers: tuple[int, ...], limit_seconds: float
    ) -> None:
        if self.store is None:
            return
        self.watch.begin_wait(label, needed_by, "store", peers, limit_seconds)
        is_complete, pause = False, 0.01
        while not is_complete:
            with contextlib.suppress(StoreSilentError):  # the watch limits how long it may be silent
                is_complete = self.store.has(names)
            if not is_complete:
                time.sleep(pause)
                pause = min(2 * pause, POLL_SECONDS)
                self.watch.raise_cause()
        self.watch.end_wait()


_this: Worker | None = None
_starts = 0
"""How often this process has started a worker; part of the keys under which processes meet."""


def initialise_worker(
    *,
    timeout_seconds: float = TIMEOUT_SECONDS,
    silence_seconds: float = SILENCE_SECONDS,
    start_seconds: float = START_SECONDS,
    torch_device: torch.device | str | None = None,
) -> Worker:
    """Let evenpipe run this process until its end, ready to communicate; a second call returns the same worker. Call it
    before the first `Pipeline`.

    Under torchrun (environment variable RANK) it joins the others and opens the default process group, unless it is
    open already: gloo on CPUs, NCCL and gloo if every process has its own GPU, only gloo if processes share one. From
    then on, an uncaught exception ends all processes with its text, as does a process that has died or is silent;
    Ctrl-C ends this process at once; and on a CPU it keeps freed memory for later use, or returns it at once if
    activations go to the host (glibc only; not if the environment configures its allocator).

    timeout_seconds: limit of a wait among live processes.
    silence_seconds: a process without a sign of life for this long counts as dead.
    start_seconds: how long processes may take to start.
    torch_device: default: a GPU if there is one, else the CPU. The GPU is the one that the default process group is
        bound to; else that of the local rank, if torchrun, srun or mpirun gives one; else the current one. It becomes
        the current one.

    Raises:
        InputError: torch_device is not a device of this machine, or not the one that the default group is bound to;
            torchrun's environment variables are incomplete or invalid; or this process already has a pipeline.
        RunError: some processes did not start. Names them.
    """
    if _this is not None:
        if not _this.owned and _this.world_size > 1:
            raise InputError("initialise_worker: this process has an open pipeline; expected the call before the first")
        _this.owned = True
        return _this
    worker = start_worker(
        timeout_seconds=timeout_seconds,
        silence_seconds=silence_seconds,
        start_seconds=start_seconds,
        torch_device=torch_device,
        owner=Owner(),
    )
    if worker.world_size > 1:
        worker.at_exit = multiprocessing.util.Finalize(None, worker.watch.finish, exitpriority=0)
        previous_hook = sys.excepthook

        def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            worker.watch.report_exception(error)
            previous_hook(kind, error, trace)

        sys.excepthook = report
    return worker


def borrow_worker(torch_device: torch.device | str | None = None) -> Worker:
    """Return the worker of this process for a pipeline, which returns it at its end. If evenpipe does not run the
    process, it joins the others as `initialise_worker` does, but handles no signals or exceptions: others learn of an
    uncaught exception at the end of the process. Collective. Raises as `initialise_worker`.
    """
    worker = _this or start_worker(torch_device=torch_device, owner=None)
    worker.borrowers += 1
    if worker.at_exit is None and not worker.owned and worker.world_size > 1:
        worker.at_exit = multiprocessing.util.Finalize(None, _end, (worker.watch,), exitpriority=0)
    return worker


def return_worker(worker: Worker) -> None:
    """End the watch when the last pipeline returns the worker, unless evenpipe runs the process."""
    global _this  # noqa: PLW0603  (one process is one worker)
    worker.borrowers -= 1
    if worker.borrowers or worker.owned:
        return
    worker.watch.finish()
    if worker.at_exit is not None:
        worker.at_exit.cancel()
    if _this is worker:
        _this = None


def _end(watch: Watch) -> None:
    """At the end of a process with open pipelines, tell the others of an uncaught exception."""
    error = getattr(sys, "last_value", None)
    if isinstance(error, BaseException) and not hasattr(sys, "ps1"):
        watch.report_exception(error)
    watch.finish()


def current_watch() -> Watch | None:
    """Return the watch of this process; None if there are no other processes."""
    return None if _this is None or _this.world_size == 1 else _this.watch


def finish_worker() -> None:
    """End the communication of this process: its silence is no alarm from now on.

    For a process that is about to exit by os._exit; otherwise Python does the same at its end. No effect without a
    call of initialise_worker.
    """
    if _this is None:
        return
    _this.watch.finish()
    if dist.is_initialized():
        dist.destroy_process_group()


def start_worker(
    *,
    timeout_seconds: float = TIMEOUT_SECONDS,
    silence_seconds: float = SILENCE_SECONDS,
    start_seconds: float = START_SECONDS,
    torch_device: torch.device | str | None = None,
    owner: Owner | None,
    board: Board | None = None,
) -> Worker:
    """As initialise_worker, for a caller that reports exceptions and ends the watch itself. Without an owner, evenpipe
    does not run the process."""
    global _this, _starts  # noqa: PLW0603  (one process is one worker)
    owned = owner is not None
    timeout = timedelta(seconds=timeout_seconds)
    if not dist.is_initialized() and is_single_process():
        _this = Worker(0, 1, _select_device(torch_device)[0], timeout_seconds, Watch(None), None, owned)
        return _this
    store, groups, rank, world_size = _meeting_place(start_seconds)
    _starts += 1
    if owner is not None:
        owner.take_over()
    watch = Watch(
        store,
        rank,
        world_size,
        silence_seconds=silence_seconds,
        timeout_seconds=timeout_seconds,
        owner=owner,
        board=board,
    )
    device, identity = torch.device("cpu"), ""
    fault: Exception | None = None
    try:
        # Before the others expect beats: the first use of a GPU takes seconds and holds the GIL.
        device, identity = _select_device(torch_device)
    except Exception as error:
        fault = error  # reported to the others, too, once they have met
    terminated: list[int] = []
    noticed = (signal.SIGTERM,) if owned and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL else ()
    with signals_handled(lambda number, _: terminated.append(number), noticed):
        with store.longer_limit(silence_seconds):
            meet(store, rank, world_size, start_seconds, terminated)
        watch.start()
    watch.handle_sigterm()
    if terminated:
        os.kill(os.getpid(), signal.SIGTERM)  # came too late for the meeting; the watch handles it
    try:
        if fault is not None:
            raise fault
        if not dist.is_initialized():
            with watch.during("the first connections", "default", watch.others):
                nccl = device.type == "cuda" and _gpus_differ(identity, groups, rank, world_size)
                dist.init_process_group(
                    "cpu:gloo,cuda:nccl" if nccl else "gloo",
                    store=groups,
                    rank=rank,
                    world_size=world_size,
                    timeout=timeout,
                    device_id=device if nccl else None,
                )
            watch.check_members(distributed_c10d._get_default_group(), "default", range(world_size))
    except BaseException as error:
        watch.report_exception(error)
        if not owned:
            watch.finish()
        raise
    _this = Worker(rank, world_size, device, timeout_seconds, watch, store, owned)
    return _this


def _meeting_place(start_seconds: float) -> tuple[Store, Any, int, int]:
    """Return where this process meets the others: the store for messages, torch's store for groups, the rank and the
    world size."""
    if folder := os.environ.get(STORE_FOLDER):
        rank, world_size = rank_and_size(meets_by_address=False)
        return FolderStore(Path(folder)), FileStore(str(Path(folder) / "groups"), world_size), rank, world_size
    if dist.is_initialized():
        store, rank, world_size = distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    else:
        rank_and_size()  # raises InputError before torch raises a different error
        store, rank, world_size = next(rendezvous("env://", timeout=timedelta(seconds=start_seconds)))
    store = PrefixStore(f"evenpipe/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{_starts}", store)
    return NetworkStore(store), PrefixStore("groups", store), rank, world_size


def meet(store: Store, rank: int, world_size: int, limit_seconds: float, terminated: Sequence[int] = ()) -> None:
    """Wait until all processes have started, before any wait that would not name a missing one.

    terminated: grows when SIGTERM arrives, as from torchrun when a process has failed.

    Raises:
        RunError: the limit passed, or SIGTERM arrived; names the missing processes. Or a process that had already
            started died on this machine.
    """
    own_beat = Beat(0, machine_id(), os.getpid(), start_time(os.getpid()) or "")
    deadline, pause = time.monotonic() + limit_seconds, 0.005
    keys = [f"here/{peer}" for peer in range(world_size)]
    try:
        store.write(keys[rank], own_beat.dump())
        peers = Peers(store, own_beat, rank, world_size, key="here")
        while not store.has(keys):
            fault = None
            if (death := peers.first_death(peers.local_ranks())) is not None:
                if store.has(keys):  # all have met, and one has ended since: left to the watch
                    break
                fault = f"{death.text}, before all processes had started"
            elif terminated or time.monotonic() > deadline:
                missing = [peer for peer in range(world_size) if not store.has([keys[peer]])]
                if missing:
                    in_time = f"did not start within {limit_seconds:g} s"
                    state = "had not started when SIGTERM came" if terminated else in_time
                    fault = f"{processes(missing)} of {world_size} {state}"
            if fault is not None or store.has(["no start"]):  # the first fault counts: others follow from it
                raise RunError(safe_text(store.write_once("no start", fault or "")))
            time.sleep(pause)
            pause = min(2 * pause, 0.5)
    except StoreError as error:
        raise RunError(f"process {rank} lost the store of the run before all processes had started: {error}") from error


def device_of_pipeline(worker: Worker, requested: torch.device | None) -> torch.device:
    """Return the device of a pipeline. Default: the device of the process.

    Raises:
        InputError: for another GPU. Groups are bound to the process's first GPU, and kernels and streams use the
            current one, so a process cannot use two.
    """
    current = worker.torch_device
    same_type = requested is not None and requested.type == current.type
    if requested is None or (same_type and (current.type == "cpu" or requested.index in (None, current.index))):
        return current
    if same_type or bound_device() is not None:
        raise InputError(
            f"torch_device: {str(requested)!r}, but this process computes on {current} since its first call of "
            f"initialise_worker or Pipeline; expected {str(current)!r}; choose another one in that call"
        )
    return _select_device(requested)[0]


def _select_device(requested: torch.device | str | None) -> tuple[torch.device, str]:
    """Return the device of this process, current and ready for use, and a globally unique id of it; "" for a CPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        device = torch.device(requested if requested is not None else "cuda" if count else "cpu")
    except RuntimeError:
        raise InputError(
            f'torch_device is {requested!r}, which is no device of torch; it must be "cpu" or "cuda"'
        ) from None
    bound = bound_device()
    if bound is not None and device not in (bound, torch.device(bound.type)):
        raise InputError(
            f"torch_device: {str(requested)!r}, but the default process group is bound to {bound} (device_id of "
            f"init_process_group); expected {str(bound)!r}"
        )
    if device.type != "cuda":
        return device, ""
    if device.index is None and count:
        device = bound or torch.device("cuda", _index_of_gpu(count))
    if device.index is None or device.index >= count:
        raise InputError(f"torch_device: {requested!r}, but this process sees {count} GPUs")
    torch.cuda.set_device(device)
    torch.cuda.synchronize(device)  # the driver opens the device now, not at the first operation
    return device, str(torch.cuda.get_device_properties(device).uuid)


def _index_of_gpu(count: int) -> int:
    """Return the index of the GPU among the `count` that this process sees, which may be only its own."""
    for name in LOCAL_RANKS:
        if os.environ.get(name):
            return whole_number(name, 0) % count
    return torch.cuda.current_device()


def _gpus_differ(identity: str, store: Any, rank: int, world_size: int) -> bool:
    """Return whether no two processes share a GPU, which NCCL refuses. Compared by UUID, because each process may see
    only its own GPU, as number 0.

    store: of torch, whose `get` waits for the value.
    """
    store.set(f"gpu/{rank}", identity)
    if rank == 0:
        identities = [store.get(f"gpu/{peer}") for peer in range(world_size)]
        store.set("gpus differ", str(len(set(identities)) == world_size))
    return bool(store.get("gpus differ") == b"True")


def bound_device() -> torch.device | None:
    """Return the GPU that the default process group is bound to by `init_process_group(device_id=...)`. All groups then
    use it: torch refuses another device."""
    if not dist.is_initialized():
        return None
    device: torch.device | None = distributed_c10d._get_default_group().bound_device_id
    return device
