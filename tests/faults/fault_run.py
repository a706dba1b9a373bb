"""Runs one case and judges how it ended."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import fault_program
import process_groups
from fault_case import FAULTS, Case

from evenpipe.errors import InputError, RunError
from evenpipe.processes.launcher import launch, prepare_launch

MARK = "EVENPIPE_FAULT_MARK"
"""In the environment of everything that these runs start."""

LIMIT_SECONDS = 20.0
"""From the fault to the end of all processes; where nothing but the limit of a wait can tell, from the end of that.
Every way in which this could go wrong takes 30 s or more: limits of torch's launcher and of waits."""

SHARE_OF_START = 0.5
"""A machine on which a run takes long until its fault is busy: by this share of that time it may end later. Elsewhere
that is less than 10 s."""

HARD_LIMIT_SECONDS = 150.0
"""Until a run that does not end is killed. Starting takes 10 to 20 s of it on a busy machine, under torchrun."""

HERE = Path(__file__).resolve().parent

PRELOAD = (
    "evenpipe.checkpoints.checkpoint",
    "evenpipe.runtime.pipeline",
    "transformers.models.llama.modeling_llama",
    "fault_program",
)


@dataclass(frozen=True)
class Verdict:
    """How a case ended."""

    case: Case
    seconds: float
    """From the fault to the end of all."""
    place: str
    """Where exactly it happened."""
    message: str
    """What whoever started the processes was told, or one of the others said."""
    complaints: tuple[str, ...]
    """What was not as it should be."""


def mark() -> None:
    """Marks this program's future processes. Before anything is started."""
    os.environ.setdefault(MARK, uuid.uuid4().hex)


def run(case: Case) -> Verdict:
    """Runs a case. Leaves no process behind, even where evenpipe does."""
    mark()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="evenpipe-fault-") as name:
        folder = Path(name)
        given = {fault_program.CASE: case.dump(), fault_program.FOLDER: name, "OMP_NUM_THREADS": "1"}
        with mock.patch.dict(os.environ, given):
            by = _by_launch if case.started_by == "launch" else _by_torchrun
            message, complaints = by(case, folder)
        ended = time.monotonic()
        left = _left_behind()
        complaints += [f"left behind: {line}" for line in left.values()]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        if not (folder / "fault").exists():
            return Verdict(case, 0.0, "", message, (*complaints, "the fault never happened"))
        at, _, place = (folder / "fault").read_text().partition(" ")
        seconds = ended - float(at) - _known_seconds(case)
        limit = LIMIT_SECONDS + SHARE_OF_START * (float(at) - begun)
        if seconds > limit:
            complaints.append(f"it took {seconds:.1f} s; expected at most {limit:.1f} s")
        return Verdict(case, seconds, place, message, tuple(complaints))


def _by_launch(case: Case, folder: Path) -> tuple[str, list[str]]:
    with mock.patch.dict(os.environ, PYTHONPATH=_path()):  # all that Python's fork server knows of where modules are
        prepare_launch(*PRELOAD)
    watchdog = subprocess.Popen(
        [sys.executable, "-c", f"import os, time; time.sleep({HARD_LIMIT_SECONDS}); os.kill({os.getpid()}, 15)"]
    )
    try:
        launch(
            fault_program.train,
            case,
            folder,
            processes=case.processes,
            timeout_seconds=fault_program.timeout_seconds(case),
            silence_seconds=fault_program.SILENCE_SECONDS,
            start_seconds=fault_program.START_SECONDS,
            torch_device="cpu",
            preload=PRELOAD,
        )
    except (InputError, RunError) as error:
        found, message = error, str(error)
    except SystemExit:
        return "", ["launch did not end"]
    else:
        return "", ["launch returned without an error"]
    finally:
        watchdog.kill()
        watchdog.wait()
    complaints = []
    if type(found) is not (InputError if case.how == "InputError" else RunError):
        complaints.append(f"launch raised {type(found).__name__}")
    if not re.search("|".join(_expected(case)), message):
        complaints.append(f"launch does not say {_expected(case)[1]!r}")
    others = _others(case, folder)
    all_waited = bool(others) and all(_waits(folder, rank) for rank in others)
    if all_waited and " awaiting " not in message and case.how != "InputError":  # whose text is the user's alone
        complaints.append("launch does not say what was awaited")
    return message, complaints


