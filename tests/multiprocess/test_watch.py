"""One process fails, in all the ways there are; the others end soon and name it, the pass awaited and the peer."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import Outcome, describe, run_outcomes, run_processes, until_they_wait

import evenpipe.processes.worker as worker_module
from evenpipe.communication.communicators import Communicators, _wait_for_all
from evenpipe.errors import InputError, RunError
from evenpipe.processes.bell import signals_handled
from evenpipe.processes.names import processes
from evenpipe.processes.signs import Beat, Board, Waiting, cause_of, started
from evenpipe.processes.store import NetworkStore
from evenpipe.processes.watch import Watch
from evenpipe.processes.worker import Worker, initialise_worker, meet

SILENCE_SECONDS = 1.5
"""Limit in these tests: six beats. It is the only one: processes that are not ended by it stay, and the harness finds
them stuck."""


def start(timeout_seconds: float = 600.0, silence_seconds: float = SILENCE_SECONDS) -> tuple[Worker, Communicators]:
    worker = initialise_worker(timeout_seconds=timeout_seconds, silence_seconds=silence_seconds, torch_device="cpu")
    size = worker.world_size
    hops = [(f"{kind}:{a}>{b}", (a, b)) for i in range(size - 1) for kind, a, b in (("F", i, i + 1), ("B", i + 1, i))]
    groups = [*hops, ("DX", range(size))]
    return worker, Communicators(groups, timeout_seconds=timeout_seconds, watch=worker.watch)


def receive_forward(communicators: Communicators, rank: int) -> None:
    hop = communicators[f"F:{rank - 1}>{rank}"]
    hop.receive(torch.zeros(4), rank - 1, f"{rank}RECV_F3").wait(f"{rank}F3")


def receive_backward(communicators: Communicators, rank: int) -> None:
    hop = communicators[f"B:{rank + 1}>{rank}"]
    hop.receive(torch.zeros(4), rank + 1, f"{rank}RECV_B2").wait(f"{rank}B2")


def check(outcome: Outcome, cause: str, awaited: str) -> None:
    """The process ended, by an exception or by the watch's hand, and said why and what it awaited."""
    message = f"{cause}; process {outcome.rank} was awaiting {awaited}"
    if outcome.exception is not None:
        assert isinstance(outcome.exception, RunError)
        assert re.fullmatch(message, str(outcome.exception))
    else:
        assert outcome.exit_code == RunError.exit_code, describe([outcome])
        assert re.search(f"^evenpipe: {message}$", outcome.printed, re.MULTILINE), describe([outcome])


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


@pytest.mark.parametrize(
    ("how", "exit_code", "cause"),
    [
        (signal.SIGKILL, -9, r"process 1 \(pid \d+\) has died: killed, out of memory or crashed"),
        ("exits", 7, r"process 1 \(pid \d+\) has died: killed, out of memory or crashed"),
        ("raises", 1, "process 1 failed: ValueError: boo"),
        (
            signal.SIGSTOP,
            -9,  # by the harness
            r"process 1 gave no sign of life for 1\.5 s \(pid \d+; it was not waiting for any process\)",
        ),
    ],
)
@pytest.mark.sampled(2)
def test_all_others_name_the_one_that_failed(how, exit_code, cause):
    outcomes = run_outcomes(one_of_four_fails, 4, how, group=False)
    assert outcomes[1].exit_code == exit_code
    check(outcomes[0], cause, "0RECV_B2 for 0B2 from process 1")
    check(outcomes[2], cause, "2RECV_F3 for 2F3 from process 1")
    check(outcomes[3], cause, "3RECV_F3 for 3F3 from process 2")


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


def test_bystanders_are_ended_by_their_own_watch():
    outcomes = run_outcomes(bystanders, 3, group=False)
    check(outcomes[0], "process 1 said: model: no such folder", "rows for 0F1 from process 2")
    assert outcomes[2].exit_code == RunError.exit_code
    assert "evenpipe: process 1 said: model: no such folder\n" in outcomes[2].printed


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


