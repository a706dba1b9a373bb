"""Start several processes on this machine, run a function in each, and return the results or raise the first failure.

    losses = launch(train, "config.toml", processes=4)

The processes have the same environment as under torchrun, but meet in a folder that only their user may enter
(`store`), and listen only on loopback. On a machine without GPUs they are forked from a server that has imported torch
and transformers once (later launches of the program reuse it); CUDA does not survive a fork, so with GPUs each process
starts from scratch.

This replaces torch's elastic launcher, which gives a stopped process 30 s to end after a failure, and waits forever for
a process that is stopped or killed between its result and its end.

Each process writes its result or failure to a file in that folder. Only the function, its arguments and its results are
pickled. Functions defined in a notebook or another program without a file cannot be imported, so they are sent by value
(cloudpickle). When a process fails, the launcher ends the others (`supervisor`); by then the watch has settled which
one was at fault.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import cloudpickle
import torch

from evenpipe.errors import InputError, RunError
from evenpipe.processes import names
from evenpipe.processes.bell import STOPS, signals_handled
from evenpipe.processes.environment import allocator_variables, default_variables
from evenpipe.processes.names import process
from evenpipe.processes.owner import EXIT_CODE, Owner
from evenpipe.processes.proof import ABORTED, AWAITED
from evenpipe.processes.signs import Board, Cause, cause_of
from evenpipe.processes.stopping import StopForwarder
from evenpipe.processes.store import FolderStore
from evenpipe.processes.supervisor import Beats, Ending, end, supervise
from evenpipe.processes.temporary import temporary_folder
from evenpipe.processes.user_line import user_line
from evenpipe.processes.watch import Watch
from evenpipe.processes.worker import (
    SILENCE_SECONDS,
    START_SECONDS,
    STORE_FOLDER,
    TIMEOUT_SECONDS,
    finish_worker,
    initialise_worker,
    start_worker,
)
from evenpipe.words import refused

__all__ = ["initialise_worker", "launch", "prepare_launch"]

PRELOAD = ("torch.distributed", "transformers.modeling_utils", "evenpipe.processes.worker")

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that the launcher handles itself while it runs."""

SHUTDOWN_SECONDS = 5.0
"""Time from SIGTERM to SIGKILL after Ctrl-C."""

UNGUARDED = 74
"""Exit code of a process that reached a launch while it imported the program."""

PR_SET_PDEATHSIG = 1


