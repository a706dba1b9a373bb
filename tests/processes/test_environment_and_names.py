"""The variables by which a process finds the others, and what messages call processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import evenpipe
from evenpipe.errors import InputError, RunError
from evenpipe.processes import names, worker
from evenpipe.processes.environment import is_single_process, rank_and_size
from evenpipe.processes.signs import Board, Cause, Waiting, cause_of
from evenpipe.processes.watch import Watch

COMPLETE = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
WRONG = "environment variable {}; it must be a whole number {}"

REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"WORLD_SIZE": None},
        "RANK is '1', WORLD_SIZE is missing, MASTER_ADDR is '127.0.0.1', MASTER_PORT is '29500'; expected all",
    ),
    ({"WORLD_SIZE": ""}, "RANK is '1', WORLD_SIZE is missing, MASTER_ADDR is '127.0.0.1', MASTER_PORT is '29500';"),
    ({"RANK": None}, "RANK is missing, WORLD_SIZE is '4'"),
    ({"MASTER_ADDR": None}, "MASTER_ADDR is missing, MASTER_PORT is '29500'; expected all four"),
    ({"MASTER_PORT": None, "MASTER_ADDR": None}, "MASTER_ADDR is missing, MASTER_PORT is missing"),
    ({"RANK": "one"}, WRONG.format('RANK is "one"', "from 0 to 3 (WORLD_SIZE is 4)")),
    ({"RANK": "4"}, WRONG.format('RANK is "4"', "from 0 to 3 (WORLD_SIZE is 4)")),
    ({"RANK": "-1"}, WRONG.format('RANK is "-1"', "from 0 to 3")),
    ({"WORLD_SIZE": "0"}, WRONG.format('WORLD_SIZE is "0"', "at least 1")),
    ({"WORLD_SIZE": "4.0"}, WRONG.format('WORLD_SIZE is "4.0"', "at least 1")),
    ({"MASTER_PORT": "http"}, WRONG.format('MASTER_PORT is "http"', "from 1 to 65535")),
    ({"MASTER_PORT": "70000"}, WRONG.format('MASTER_PORT is "70000"', "from 1 to 65535")),
    ({"LOCAL_RANK": "x"}, WRONG.format('LOCAL_RANK is "x"', "at least 0")),
    ({"LOCAL_WORLD_SIZE": "all"}, WRONG.format('LOCAL_WORLD_SIZE is "all"', "at least 0")),
]


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the complete variables, with changes; None removes one."""
    monkeypatch.setattr(worker, "_this", None)

    def put(changes: dict[str, str | None]) -> None:
        for name in (*COMPLETE, "LOCAL_RANK", "LOCAL_WORLD_SIZE", worker.STORE_FOLDER):
            monkeypatch.delenv(name, raising=False)
        for name, value in {**COMPLETE, **changes}.items():
            if value is not None:
                monkeypatch.setenv(name, value)

    return put


def test_incomplete_variables_are_refused_before_anything_starts(variables: Any) -> None:
    for changes, says in REFUSED:
        variables(changes)
        with pytest.raises(evenpipe.InputError) as caught:
            evenpipe.initialise_worker()
        assert says in str(caught.value), changes
        assert not dist.is_initialized() and worker._this is None


def test_complete_variables_are_accepted(variables: Any) -> None:
    for changes, alone in (
        ({}, False),
        ({"RANK": None, "WORLD_SIZE": None}, True),  # an address for a torchrun to come
        ({"RANK": None, "WORLD_SIZE": "1"}, True),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, False),
    ):
        variables(changes)
        assert is_single_process() == alone, changes
        assert alone or rank_and_size() == (1, 4)
    variables({"MASTER_ADDR": None, "MASTER_PORT": None})  # processes of a launch need no address
    assert rank_and_size(meets_by_address=False) == (1, 4)


# --- names in messages ------------------------------------------------------------------------------------------------

PLACES = {2 * device + rank: f"device {device}, tensor rank {rank}" for device in range(2) for rank in range(2)}


@pytest.fixture(autouse=True)
def _no_pipelines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "_pipelines", [])


def test_what_messages_call_processes() -> None:
    names.show_positions({})
    assert (names.process(3), names.process(3, 77)) == ("process 3", "process 3 (pid 77)")
    assert (names.processes([3]), names.processes([0, 3])) == ("process 3", "processes 0, 3")
    assert names.processes(range(10)) == "processes 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
    names.show_positions(PLACES)
    first, third = "0 (device 0, tensor rank 0)", "2 (device 1, tensor rank 0)"
    assert names.process(3, 77) == "process 3 (device 1, tensor rank 1, pid 77)"
    assert (names.process(2), names.process(9)) == (f"process {third}", "process 9")
    assert str(Waiting("rows of 1F2", "", "tp", (2,))) == f"rows of 1F2 from process {third}"
    assert str(Waiting("X0", "S0", "X", (0, 2))) == f"X0 for S0 from processes {first}, {third}"
    for error, kind, text in (
        (KeyError("x"), "exception", "process 1 (device 0, tensor rank 1) failed: KeyError: 'x'"),
        (InputError("a: b"), "input", "a: b"),
        (RunError("no space left"), "exception", "no space left"),
    ):
        cause = cause_of(error, 1)
        assert (cause.kind, cause.origin, cause.text) == (kind, 1, text)
    assert str(Cause("input", 1, "a: b", 1)) == "process 1 (device 0, tensor rank 1) said: a: b"


def test_places_are_those_of_open_pipelines() -> None:
    close = names.show_positions(PLACES)
    close()
    assert names.position_of(0) == PLACES[0]  # an exception may close a pipeline before it is reported
    close_other = names.show_positions({0: "device 0, tensor rank 1"})
    assert (names.position_of(0), names.position_of(3)) == ("device 0, tensor rank 1", "")
    names.show_positions(PLACES)
    assert (names.position_of(0), names.position_of(3)) == ("", PLACES[3])  # two places: none is right
    close_other()
    names.show_positions({})
    assert names.position_of(0) == PLACES[0]


def test_the_launcher_reads_waits_and_places_from_the_board(tmp_path: Path) -> None:
    board = Board(tmp_path / "board", 4)
    watch = Watch(None, 3, 4, board=board)
    board.show(2, Waiting("2RECV_F0", "2F0", "F:1>2", (1,)))
    board.show(3, Waiting("X" * 1000, "", "X", (0,)))
    again = Board(tmp_path / "board", 4)
    assert [again.read(rank) for rank in range(4)] == ["", "", "2RECV_F0 for 2F0 from process 1", "X" * Board.WIDTH]
    watch.show_positions(PLACES)
    assert [again.position(rank) for rank in range(4)] == ["", "", "", PLACES[3]]
    board.clear(3)
    assert (again.read(3), again.position(3)) == ("", PLACES[3])
    watch.show_positions({3: "device 0, tensor rank 7"})
    assert again.position(3) == ""
