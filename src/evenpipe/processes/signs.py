"""Messages between processes: heartbeats with pending waits, and why a run ended. Only data, no decisions.

Beats and causes come from a store (`store`) that strangers may also reach, so reading is strict: a text that no process
of this run would write is not a beat, and the message of another process is shown as a quotation.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evenpipe.errors import InputError, RunError
from evenpipe.given import plain_lines, shortened
from evenpipe.processes.names import process, processes

KINDS = ("input", "exception", "dead", "silent", "left", "stuck")

LAUNCHER = -1
"""Instead of a rank: the cause comes from the process that started the others."""

TEXT_LENGTH = 4000
"""Longest sentence of another process that is shown."""

NAME_LENGTH = 1000
"""Longest name of a machine, pass or communicator."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why the run ended, as written by the first process to notice."""

    kind: str
    """One of KINDS: "input" (the user's mistake), "exception", "dead", "silent", "left" (ended without an error while
    needed), "stuck" (all live, but a wait timed out)."""
    origin: int
    """The process at fault; LAUNCHER for the process that started them."""
    text: str
    """One sentence; for "input" the text of the InputError itself."""
    witness: int | None = None
    """The process that wrote the text, if it was read from a store."""

    def __str__(self) -> str:
        """Return the text, with its author if it does not begin with the name of a process."""
        if self.witness is None or self.text.startswith(("process ", "the launcher ")):
            return self.text
        return f"{process(self.witness)} said: {self.text}"

    def dump(self, rank: int) -> str:
        """Return the cause for the others, as written by process `rank`."""
        return json.dumps(asdict(self) | {"witness": rank})

    @staticmethod
    def load(text: str, world_size: int) -> Cause:
        """Parse the result of `dump`. Any other text becomes a cause that says so."""
        try:
            kind, origin, message, witness = _values(_parsed(text), "kind", "origin", "text", "witness")
            origin, witness = _number(origin, LAUNCHER, world_size - 1), _number(witness, 0, world_size - 1)
            return Cause(_one_of(kind, KINDS), origin, safe_text(_text(message, None)), witness)
        except ValueError:
            return Cause("dead", LAUNCHER, "the store of the run has a cause that no process of the run has written")


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a main thread waits for."""

    label: str
    needed_by: str
    communicator: str
    peers: tuple[int, ...]

    def __str__(self) -> str:
        for_pass = f" for {self.needed_by}" if self.needed_by else ""
        return f"{self.label}{for_pass} from {processes(self.peers)}"


@dataclass(frozen=True, slots=True)
class Beat:
    """The content of a heartbeat."""

    count: int
    machine: str
    pid: int
    started: str
    waiting: Waiting | None = None
    done: bool = False

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str, world_size: int) -> Beat | None:
        """Parse the result of `dump`; None for any other text."""
        try:
            count, machine, pid, started, waiting, done = _values(
                _parsed(text), "count", "machine", "pid", "started", "waiting", "done"
            )
            return Beat(
                _number(count, 0, 1 << 62),
                _text(machine),
                _number(pid, 1, 1 << 31),
                _text(started),
                None if waiting is None else _waiting(waiting, world_size),
                _one_of(done, (False, True)),
            )
        except ValueError:
            return None


def _waiting(fields: Any, world_size: int) -> Waiting:
    label, needed_by, communicator, peers = _values(fields, "label", "needed_by", "communicator", "peers")
    if not isinstance(peers, list) or len(peers) > world_size:
        raise ValueError
    numbers = tuple(_number(peer, 0, world_size - 1) for peer in peers)
    return Waiting(_text(label), _text(needed_by), _text(communicator), numbers)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError from None


def _values(fields: Any, *names: str) -> list[Any]:
    """Return the values of a table with exactly these names."""
    if not isinstance(fields, dict) or set(fields) != set(names):
        raise ValueError
    return [fields[name] for name in names]


def _number(value: Any, minimum: int, maximum: int) -> int:
    if type(value) is not int or not minimum <= value <= maximum:
        raise ValueError
    return value


def _text(value: Any, length: int | None = NAME_LENGTH) -> str:
    """Return a printable string of at most `length`; None: any string."""
    if not isinstance(value, str) or (length is not None and (len(value) > length or not value.isprintable())):
        raise ValueError
    return value


def _one_of(value: Any, values: Sequence[Any]) -> Any:
    if not any(type(value) is type(allowed) and value == allowed for allowed in values):
        raise ValueError
    return value


class Board:
    """A small mapped file in which each process shows its position and its wait, readable even after all have been
    killed."""

    WIDTH, POSITION_WIDTH = 448, 64

    def __init__(self, path: Path, world_size: int) -> None:
        """Open the board; create it if it does not exist."""
        size = (self.WIDTH + self.POSITION_WIDTH) * world_size
        if not path.exists():
            path.write_bytes(bytes(size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), size)
        self._positions_start = self.WIDTH * world_size

    def show(self, rank: int, waiting: Waiting) -> None:
        self._write(rank * self.WIDTH, self.WIDTH, str(waiting))

    def clear(self, rank: int) -> None:
        self._memory[rank * self.WIDTH] = 0

    def read(self, rank: int) -> str:
        """Return what that process waits for, or waited for when it ended; empty if it did not wait."""
        return self._read(rank * self.WIDTH, self.WIDTH)

    def show_position(self, rank: int, position: str) -> None:
        self._write(self._positions_start + rank * self.POSITION_WIDTH, self.POSITION_WIDTH, position)

    def position(self, rank: int) -> str:
        """Return the position of that process in its pipeline, as in `names`; empty if it has none."""
        return self._read(self._positions_start + rank * self.POSITION_WIDTH, self.POSITION_WIDTH)

    def _write(self, start: int, width: int, text: str) -> None:
        self._memory[start : start + width] = text.encode()[:width].ljust(width, b"\0")

    def _read(self, start: int, width: int) -> str:
        return self._memory[start : start + width].partition(b"\0")[0].decode(errors="replace")


def safe_text(text: str) -> str:
    """Return the message of another process, safe for a terminal."""
    return shortened(plain_lines(text), TEXT_LENGTH)


def cause_of(error: BaseException, rank: int) -> Cause:
    """Return the cause to report to the others for an exception of process `rank`."""
    if isinstance(error, InputError):
        return Cause("input", rank, str(error))
    if isinstance(error, RunError):
        return Cause("exception", rank, str(error))
    text = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    return Cause("exception", rank, f"{process(rank)} failed: {text}")


def machine_id() -> str:
    """Return an id that two processes share exactly if they see each other's pids: containers on a host may not."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return f"no /proc, process {os.getpid()}"


