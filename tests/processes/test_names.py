"""What messages call processes: their places come from the pipelines that are open in a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenpipe.errors import InputError, RunError
from evenpipe.processes import names
from evenpipe.processes.signs import Board, Cause, Waiting, cause_of
from evenpipe.processes.watch import Watch

PLACES = {2 * device + rank: f"device {device}, tensor rank {rank}" for device in range(2) for rank in range(2)}


@pytest.fixture(autouse=True)
def _no_pipelines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "_pipelines", [])


def test_what_messages_call_processes() -> None:
    names.call_by_place({})
    assert (names.process(3), names.process(3, 77)) == ("process 3", "process 3 (pid 77)")
    assert (names.processes([3]), names.processes([0, 3])) == ("process 3", "processes 0, 3")
    assert names.processes(range(10)) == "processes 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
    names.call_by_place(PLACES)
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
    close = names.call_by_place(PLACES)
    close()
    assert names.place_of(0) == PLACES[0]  # an exception may close a pipeline before it is reported
    close_other = names.call_by_place({0: "device 0, tensor rank 1"})
    assert (names.place_of(0), names.place_of(3)) == ("device 0, tensor rank 1", "")
    names.call_by_place(PLACES)
    assert (names.place_of(0), names.place_of(3)) == ("", PLACES[3])  # two places: none is right
    close_other()
    names.call_by_place({})
    assert names.place_of(0) == PLACES[0]


def test_the_launcher_reads_waits_and_places_from_the_board(tmp_path: Path) -> None:
    board = Board(tmp_path / "board", 4)
    watch = Watch(None, 3, 4, board=board)
    board.show(2, Waiting("2RECV_F0", "2F0", "F:1>2", (1,)))
    board.show(3, Waiting("X" * 1000, "", "X", (0,)))
    again = Board(tmp_path / "board", 4)
    assert [again.read(rank) for rank in range(4)] == ["", "", "2RECV_F0 for 2F0 from process 1", "X" * Board.WIDTH]
    watch.call_by_place(PLACES)
    assert [again.place(rank) for rank in range(4)] == ["", "", "", PLACES[3]]
    board.clear(3)
    assert (again.read(3), again.place(3)) == ("", PLACES[3])
    watch.call_by_place({3: "device 0, tensor rank 7"})
    assert again.place(3) == ""
