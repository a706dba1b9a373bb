"""Runs a function in a few fresh processes that are joined by gloo, and brings back what it returned or raised.

    results = run_processes(function, 3, "an argument")          # [function("an argument") of rank 0, 1, 2]

A fork server imports torch and transformers once per pytest run (preload.py); every call then forks new processes from
it in about 0.05 s each: no state is shared between tests, and a killed process costs nothing. Inside, the default
process group is ready (gloo, its store in the parent, every wait limited by `GROUP_TIMEOUT`), with one thread per
process. Work may take as long as it takes on a busy machine; processes that do not work any more are killed.

`function` is found by name in the child, so it stands at the top level of its test module; arguments, results and
exceptions travel by pickle. What a process prints is kept in a file and shown when something fails.
"""

import contextlib
import datetime
import faulthandler
import logging
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from evenpipe.processes.supervisor import end, send

GROUP_TIMEOUT = datetime.timedelta(seconds=600)
"""Limit of every collective and message; tests that make groups of their own pass it on (groups do not inherit it)."""

SILENCE_SECONDS = 60.0
"""For so long none of the processes may do without a processor, or they are stuck."""

LINGER_SECONDS = 3.0
"""The same once one has failed: the others go on until their own words are collected too."""

CASES = 50
"""As many run in one set of processes."""

WORK_SHARE = 0.03
"""Of that time: a process that only waits wakes up now and then, but takes less."""


@dataclass(frozen=True)
class Outcome:
    """How one process ended. `exit_code` as in multiprocessing: -9 for SIGKILL. `pid` is no more."""

    rank: int
    pid: int
    exit_code: int | None
    value: Any
    exception: BaseException | None
    seconds: float
    printed: str


def run_processes(function: Callable[..., Any], processes: int, *arguments: Any, group: bool = True) -> list[Any]:
    """The values that `function(*arguments)` returned in each process, by rank.

    An exception of a process is raised again here, the earliest one, with the traceback of its process as a note. A
    process that ends otherwise (killed, or exit code not 0) is an AssertionError with all that the processes printed,
    the Python stacks of those that were stuck included.
    """
    outcomes = run_outcomes(function, processes, *arguments, group=group)
    raised = [outcome for outcome in outcomes if outcome.exception is not None]
    if raised:
        raise min(raised, key=lambda outcome: outcome.seconds).exception
    if any(outcome.exit_code != 0 for outcome in outcomes):
        raise AssertionError(describe(outcomes))
    return [outcome.value for outcome in outcomes]


def check_cases(run_cases: Callable[[list[Any]], list[str]], cases: list[Any]) -> None:
    """Run cases, each on its number of `processes`, and assert that no process returns faults."""
    for processes in sorted({case.processes for case in cases}):
        of_size = [case for case in cases if case.processes == processes]
        for start in range(0, len(of_size), CASES):  # meshes and what torch caches last as long as their process
            faults = run_processes(run_cases, processes, of_size[start : start + CASES])
            assert not any(faults), "\n".join(dict.fromkeys(fault for one in faults for fault in one))


def run_outcomes(function: Callable[..., Any], processes: int, *arguments: Any, group: bool = True) -> list[Outcome]:
    """As run_processes, for tests in which processes fail: raises nothing, tells how each of them ended.

    Processes that are stuck are killed (exit code -9): `SILENCE_SECONDS`, or `LINGER_SECONDS` once one has failed.
    With `group=False` there is no process group yet, only the environment that torchrun would set (RANK, MASTER_PORT,
    ...).
    """
    import torch.distributed as dist

    _start_fork_server()
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="evenpipe-test-") as folder:
        context = multiprocessing.get_context("forkserver")
        children = [
            context.Process(
                target=_child,
                args=(rank, processes, store.port, Path(folder), function, arguments),
                kwargs={"group": group},
                daemon=True,
            )
            for rank in range(processes)
        ]
        started = time.monotonic()
        try:
            for child in children:
                child.start()
            ended = _wait_for(children)
        finally:
            for child in children:
                send(child, signal.SIGKILL)
            end(children, 0.0)
        return [
            _outcome(rank, child, Path(folder), ended.get(rank, time.monotonic()) - started)
            for rank, child in enumerate(children)
        ]


def until_they_wait(watch: Any, ranks: Iterable[int]) -> None:
    """Returns once the beats of these processes say that they wait for a message, and that of this process, which
    `watch` belongs to, that it does not wait."""

    def awaits(rank: int) -> str:
        beat = watch._peers.beat(rank)[1]
        return "" if beat is None or beat.waiting is None else beat.waiting.label

    while awaits(watch.rank) or not all("RECV" in awaits(rank) for rank in ranks):
        time.sleep(0.02)


