"""What a run says that is asked to stop, and what it has lost when it ends at once."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from checkpoint_run import save_three

from evenpipe.train.config import Config
from evenpipe.train.input_sections import DataConfig, ModelConfig
from evenpipe.train.run_sections import OutputConfig
from evenpipe.train.stopping import say_stop


def said(folder: Path, capsys: pytest.CaptureFixture[str], number: int, *, ends: bool) -> str:
    model, data = ModelConfig(architecture="llama"), DataConfig(files=("a.txt",))
    say_stop(Config(model=model, data=data, output=OutputConfig(folder=str(folder))), number, ends)
    return capsys.readouterr().err.strip()


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_the_first_signal(tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int, name: str) -> None:
    assert said(tmp_path, capsys, number, ends=False) == (
        f"evenpipe: {name}: finishing the step and saving; a second signal ends the run at once, without saving"
    )


def test_the_second_one_says_what_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = "no step was saved, so all steps are lost; the same command starts again"
    assert said(tmp_path, capsys, signal.SIGINT, ends=True) == f"evenpipe: Ctrl-C: ended at once; {nothing}"
    newest, *_ = sorted(save_three(tmp_path / "checkpoints").glob("step-*"), reverse=True)
    assert "; steps after 3, the last one saved, are lost; the same command continues from there" in said(
        tmp_path, capsys, signal.SIGINT, ends=True
    )
    next(newest.glob("*.distcp")).unlink()
    assert "; steps after 2, the last one saved, are lost" in said(tmp_path, capsys, signal.SIGTERM, ends=True)
