"""Attacks on real runs, and what has to be true afterwards: nobody else's code has run, nobody else's process was
killed, and the run has come to its right end, or to one that names the stranger.

The machine of the run is a network namespace; a second one, joined by a cable, is the stranger's. Namespaces are made
and removed here, and reach nothing else.
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
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import process_groups
from attacker import SENTENCE, WORDS
from network_case import ADDRESSES, HERE, START_SECONDS, Cable, alive, environment, kill_written, until

PROCESSES = 2
SECONDS = 6.0
"""How long a stranger tries once the run trains."""

ENDINGS = r"is not part of this run|timed out awaiting|process \d said|did not start|no process of the run has written"
"""How a run may end that a stranger has disturbed."""

PORT = 29511
"""Of torchrun's store, in the one case that has one."""


@dataclass(frozen=True)
class Attack:
    """Where the stranger is, when he begins, and how the run was started."""

    name: str
    machine: int
    """0: that of the run, as another user. 1: another one."""
    early: bool
    """He is there before the run begins, and not only once it trains."""
    torchrun: bool = False
    reaches: bool = True
    """Whether he can reach a port at all."""
    answers: int = 1
    """How many proofs he sends where he is taken for a peer. gloo aborts a process that gets more than one."""


ATTACKS = (
    Attack("another user of the machine, while it trains", 0, early=False),
    Attack("another user of the machine, from the start", 0, early=True),
    Attack("another user of the machine, who answers twice, from the start", 0, early=True, answers=2),
    Attack("another machine, while it trains", 1, early=False, reaches=False),
    Attack("another machine, under torchrun, while it trains", 1, early=False, torchrun=True),
    Attack("another machine, under torchrun, from the start", 1, early=True, torchrun=True),
)


@dataclass
class Result:
    attack: Attack
    reached: list[str] = field(default_factory=list)
    """What the stranger says."""
    ending: str = ""
    """The run's last words."""
    complaints: list[str] = field(default_factory=list)


def play(attack: Attack, loss: float) -> Result:
    """Runs an attack and judges it. loss: of the same training in one process."""
    result = Result(attack)
    with (
        tempfile.TemporaryDirectory(prefix="evenpipe-attack-") as name,
        Cable(f"evenpipe-{os.getpid()}") as cable,
        _unrelated() as unrelated,
    ):
        base = Path(name)
        base.chmod(0o755)  # all may come this far; the run's own folder is no secret either
        folder, open_to_all = base / "run", base / "all"
        folder.mkdir()
        open_to_all.mkdir()
        open_to_all.chmod(0o777)
        marker = open_to_all / "marker"
        ports = [PORT] if attack.torchrun else []
        address = "127.0.0.1" if attack.machine == 0 else ADDRESSES[0]
        stranger = None
        begin = [*cable.command(attack.machine), sys.executable, str(HERE / "attacker.py"), address]
        begin += [str(unrelated.pid), str(marker), str(attack.answers)]
        if attack.early:
            stranger = _start_stranger(begin, START_SECONDS, ports)
        run = _start_run(cable, folder, attack.torchrun)
        try:
            until(lambda: _steps(folder) >= 3 or run.poll() is not None, time.monotonic() + START_SECONDS)
            if not attack.torchrun:
                _check_ports(cable, run.poll() is None, result)
            _check_folders(result)
            if stranger is None:
                if attack.machine and not attack.torchrun:
                    ports = [port for _, port in _listening(cable)]
                stranger = _start_stranger(begin, SECONDS, ports)
            until(lambda: run.poll() is not None, time.monotonic() + SECONDS)
            stranger.kill()
            printed = stranger.communicate()[0].splitlines()
            result.reached = [line for line in printed if line in WORDS]
            result.complaints += [f"the stranger gave up: {line}" for line in printed if line.startswith("Traceback")]
            (folder / "end").touch()
            until(lambda: run.poll() is not None, time.monotonic() + 60)
            _judge(attack, folder, run, loss, result)
        finally:
            process_groups.kill(run)
            kill_written(folder)
            if stranger is not None:
                stranger.kill()
                stranger.wait()
        if marker.exists():
            result.complaints.append("the stranger's code has run")
        if not alive(unrelated.pid):
            result.complaints.append("an unrelated process was killed")
    return result


