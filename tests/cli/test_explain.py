"""evenpipe explain: what it prints and writes, exit codes, wrong input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig

from evenpipe.cli.main import main


@pytest.fixture
def model(tmp_path: Path) -> str:
    LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=2048,
    ).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_report_and_picture_in_the_terminal(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", model, "--gpus", "4"]) == 0
    out = capsys.readouterr().out
    assert "on 4 GPUs (H100-80G" in out
    for part in ("Out of balance: 1f1b + first-last", "Alternatives", "1f1b, vocab-2", "Next commands"):
        assert part in out
    assert f"evenpipe plan --model {model} --gpus 4 --hardware H100-80G --sequence 2048 --explain" in out


def test_a_page_and_json(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main(["explain", model, "--gpus", "4", "--json", "-o", str(page)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["usual"]["vocabulary"] == "first-last"
    assert len(found["usual"]["devices"]) == 4
    assert found["next"][0].startswith("evenpipe plan ")
    assert "1f1b, vocab-2" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "0"], "--gpus is 0, expected a whole number of at least 1"),
        (["--gpus", "1"], "gpus is 1, expected at least 2"),
        (["--gpus", "4", "--hardware", "H10"], "hardware 'H10' is unknown, did you mean"),
        (["--gpus", "4", "--gpu-memory", "80"], "80"),
        (["--gpus", "4", "--tp", "3"], "tp"),
        (["--gpus", "4", "-o", "picture.pdf"], "picture.pdf"),
        (["--gpus", "4", "--kernels", "fast"], "kernels is 'fast', expected one of"),
    ],
)
def test_wrong_input(model: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", model, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("evenpipe: ")
    assert error.count("\n") == 1
    assert message in error
