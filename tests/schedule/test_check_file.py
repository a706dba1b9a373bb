"""What is said of a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenpipe.errors import InputError
from evenpipe.schedule import Costs, generate, plan_program
from evenpipe.schedule.check_file import check_file
from evenpipe.schedule.files import read_order, write_schedule

SAID = [
    ("0F0,0B0", "sound: an order of 1 device and 1 microbatch\ndevice of stage 0: 0\n"),
    ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1", "sound: an order of 2 devices and 2 microbatches\ndevices of stages 0 to 1: "),
    ("0F0,0F1\n1F0,1F1", "sound: an order, for evaluation, of 2 devices and 2 microbatches\n"),
    ("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0", "sound: a program with transfers of 2 devices and 1 "),
    ("0F0\n1F0,1B0", "1 fault\ndevice 0: 0B0 is missing"),
    ("0F0,0B0,0B0\n1F0", "2 faults\ndevice 0, position 2: 0B0 is already at position 1"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "said"), SAID)
def test_what_is_said(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "some.csv"
    path.write_text(text)
    report = check_file(path)
    assert report.text().startswith(said)
    assert report.sound == said.startswith("sound") == report.to_dict()["sound"]


def test_a_file_and_back(tmp_path: Path) -> None:
    order, program = plan_program("zb-h1", 3, 4, "vocab-2")
    write_schedule(program, tmp_path / "program.csv")
    assert check_file(tmp_path / "program.csv").schedule == program
    assert read_order(tmp_path / "program.csv") == order


def test_bytes_by_costs(tmp_path: Path) -> None:
    write_schedule(generate("1f1b", 2, 3), tmp_path / "order.csv")
    report = check_file(tmp_path / "order.csv", Costs(F=1, B=2, bytes=[3, 5]))
    assert report.peak_bytes == (6, 5)
    assert "most bytes of activations, per device: 6 5" in report.text()


def test_no_name() -> None:
    with pytest.raises(InputError, match="the name of a file is empty"):
        check_file("")
