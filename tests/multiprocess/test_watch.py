"""One process fails, in all the ways there are; the others end soon and name it, the pass awaited and the peer."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import describe, run_outcomes, run_processes, until_they_wait

import evenpipe.processes.worker as worker_module
from evenpipe.communication.communicators import Communicators, _wait_for_all
from evenpipe.errors import InputError, RunError
from evenpipe.processes.bell import signals_handled
from evenpipe.processes.signs import start_time
from evenpipe.processes.store import NetworkStore
from evenpipe.processes.watch import Watch
from evenpipe.processes.worker import Worker, initialise_worker, meet

SILENCE_SECONDS = 4.0
"""Limit in these tests: sixteen beats, since a busy machine may keep some. It is the only one: processes that are not
ended by it stay, and the harness finds them stuck."""


def start(timeout_seconds: float = 600.0, silence_seconds: float = SILENCE_SECONDS) -> tuple[Worker, Communicators]:
    worker = initialise_worker(timeout_seconds=timeout_seconds, silence_seconds=silence_seconds, torch_device="cpu")
    size = worker.world_size
    hops = [(f"{kind}:{a}>{b}", [(a, b)]) for i in range(size - 1) for kind, a, b in (("F", i, i + 1), ("B", i + 1, i))]
    groups = [*hops, ("DX", [range(size)])]
    return worker, Communicators(groups, timeout_seconds=timeout_seconds, watch=worker.watch)


def receive_forward(communicators: Communicators, rank: int) -> None:
    hop = communicators[f"F:{rank - 1}>{rank}"]
    hop.receive(torch.zeros(4), rank - 1, f"{rank}RECV_F3").wait(f"{rank}F3")


def receive_backward(communicators: Communicators, rank: int) -> None:
    hop = communicators[f"B:{rank + 1}>{rank}"]
    hop.receive(torch.zeros(4), rank + 1, f"{rank}RECV_B2").wait(f"{rank}B2")


# -- one of four fails: 0 and 2 wait for it, 3 waits for 2 -----------------------------------------


def one_of_four_fails(how: str) -> None:
    worker, communicators = start()
    if worker.rank == 1:
        until_they_wait(worker.watch, (0, 2, 3))
        if how == "raises":
            try:
                raise ValueError("boo")
            except ValueError:
                sys.excepthook(*sys.exc_info())  # what Python does with an exception that nobody catches
                raise
        if how == "exits":
            os._exit(7)
        os.kill(os.getpid(), how)
    elif worker.rank == 0:
        receive_backward(communicators, 0)
    else:
        receive_forward(communicators, worker.rank)


# -- those that do not touch the one that failed ---------------------------------------------------


def bystanders() -> None:
    """0 waits for 2 in gloo, where nothing can interrupt it, and 2 computes; 1 fails."""
    worker, communicators = start()
    if worker.rank == 0:
        communicators["DX"].receive(torch.zeros(1), 2, "rows").wait("0F1")
    elif worker.rank == 2:
        time.sleep(50)
    else:
        worker.watch.report_exception(InputError("model: no such folder"))


def the_next_wait_raises() -> None:
    worker, communicators = start()
    if worker.rank == 0:
        dist.barrier()
        worker.watch.report_exception(InputError("model: no such folder"))
        return
    handle = communicators["F:0>1"].receive(torch.zeros(4), 0, "1RECV_F3")
    dist.barrier()
    while worker.watch.cause is None:
        time.sleep(0.01)
    message = "process 0 said: model: no such folder; process 1 was awaiting 1RECV_F3 for 1F3 from process 0"
    with pytest.raises(RunError, match=f"^{message}$"):
        handle.wait("1F3")


def an_operation_of_torchs_own() -> None:
    """A collective that is not one of ours, as in gathering of results, is a victim too, and names the culprit."""
    worker, _ = start()
    everyone = tuple(range(worker.world_size))
    if worker.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if worker.rank == 0:
        message = r"process 1 .*has died.* was awaiting token ids from processes 0, 1, 2"
        with pytest.raises(RunError, match=f"^{message}$"), worker.watch.during("token ids", "default", everyone):
            dist.all_reduce(torch.zeros(1))
    else:
        try:
            dist.all_reduce(torch.zeros(1))
        except RuntimeError as error:
            worker.watch.report_exception(error)
    assert worker.watch.cause.origin == 1


def the_store_dies_with_process_0() -> None:
    """Without a launcher the first process holds the store; 1 waits for it, 2 waits for 1."""
    rank = dist.get_rank()
    shared = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), None, False, wait_for_workers=False)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        shared.set("port of the store", str(store.port))
    else:
        port = int(shared.get("port of the store"))
        store = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    watch = Watch(NetworkStore(dist.PrefixStore("watch", store)), rank, 3, silence_seconds=SILENCE_SECONDS)
    watch.start()
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with watch.during(f"{rank}RECV_F0", "F", (rank - 1,)):
        dist.recv(torch.zeros(1), rank - 1)


# -- nobody dies: a program that cannot go on ------------------------------------------------------


def stuck(circle: bool) -> None:
    worker, communicators = start(timeout_seconds=8.0, silence_seconds=30.0)
    if worker.rank == 2:
        until_they_wait(worker.watch, (1,))
        if circle:
            receive_forward(communicators, 2)
        time.sleep(50)
    elif worker.rank == 1:
        until_they_wait(worker.watch, (0,))  # so that 0 is the first to run into its limit
        receive_backward(communicators, 1)
    else:
        receive_backward(communicators, 0)


def one_makes_no_group() -> None:
    worker = initialise_worker(timeout_seconds=6.0, silence_seconds=30.0, torch_device="cpu")
    if worker.rank == 1:
        time.sleep(50)
    Communicators([("X", [range(3)])], timeout_seconds=6.0, watch=worker.watch)


def waits_on_a_gpu() -> None:
    """The host goes on, and what the GPU waits for does not come: no library says so."""
    worker, _ = start()
    watch, arrived = worker.watch, threading.Event()
    if worker.rank == 0:
        for number in range(3):
            watch.begin_wait(f"0RECV_B{number}", f"0B{number}", "B:1>0", (1,))
            watch.end_wait_when(*((arrived.is_set, 1.0) if number == 1 else (lambda: True, 600.0)))
        assert str(watch.waiting) == "0RECV_B0 for 0B0 from process 1"  # until the watch has asked
        while watch.cause is None:  # the first is found done; then the second counts
            time.sleep(0.01)
        assert watch.cause.text == (
            "process 0 timed out awaiting 0RECV_B1 for 0B1 from process 1; process 1 does not wait"
        )
        time.sleep(50)
    time.sleep(50)


def waits_on_a_gpu_end() -> None:
    worker, _ = start()
    for number in range(40):
        worker.watch.begin_wait(f"0RECV_B{number}", "", "B:1>0", (1,))
        worker.watch.end_wait_when(lambda: True, 1.0)
        time.sleep(0.05)
    worker.watch.end_wait_when(lambda: False, 0.5)  # of nothing: no wait was announced
    time.sleep(1.0)
    assert worker.watch.cause is None and worker.watch.waiting is None
    worker.watch.finish()


# -- one comes late to the making of communicators --------------------------------------------------


def one_comes_late(how: str = "comes") -> None:
    """As where NCCL is to communicate; all wait on the CPU."""
    worker, _ = start()
    others = tuple(other for other in range(3) if other != worker.rank)
    if worker.rank == 1:
        time.sleep(1.25 * SILENCE_SECONDS)
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
    with worker.watch.during("the making of communicators", "default", others):
        _wait_for_all()
    assert worker.watch.cause is None


# -- the device of one is not to be had ------------------------------------------------------------


def one_has_no_such_device() -> None:
    wanted = "tpu" if int(os.environ["RANK"]) == 1 else "cpu"
    initialise_worker(timeout_seconds=600.0, silence_seconds=SILENCE_SECONDS, torch_device=wanted)
    time.sleep(50)


def one_opens_its_gpu_slowly() -> None:
    """For longer than others may be silent; the interpreter's lock would be held meanwhile."""
    opened = worker_module._select_device

    def slowly(wanted):
        if int(os.environ["RANK"]) == 1:
            time.sleep(1.25 * SILENCE_SECONDS)
        assert not any(thread.name == "evenpipe-watch" for thread in threading.enumerate())
        return opened(wanted)

    worker_module._select_device = slowly
    worker, _ = start()
    dist.barrier()
    assert worker.watch.cause is None


