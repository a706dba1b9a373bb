"""`evenpipe init`: what it writes for which model and data, and that it trains as it stands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet
from transformers import LlamaConfig, LlamaForCausalLM

from evenpipe.cli.main import main
from evenpipe.errors import InputError
from evenpipe.train.config_file import load_config
from evenpipe.train.examples import example_configurations, examples
from evenpipe.train.found_data import find_data
from evenpipe.train.new_config import new_tables
from evenpipe.train.tokenizer import train_tokenizer

TEXT = "def f(x):\n    return x + 1\n" * 2000
SHAPE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    return tmp_path


@pytest.mark.slow
def test_from_a_config_and_a_folder_of_text_it_trains_as_it_stands(folder: Path) -> None:
    LlamaConfig(**SHAPE, vocab_size=400, max_position_embeddings=64).save_pretrained("model")
    for name in ("a.txt", "b.txt", "c.py"):
        (folder / "data" / name).write_text(TEXT)
    assert main(["init", "--model", "model", "--data", "data", "--processes", "2", "-o", "mine.toml"]) == 0
    config = load_config("mine.toml")
    assert config.model.architecture == "llama" and config.pipeline.processes == 2
    assert config.data.files == ("data/**/*.py", "data/**/*.txt") and config.data.sequence_length == 64
    assert config.output.folder == "runs/mine"
    text = Path("mine.toml").read_text()
    assert "# Highest learning rate, reached after the warm-up\nlearning_rate = " in text
    command = [sys.executable, "-m", "evenpipe", "train", "mine.toml", "sample.new_tokens=2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads((folder / "runs" / "mine" / "report.json").read_text())
    assert report["steps"] == config.training.steps and report["validation_loss"] > 0
    assert report["validation_loss"] < 5, "it has learned"


RECORDS = [{"id": "1", "body": "a long text"}]
DATA = {
    # what is in the folder, and what [data] says of it
    "text": ({"a.md": TEXT, ".hidden": "x", "picture.png": b"\x89PNG\xff"}, {"files": ["data/**/*.md"]}),
    "records": ({"a.jsonl": json.dumps(RECORDS[0])}, {"files": ["data/**/*.jsonl"], "text_field": "body"}),
    "named text": ({"a.json": json.dumps({"text": "x", "url": "long" * 9})}, {"files": ["data/**/*.json"]}),
}


@pytest.mark.parametrize(("files", "said"), DATA.values(), ids=DATA)
def test_what_is_in_the_folder(folder: Path, files: dict[str, str | bytes], said: dict[str, object]) -> None:
    for name, content in files.items():
        (folder / "data" / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert find_data("data").table == said


def test_tables_and_what_save_to_disk_wrote(folder: Path) -> None:
    parquet.write_table(pa.Table.from_pylist(RECORDS), "data/a.parquet")
    assert find_data("data").table == {"files": ["data/**/*.parquet"], "text_field": "body"}
    datasets.Dataset.from_list([{"text": TEXT}]).save_to_disk("saved")
    assert new_tables(None, find_data("saved"), 2, "run")["data"]["dataset"] == "saved"


def test_a_model_with_weights_is_continued_with_its_own_tokenizer() -> None:
    tokenizer = train_tokenizer([TEXT], 300, "<|end|>")
    LlamaForCausalLM(LlamaConfig(**SHAPE, vocab_size=300)).save_pretrained("model")
    with pytest.raises(InputError, match=r'"model" has no tokenizer: it has no .*; give tokenizer\.source'):
        new_tables("model", None, 2, "run")
    tokenizer.save_pretrained("model")
    tables = new_tables("model", None, 8, "run")
    assert tables["model"] == {"source": "model"} and "tokenizer" not in tables
    assert tables["pipeline"]["processes"] == 3, "no more than layers"


def test_little_data_gets_short_sequences_and_a_lot_gets_long_ones(folder: Path) -> None:
    lengths = []
    for numbers in (400, 20_000, 2_000_000):
        (folder / "data" / "a.txt").write_text(" ".join(map(str, range(numbers))))
        lengths.append(new_tables(None, find_data("data"), 2, "run")["data"]["sequence_length"])
    assert lengths == [16, 256, 1024]


@pytest.mark.parametrize("name", example_configurations())
def test_the_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--example", name]) == 0
    assert capsys.readouterr().out == f"wrote {name}.toml; next: evenpipe train {name}.toml\n"
    assert f"evenpipe train {name}.toml" in Path(f"{name}.toml").read_text()
    assert load_config(f"{name}.toml").output.folder.startswith("runs/")
    assert main(["init", "--example", name]) == 2
    assert f'"{name}.toml" exists already; -o names another one' in capsys.readouterr().err


def test_all_examples_reach_those_who_have_no_source_checkout(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--example", "all"]) == 0
    assert capsys.readouterr().out == "wrote examples\n"
    copied = {path.relative_to("examples") for path in Path("examples").rglob("*") if path.is_file()}
    assert {
        Path("own_loop.py"),
        Path("own_loop.ipynb"),
        Path("models/llama-3.1-8b.json"),
        Path("train.slurm"),
    } <= copied
    for path in copied:
        assert (Path("examples") / path).read_bytes() == (examples() / path).read_bytes()
    assert main(["init", "--example", "all"]) == 2
    assert '"examples" exists already; -o names another one' in capsys.readouterr().err


WRONG = [
    (["--example", "zvb"], 'one of all, experts, quickstart, v_half, zbv; did you mean "zbv"?'),
    (["--example", "zbv", "--data", "data"], "--example is a complete configuration"),
    (["--data", "date"], '--data is "date", but there is no such file or folder; did you mean "data"?'),
    (["--data", "data"], "that folder has no text, JSON lines or parquet"),
    (["--processes", "0"], "--processes is 0, but must be at least 1"),
    (["-o", "train.txt"], "must end in .toml"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=str)
def test_what_cannot_be_written(
    folder: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert [path.name for path in folder.iterdir()] == ["data"]
