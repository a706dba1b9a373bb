"""Machines that lose each other: two network namespaces with a cable between them, two processes on each.

Namespaces are made and removed here, hold nothing but the two ends of the cable, and reach nothing else.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import process_groups

HERE = Path(__file__).resolve().parent

PROCESSES = 4
ADDRESSES = ("10.231.77.1", "10.231.77.2")
NOWHERE = "02:00:00:00:77:77"
"""An address of no card: what is sent to it is lost."""

START_SECONDS = 300.0
"""Time for all to start and take three steps, on a machine that may be busy."""

LATE_SECONDS = 5.0
"""By so much may the end of all processes come after the limit of a wait."""


class Cable:
    """Two namespaces, joined. Machine 0 holds torchrun's store."""

    def __init__(self, name: str) -> None:
        self.machines = (f"{name}-0", f"{name}-1")
        self._ends = ("cable0", "cable1")

    def __enter__(self) -> Cable:
        try:
            for machine in self.machines:
                _ip("netns", "add", machine)
            first, second = self._ends
            _ip("-n", self.machines[0], "link", "add", first, "type", "veth", "peer", second, "netns", self.machines[1])
            for machine, end, address in zip(self.machines, self._ends, ADDRESSES, strict=True):
                _ip("-n", machine, "address", "add", f"{address}/24", "dev", end)
                _ip("-n", machine, "link", "set", "lo", "up")
                _ip("-n", machine, "link", "set", end, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for machine in self.machines:
            subprocess.run(["ip", "netns", "delete", machine], check=False, capture_output=True)

    def down(self) -> None:
        _ip("-n", self.machines[0], "link", "set", self._ends[0], "down")

    def up(self) -> None:
        _ip("-n", self.machines[0], "link", "set", self._ends[0], "up")

    def deafen(self, machine: int) -> None:
        """Loses all that this machine is sent; what it sends arrives."""
        other = 1 - machine
        given = ["lladdr", NOWHERE, "nud", "permanent", "dev", self._ends[other]]
        _ip("-n", self.machines[other], "neighbour", "replace", ADDRESSES[machine], *given)

    def command(self, machine: int) -> list[str]:
        """What to put before a command that is to run on that machine."""
        return ["ip", "netns", "exec", self.machines[machine]]


@cache
def why_not() -> str | None:
    """Why no namespaces can be made here, or None."""
    try:
        with Cable(f"evenpipe-try-{os.getpid()}"):
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        return f"no network namespaces can be made here ({reason.strip()})"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@dataclass(frozen=True)
class Scenario:
    """What happens to four processes on two machines while they train."""

    name: str
    happens: Callable[[Cable, list[subprocess.Popen[bytes]]], None]
    says: tuple[str, ...] = ()
    """What each process must say, as patterns; () where the run has to go on to its end."""
    silence_seconds: float = 4.0
    timeout_seconds: float = 20.0


NO_SIGN = r"process [23] gave no sign of life for"
LOST_STORE = rf"the launcher cannot be reached: the store at {re.escape(ADDRESSES[0])}:\d+ has not answered for"
CUT = (NO_SIGN, NO_SIGN, LOST_STORE, LOST_STORE)
AWAITED = r".*process \d was awaiting .* from process"


def _down_for(seconds: float) -> Callable[[Cable, object], None]:
    def happens(cable: Cable, _: object) -> None:
        cable.down()
        time.sleep(seconds)
        cable.up()

    return happens


SCENARIOS = (
    Scenario("the link fails for a moment", _down_for(1.0)),
    Scenario("the link fails", lambda cable, _: cable.down(), CUT),
    Scenario("the link comes back too late", _down_for(12.0), CUT),
    Scenario("machine 0 hears nothing", lambda cable, _: cable.deafen(0), CUT),
    Scenario("machine 1 hears nothing", lambda cable, _: cable.deafen(1), CUT),
    Scenario(
        "the launcher with the store is stopped",
        lambda _, launchers: launchers[0].send_signal(signal.SIGSTOP),
        (LOST_STORE,) * 4,
    ),
    Scenario(
        "the link fails, and silence may last",
        lambda cable, _: cable.down(),
        (r"timed out awaiting .* from process",) * PROCESSES,
        silence_seconds=60.0,
        timeout_seconds=8.0,
    ),
)


@dataclass
class Report:
    """How a scenario ended."""

    scenario: Scenario
    seconds: float = 0.0
    """From the fault to the end of the last process of the run; torchrun's own are not counted."""
    said: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


def play(scenario: Scenario) -> Report:
    """Runs a scenario and judges it. Leaves no process and no namespace behind."""
    report = Report(scenario)
    with (
        tempfile.TemporaryDirectory(prefix="evenpipe-network-") as name,
        Cable(f"evenpipe-{os.getpid()}") as cable,
        _launchers(cable, Path(name), scenario) as launchers,
    ):
        folder = Path(name)
        pids = _pids_of_all_that_train(folder, launchers, report)
        if pids:
            at = time.monotonic()
            scenario.happens(cable, launchers)
            _judge(scenario, folder, pids, at, report)
    return report


def environment(machine: int) -> dict[str, str]:
    """Of what is started on that machine."""
    own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": f"cable{machine}"}
    return os.environ | own | {"PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)])}


@contextlib.contextmanager
def _launchers(cable: Cable, folder: Path, scenario: Scenario) -> Iterator[list[subprocess.Popen[bytes]]]:
    """torchrun on both machines. At the end all that they started is killed."""
    limits = [str(scenario.silence_seconds), str(scenario.timeout_seconds)]
    with contextlib.ExitStack() as stack:
        stack.callback(kill_written, folder)
        started = []
        for machine in range(2):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={machine}"]
            torchrun += [f"--nproc-per-node={PROCESSES // 2}", f"--master-addr={ADDRESSES[0]}", "--master-port=29511"]
            printed = stack.enter_context((folder / f"launcher-{machine}").open("wb"))
            command = [*cable.command(machine), *torchrun, str(HERE / "network_program.py"), str(folder), *limits]
            options = {"env": environment(machine), "stdout": printed, "stderr": printed}
            started.append(stack.enter_context(process_groups.running(command, **options)))
        yield started


def kill_written(folder: Path) -> None:
    for pid in written_pids(folder).values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _pids_of_all_that_train(
    folder: Path, launchers: list[subprocess.Popen[bytes]], report: Report
) -> dict[int, int] | None:
    """The processes by rank, once all have taken three steps."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and all(launcher.poll() is None for launcher in launchers):
        steps = [folder / f"step-{rank}" for rank in range(PROCESSES)]
        if all(step.exists() and int(step.read_text() or 0) >= 3 for step in steps):
            return written_pids(folder)
        time.sleep(0.05)
    report.complaints.append(f"the run did not start: {(folder / 'launcher-0').read_text()[-500:]}")
    return None


def written_pids(folder: Path) -> dict[int, int]:
    return {int(file.name[4:]): int(file.read_text() or 0) for file in folder.glob("pid-*")}


def _judge(scenario: Scenario, folder: Path, pids: dict[int, int], at: float, report: Report) -> None:
    limit = scenario.timeout_seconds + LATE_SECONDS
    if not scenario.says:
        before = int((folder / "step-0").read_text())
        until(lambda: int((folder / "step-0").read_text() or 0) > before + 20, at + limit)
        (folder / "end").touch()
    until(lambda: not any(alive(pid) for pid in pids.values()), at + limit)
    report.seconds = time.monotonic() - at
    late = [rank for rank, pid in pids.items() if alive(pid)]
    if late:
        report.complaints.append(f"processes {late} still run {limit:g} s after the fault")
    for rank in range(PROCESSES):
        text = (folder / f"printed-{rank}").read_text(errors="replace")
        if not scenario.says:
            if not (folder / f"done-{rank}").exists():
                report.complaints.append(f"process {rank} did not come to its end: {text[-300:]!r}")
            continue
        said = re.search(f"[^\n]*(?:{scenario.says[rank]})[^\n]*", text)
        report.said.append("" if said is None else said[0])
        if said is None:
            last = (text.strip().splitlines() or ["nothing"])[-1]
            report.complaints.append(f"process {rank} does not say {scenario.says[rank]!r} but {last!r}")
        elif not re.search(f"{NO_SIGN}|{AWAITED}|timed out awaiting .* from process", said[0]):
            report.complaints.append(f"process {rank} names no peer: {said[0]!r}")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until(holds: Callable[[], bool], deadline: float) -> None:
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
