"""launch() brings back results and first causes, and leaves no process behind however it ends."""

import inspect
import json
import multiprocessing
import multiprocessing.forkserver
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import until_they_wait
from process_groups import running
from torch import Tensor, nn

import evenpipe
from evenpipe import Pipeline
from evenpipe.communication.communicators import Communicators
from evenpipe.errors import InputError, RunError
from evenpipe.processes.launcher import initialise_worker, launch, prepare_launch


@pytest.fixture(scope="module", autouse=True)
def without_gpus():
    """These tests start processes that share nothing with a GPU, on any machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.delenv("RANK", raising=False)
        multiprocessing.forkserver._forkserver._stop()  # the harness may have started one that knows other modules
        prepare_launch("colorsys")
        yield


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


HANGS_SECONDS = 600.0
"""What takes so long hangs, on any machine."""


def pids_in(folder: Path, processes: int = 3) -> list[int]:
    """The pids that the processes wrote down, once all have."""
    deadline = time.monotonic() + HANGS_SECONDS
    files = [folder / f"pid-{rank}" for rank in range(processes)]
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline, "processes did not start"
        time.sleep(0.02)
    return [int(file.read_text()) for file in files]


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + HANGS_SECONDS
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "processes go on"
        time.sleep(0.02)


def report(number, table):
    """What a process is: its rank, the sum over all, and how it was set up."""
    worker = initialise_worker()
    total = torch.tensor([float(worker.rank)])
    dist.all_reduce(total)
    return {
        "rank": worker.rank,
        "pid": os.getpid(),
        "sum": total,
        "arguments": (number, table),
        "threads": torch.get_num_threads(),
        "environment": os.environ.get("OF_THE_CALLER"),
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
        "prepared": "colorsys" in sys.modules,
        "interrupt": signal.getsignal(signal.SIGINT) is signal.SIG_DFL,
        "timeout": worker.timeout_seconds,
    }


def test_results_come_back_in_rank_order_and_nothing_is_left_behind(monkeypatch, tmp_path):
    monkeypatch.setenv("OF_THE_CALLER", "seen")
    for name in ("OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    results = launch(report, 7, {"a": torch.arange(3)}, processes=3, timeout_seconds=99, torch_device="cpu")
    assert [result["rank"] for result in results] == [0, 1, 2]
    for result in results:
        assert result["sum"].item() == 3.0
        assert result["arguments"][0] == 7
        assert torch.equal(result["arguments"][1]["a"], torch.arange(3))
        assert (result["threads"], result["environment"], result["interrupt"]) == (1, "seen", True)
        assert (result["timeout"], result["prepared"]) == (99, True)
        assert result["allocator"] == "expandable_segments:True"
    assert len({result["pid"] for result in results} | {os.getpid()}) == 4
    assert not any(alive(result["pid"]) for result in results)
    assert dict(os.environ) == before
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    assert [path for path in tmp_path.iterdir() if not path.name.startswith("pymp-")] == []


def test_one_process_is_a_group_of_one():
    (result,) = launch(report, 0, {}, processes=1, torch_device="cpu")
    assert (result["rank"], result["sum"].item()) == (0, 0.0)
    assert not alive(result["pid"])


def fail(folder: str, how: str) -> None:
    """Process 1 of three fails while 0 and 2 wait for it."""
    worker = initialise_worker()
    rank = worker.rank
    (Path(folder) / f"pid-{rank}").write_text(str(os.getpid()))
    communicators = Communicators([("B:1>0", [(0, 1)]), ("F:1>2", [(1, 2)])], timeout_seconds=600, watch=worker.watch)
    communicators.warm_up()
    if rank == 0:
        communicators["B:1>0"].receive(torch.zeros(1), 1, "0RECV_B2").wait("0B2")
    elif rank == 2:
        communicators["F:1>2"].receive(torch.zeros(1), 1, "2RECV_F3").wait("2F3")
    elif how == "input":
        raise InputError('schedule: "2f2b"; expected one of gpipe, 1f1b')
    elif how == "run":
        raise RunError("checkpoint: no space left on the device")
    elif how == "other":
        raise KeyError("boo")
    elif how == "exit":
        sys.exit(5)
    else:
        until_they_wait(worker.watch, (0, 2))
        os.kill(os.getpid(), getattr(signal, how))


def everyone_fails() -> None:
    """The same mistake found by all at once, as with a wrong config."""
    raise InputError("devices: 3; expected at most 2")


AWAITING = r"; process (0 was awaiting 0RECV_B2 for 0B2|2 was awaiting 2RECV_F3 for 2F3) from process 1"
KILLED = r"process 1 \(pid \d+\) (was killed by signal 9 \(SIGKILL\)|has died: killed, out of memory or crashed)"
SILENT = r"process 1 gave no sign of life for 2 s \(pid \d+; it was not waiting for any process\)"
CAUSES = {
    # Those that waited may be a moment late: a culprit that fails at once may do so before they wait.
    "input": (InputError, re.escape('schedule: "2f2b"; expected one of gpipe, 1f1b')),
    "run": (RunError, f"checkpoint: no space left on the device({AWAITING})?"),
    "other": (RunError, f"process 1 failed: KeyError: 'boo'({AWAITING})?"),
    "exit": (RunError, f"process 1 failed: SystemExit: 5({AWAITING})?"),
    "SIGKILL": (RunError, KILLED + AWAITING),
    "SIGSTOP": (RunError, SILENT + AWAITING),
}


@pytest.mark.parametrize("how", CAUSES)
@pytest.mark.sampled(2)
def test_the_first_cause_comes_back_and_no_process_is_left(tmp_path, capfd, how):
    kind, message = CAUSES[how]
    with pytest.raises(kind) as caught:
        launch(fail, str(tmp_path), how, processes=3, silence_seconds=2, torch_device="cpu")
    assert type(caught.value) is kind
    assert re.fullmatch(message, str(caught.value)), caught.value
    notes = getattr(caught.value, "__notes__", [])
    assert any("KeyError: 'boo'" in note and "test_launch.py" in note for note in notes) == (how == "other")
    assert not any(alive(pid) for pid in pids_in(tmp_path))
    assert "torch/distributed/elastic" not in capfd.readouterr().err  # the agent's own 40 lines


def test_a_mistake_found_by_all_is_told_once():
    with pytest.raises(InputError) as caught:
        launch(everyone_fails, processes=3, torch_device="cpu")
    assert str(caught.value) == "devices: 3; expected at most 2"
    assert len(caught.value.__notes__) == 1


def wait_for_ever(folder: str) -> None:
    """0 and 1 wait for each other in gloo, where Python's own Ctrl-C is not heard; 2 computes."""
    rank = dist.get_rank()
    (Path(folder) / f"pid-{rank}").write_text(str(os.getpid()))
    if rank == 2:
        time.sleep(600)
    dist.recv(torch.zeros(1), 1 - rank)


