"""Starts several processes on this machine, runs a function in each, brings back results or the first cause of failure.

    losses = launch(train, "config.toml", processes=4)

By torch's elastic launcher with one attempt: the processes find the same environment as under torchrun. On a machine
without GPUs they are forked from a server that has imported torch and transformers once (a second launch from the same
program finds it ready); CUDA does not survive a fork, so with GPUs each process starts afresh.

What a process returned, or how it failed, goes through a file of its own. When one fails the launcher ends the others;
which of them was at fault is settled among them beforehand, by the watch.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from evenpipe.errors import InputError, RunError
from evenpipe.runtime.signs import Board, Cause, cause_of
from evenpipe.runtime.watch import EXIT_CODE, Watch
from evenpipe.runtime.worker import SILENCE_SECONDS, TIMEOUT_SECONDS, finish_worker, initialise_worker, start_worker

__all__ = ["initialise_worker", "launch", "prepare_launch"]

PRELOAD = ("torch.distributed", "transformers.modeling_utils", "evenpipe.runtime.worker")

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""The launcher handles these itself while it runs."""

FROM_THE_AGENT = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
    *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCHELASTIC_ERROR_FILE"),
)
"""Environment variables that each process gets from the launcher; the others are the caller's."""


def launch(
    function: Callable[..., Any],
    *arguments: Any,
    processes: int,
    timeout_seconds: float = TIMEOUT_SECONDS,
    silence_seconds: float = SILENCE_SECONDS,
    torch_device: str | None = None,
    preload: Sequence[str] = (),
) -> list[Any]:
    """Runs `function(*arguments)` in `processes` new processes of this machine; returns their results in rank order.

    In each, the default process group is open (see `initialise_worker`), torch uses one thread unless OMP_NUM_THREADS
    says otherwise, and Ctrl-C ends it at once.

    function: importable by name: at the top level of a module. It, its arguments and its results travel by pickle.
    timeout_seconds: limit of a wait among live processes.
    silence_seconds: a process without a sign of life for this long is given up.
    torch_device: "cpu" or "cuda"; default: a GPU where there is one.
    preload: as in `prepare_launch`, which may have been called before.

    Raises:
        InputError: `function` raised one, or an argument of launch is wrong. Same text.
        RunError: anything else that ended a process: the first cause, with the traceback of the process as a note.
        KeyboardInterrupt: Ctrl-C. SystemExit: SIGTERM, SIGHUP or SIGQUIT. All processes are gone by then.
    """
    if "RANK" in os.environ:
        raise InputError(
            f"launch: this is already process {os.environ['RANK']} of a launched group (environment variable RANK), "
            "expected a program that is not; call the function itself"
        )
    if processes < 1:
        raise InputError(f"processes: {processes}, expected at least 1")
    try:
        work = pickle.dumps((function, arguments))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InputError(
            f"launch: the function and its arguments cannot be pickled ({error}), expected a function at the top level "
            "of a module and arguments of plain types"
        ) from error
    limits = {"timeout_seconds": timeout_seconds, "silence_seconds": silence_seconds, "torch_device": torch_device}
    with tempfile.TemporaryDirectory(prefix="evenpipe-launch-") as name, _elastic_as_a_guest():
        folder = Path(name)
        Board(folder / "board", processes)
        prepare_launch(*preload, torch_device=torch_device)
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id="evenpipe",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            start_method=_start_method(torch_device),
            logs_specs=DefaultLogsSpecs(log_dir=name),
            shutdown_timeout=5,
        )
        try:
            elastic_launch(config, _process)(work, dict(os.environ), folder, limits)
        except ChildFailedError as failed:
            raise _first_cause(folder, processes, failed.failures) from None
        except (SignalException, KeyboardInterrupt) as interrupted:
            number = getattr(interrupted, "sigval", signal.SIGINT)
            if not (folder / "started").exists() and (server := _server_pid()):
                os.kill(server, signal.SIGKILL)  # it is in its imports, and would go on with them
            if number == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + number) from None
        except (OSError, EOFError) as error:
            raise RunError(f"the processes could not be started: {error!r}") from error
        return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(processes)]


def prepare_launch(*modules: str, torch_device: str | None = None) -> None:
    """Lets a server begin in the background to import what the processes of a later `launch` will need.

    Worth calling early: four imports of torch and transformers take 12 s on two cores; one takes 3 s, which pass
    while the caller does something else. With GPUs it does nothing.

    modules: names of more modules to import, beside torch, transformers and evenpipe.
    """
    if _start_method(torch_device) != "forkserver":
        return
    multiprocessing.set_forkserver_preload([*PRELOAD, *modules])
    before, threads = signal.getsignal(signal.SIGINT), os.environ.get("OMP_NUM_THREADS")
    try:
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server keeps it: no traceback from its imports
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        multiprocessing.forkserver.ensure_running()
    finally:
        if threads is None:
            del os.environ["OMP_NUM_THREADS"]
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGINT, before)