def test_a_process_that_computes_learns_at_its_next_wait():
    run_processes(the_next_wait_raises, 2, group=False)


def an_operation_of_torchs_own() -> None:
    """A collective that is not one of ours, as in gathering of results, is a victim too, and names the culprit."""
    worker, _ = start()
    everyone = tuple(range(worker.world_size))
    if worker.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if worker.rank == 0:
        message = r"process 1 .*has died.* was awaiting token ids from processes 0, 1, 2"
        with (
            pytest.raises(RunError, match=f"^{message}$"),
            worker.watch.during("token ids", "default", everyone),
        ):
            dist.all_reduce(torch.zeros(1))
    else:
        try:
            dist.all_reduce(torch.zeros(1))
        except RuntimeError as error:
            worker.watch.report_exception(error)
    assert worker.watch.cause.origin == 1


def test_an_operation_of_torchs_own_is_explained_too():
    outcomes = run_outcomes(an_operation_of_torchs_own, 3, group=False)
    assert [outcome.exit_code for outcome in outcomes] == [0, -9, 0], describe(outcomes)


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


def test_the_store_dies_with_process_0():
    outcomes = run_outcomes(the_store_dies_with_process_0, 3)
    check(outcomes[1], r"process 0 has died.*store of the run.*", "1RECV_F0 from process 0")
    check(outcomes[2], r"process 0 has died.*store of the run.*", "2RECV_F0 from process 1")


# -- nobody dies: a program that cannot go on ------------------------------------------------------


def stuck(circle: bool) -> None:
    worker, communicators = start(timeout_seconds=4.0, silence_seconds=30.0)
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


@pytest.mark.parametrize(
    ("circle", "end"),
    [
        (False, "process 2 does not wait"),
        (True, "process 2 awaits 2RECV_F3 for 2F3 from process 1, a circle back to process 1"),
    ],
)
@pytest.mark.sampled(1)
def test_a_time_out_tells_who_waits_for_whom(circle, end):
    outcomes = run_outcomes(stuck, 3, circle, group=False)
    cause = (
        "process 0 timed out awaiting 0RECV_B2 for 0B2 from process 1; "
        "process 1 awaits 1RECV_B2 for 1B2 from process 2; "
    )
    for outcome in outcomes[:2]:
        assert cause in describe([outcome])
        assert re.search(end, describe([outcome]))


def one_makes_no_group() -> None:
    worker = initialise_worker(timeout_seconds=2.0, silence_seconds=30.0, torch_device="cpu")
    if worker.rank == 1:
        time.sleep(50)
    Communicators([("X", range(3))], timeout_seconds=2.0, watch=worker.watch)


def test_who_makes_no_communicator_is_named():
    outcomes = run_outcomes(one_makes_no_group, 3, group=False)
    cause = r"process [02] timed out awaiting communicator X from processes \d, \d; process 1 does not wait"
    for rank in (0, 2):
        assert re.search(cause, f"{outcomes[rank].exception or ''} {outcomes[rank].printed}"), describe(outcomes)


def waits_on_a_gpu() -> None:
    """The host goes on, and what the GPU waits for does not come: no library says so."""
    worker, _ = start()
    watch, arrived = worker.watch, threading.Event()
    if worker.rank == 0:
        for number in range(3):
            watch.awaiting(f"0RECV_B{number}", f"0B{number}", "B:1>0", (1,))
            watch.arrives_when(*((arrived.is_set, 1.0) if number == 1 else (lambda: True, 600.0)))
        assert str(watch.waiting) == "0RECV_B0 for 0B0 from process 1"  # until the watch has asked
        while watch.cause is None:  # the first is found done; then the second counts
            time.sleep(0.01)
        assert watch.cause.text == (
            "process 0 timed out awaiting 0RECV_B1 for 0B1 from process 1; process 1 does not wait"
        )
        time.sleep(50)
    time.sleep(50)