def launch(
    function: Callable[..., Any],
    *arguments: Any,
    processes: int,
    timeout_seconds: float = TIMEOUT_SECONDS,
    silence_seconds: float = SILENCE_SECONDS,
    start_seconds: float = START_SECONDS,
    torch_device: str | None = None,
    preload: Sequence[str] = (),
    on_stop: Callable[[int], None] | None = None,
) -> list[Any]:
    """Run `function(*arguments)` in `processes` new processes of this machine; return their results in rank order.

    In each process the default process group is open (see `initialise_worker`), torch uses one thread unless
    OMP_NUM_THREADS says otherwise, and Ctrl-C ends it at once.

    function: at the top level of a module, or defined in a notebook, `python -c` or a program from standard input;
        such a function is sent together with the globals that it uses. Arguments and results are pickled. A script
        calls launch under `if __name__ == "__main__":`, because the processes import it.
    timeout_seconds: limit of a wait among live processes.
    silence_seconds: a process without a sign of life for this long counts as dead.
    start_seconds: how long processes may take to start.
    torch_device: "cpu" or "cuda"; default: a GPU if there is one.
    preload: as `modules` of `prepare_launch`, which may have been called before.
    on_stop: called with the number of the first Ctrl-C or SIGTERM when it was forwarded to processes that can stop on
        request (`stopping`); it then ends nothing. Without `on_stop`, or if they cannot, the first signal ends them.

    Raises:
        InputError: `function` raised one, or an argument of launch is wrong. Has the same text, and notes with the
            lines of your program where processes raised it.
        RunError: a process ended for any other reason. Names the first cause; a note has the line of your program and
            the traceback of the process.
        KeyboardInterrupt: Ctrl-C. SystemExit: SIGTERM, SIGHUP or SIGQUIT. All processes have ended by then.
    """
    _end_if_unguarded()
    if "RANK" in os.environ:
        raise InputError(
            f"launch: this is already process {os.environ['RANK']} of a launched group (environment variable RANK); "
            "expected a program that is not; call the function itself"
        )
    if processes < 1:
        raise refused("processes", processes, "at least 1")
    try:
        work = _dumps((function, arguments))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InputError(
            f"launch: the function and its arguments cannot be pickled ({error}); expected a function at the top level "
            "of a module and arguments of plain types"
        ) from error
    limits = {
        "timeout_seconds": timeout_seconds,
        "silence_seconds": silence_seconds,
        "start_seconds": start_seconds,
        "torch_device": torch_device,
    }
    handler = _Handler()
    with temporary_folder("evenpipe-launch-") as folder, signals_handled(handler, SIGNALS):
        Board(folder / "board", processes)
        prepare_launch(*preload, torch_device=torch_device)
        store = FolderStore(folder / "store")
        stop_forwarder = StopForwarder(store, on_stop)
        handler.accept = stop_forwarder.accept
        method = _start_method(torch_device)
        parent = _server_pid() if method == "forkserver" else os.getpid()
        # The type stubs know no common type of contexts that has Process.
        new_process: Any = multiprocessing.get_context(method).Process  # type: ignore[attr-defined]
        environments = [_environment(rank, processes, folder / "store") for rank in range(processes)]
        children = [
            new_process(target=_process, args=(work, environment, folder, limits, parent))
            for environment in environments
        ]
        try:
            first = _run(children, Beats(store, processes), silence_seconds)
        finally:
            with signals_handled(lambda *_: None, SIGNALS):
                # Processes that can stop on request ignore SIGTERM.
                end(children, 0.0 if stop_forwarder.accepted else SHUTDOWN_SECONDS)
        if first is not None:
            raise _first_cause(folder, processes, first)
        return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(processes)]


def prepare_launch(*modules: str, torch_device: str | None = None) -> None:
    """Start a background server that imports the modules for a later `launch`.

    Call it early: four imports of torch and transformers take 12 s on two cores; one takes 3 s, in parallel with the
    caller. Does nothing with GPUs.

    modules: names of modules to import besides torch, transformers and evenpipe.
    """
    _end_if_unguarded()  # before the caller does anything else
    if _start_method(torch_device) != "forkserver":
        return
    multiprocessing.set_forkserver_preload([*PRELOAD, *modules])
    # The server inherits the ignored signals: only the launcher should react to Ctrl-C or Slurm's SIGTERM.
    with default_variables(OMP_NUM_THREADS="1"), signals_handled(signal.SIG_IGN, STOPS):
        _set_server_folder()
        multiprocessing.forkserver.ensure_running()


# -- pickling --------------------------------------------------------------------------------------------------------


def _main_can_be_imported() -> bool:
    """Return whether another process could import a file as this process's `__main__`."""
    main = sys.modules["__main__"]
    return main.__spec__ is not None or Path(getattr(main, "__file__", None) or "").is_file()


def _dumps(value: Any) -> bytes:
    """Pickle by reference, which fails early if the processes could not import the value; by value if `__main__` is
    not a file."""
    return pickle.dumps(value) if _main_can_be_imported() else cloudpickle.dumps(value)


