"""What README and docs show is what happens: every command and program in them is run, with small sizes."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from evenpipe.schedule import SCHEDULES

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SMALL = (
    *("training.steps=2", "training.minutes=none", "data.corpus=python-standard-library:json"),
    *("data.sequence_length=32", "data.validation_fraction=0.05", "tokenizer.vocabulary_size=300"),
    *("model.config.hidden_size=16", "model.config.num_hidden_layers=4", "model.config.head_dim=8"),
    *("model.config.num_attention_heads=2", "model.config.num_key_value_heads=1", "sample.new_tokens=4"),
)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands(program: str) -> list[list[str]]:
    lines = [line.split("#")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    return [shlex.split(line) for line in lines if line.startswith(program)]


def run(arguments: list[str], folder: Path) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "110"}
    done = subprocess.run(
        arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{shlex.join(arguments)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_commands_of_the_readme(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    evenpipe = [sys.executable, "-m", "evenpipe.cli.main"]
    shown = [words for words in commands("evenpipe ") if words[1] in {"train", "generate", "export"}]
    shown = [words for words in shown if "--trace" not in words]
    assert [words[1] for words in shown] == ["train", "train", "train", "generate", "export"]
    run([*evenpipe, "train", "examples/quickstart.toml", *SMALL], tmp_path)  # what `make train` runs
    for words in shown:
        if words[2] not in {"examples/zbv.toml", "examples/v_half.toml"}:  # tests/multiprocess/test_examples.py
            run([*evenpipe, *words[1:], *(SMALL if words[1] == "train" else ())], tmp_path)
    assert (tmp_path / "exported" / "model.safetensors").is_file()
    (words,) = commands("torchrun ")
    folder = "output.folder=runs/torchrun"
    run([sys.executable, "-m", "torch.distributed.run", *words[1:], *SMALL, folder], tmp_path)
    assert (tmp_path / "runs" / "torchrun" / "model" / "config.json").is_file()


def test_the_commands_about_measured_steps_of_the_readme(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    shown = commands("evenpipe ")
    (first,) = (number for number, words in enumerate(shown) if "--trace" in words)
    measured = shown[first : first + 4]
    assert [words[1] for words in measured] == ["train", "draw", "profile", "simulate"]
    small = [*SMALL, "training.steps=3", "model.config.num_hidden_layers=4", "model.self_check=false"]
    for words in measured:
        configured = 3 if words[1] in {"train", "profile"} else len(words)  # overrides stand behind the configuration
        given = [*words[1:configured], *(small if configured == 3 else ()), *words[configured:]]
        run([sys.executable, "-m", "evenpipe.cli.main", *given], tmp_path)
    report = json.loads((tmp_path / "runs" / "zbv" / "report.json").read_text())["schedule"]
    assert (report["name"], report["stages"], report["in_flight"]) == ("zbv", 4, [6, 6])
    assert (tmp_path / "measured.html").is_file()
    assert "F = " in (tmp_path / "costs.toml").read_text()


def test_the_schedule_commands_of_the_readme(tmp_path: Path) -> None:
    pytest.importorskip("ortools")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    shown = {words[1]: words[1:] for words in reversed(commands("evenpipe "))}  # the first of each
    evenpipe = [sys.executable, "-m", "evenpipe.cli.main"]
    table = run([*evenpipe, *shown["simulate"]], tmp_path).splitlines()
    assert "\n".join(line for line in table if line.split()[:1] == ["schedule"] or "vocab-2" in line) in README
    for command in ("draw", "check", "search"):
        run([*evenpipe, *shown[command]], tmp_path)
    assert (tmp_path / "page.html").is_file()
    run([*evenpipe, "check", "best.csv"], tmp_path)


def test_the_command_about_activations_on_the_host_of_the_readme(tmp_path: Path) -> None:
    (words,) = (words for words in commands("evenpipe ") if "--offload" in words)
    run([sys.executable, "-m", "evenpipe.cli.main", *words[1:]], tmp_path)
    assert "offload to host" in (tmp_path / "offload.html").read_text(encoding="utf-8")


def test_the_commands_about_what_is_known_before_a_run_of_the_readme(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    shown = [words for words in commands("evenpipe ") if words[1] in {"explain", "estimate", "plan"}]
    assert [words[1] for words in shown] == ["explain", "estimate", "plan"]
    printed = [run([sys.executable, "-m", "evenpipe.cli.main", *words[1:]], tmp_path) for words in shown]
    for text, words in zip(printed, ("Out of balance", "when it is fullest", "best plan of each"), strict=True):
        assert words in text


@pytest.mark.parametrize("name", ["schedules.md", "memory.md", "offload.md"])
def test_what_a_page_shows_is_what_its_commands_print(name: str, tmp_path: Path) -> None:
    pytest.importorskip("ortools")
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        from outputs import FILES, render
    finally:
        sys.path.pop(0)
    (file,) = (file for file in FILES if file.name == name)
    page = file.read_text(encoding="utf-8")
    assert render(page, tmp_path) == page, "run python docs/outputs.py"


def test_the_page_on_schedules_has_every_name() -> None:
    page = (ROOT / "docs" / "schedules.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z0-9-]+)` \|", page, re.MULTILINE)
    assert set(SCHEDULES) <= set(rows)
    assert len(rows) == len(set(rows))


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`?make ([\w-]+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_the_programs_of_the_readme(number: int, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(blocks("python")[number])
    run([sys.executable, str(program)], tmp_path)


@pytest.mark.parametrize("name", ["picture", "memory_picture", "offload_picture"])
def test_pictures_are_what_the_code_draws(name: str) -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        module = importlib.import_module(name)
    finally:
        sys.path.pop(0)
    assert module.FILE.read_text(encoding="utf-8") == module.draw(), f"run python docs/{name}.py"