@contextlib.contextmanager
def _unrelated() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with the run. It is stopped, as what evenpipe kills without asking."""
    process = subprocess.Popen(["sleep", "1000"])
    process.send_signal(signal.SIGSTOP)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _start_stranger(begin: list[str], seconds: float, ports: list[int]) -> subprocess.Popen[str]:
    own = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "HOME": "/", "GLOO_SOCKET_IFNAME": "lo"}
    stranger = subprocess.Popen(
        [*begin, str(seconds), *map(str, ports)], env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert stranger.stdout is not None
    assert stranger.stdout.readline() == "ready\n", "the stranger did not start"
    return stranger


def _start_run(cable: Cable, folder: Path, torchrun: bool) -> subprocess.Popen[bytes]:
    command = [sys.executable]
    if torchrun:
        command += ["-m", "torch.distributed.run", "--nnodes=1", "--node-rank=0", f"--nproc-per-node={PROCESSES}"]
        command += [f"--master-addr={ADDRESSES[0]}", f"--master-port={PORT}", "--rdzv-backend=static"]
        command += [f"--rdzv-endpoint={ADDRESSES[0]}:{PORT}"]
    command += [str(HERE / "network_program.py"), str(folder), "4", "20"]
    with (folder / "launcher").open("wb") as printed:
        return process_groups.start([*cable.command(0), *command], env=environment(0), stdout=printed, stderr=printed)


def _steps(folder: Path) -> int:
    """Of all processes, the fewest."""
    files = [folder / f"step-{rank}" for rank in range(PROCESSES)]
    return min(int(file.read_text() or 0) if file.exists() else 0 for file in files)


def _listening(cable: Cable) -> list[tuple[str, int]]:
    """Where somebody listens on the run's machine: addresses and ports."""
    command = [*cable.command(0), "ss", "-ltnH"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    places = [line.split()[3].rpartition(":") for line in lines]
    return [(address, int(port)) for address, _, port in places]


def _check_ports(cable: Cable, runs: bool, result: Result) -> None:
    places = _listening(cable)
    result.complaints += [f"{place} is open" for place in places if place[0] not in ("127.0.0.1", "[::1]")]
    if runs and not places:
        result.complaints.append("nobody listens at all: this looked at the wrong machine")


def _check_folders(result: Result) -> None:
    """The run's folders are for its user alone."""
    for folder in Path(tempfile.gettempdir()).glob("evenpipe-[ls]*-*"):
        if folder.stat().st_mode & 0o077:
            result.complaints.append(f"{folder} is open to others")


def _judge(attack: Attack, folder: Path, run: subprocess.Popen[bytes], loss: float, result: Result) -> None:
    printed = "".join(file.read_text(errors="replace") for file in [folder / "launcher", *folder.glob("printed-*")])
    done = [folder / f"done-{rank}" for rank in range(PROCESSES)]
    told = [line for line in printed.splitlines() if re.search(r"evenpipe|Error", line)]
    result.ending = told[-1] if told else "as it should"
    if run.poll() is None:
        result.complaints.append("the run did not end")
    elif all(file.exists() for file in done):
        wrong = [file.read_text() for file in done if abs(float(file.read_text()) - loss) > 1e-6]
        result.complaints += [f"a loss is {text}; expected {loss!r}" for text in wrong]
    elif not attack.early and not attack.torchrun:
        result.complaints.append(f"the run did not come to its end: {result.ending}")
    elif not any(re.search(ENDINGS, line) for line in told):
        result.complaints.append(f"the run ended without a word that helps: {result.ending}")
    if any(SENTENCE in line and " said: " not in line for line in told):
        result.complaints.append("the stranger's sentence is shown as evenpipe's own")
    if attack.reaches != bool(result.reached):
        result.complaints.append(f"the stranger reached {result.reached}, which is not what this attack is about")
    if not attack.torchrun and "store" in result.reached:
        result.complaints.append("the stranger reached a store")