def _end_if_unguarded() -> None:
    """End this process if it reaches a launch while it imports the program of its own launcher, which then explains the
    mistake."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(UNGUARDED)


# -- the parent -------------------------------------------------------------------------------------------------------


def _run(children: Sequence[BaseProcess], beats: Beats, silence_seconds: float) -> Ending | None:
    """Start the processes and return when they have ended, as `supervise` does. Raises the errors of `launch`."""
    try:
        # torch reads these variables at import, which in a fresh process precedes our code.
        with default_variables(OMP_NUM_THREADS="1", **allocator_variables()), _without_main_file():
            for child in children:
                child.start()
        return supervise(children, beats, silence_seconds=silence_seconds)
    except _Interrupted as interrupted:
        if (server := _server_pid()) and any(child.pid is None for child in children):
            # The server is importing, or is about to fork a process that we do not know yet.
            os.kill(server, signal.SIGKILL)
            multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]  # or it would be used again
        if interrupted.number == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + interrupted.number) from None
    except (OSError, EOFError) as error:
        raise RunError(f"the processes could not be started: {error!r}") from error


def _start_method(torch_device: str | None) -> str:
    """Return the start method: fork from a server with everything imported, if that is safe."""
    gpus = torch_device != "cpu" and torch.cuda.is_available()
    return "spawn" if sys.platform != "linux" or gpus else "forkserver"


def _server_pid() -> int | None:
    """Return the pid of this program's fork server, if it has one. Python has no public function for it."""
    pid: int | None = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return pid


def _set_server_folder() -> None:
    """Put the fork server's socket into one of our folders: if the program is killed, multiprocessing's own folder
    would remain forever, and ours until the next program starts."""
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if config.get("tempdir") is None:
        folder = temporary_folder("evenpipe-server-")
        config["tempdir"] = str(folder.__enter__())
        multiprocessing.util.Finalize(None, folder.__exit__, (None, None, None), exitpriority=-100)


def _environment(rank: int, processes: int, store: Path) -> dict[str, str]:
    """Return the environment of a process: the caller's, plus the variables of torchrun except for its store."""
    loopback = "lo" if sys.platform == "linux" else "lo0"
    return {
        "OMP_NUM_THREADS": "1",
        **allocator_variables(),
        **os.environ,
        **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(processes)),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        STORE_FOLDER: str(store),
        **dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), loopback),  # no other machine needs to reach them
    }


class _Interrupted(BaseException):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _Handler:
    """Raises _Interrupted for the first signal that is not accepted."""

    def __init__(self) -> None:
        self.accept: Callable[[int], bool] = lambda number: False
        self._raised = False

    def __call__(self, number: int, _: FrameType | None) -> None:
        if not self._raised and not self.accept(number):
            self._raised = True  # another signal would interrupt the handling of this one
            raise _Interrupted(number)


@contextlib.contextmanager
def _without_main_file() -> Iterator[None]:
    """Keep new processes from importing the file that `__main__` names if it is "<stdin>", standard input."""
    main = vars(sys.modules["__main__"])
    if _main_can_be_imported() or "__file__" not in main:
        yield
        return
    file = main.pop("__file__")
    try:
        yield
    finally:
        main["__file__"] = file


def _first_cause(folder: Path, processes: int, first: Ending) -> InputError | RunError:
    """Return the error to raise, from the records of the processes and the ending of the first one."""
    board = Board(folder / "board", processes)
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("failure-*.json"))]
    records.sort(key=lambda record: record["rank"] != record["origin"])  # the culprit's own message first
    if not records and first.exit_code == UNGUARDED:
        return InputError(
            f"launch: {sys.modules['__main__'].__file__!r} calls it wherever it is imported, and the processes import "
            'it; expected the call under `if __name__ == "__main__":`'
        )
    culprit = records[0]["origin"] if records else first.rank
    if records and (records[0]["kind"] != "dead" or first.exit_code == EXIT_CODE):
        text = records[0]["text"]
        if records[0]["kind"] == "input":
            return _with_lines(InputError(text), records, board)
    else:
        how = first.why or f"ended with exit code {first.exit_code}"
        if not first.why and first.exit_code < 0:
            how = f"was killed by signal {-first.exit_code} ({signal.Signals(-first.exit_code).name})"
        text = f"{process(first.rank, first.pid, board.position(first.rank))} {how}"
    for rank in range(processes):
        if rank != culprit and (waiting := board.read(rank)):
            text += f"; {process(rank, position=board.position(rank))} was awaiting {waiting}"
            break
    if first.exit_code == -signal.SIGABRT and any(board.read(rank).startswith(AWAITED) for rank in range(processes)):
        text += f"; {ABORTED}"
    error = RunError(text)
    if records and records[0]["rank"] == culprit:
        details = "\n".join(filter(None, (records[0]["line"], records[0]["traceback"])))
        error.add_note(f"in {process(culprit, position=board.position(culprit))}:\n{details}")
    return error