def _by_torchrun(case: Case, folder: Path) -> tuple[str, list[str]]:
    program = [str(HERE / "fault_program.py")]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={case.processes}"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    environment = os.environ | {"PYTHONPATH": _path()}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = process_groups.start(command + program, env=environment, **quiet)
    try:
        exit_code = started.wait(HARD_LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        process_groups.kill(started)
        return "", ["torchrun did not end"]
    complaints = [] if exit_code else ["torchrun ended with exit code 0"]
    message = ""
    files = {rank: folder / f"printed-{rank}" for rank in _others(case, folder)}
    printed = {rank: file.read_text(errors="replace") if file.exists() else "" for rank, file in files.items()}
    absent = _not_started("".join(printed.values()))
    for rank, text in printed.items():
        if rank in absent and not text:
            continue
        said = re.search(f"[^\n]*({'|'.join(_expected(case))})[^\n]*", text)
        if said is None:
            last = text.strip().splitlines()[-1:] or ["nothing"]
            complaints.append(f"process {rank} does not say {_expected(case)[0]!r} but {last[0]!r}")
        else:
            message = said[0]
            awaited = rf"process {rank}( \([^()]*\))? was awaiting |timed out awaiting"
            if _waits(folder, rank) and not re.search(awaited, text):
                complaints.append(f"process {rank} does not say what it was awaiting")
    return message, complaints


def _not_started(text: str) -> set[int]:
    """Of whom others say that they had not even begun when torchrun ended them: they cannot say anything."""
    lists = re.findall(r"process(?:es)? ([\d, ]+) of \d had not started", text)
    return {int(rank) for ranks in lists for rank in ranks.split(", ")}


def _known_seconds(case: Case) -> float:
    """How long nobody can know of the fault: the limit of a wait, of silence, or of the start."""
    before_meeting = case.where == "start" and case.share < 0.25
    unseen = ("hangs", "freezes") if case.started_by == "launch" else ("hangs", "freezes", "SIGSTOP")
    if before_meeting and case.how in unseen:
        return fault_program.START_SECONDS
    waits = {"hangs": fault_program.HANG_SECONDS, "freezes": fault_program.SILENCE_SECONDS}
    return {"SIGSTOP": fault_program.SILENCE_SECONDS, **waits}.get(case.how, 0.0)


def _path() -> str:
    return os.pathsep.join([str(HERE), *filter(None, sys.path)])


def _expected(case: Case) -> tuple[str, ...]:
    """What may be said about the victim: by the others and by who started them, as patterns."""
    patterns = FAULTS[case.how]
    if case.where == "start" and case.share < 0.25:
        patterns = (*patterns, r"process(es)? (\d, )*V(, \d)* of \d (did not start within|had not started)")
    if case.where == "start" and case.how == "hangs":  # while it too has announced them
        patterns = (*patterns, "timed out awaiting the first connections")
    return tuple(_of_victim(case, pattern) for pattern in patterns)


def _of_victim(case: Case, pattern: str) -> str:
    """The pattern with the victim for V. With tensor ranks its place must be there too, if it has had a pipeline."""
    maybe = "?" if case.where in ("start", "build") else ""

    def name(found: re.Match[str]) -> str:
        if not case.place:
            return str(case.victim) + (found[1] or "")
        if found[1]:
            return rf"{case.victim} \(({case.place}, ){maybe}pid \d+\)"
        return rf"{case.victim}( \({case.place}\)){maybe}"

    return re.sub(r"\bV\b( \\\(pid \\d\+\\\))?", name, pattern)


def _others(case: Case, folder: Path) -> list[int]:
    """Those of whom a word is expected: not the victim, not a stopped one, not one that had done all its work."""
    return [
        rank
        for rank in range(case.processes)
        if rank not in (case.victim, case.also_stopped) and not (folder / f"done-{rank}").exists()
    ]


def _waits(folder: Path, rank: int) -> bool:
    """Whether that process ended in a wait of a transfer."""
    file = folder / f"waiting-{rank}"
    return file.exists() and file.read_bytes() == b"1"


def _left_behind() -> dict[int, str]:
    """Processes that carry the mark: command by pid. The fork server and Python's resource tracker are to stay."""
    wanted = f"{MARK}={os.environ[MARK]}".encode()
    left: dict[int, str] = {}
    deadline = time.monotonic() + 2.0  # what has just ended may take a moment to vanish
    while True:
        left.clear()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            helper = int(parent) == os.getpid() and ("forkserver" in command or "resource_tracker" in command)
            if wanted in variables and not helper and state not in "ZX":
                left[int(entry.name)] = f"{command[:80]} ({state})"
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)
