"""evenpipe plan while it searches: progress on stderr, Ctrl-C, and a limit on its time."""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from process_groups import send
from transformers import LlamaConfig

from evenpipe.cli import printing
from evenpipe.cli.main import main
from evenpipe.plan import configuration_search
from evenpipe.train.config_file import load_config

LARGE = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
"""Of Llama 3.1 70B: a search for 64 GPUs takes minutes."""
PLAN = ["plan", "--model", "model", "--gpus", "64", "--cp", "1", "--no-cache"]
END_SECONDS = 120


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    LlamaConfig(**LARGE, num_key_value_heads=8, vocab_size=128256).save_pretrained("model")
    return tmp_path


COMMAND = """
import sys
from evenpipe.cli import printing
from evenpipe.cli.main import main
printing.EVERY_SECONDS = 0.0
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--workers", "2", "--json"], ["--workers", "1", "-o", "planned.toml"]])
def test_ctrl_c_in_a_terminal_prints_what_was_found(options):
    """All processes of the terminal get the signal; none stays behind, and none complains."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    search = subprocess.Popen([sys.executable, "-c", COMMAND, *PLAN, *options], env=environment, **streams)
    assert any("best step" in line for line in search.stderr)
    send(search, signal.SIGINT)
    out, err = search.communicate(timeout=END_SECONDS)
    assert search.returncode == 130, err
    assert "Traceback" not in err and "Error" not in err
    if "--json" in options:
        found = json.loads(out)
        assert (found["finished"], found["ended_by"]) == (False, "interrupt")
        assert found["plans"] and found["layouts_left"] + found["configurations_left"] > 0
    else:
        assert "unfinished, interrupted after" in out and "wrote planned.toml" in out
        assert Path("planned.toml").is_file()
    deadline = time.monotonic() + END_SECONDS
    while send(search, 0) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not send(search, 0)


def test_a_plan_is_there_when_the_time_is_up(capsys, monkeypatch):
    """A second passes whenever the search looks at the time."""
    ticks = itertools.count()
    monkeypatch.setattr(configuration_search, "MANY", 1)
    monkeypatch.setattr(configuration_search.time, "monotonic", lambda: float(next(ticks)))
    few = ["--tp", "8", "--pp", "4,8", "--microbatch-size", "1", "--schedule", "1f1b,zb-h1"]
    assert main([*PLAN, *few, "--workers", "1", "--minutes", "3", "-o", "planned.toml"]) == 0
    out = capsys.readouterr().out
    assert "unfinished, the time is up after 3." in out and "wrote planned.toml" in out
    assert load_config("planned.toml").pipeline.tensor_parallel == 8


def test_no_time_is_no_answer(capsys):
    """It is not known that nothing fits."""
    assert main([*PLAN, "--workers", "1", "--minutes", "1e-9"]) == 3
    text = capsys.readouterr().out
    assert "unfinished, the time is up after" in text and "no plan was found so far" in text
    assert "no plan fits" not in text and "would fit" not in text


# --- the line --------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_line_that_is_removed(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "20")
    with printing.progress_line() as show:
        show("a plan in a line that is longer than the terminal")
        show("two\nlines")
    first, second, last = terminal.getvalue().split("\r\033[K")[1:]
    assert first == "a plan in a line th" and "\n" not in second and last == ""


def test_a_file_gets_a_line_per_minute(monkeypatch):
    file, now = io.StringIO(), [0.0]
    monkeypatch.setattr(sys, "stderr", file)
    monkeypatch.setattr(printing.time, "monotonic", lambda: now[0])
    with printing.progress_line() as show:
        for second in range(0, 200, 5):
            now[0] = float(second)
            show(f"after {second} s")
    assert file.getvalue().splitlines() == ["after 60 s", "after 120 s", "after 180 s"]
