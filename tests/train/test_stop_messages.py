"""What a run says that is asked to stop, and what it has lost when it ends at once."""

from __future__ import annotations

import signal

from checkpoint_run import save_three

from evenpipe.train.config_file import config_from_dict
from evenpipe.train.stopping import say_stop


def test_a_first_signal_lets_the_step_finish_and_a_second_one_says_what_is_lost(tmp_path, capsys):
    tables = {"model": {"architecture": "llama"}, "data": {"files": "a.txt"}, "output": {"folder": str(tmp_path)}}

    def said(number: int, *, ends: bool) -> str:
        say_stop(config_from_dict(tables), number, ends)
        return capsys.readouterr().err

    assert "Ctrl-C: finishing the step and saving" in said(signal.SIGINT, ends=False)
    assert "SIGTERM: finishing the step and saving" in said(signal.SIGTERM, ends=False)
    assert "no step was saved, so all steps are lost" in said(signal.SIGINT, ends=True)
    newest, *_ = sorted(save_three(tmp_path / "checkpoints").glob("step-*"), reverse=True)
    assert "steps after 3, the last one saved, are lost" in said(signal.SIGINT, ends=True)
    next(newest.glob("*.distcp")).unlink()
    assert "steps after 2, the last one saved, are lost" in said(signal.SIGTERM, ends=True)