@contextlib.contextmanager
def lines_logged(level: int = logging.WARNING) -> Iterator[list[str]]:
    """What evenpipe logs inside."""
    lines: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("evenpipe")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def describe(outcomes: list[Outcome]) -> str:
    """All that is known of processes that ended badly, for the text of an assertion."""
    codes = [outcome.exit_code for outcome in outcomes]
    lines = [f"processes ended with exit codes {codes} (-9 = killed, since they were stuck or by the test)"]
    for outcome in outcomes:
        lines.append(f"--- process {outcome.rank}: exit code {outcome.exit_code} after {outcome.seconds:.1f} s")
        lines.append(outcome.printed)
    return "\n".join(lines)


_server_pid: int | None = None


def _start_fork_server() -> None:
    """Starts the server with the test folder on its path, and makes sure that the preload really happened.

    Python ignores a module that the server cannot import, which would only be seen as tests that take ten times as
    long.
    """
    global _server_pid
    server = multiprocessing.forkserver._forkserver
    if server._forkserver_pid is not None and server._forkserver_pid == _server_pid:
        return
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), *(entry for entry in sys.path if entry)])
    server._stop()  # launch() may have started one that knows less
    multiprocessing.set_forkserver_preload(["preload"])
    with mock.patch.dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false"):
        server.ensure_running()
    _server_pid = server._forkserver_pid
    child = multiprocessing.get_context("forkserver").Process(target=_assert_preloaded)
    child.start()
    child.join()
    assert child.exitcode == 0, f"the fork server has not imported {here / 'preload.py'}; import it to see why"


def _assert_preloaded() -> None:
    sys.exit(0 if "preload" in sys.modules and "torch.distributed" in sys.modules else 1)


def _wait_for(children: list[Any]) -> dict[int, float]:
    """Waits until all have ended, or those that are left do not work any more: their stacks are printed unless one has
    failed. Nothing is to be expected of those that a signal has stopped."""
    ended: dict[int, float] = {}
    used: dict[int, float] = {}
    limit, worked, since = SILENCE_SECONDS, 0.0, time.monotonic()
    while len(ended) < len(children) and time.monotonic() < since + limit:
        left = [rank for rank in range(len(children)) if rank not in ended]
        multiprocessing.connection.wait([children[rank].sentinel for rank in left], 0.25)
        stopped = []
        for rank in left:
            used[rank], is_stopped = _work_of(children[rank].pid, used.get(rank, 0.0))
            stopped.append(is_stopped)
            if children[rank].exitcode is not None:
                ended[rank] = since = time.monotonic()
                limit = LINGER_SECONDS if children[rank].exitcode else limit
        if limit == LINGER_SECONDS and all(stopped):
            break
        if sum(used.values()) > worked + WORK_SHARE * limit:
            worked, since = sum(used.values()), time.monotonic()
    if limit == SILENCE_SECONDS and len(ended) < len(children):
        for child in children:
            if child.exitcode is None:
                os.kill(child.pid, signal.SIGUSR2)
        time.sleep(1.0)
    return ended


def _work_of(pid: int, before: float) -> tuple[float, bool]:
    """Seconds of a processor that it and what it waited for have used, and whether it has been stopped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has just ended
        return before, False
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK"), fields[0] == "T"


def _outcome(rank: int, child: Any, folder: Path, seconds: float) -> Outcome:
    value, exception = None, None
    result = folder / f"result-{rank}"
    if result.exists():
        value, exception, note = pickle.loads(result.read_bytes())
        if exception is not None:
            exception.add_note(f"in process {rank}:\n{note}")
    printed = folder / f"printed-{rank}"
    text = printed.read_text(errors="replace") if printed.exists() else ""
    return Outcome(rank, child.pid, child.exitcode, value, exception, seconds, text)


def _child(rank, processes, port, folder, function, arguments, *, group) -> None:  # noqa: PLR0917
    """The whole life of one process."""
    printed = os.open(folder / f"printed-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR2, file=2)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.update(
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(processes),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store lives in the parent: nobody here opens one
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
    )
    value, exception, note = None, None, ""
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        if group:
            dist.init_process_group("gloo", rank=rank, world_size=processes, timeout=GROUP_TIMEOUT)
        value = function(*arguments)
        if worker := sys.modules.get("evenpipe.processes.worker"):
            worker.finish_worker()  # or else its watch would take the end of this process for its death
    except BaseException as error:
        exception, note = error, traceback.format_exc()
        print(note, file=sys.stderr)
    (folder / f"result-{rank}.part").write_bytes(_pickled(value, exception, note))
    (folder / f"result-{rank}.part").rename(folder / f"result-{rank}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if exception is None else 1)


def _pickled(value: Any, exception: BaseException | None, note: str) -> bytes:
    """One pickle; an exception that does not survive pickling is replaced by one that says the same."""
    try:
        content = pickle.dumps((value, exception, note))
        pickle.loads(content)
    except Exception as error:
        if exception is None:
            note = f"the result of the process cannot be pickled: {error!r}"
        content = pickle.dumps((None, RuntimeError(note.strip().splitlines()[-1]), note))
    return content