# -- the parent -------------------------------------------------------------------------------------------------------


def _start_method(torch_device: str | None) -> str:
    """Fork from a server that has imported everything, where that is safe."""
    gpus = torch_device != "cpu" and torch.cuda.is_available()
    return "spawn" if sys.platform != "linux" or gpus else "forkserver"


def _server_pid() -> int | None:
    """The fork server of this program, if it has one. Python tells nobody."""
    return getattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", None)


@contextlib.contextmanager
def _elastic_as_a_guest() -> Iterator[None]:
    """Undoes what the elastic launcher leaves behind in this process (signal handlers, environment), and keeps it
    quiet: it logs the traceback of a failed process at length, and we say what happened in one sentence."""
    environment = dict(os.environ)
    handlers = _handlers()
    loggers = [
        logger
        for name, logger in logging.root.manager.loggerDict.items()
        if isinstance(logger, logging.Logger)
        and name.startswith(("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing"))
        and not logger.disabled
    ]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger in loggers:
            logger.disabled = False
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for key in set(os.environ) - set(environment):
            del os.environ[key]
        os.environ.update(environment)


def _handlers() -> dict[signal.Signals, Any]:
    """The signal handlers to put back. Empty outside the main thread, where the launcher does not touch them either."""
    try:
        return {number: signal.signal(number, signal.getsignal(number) or signal.SIG_DFL) for number in SIGNALS}
    except ValueError:
        return {}


def _first_cause(folder: Path, processes: int, failures: Mapping[int, ProcessFailure]) -> InputError | RunError:
    """The error to raise, from what the processes wrote down and from how the launcher saw the first of them end."""
    board = Board(folder / "board", processes)
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("failure-*.json"))]
    records.sort(key=lambda record: record["rank"] != record["origin"])  # the culprit's own words first
    rank, failure = min(failures.items())
    if records and (records[0]["kind"] != "dead" or failure.exitcode == EXIT_CODE):
        text = records[0]["text"]
        if records[0]["kind"] == "input":
            return InputError(text)
    elif failure.exitcode < 0:
        text = f"process {rank} (pid {failure.pid}) was killed by signal {-failure.exitcode} ({failure.signal_name()})"
    else:
        text = f"process {rank} (pid {failure.pid}) ended with exit code {failure.exitcode}"
    culprit = records[0]["origin"] if records else rank
    for other in range(processes):
        if other != culprit and (waiting := board.read(other)):
            text += f"; process {other} was awaiting {waiting}"
            break
    error = RunError(text)
    if records and records[0]["rank"] == culprit:
        error.add_note(f"in process {culprit}:\n{records[0]['traceback']}")
    return error


# -- a process --------------------------------------------------------------------------------------------------------


def _process(work: bytes, environment: dict[str, str], folder: Path, limits: dict[str, Any]) -> None:
    """The whole life of one process. Returns when all is well, and leaves by os._exit when not."""
    from_agent = {key: os.environ[key] for key in FROM_THE_AGENT if key in os.environ}
    os.environ.clear()  # a fork server has the environment of the time when it was started
    os.environ.update(environment | from_agent)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_with_the_parent, name="evenpipe-parent", daemon=True).start()
    (folder / "started").touch()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].split(",")[0]))
    rank = int(os.environ["RANK"])
    watch: Watch | None = None

    def note(watch: Watch) -> None:
        assert watch.cause is not None
        _record(folder, rank, watch.cause)

    try:
        board = Board(folder / "board", int(os.environ["WORLD_SIZE"]))
        watch = start_worker(**limits, on_cause=note, board=board).watch
        function, arguments = pickle.loads(work)
        result = pickle.dumps(function(*arguments))
        (folder / f"result-{rank}").write_bytes(result)
        finish_worker()
    except BaseException as error:
        if watch is not None:
            watch.report_exception(error)
        cause = watch.cause if watch is not None and watch.cause is not None else cause_of(error, rank)
        _record(folder, rank, cause, error)
        _flush()
        os._exit(error.exit_code if isinstance(error, InputError) else EXIT_CODE)
    _flush()
    atexit.register(os._exit, 0)  # the interpreter's own way out takes 1.5 s with torch loaded


def _end_with_the_parent() -> None:
    """Leaves no process behind when the caller is killed: a fork server would live on, and its processes with it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(EXIT_CODE)


def _record(folder: Path, rank: int, cause: Cause, error: BaseException | None = None) -> None:
    """Writes down how this process failed, for the parent. The second time, with the exception, replaces the first."""
    record = {
        "rank": rank,
        "origin": cause.origin,
        "kind": cause.kind,
        "text": cause.text,
        "traceback": "" if error is None else "".join(traceback.format_exception(error)),
    }
    part = folder / f"failure-{rank}-{threading.get_ident()}.part"
    with contextlib.suppress(OSError):  # no space left: the launcher still sees the exit code
        part.write_text(json.dumps(record))
        part.rename(folder / f"failure-{rank}.json")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