def test_a_wait_on_a_gpu_has_a_limit_too():
    outcomes = run_outcomes(waits_on_a_gpu, 2, group=False)
    cause = "process 0 timed out awaiting 0RECV_B1 for 0B1 from process 1; process 1 does not wait"
    check(outcomes[0], cause, "0RECV_B1 for 0B1 from process 1")
    assert f"evenpipe: {cause}\n" in outcomes[1].printed


def waits_on_a_gpu_end() -> None:
    worker, _ = start()
    for number in range(40):
        worker.watch.awaiting(f"0RECV_B{number}", "", "B:1>0", (1,))
        worker.watch.arrives_when(lambda: True, 1.0)
        time.sleep(0.05)
    worker.watch.arrives_when(lambda: False, 0.5)  # of nothing: no wait was announced
    time.sleep(1.0)
    assert worker.watch.cause is None and worker.watch.waiting is None
    worker.watch.finish()


def test_many_short_waits_on_a_gpu_are_no_long_one():
    run_processes(waits_on_a_gpu_end, 2, group=False)


def gpu_fails() -> None:
    """What it waits for never comes; its main thread hears why at its next call."""
    worker, _ = start()
    if worker.rank == 0:
        worker.watch.awaiting("0RECV_B0", "0B0", "B:1>0", (1,))
        worker.watch.arrives_when(lambda: False, 600.0)
        time.sleep(0.5)
        error = RuntimeError("CUDA error: an illegal memory access was encountered")
        worker.watch.report_exception(error)
        raise error
    time.sleep(50)


def test_a_gpu_that_fails_is_the_cause_and_not_what_it_waited_for():
    outcomes = run_outcomes(gpu_fails, 2, group=False)
    cause = "process 0 failed: RuntimeError: CUDA error: an illegal memory access was encountered"
    assert isinstance(outcomes[0].exception, RuntimeError), describe(outcomes)
    assert outcomes[1].exit_code == RunError.exit_code, describe(outcomes)
    assert f"evenpipe: {cause}\n" in outcomes[1].printed, describe(outcomes)


# -- one comes late to the making of communicators --------------------------------------------------


def one_comes_late(how: str) -> None:
    """As where NCCL is to communicate; all wait on the CPU."""
    worker, _ = start()
    others = tuple(other for other in range(3) if other != worker.rank)
    if worker.rank == 1:
        time.sleep(2 * SILENCE_SECONDS)
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
    with worker.watch.during("the making of communicators", "default", others):
        _wait_for_all()
    assert worker.watch.cause is None


def test_who_comes_late_is_waited_for_by_processes_that_beat():
    run_processes(one_comes_late, 3, "comes", group=False)


def test_who_dies_on_the_way_is_named():
    outcomes = run_outcomes(one_comes_late, 3, "dies", group=False)
    cause = r"process 1 \(pid \d+\) has died: killed, out of memory or crashed"
    check(outcomes[0], cause, "the making of communicators from processes 1, 2")
    check(outcomes[2], cause, "the making of communicators from processes 0, 1")


# -- the device of one is not to be had ------------------------------------------------------------


def one_has_no_such_device() -> None:
    wanted = "tpu" if int(os.environ["RANK"]) == 1 else "cpu"
    initialise_worker(timeout_seconds=600.0, silence_seconds=SILENCE_SECONDS, torch_device=wanted)
    time.sleep(50)


def test_a_wrong_device_of_one_process_ends_all():
    outcomes = run_outcomes(one_has_no_such_device, 3, group=False)
    cause = "torch_device: 'tpu' is not a device of torch, expected 'cpu' or 'cuda'"
    assert isinstance(outcomes[1].exception, InputError)
    assert str(outcomes[1].exception) == cause
    for rank in (0, 2):
        assert cause in f"{outcomes[rank].exception or ''} {outcomes[rank].printed}", describe(outcomes)


