"""`evenpipe doctor`: parts that fail, end or hang are rows of its page, and wrong gradients are found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from evenpipe.cli.main import main
from evenpipe.errors import InputError
from evenpipe.processes.launcher import launch
from evenpipe.runtime.pipeline import Pipeline
from evenpipe.train import doctor
from evenpipe.train.doctor import Check, Outcome, axes_of, check_gradients, checks_for, examine, predicted_steps
from evenpipe.train.doctor_page import page_text, page_values


def is_right() -> dict[str, Any]:
    return {"error": 3e-16}


def refuses() -> dict[str, Any]:
    raise InputError("heads is 3; it must be 4")


def raises() -> dict[str, Any]:
    print("the last words")
    return {"error": 1 / 0}


def crashes() -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def hangs(folder: Path) -> dict[str, Any]:
    started = subprocess.Popen(["sleep", "600"])
    (folder / str(started.pid)).touch()
    return {"code": started.wait()}


def damaged() -> dict[str, Any]:
    """In one of the processes: a gradient is off by a millionth."""
    exact = Pipeline.full_gradients

    def wrong(pipeline: Pipeline) -> dict[str, torch.Tensor]:
        gradients = exact(pipeline)
        if gradients:  # on the first process
            gradients["model.layers.1.mlp.up_proj.weight"] *= 1 + 1e-6
        return gradients

    Pipeline.full_gradients = wrong  # type: ignore[method-assign]
    return doctor._gradients("llama", {"pp": 2})


def wrong_gradient() -> dict[str, Any]:
    return dict(launch(damaged, processes=2, torch_device="cpu")[0])


def test_parts_that_fail_end_or_hang_are_rows(tmp_path: Path) -> None:
    parts = [
        Check("gradients", "right", is_right),
        Check("gradients", "refused", refuses),
        Check("gradients", "raising", raises),
        Check("gradients", "crashed", crashes),
        Check("gradients", "hanging", partial(hangs, tmp_path), seconds=8.0),
        Check("gradients", "wrong", wrong_gradient),
    ]
    said: list[str] = []
    outcomes = examine(parts, said.append)
    assert [one.name for one in outcomes] == [part.name for part in parts]
    assert said[4] == "5 of 6: gradients, hanging"
    faults = {one.name: one.fault for one in outcomes}
    assert faults["right"] == ""
    assert faults["refused"] == "heads is 3; it must be 4"
    assert faults["raising"] == "ZeroDivisionError: division by zero"
    assert faults["crashed"] == "its process ended with exit code -9"
    assert faults["hanging"] == "not done after 8 s"
    assert faults["wrong"].startswith("the gradient of model.layers.1.mlp.up_proj.weight is off by 1.0e-06; expected")
    assert "the last words" in outcomes[2].log and not outcomes[0].log
    assert not any(is_alive(int(file.name)) for file in tmp_path.iterdir())

    text, values = page_text(outcomes), page_values(outcomes)
    assert "6 parts, 5 faults" in text and "| right | 3e-16 |" in text and "| crashed | **-, fault** |" in text
    assert "| wrong | **1e-06, fault** |" in text and "- **gradients, hanging**: not done after 8 s" in text
    assert "  the last words" in text
    assert values["faulty"][0] == "gradients: refused" and json.loads(json.dumps(values)) == values


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()


def test_checks_of_gradients_fit_the_processes() -> None:
    """Every axis is among them."""
    names = {processes: [name for name, _, _ in axes_of(processes)] for processes in (1, 2, 3, 4, 8)}
    assert all(len(set(found)) == len(found) for found in names.values())
    assert all("1f1b" in name or "pp 1" in name for name in names[1])
    for axis in ("pp", "dp", "tp", "cp", "ep", "slices", "shard"):
        assert any(axis in name for name in names[2])
    assert "mixtral, pp 4, dp 2, ep 2, schedule zbv" in names[8] and len(names[3]) == len(names[2])


@pytest.mark.parametrize(("name", "family", "options"), axes_of(2))
@pytest.mark.sampled(2)
def test_gradients_are_right(name: str, family: str, options: dict[str, Any]) -> None:
    assert check_gradients(family, options, 2)["error"] < 1e-12


def a_hardware(processes: int) -> dict[str, Any]:
    from evenpipe.costs.hardware import find_hardware

    return find_hardware("H100-80G").to_dict() | {"torch_device": "cpu"}


def a_step(options: dict[str, Any]) -> dict[str, Any]:
    return {"seconds": 0.5, "tokens": 1000}


def here(parts: Sequence[Check], say: Callable[[str], None]) -> list[Outcome]:
    return [Outcome(part.section, part.name, 1.0, part.run()) for part in parts]


def test_the_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Of stand-ins for what takes long, by the command; predictions are those of the planner."""
    real = [part for part in checks_for(2) if part.section == "machine"]
    steps = [Check("steps", part.name, partial(a_step, {})) for part in checks_for(2) if part.section == "steps"]
    parts = [*real, Check("transfers", doctor.PRODUCTS, partial(a_hardware, 2)), *steps]
    monkeypatch.setattr(doctor, "checks_for", lambda processes: parts)
    monkeypatch.setattr(doctor, "examine", here)
    page = tmp_path / "page.md"
    assert main(["doctor", "--processes", "2", "-o", str(page)]) == 0
    assert capsys.readouterr().out == f"wrote {page}: 0 of {len(parts) + 1} parts have a fault\n"
    text, values = page.read_text(), json.loads(page.with_suffix(".json").read_text())
    assert f"| torch | {torch.__version__} |" in text
    predicted = predicted_steps(2, a_hardware(2))
    assert values["outcomes"][-1]["values"] == predicted and len(predicted) == 4
    seconds = predicted["pp 2, 1f1b, vocab-2"]
    assert f"| pp 2, 1f1b, vocab-2 | 0.500 s | 2000 | {seconds:.3f} s | {seconds / 0.5:.2f} |" in text
    assert main(["doctor", "--processes", "0"]) == 2
    assert main(["doctor", "-o", str(tmp_path / "missing" / "page.md")]) == 2, "before anything is measured"
