"""What processes tell each other: beats, what they wait for, and why a run ended. Data only, no decisions."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from evenpipe.errors import InputError, RunError


@dataclass(frozen=True, slots=True)
class Cause:
    """Why the run ended, as the first process to notice wrote it."""

    kind: str
    """One of "input" (the user's mistake), "exception", "dead", "silent", "left" (ended without an error while needed),
    "stuck" (all live, but a wait timed out)."""
    origin: int
    """The process at fault; -1 for who started them."""
    text: str
    """One sentence; for "input" the text of the InputError itself."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a main thread waits for."""

    what: str
    needed_by: str
    communicator: str
    peers: tuple[int, ...]

    def __str__(self) -> str:
        for_pass = f" for {self.needed_by}" if self.needed_by else ""
        return f"{self.what}{for_pass} from {processes(self.peers)}"


@dataclass(frozen=True, slots=True)
class Beat:
    """What a process tells the others."""

    count: int
    machine: str
    pid: int
    started: str
    waiting: Waiting | None = None
    done: bool = False

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str) -> Beat:
        fields = json.loads(text)
        if waiting := fields.pop("waiting"):
            waiting = Waiting(**(waiting | {"peers": tuple(waiting["peers"])}))
        return Beat(waiting=waiting, **fields)


class Board:
    """A small mapped file in which each process shows what it waits for, readable when all have been killed."""

    WIDTH = 256

    def __init__(self, path: Path, world_size: int) -> None:
        """Opens the board, or makes it if there is none."""
        if not path.exists():
            path.write_bytes(bytes(self.WIDTH * world_size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), self.WIDTH * world_size)

    def show(self, rank: int, waiting: Waiting) -> None:
        text = str(waiting).encode()[: self.WIDTH]
        self._memory[rank * self.WIDTH : (rank + 1) * self.WIDTH] = text.ljust(self.WIDTH, b"\0")

    def clear(self, rank: int) -> None:
        self._memory[rank * self.WIDTH] = 0

    def read(self, rank: int) -> str:
        """What that process waits for, or waited for when it ended; empty if for nothing."""
        return self._memory[rank * self.WIDTH : (rank + 1) * self.WIDTH].partition(b"\0")[0].decode(errors="replace")


def cause_of(error: BaseException, rank: int) -> Cause:
    """The cause that an exception of process `rank` is to the others."""
    if isinstance(error, InputError):
        return Cause("input", rank, str(error))
    if isinstance(error, RunError):
        return Cause("exception", rank, str(error))
    return Cause("exception", rank, f"process {rank} failed: {type(error).__name__}: {error}")


def processes(ranks: Sequence[int]) -> str:
    """As "process 2" or "processes 0, 1, 3"; at most eight by number."""
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"process{'' if len(ranks) == 1 else 'es'} {', '.join(map(str, ranks[:8]))}{more}"


def machine() -> str:
    """Equal for processes that see each other's pids, and only for those: containers of one host may not."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return f"no /proc, process {os.getpid()}"


def started(pid: int) -> str | None:
    """When that process started, in the kernel's ticks; None if it is no more. With the pid it is unique."""
    state, ticks = _state(pid)
    return None if state in "ZX" else ticks


def is_stopped(pid: int) -> bool:
    """Whether that process has been stopped by a signal. It hears none but SIGCONT and SIGKILL."""
    return _state(pid)[0] == "T"


def _state(pid: int) -> tuple[str, str]:
    """The kernel's letter for what a process does, X if it is no more, and when it started."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", ""
    return after_name[0], after_name[19]