def one_opens_its_gpu_slowly() -> None:
    """For longer than others may be silent; the interpreter's lock would be held meanwhile."""
    module = sys.modules["evenpipe.processes.worker"]
    opened = module._own_device

    def slowly(wanted):
        if int(os.environ["RANK"]) == 1:
            time.sleep(2 * SILENCE_SECONDS)
        assert not any(thread.name == "evenpipe-watch" for thread in threading.enumerate())
        return opened(wanted)

    module._own_device = slowly
    worker, _ = start()
    dist.barrier()
    assert worker.watch.cause is None


def test_a_gpu_may_open_slowly():
    run_processes(one_opens_its_gpu_slowly, 3, group=False)


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


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("dies", r"process 1 \(pid \d+\) has died: killed, out of memory or crashed"),
        ("leaves", r"process 1 \(pid \d+\) has ended while others still needed it"),
        ("terminated", r"process [02] \(pid \d+\) was ended by signal 15 \(SIGTERM\)"),
    ],
)
@pytest.mark.sampled(1)
def test_whom_torchrun_ends_says_why(how, cause):
    outcomes = run_outcomes(victims_of_sigterm, 3, how, group=False)
    texts = [f"{outcomes[rank].exception or ''} {outcomes[rank].printed}" for rank in (0, 2)]
    assert all(re.search(cause, text) for text in texts), describe(outcomes)
    # Who settles that it was the signal is itself the origin, and says nothing of what it awaited.
    assert how == "terminated" or "process 0 was awaiting 0RECV_B2 for 0B2 from process 1" in texts[0]


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


def test_a_forked_process_is_ended_by_sigterm_as_always():
    run_processes(forks_while_it_hears, 2, group=False)


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


def test_a_run_whose_launcher_has_died_ends():
    outcomes = run_outcomes(orphans, 2, group=False)
    text = "evenpipe: the launcher of this process has died: killed, out of memory or crashed\n"
    assert text in outcomes[1].printed, describe(outcomes)


# -- no false alarms -------------------------------------------------------------------------------


def some_finish_early() -> None:
    worker, _ = start(silence_seconds=0.75)
    if worker.rank in (1, 2):
        worker.watch.finish()
        return
    time.sleep(2.0)
    assert worker.watch.cause is None
    worker.watch.finish()


def test_a_process_that_has_finished_is_not_taken_for_dead():
    run_processes(some_finish_early, 4, group=False)


def suspended_and_continued() -> None:
    """As when a laptop sleeps: all stop for longer than the limit, and go on one after the other."""
    worker, _ = start(silence_seconds=1.0)
    pids = [None] * worker.world_size
    dist.all_gather_object(pids, os.getpid())
    if worker.rank == 0:
        numbers = " ".join(map(str, pids))
        subprocess.Popen(["sh", "-c", f"kill -STOP {numbers}; sleep 2; kill -CONT {numbers}"], start_new_session=True)
    before = time.monotonic()
    while time.monotonic() < before + 3.0:
        time.sleep(0.05)
    assert worker.watch.cause is None
    worker.watch.finish()


def test_a_job_that_was_suspended_goes_on():
    run_processes(suspended_and_continued, 3, group=False)


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


def test_a_missing_process_is_named():
    run_processes(one_is_missing, 3, group=False)


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


def test_processes_meet_though_the_store_is_slow_when_all_ask_it():
    run_processes(start_with_a_slow_store, 3, group=False)


def dies_once_others_are_here(here: list[str]) -> None:
    store = store_of_the_harness()
    while not store.has(here):
        time.sleep(0.01)
    time.sleep(0.5)  # they have written that, and soon hear signals too
    store.write("dying", str(os.getpid()))
    os.kill(os.getpid(), signal.SIGKILL)