# -- under torchrun --------------------------------------------------------------------------------


def victims_of_sigterm(how: str) -> None:
    """What torchrun's agent does to the others as soon as one has failed: 0 is deaf in gloo, 2 computes."""
    os.environ["TORCHELASTIC_RUN_ID"] = "a run"
    worker, communicators = start()
    if worker.rank == 1:
        until_they_wait(worker.watch, (0,))
        if how == "leaves":
            worker.watch.finish()
        for rank in (0, 2):
            os.kill(int(worker.watch._peers.beat(rank)[1].pid), signal.SIGTERM)
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(50 if how == "terminated" else 3)
    elif worker.rank == 0:
        receive_backward(communicators, 0)
    else:
        time.sleep(50)


def forks_while_it_hears() -> None:
    os.environ["TORCHELASTIC_RUN_ID"] = "a run"
    worker, _ = start()
    for _ in range(20):
        child = os.fork()
        if child == 0:
            time.sleep(50)
        os.kill(child, signal.SIGTERM)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
    time.sleep(1.0)
    worker.watch.finish()
    assert worker.watch.cause is None
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def orphans() -> None:
    """0 starts another process in its place and is gone: the launcher of that one has died. It computes."""
    os.environ["TORCHELASTIC_RUN_ID"] = "a run"
    if int(os.environ["RANK"]) == 0 and os.fork() == 0:
        parent = os.getppid()
        worker, _ = start()
        os.kill(parent, signal.SIGKILL)
        time.sleep(50)
        worker.watch.finish()
    elif int(os.environ["RANK"]) == 0:
        time.sleep(50)
    else:
        start()
        time.sleep(50)