def _with_lines(error: InputError, records: Sequence[dict[str, Any]], board: Board) -> InputError:
    """Add a note for each line of the user's program where processes raised this error themselves."""
    ranks_by_line: dict[str, list[int]] = {}
    for record in records:
        if record["line"] and record["raised"] == str(error):
            ranks_by_line.setdefault(record["line"], []).append(record["rank"])
    for line, ranks in ranks_by_line.items():
        who = (
            process(ranks[0], position=board.position(ranks[0])) if len(ranks) == 1 else names.processes(sorted(ranks))
        )
        error.add_note(f"in {who}:\n{line}")
    return error


# -- a process --------------------------------------------------------------------------------------------------------


def _process(work: bytes, environment: dict[str, str], folder: Path, limits: dict[str, Any], parent: int) -> None:
    """Run one process. Returns on success, otherwise exits by os._exit."""
    os.environ.clear()  # a fork server has the environment from when it was started
    os.environ.update(environment)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    _end_with_parent(parent)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].split(",")[0]))
    rank = int(os.environ["RANK"])
    watch: Watch | None = None
    known: Cause | None = None

    def note(cause: Cause) -> None:
        nonlocal known
        known = cause
        _record(folder, rank, known)

    try:
        board = Board(folder / "board", int(os.environ["WORLD_SIZE"]))
        watch = start_worker(**limits, owner=Owner(note), board=board).watch
        function, arguments = pickle.loads(work)
        result = _dumps(function(*arguments))
        (folder / f"result-{rank}").write_bytes(result)
        finish_worker()
    except BaseException as error:
        if watch is not None:
            watch.report_exception(error)
        _record(folder, rank, known or cause_of(error, rank), error)
        _flush()
        os._exit(error.exit_code if isinstance(error, InputError) else EXIT_CODE)
    _flush()
    atexit.register(os._exit, 0)  # the interpreter's normal exit takes 1.5 s with torch loaded


def _end_with_parent(parent: int) -> None:
    """End this process when the caller, or the fork server, is killed.

    parent: pid of the process that started this one. The kernel ends this process with its parent, even when it is
    stopped. A fork server lives as long as any of its processes, so a thread also waits for the end of the caller.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent has ended already
            os._exit(EXIT_CODE)
    caller = multiprocessing.parent_process()
    assert caller is not None

    def end_with_caller() -> None:
        caller.join()
        os._exit(EXIT_CODE)

    threading.Thread(target=end_with_caller, name="evenpipe-parent", daemon=True).start()


def _record(folder: Path, rank: int, cause: Cause, error: BaseException | None = None) -> None:
    """Write for the parent how this process failed. A second record, with the exception, replaces the first."""
    record = {
        "rank": rank,
        "origin": cause.origin,
        "kind": cause.kind,
        "text": cause.text,
        "traceback": "" if error is None else "".join(traceback.format_exception(error)),
        "line": "" if error is None else user_line(error),
        "raised": "" if error is None else str(error),
    }
    temporary = folder / f"failure-{rank}-{threading.get_ident()}.part"
    with contextlib.suppress(OSError):  # disk full: the launcher still sees the exit code
        temporary.write_text(json.dumps(record))
        temporary.rename(folder / f"failure-{rank}.json")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
