"""The commands answer for models that people train: dense ones, mixtures, with windows, state spaces or pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from planned_problems import MODELS

from evenpipe.cli.main import main

PIPELINE = ["--pp", "8", "--sequence", "4096", "--json"]
COMMANDS = {
    "estimate": ["--hardware", "H100-80G", "--model"],
    "plan": [
        *("--gpus", "64", "--batch", "256", "--tp", "1", "--cp", "1", "--zero", "1", "--microbatch-size", "1"),
        *("--no-cache", "--model"),
    ],
    "explain": ["--gpus", "64", "--tp", "1"],
}


@pytest.mark.parametrize("path", sorted(MODELS.glob("*.json")), ids=lambda path: path.stem)
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.slow
def test_a_command_answers(command: str, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main([command, *PIPELINE, *COMMANDS[command], str(path)])
    out, err = capsys.readouterr()
    if code == 2:  # it says in a sentence what is missing
        assert out == "" and err.startswith("evenpipe: error: ") and "expected" in err and err.count("\n") == 1, err
        return
    found = json.loads(out)
    if command == "estimate":
        assert found["verdict"] in ("fits", "at risk", "does not fit") and len(found["devices"]) == 8
    elif command == "plan":
        assert code == (0 if found["plans"] else 1)
        assert found["plans"] or "nearest" in found
    else:
        assert code == 0 and found["others"] and found["next"]