# -- no false alarms -------------------------------------------------------------------------------


def some_finish_early() -> None:
    worker, _ = start()
    if worker.rank in (1, 2):
        worker.watch.finish()
        return
    time.sleep(1.25 * SILENCE_SECONDS)
    assert worker.watch.cause is None
    worker.watch.finish()


def suspended_and_continued() -> None:
    """As when a laptop sleeps: all stop for longer than the limit, and go on one after the other."""
    worker, _ = start(silence_seconds=3.0)
    pids = [None] * worker.world_size
    dist.all_gather_object(pids, os.getpid())
    if worker.rank == 0:
        numbers = " ".join(map(str, pids))
        subprocess.Popen(["sh", "-c", f"kill -STOP {numbers}; sleep 4; kill -CONT {numbers}"], start_new_session=True)
    before = time.monotonic()
    while time.monotonic() < before + 6.0:
        time.sleep(0.05)
    assert worker.watch.cause is None
    worker.watch.finish()


# -- the start -------------------------------------------------------------------------------------


def store_of_the_harness() -> NetworkStore:
    port = int(os.environ["MASTER_PORT"])
    return NetworkStore(dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False))


def one_is_missing() -> None:
    rank, store = int(os.environ["RANK"]), store_of_the_harness()
    if rank != 1:
        store.write(f"up {rank}", "")
        while not store.has(["up 0", "up 2"]):  # however slowly a process starts, only 1 is missing
            time.sleep(0.01)
        with pytest.raises(RunError, match=r"^process 1 of 3 did not start within 2 s$"):
            meet(store, rank, 3, 2.0)