def go_on_until_told(folder: str) -> None:
    """Steps of all together, until there is a file `go`."""
    rank = dist.get_rank()
    (Path(folder) / f"pid-{rank}").write_text(str(os.getpid()))
    told = torch.zeros(1)
    while not told:
        told[0] = rank == 0 and (Path(folder) / "go").exists()
        dist.broadcast(told, 0)
    (Path(folder) / f"done-{rank}").touch()


def told(folder: str) -> None:
    """The program whose launcher is stopped for longer than any process may be silent."""
    launch(go_on_until_told, folder, processes=2, silence_seconds=1.0)


def interrupted(folder: str) -> None:
    """The program: says how each launch ended. The test sends the signals."""
    for name in ("early", "first", "second", "third"):
        (Path(folder) / name).mkdir()
        try:
            launch(wait_for_ever, str(Path(folder) / name), processes=3)
        except BaseException as error:
            print(name, repr(error), flush=True)


def program(name: str, folder: Path) -> AbstractContextManager[subprocess.Popen[str]]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
    command = [sys.executable, __file__, name, str(folder)]
    return running(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_processes_do_their_work_while_their_launcher_is_stopped(tmp_path):
    with program("told", tmp_path) as launcher:
        pids = pids_in(tmp_path, processes=2)
        launcher.send_signal(signal.SIGSTOP)
        time.sleep(2.0)  # longer than a silence
        assert all(alive(pid) for pid in pids)
        (tmp_path / "go").touch()
        wait_until_gone(pids)
        assert all((tmp_path / f"done-{rank}").exists() for rank in range(2))
        launcher.send_signal(signal.SIGCONT)
        assert launcher.communicate(timeout=HANGS_SECONDS) == ("", "")
        assert launcher.returncode == 0


@pytest.mark.slow
def test_signals_to_the_program_end_all_processes(tmp_path):
    """Ctrl-C and SIGTERM become exceptions once all are gone; after SIGKILL the kernel ends the processes."""
    with program("interrupted", tmp_path) as launcher:
        while not (tmp_path / "early").exists():
            time.sleep(0.02)
        time.sleep(0.3)  # the fork server is in its imports
        launcher.send_signal(signal.SIGINT)
        for name, number in (("first", signal.SIGINT), ("second", signal.SIGTERM)):
            pids = pids_in(tmp_path / name)
            launcher.send_signal(number)
            wait_until_gone(pids)
        pids = pids_in(tmp_path / "third")
        launcher.kill()
        wait_until_gone(pids)
        output, errors = launcher.communicate(timeout=HANGS_SECONDS)
    lines = ["early KeyboardInterrupt()", "first KeyboardInterrupt()", "second SystemExit(143)"]
    assert output.splitlines() == lines
    assert "Traceback" not in errors


def test_what_cannot_be_launched_is_refused(monkeypatch):
    for processes in (0, -2):
        with pytest.raises(InputError, match=f"processes is {processes}; it must be at least 1"):
            launch(everyone_fails, processes=processes)
    # In a program with a file; a worker of pytest-xdist has none.
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
    with pytest.raises(InputError, match=r"^launch: the function and its arguments cannot be pickled"):
        launch(lambda: None, processes=2)
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(InputError, match=r"^launch: this is already process 3 of a launched group"):
        launch(everyone_fails, processes=2)


# ---- mistakes of a user


class Layer(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ torch.ones(3, 5)  # shown


def pipeline_of(*layers: nn.Module) -> Any:
    return Pipeline.from_modules(
        nn.Embedding(32, 8), layers, None, nn.Linear(8, 32, bias=False), microbatches=2, self_check=False
    )


IDS = torch.arange(8).view(2, 4)


def gives_text() -> None:
    pipeline = pipeline_of(nn.Linear(8, 8), nn.Linear(8, 8))
    pipeline.step("text")  # shown


def calls_two_methods() -> None:
    pipeline = pipeline_of(nn.Linear(8, 8), nn.Linear(8, 8))
    if dist.get_rank() == 0:
        pipeline.full_state_dict()  # shown
    else:
        pipeline.step(IDS)  # shown


def multiplies_wrongly() -> None:
    pipeline = pipeline_of(Layer(8, 8), Layer(8, 8))
    pipeline.step(IDS)


def reads_no_json() -> None:
    json.loads("{")  # shown


def refuses() -> None:
    raise InputError("size: 3; expected 4")  # shown


MISTAKES = {
    # the error, and the function whose lines with "# shown" it shows
    gives_text: (InputError, gives_text),
    calls_two_methods: (InputError, calls_two_methods),
    multiplies_wrongly: (RunError, Layer.forward),
    reads_no_json: (RunError, reads_no_json),
    refuses: (InputError, refuses),
}


@pytest.mark.parametrize("function", MISTAKES)
@pytest.mark.sampled(2)
def test_an_error_shows_the_line_of_the_users_own_program_whatever_lies_below_it(function):
    kind, faulty = MISTAKES[function]
    with pytest.raises(kind) as caught:
        launch(function, processes=2, torch_device="cpu")
    notes = [note.splitlines() for note in caught.value.__notes__]
    assert all(note[0].startswith("in process") for note in notes)
    lines, first = inspect.getsourcelines(faulty)
    places = [f'File "{__file__}", line {number}, in {faulty.__name__}' for number in range(first, first + 20)]
    expected = {place for place, line in zip(places, lines, strict=False) if line.endswith("# shown\n")}
    assert expected and expected <= {note[1].strip() for note in notes}
    if kind is InputError:  # then nothing of what lies below
        library = str(Path(evenpipe.__file__).parent)
        assert not any(library in line for note in notes for line in note)


# ---- programs that processes cannot import, or must not run again

PROGRAM = """
import evenpipe
import torch.distributed as dist

OFFSET = 10

class Pair:
    def __init__(self, left, right):
        self.left, self.right = left, right

def train(given, change):
    return Pair(dist.get_rank() + OFFSET, change(given.right))

pairs = evenpipe.launch(train, Pair(1, 2), lambda value: value + OFFSET, processes=2, torch_device="cpu")
print([(type(pair) is Pair, pair.left, pair.right) for pair in pairs])
"""


def run_program(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], input=text, capture_output=True, text=True, timeout=HANGS_SECONDS, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(("-c", PROGRAM), None), (("-",), PROGRAM), ((), PROGRAM)],
    ids=["-c", "-", "standard input"],
)
@pytest.mark.slow
def test_what_a_program_without_a_file_defines_travels_whole(arguments, text):
    done = run_program(*arguments, text=text)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "[(True, 10, 12), (True, 11, 12)]\n"


@pytest.mark.slow
def test_a_script_that_launches_wherever_it_is_imported_is_told_what_to_do(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import evenpipe\n\ndef train():\n    pass\n\nevenpipe.launch(train, processes=2)\n")
    done = run_program(str(script))
    *_, last = done.stderr.splitlines()
    words = f"{str(script)!r} calls it wherever it is imported, and the processes import it"
    assert last == f'evenpipe.errors.InputError: launch: {words}; expected the call under `if __name__ == "__main__":`'
    assert done.stderr.count("Traceback") == 1, "of the script's own call alone"


if __name__ == "__main__":
    {"interrupted": interrupted, "told": told}[sys.argv[1]](sys.argv[2])