def start_time(pid: int) -> str | None:
    """Return when that process started, in kernel ticks; None if it has ended. Unique together with the pid."""
    state, ticks = _state(pid)
    return None if state in "ZX" else ticks


def is_stopped(pid: int) -> bool:
    """Return whether that process has been stopped by a signal. It then reacts only to SIGCONT and SIGKILL."""
    return _state(pid)[0] == "T"


def _state(pid: int) -> tuple[str, str]:
    """Return the kernel's letter for the state of a process, X if it has ended, and its start time."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", ""
    return after_name[0], after_name[19]


def siblings() -> dict[int, int]:
    """Return the pids, by rank, of the processes that torchrun's agent, the parent of this one, started for the same
    run, according to the kernel. Ranks come from the environment that the agent gave to the processes."""
    run, pids = os.environ.get("TORCHELASTIC_RUN_ID"), {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent != os.getppid() or int(entry.name) == os.getpid():
                continue
            pairs = (pair.partition(b"=") for pair in (entry / "environ").read_bytes().split(b"\0"))
            variables = {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
        except OSError:  # it has ended, or belongs to another user
            continue
        if run is not None and variables.get("TORCHELASTIC_RUN_ID") == run and variables.get("RANK", "").isdecimal():
            pids[int(variables["RANK"])] = int(entry.name)
    return pids