class Slow:
    """A store of torch's whose machine is busy."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def clone(self) -> "Slow":
        return Slow(self._store.clone())

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def answer(*arguments: Any) -> Any:
            time.sleep(0.6)
            return getattr(self._store, name)(*arguments)

        return answer


def start_with_a_slow_store() -> None:
    meeting_place = worker_module._meeting_place

    def slow(start_seconds: float) -> tuple[NetworkStore, Any, int, int]:
        store, groups, rank, world_size = meeting_place(start_seconds)
        assert isinstance(store, NetworkStore)
        return NetworkStore(Slow(store._store), limit_seconds=0.3), groups, rank, world_size

    with mock.patch.object(worker_module, "_meeting_place", slow):
        worker = initialise_worker(timeout_seconds=600.0, silence_seconds=10.0, torch_device="cpu")
    assert worker.watch.cause is None


def dies_once_others_are_here(here: list[str]) -> None:
    store = store_of_the_harness()
    while not store.has(here):
        time.sleep(0.01)
    time.sleep(0.5)  # they have written that, and soon hear signals too
    store.write("dying", str(os.getpid()))
    os.kill(os.getpid(), signal.SIGKILL)


def terminated_once_1_is_dead() -> None:
    store = store_of_the_harness()
    while (pid := store.read("dying")) is None or start_time(int(pid)) is not None:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)


def one_dies_before_all_are_here(how: str) -> None:
    """1 is here and dies, or never comes; torchrun sends SIGTERM to the others, which wait for 2 as well."""
    rank, store = int(os.environ["RANK"]), store_of_the_harness()
    if rank == 1:
        here = ["here/0", "here/3", *(["here/1"] if how == "dies" else [])]
        threading.Thread(target=dies_once_others_are_here, args=(here,)).start()
        if how == "dies":
            meet(store, rank, 4, 600.0)
        time.sleep(50)
    if rank == 2:
        time.sleep(50)
    threading.Thread(target=terminated_once_1_is_dead, daemon=True).start()
    message = {
        "dies": r"process 1 \(pid \d+\) has died: killed, out of memory or crashed, before all processes had started",
        "comes not": r"processes 1, 2 of 4 had not started when SIGTERM came",
    }[how]
    terminated: list[int] = []
    with signals_handled(lambda number, _: terminated.append(number), [signal.SIGTERM]):
        with pytest.raises(RunError, match=f"^{message}$"):
            meet(store, rank, 4, 600.0, terminated)
        store.write(f"found {rank}", "")
        while not (terminated and store.has(["found 0", "found 3"])):  # nobody takes the end of another for the cause
            time.sleep(0.01)


def one_has_come_and_ended() -> None:
    """Between two questions of process 0 whether all are here, the other one comes and has its whole life."""
    rank, store = int(os.environ["RANK"]), store_of_the_harness()
    if rank == 1:
        wait_for(store, "not all here")
        meet(store, 1, 2, 600.0)
        store.write("ended", str(os.getpid()))
        return
    has, questions = store.has, []

    def asked(keys: list[str]) -> bool:
        questions.append(keys)
        if len(questions) > 1:
            return has(keys)
        assert not has(keys)
        store.write("not all here", "")
        pid = int(wait_for(store, "ended"))
        while start_time(pid) is not None:
            time.sleep(0.01)
        return False

    store.has = asked
    meet(store, 0, 2, 600.0)


def wait_for(store: NetworkStore, key: str) -> str:
    while (text := store.read(key)) is None:
        time.sleep(0.01)
    return text


def alone() -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    worker = initialise_worker(torch_device="cpu")
    assert initialise_worker() is worker
    assert (worker.rank, worker.world_size, dist.is_initialized()) == (0, 1, False)
    worker.watch.report_exception(ValueError("boo"))
    worker.watch.finish()


# -- how scenarios end -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Ending:
    """What the processes of a scenario say."""

    scenario: Callable[..., None]
    processes: int
    cause: str
    """A pattern."""
    awaited: dict[int, str | None]
    """By process, what it also says that it was awaiting; "": it says the cause alone; None: the cause among others."""
    arguments: tuple[Any, ...] = ()
    exit_codes: dict[int, int] = field(default_factory=dict)
    """Of others."""
    group: bool = False

    def __str__(self) -> str:
        return " ".join([self.scenario.__name__, *map(str, self.arguments)])


DIED = r"process 1 \(pid \d+\) has died: killed, out of memory or crashed"
SILENT = rf"process 1 gave no sign of life for {SILENCE_SECONDS:g} s \(pid \d+; it was not waiting for any process\)"
OF_1 = {
    0: "0RECV_B2 for 0B2 from process 1",
    2: "2RECV_F3 for 2F3 from process 1",
    3: "3RECV_F3 for 3F3 from process 2",
}
OF_0 = {1: "1RECV_F0 from process 0", 2: "2RECV_F0 from process 1"}
NO_STORE = "process 0 has died.*store of the run.*"
CIRCLE = "process 2 awaits 2RECV_F3 for 2F3 from process 1, a circle back to process 1"
WAITS = (
    "process 0 timed out awaiting 0RECV_B2 for 0B2 from process 1; process 1 awaits 1RECV_B2 for 1B2 from process 2; "
)
NO_GROUP = r"process [02] timed out awaiting communicator X from processes \d, \d; process 1 does not wait"
STUCK_ON_GPU = "process 0 timed out awaiting 0RECV_B1 for 0B1 from process 1; process 1 does not wait"
NO_DEVICE = 'torch_device is \'tpu\', which is no device of torch; it must be "cpu" or "cuda"'
COMMUNICATORS = {
    0: "the making of communicators from processes 1, 2",
    2: "the making of communicators from processes 0, 1",
}
ORPHANED = "evenpipe: the launcher of this process has died: killed, out of memory or crashed\n"
TERMINATED = r"process [02] \(pid \d+\) was ended by signal 15 \(SIGTERM\)"
LEFT = r"process 1 \(pid \d+\) has ended while others still needed it"

ENDINGS = [
    Ending(one_of_four_fails, 4, DIED, OF_1, (signal.SIGKILL,), {1: -9}),
    Ending(one_of_four_fails, 4, DIED, OF_1, ("exits",), {1: 7}),
    Ending(one_of_four_fails, 4, "process 1 failed: ValueError: boo", OF_1, ("raises",), {1: 1}),
    Ending(one_of_four_fails, 4, SILENT, OF_1, (signal.SIGSTOP,), {1: -9}),  # by the harness
    Ending(bystanders, 3, "process 1 said: model: no such folder", {0: "rows for 0F1 from process 2", 2: ""}),
    Ending(an_operation_of_torchs_own, 3, "", {}, (), {0: 0, 1: -9, 2: 0}),
    Ending(the_store_dies_with_process_0, 3, NO_STORE, OF_0, group=True),
    Ending(stuck, 3, WAITS + "process 2 does not wait", {0: None, 1: None}, (False,)),
    Ending(stuck, 3, WAITS + CIRCLE, {0: None, 1: None}, (True,)),
    Ending(one_makes_no_group, 3, NO_GROUP, {0: None, 2: None}),
    Ending(waits_on_a_gpu, 2, STUCK_ON_GPU, {0: "0RECV_B1 for 0B1 from process 1", 1: ""}),
    Ending(one_comes_late, 3, DIED, COMMUNICATORS, ("dies",)),
    Ending(one_has_no_such_device, 3, NO_DEVICE, {0: None, 2: None}, (), {1: 1}),
    Ending(victims_of_sigterm, 3, DIED, {0: OF_1[0], 2: None}, ("dies",)),
    Ending(victims_of_sigterm, 3, LEFT, {0: OF_1[0], 2: None}, ("leaves",)),
    # who settles that it was the signal is itself the origin, and says nothing of what it awaited
    Ending(victims_of_sigterm, 3, TERMINATED, {0: None, 2: None}, ("terminated",)),
    Ending(orphans, 2, ORPHANED, {1: None}),
    Ending(one_dies_before_all_are_here, 4, "", {}, ("dies",), {0: 0, 3: 0}),
    Ending(one_dies_before_all_are_here, 4, "", {}, ("comes not",), {0: 0, 3: 0}),
]


@pytest.mark.parametrize("ending", ENDINGS, ids=str)
@pytest.mark.sampled(4)
def test_all_others_end_and_say_why(ending: Ending) -> None:
    """By an exception or by the watch's hand."""
    outcomes = run_outcomes(ending.scenario, ending.processes, *ending.arguments, group=ending.group)
    for rank, code in ending.exit_codes.items():
        assert outcomes[rank].exit_code == code, describe(outcomes)
    for rank, awaited in ending.awaited.items():
        outcome = outcomes[rank]
        message = f"{ending.cause}; process {rank} was awaiting {awaited}" if awaited else ending.cause
        if awaited is None:
            assert re.search(message, f"{outcome.exception or ''} {outcome.printed}"), describe(outcomes)
        elif outcome.exception is not None and awaited:
            assert isinstance(outcome.exception, RunError)
            assert re.fullmatch(message, str(outcome.exception)), describe(outcomes)
        else:
            assert outcome.exit_code == RunError.exit_code, describe(outcomes)
            assert re.search(f"^evenpipe: {message}$", outcome.printed, re.MULTILINE), describe(outcomes)


NO_ALARM: list[tuple[Callable[..., None], int]] = [
    (the_next_wait_raises, 2),
    (waits_on_a_gpu_end, 2),
    (one_comes_late, 3),
    (one_opens_its_gpu_slowly, 3),
    (forks_while_it_hears, 2),
    (some_finish_early, 4),
    (suspended_and_continued, 3),
    (one_is_missing, 3),
    (start_with_a_slow_store, 3),
    (one_has_come_and_ended, 2),
    (alone, 1),
]


@pytest.mark.parametrize(("scenario", "processes"), NO_ALARM)
@pytest.mark.sampled(2)
def test_processes_come_to_their_own_end(scenario: Callable[..., None], processes: int) -> None:
    run_processes(scenario, processes, group=False)