def terminated_once_1_is_dead() -> None:
    store = store_of_the_harness()
    while (pid := store.read("dying")) is None or started(int(pid)) is not None:
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
    with (
        signals_handled(lambda number, _: terminated.append(number), [signal.SIGTERM]),
        pytest.raises(RunError, match=f"^{message}$"),
    ):
        meet(store, rank, 4, 600.0, terminated)
    store.write(f"found {rank}", "")
    while not store.has(["found 0", "found 3"]):  # nobody takes the end of another for the cause
        time.sleep(0.01)


@pytest.mark.parametrize("how", ["dies", "comes not"])
@pytest.mark.sampled(1)
def test_who_dies_before_all_have_started_is_named(how):
    outcomes = run_outcomes(one_dies_before_all_are_here, 4, how, group=False)
    assert [outcomes[rank].exit_code for rank in (0, 3)] == [0, 0], describe(outcomes)


class Interrupted:
    """A store between two questions of whose process the others come, and one of them has its whole life."""

    def __init__(self, store: NetworkStore) -> None:
        self._store, self.questions = store, 0

    def has(self, keys: list[str]) -> bool:
        self.questions += 1
        if self.questions == 1:
            assert not self._store.has(keys)
            self._store.write("not all here", "")
            pid = int(wait_for(self._store, "ended"))
            while started(pid) is not None:
                time.sleep(0.01)
            return False
        return self._store.has(keys)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def one_has_come_and_ended() -> None:
    rank, store = int(os.environ["RANK"]), store_of_the_harness()
    if rank == 1:
        wait_for(store, "not all here")
        meet(store, 1, 2, 600.0)
        store.write("ended", str(os.getpid()))
        return
    meet(Interrupted(store), 0, 2, 600.0)


def wait_for(store: NetworkStore, key: str) -> str:
    while (text := store.read(key)) is None:
        time.sleep(0.01)
    return text


def test_who_ends_once_all_have_started_has_not_died_before():
    run_processes(one_has_come_and_ended, 2, group=False)


def test_a_single_process_has_a_watch_that_does_nothing():
    outcome = run_outcomes(alone, 1, group=False)[0]
    assert outcome.exit_code == 0, describe([outcome])


def alone() -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    worker = initialise_worker(torch_device="cpu")
    assert initialise_worker() is worker
    assert (worker.rank, worker.world_size, dist.is_initialized()) == (0, 1, False)
    worker.watch.report_exception(ValueError("boo"))
    worker.watch.finish()
    with pytest.raises(InputError, match="torch_device: 'tpu' is not a device"):
        sys.modules["evenpipe.processes.worker"]._own_device("tpu")


# -- the small parts -------------------------------------------------------------------------------


def test_beats_and_board_bring_back_what_was_written(tmp_path):
    waiting = Waiting("2RECV_F0", "2F0", "F:1>2", (1,))
    for beat in (Beat(1, "machine", 5, "77"), Beat(2, "machine", 5, "77", waiting, done=True)):
        assert Beat.load(beat.dump(), 3) == beat
    board = Board(tmp_path / "board", 3)
    board.show(2, waiting)
    board.show(1, Waiting("X" * 500, "", "X", (0,)))
    again = Board(tmp_path / "board", 3)
    assert (again.read(0), again.read(2)) == ("", "2RECV_F0 for 2F0 from process 1")
    assert again.read(1) == "X" * Board.WIDTH
    board.clear(2)
    assert again.read(2) == ""


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (InputError("a: b"), "input", "a: b"),
        (RunError("no space left"), "exception", "no space left"),
        (KeyError("x"), "exception", "process 4 failed: KeyError: 'x'"),
    ],
)
def test_what_an_exception_is_to_the_others(error, kind, text):
    cause = cause_of(error, 4)
    assert (cause.kind, cause.origin, cause.text) == (kind, 4, text)


def test_processes_are_listed_up_to_eight():
    assert processes((3,)) == "process 3"
    assert processes(range(10)) == "processes 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
