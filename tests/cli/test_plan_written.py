"""evenpipe plan -o: what is in the file besides the pipeline, and what is said and refused."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from transformers import LlamaConfig

from evenpipe.cli import printing
from evenpipe.cli.main import main
from evenpipe.costs.hardware import KNOWN, hardware_from_dict, write_hardware
from evenpipe.plan import configuration_search
from evenpipe.train.config_file import load_config
from evenpipe.train.data import check_enough
from evenpipe.train.new_config import LEAST_STEPS, MOST_STEPS
from evenpipe.train.planned_run import PLACEHOLDER
from evenpipe.train.tokenizer import train_tokenizer

ROWS = 1000
"""Of the model's vocabulary."""
TEXT = "The committee met on a rainy day, and said little about what it had found in the old harbour.\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model's config, a machine of two processes, texts, and tokenizers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(printing, "EVERY_SECONDS", float("inf"))  # on a busy machine too
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    for name, entries in (("model", ROWS), ("narrow", 200)):
        LlamaConfig(**shape, vocab_size=entries, max_position_embeddings=256).save_pretrained(name)
    two = KNOWN["A100-80G"].to_dict() | {"name": "host", "torch_device": "cpu", "devices_per_node": 2}
    write_hardware(hardware_from_dict(two), "host.toml")
    Path("texts").mkdir()
    for number in range(4):
        Path(f"texts/{number}.txt").write_text(TEXT * 200)
    lines = [json.dumps({"id": "x", "body": TEXT * 20}) for _ in range(40)]
    Path("lines.jsonl").write_text("\n".join(lines))
    Path("little.txt").write_text(TEXT)
    many = [f"{chr(97 + first)}{chr(97 + second)} " * 20 for first in range(26) for second in range(26)]
    for name, texts, entries in (("fits", [TEXT], 300), ("letters", ["ab"], 258), ("too large", many, 1200)):
        train_tokenizer(texts, entries, "<|endoftext|>").save_pretrained(name)
    return tmp_path


PLAN = ["--gpus", "2", "--hardware", "host.toml", "--schedule", "1f1b", "--best", "1", "--workers", "1", "--no-cache"]
SHORT = ["--sequence", "64"]


def planned(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    """What `evenpipe plan` prints on stdout and stderr."""
    model = () if "--model" in arguments else ("--model", "model")
    assert main(["plan", *model, *PLAN, *arguments]) == code
    output = capsys.readouterr()
    return output.out, output.err


WRITTEN = {
    "a folder of text": (["--data", "texts"], ("texts/**/*.txt",), "text", None),
    "records with another field": (["--data", "lines.jsonl"], ("lines.jsonl",), "body", None),
    "a tokenizer": (["--data", "texts", "--tokenizer", "fits"], ("texts/**/*.txt",), "text", "fits"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", WRITTEN)
def test_with_data_the_file_is_complete(name, capsys):
    options, files, field, tokenizer = WRITTEN[name]
    out, _ = planned(capsys, *SHORT, "--batch", "8", *options, "-o", "run.toml")
    assert "wrote run.toml; the run will write to runs/run" in out and "replace" not in out
    config, text = load_config("run.toml"), Path("run.toml").read_text()
    assert (config.data.files, config.data.text_field) == (files, field)
    assert config.data.sequence_length == 64 and config.pipeline.sequences_per_step == 8
    assert config.model.config["vocab_size"] == ROWS
    assert config.tokenizer.source == tokenizer
    assert config.trained_tokenizer_entries == (None if tokenizer else ROWS)
    assert ("trains a tokenizer of at most 1,000 entries" in out) == (tokenizer is None)
    unused = 'the tokenizer "fits" has 300 entries, so 700 rows of the model are unused'
    assert (unused in out) == (tokenizer is not None)
    for section in ("optimizer", "training", "checkpoint", "output", "pipeline"):
        assert f"\n[{section}]\n" in text
    assert LEAST_STEPS <= (config.training.steps or 0) <= MOST_STEPS
    assert "# Tokens per row\nsequence_length = 64" in text and PLACEHOLDER not in text
    check_enough(config, 8)


def test_without_data_the_file_says_what_to_replace(capsys):
    out, _ = planned(capsys, *SHORT, "--batch", "8", "-o", "run.toml")
    assert "replace data.files in run.toml before evenpipe train, or give --data" in out
    text = Path("run.toml").read_text()
    assert "# REPLACE THIS by your text. Files or patterns (`corpus/**/*.py`), read in the order" in text
    assert f'files = ["{PLACEHOLDER}"]' in text and "\n[training]\n" in text
    assert main(["train", "run.toml"]) == 2
    assert PLACEHOLDER in capsys.readouterr().err


@pytest.mark.slow
def test_little_data_gives_a_smaller_step_unless_one_is_asked_for(capsys):
    _, err = planned(capsys, *SHORT, "--data", "texts", "-o", "run.toml")
    batch = load_config("run.toml").pipeline.sequences_per_step
    assert batch == 8 and f"a step has {batch} sequences instead of 65536: --data is small" in err
    out, err = planned(capsys, *SHORT, "--data", "texts", "--batch", "4096", "-o", "no.toml", code=2)
    assert out == "" and err.count("\n") == 1 and not Path("no.toml").exists()
    assert "tokens, but one step of 4096 sequences of 64 tokens needs" in err


@pytest.mark.slow
def test_tokens_are_counted_as_the_tokenizer_of_the_run_counts_them(capsys):
    """One that is trained on this text has tokens of whole words, the other one of single letters."""
    step = [*SHORT, "--data", "texts", "-o", "run.toml", "--batch", "320"]
    _, err = planned(capsys, *step, code=2)
    assert "the data has 17,604 tokens" in err and "needs 20,672" in err
    assert planned(capsys, *step, "--tokenizer", "letters")[0]


@pytest.mark.slow
def test_a_configuration_keeps_its_own_sections_and_the_planned_vocabulary(capsys):
    """A small text may give a tokenizer with fewer entries; the model has as many rows as planned all the same."""
    planned(capsys, *SHORT, "--batch", "8", "--data", "texts", "-o", "run.toml")
    text = Path("run.toml").read_text().replace("vocab_size = 1000\n", "")
    text = re.sub(r"\[checkpoint\]\n[^\[]*", "", text)
    Path("own.toml").write_text(re.sub("learning_rate = .*", "learning_rate = 0.5", text))
    planned(capsys, "--model", "own.toml", "-o", "again.toml")
    before, after = load_config("own.toml"), load_config("again.toml")
    assert "vocab_size" not in before.model.config and after.model.config["vocab_size"] == ROWS
    assert (after.data.files, after.training, after.optimizer) == (before.data.files, before.training, before.optimizer)
    assert "\n[checkpoint]\n" not in Path("again.toml").read_text()


REFUSED = {
    "--data texts": "--data goes into the configuration that -o writes, but there is no -o",
    "--tokenizer fits": "--tokenizer goes into the configuration that -o writes",
    "--data nowhere -o run.toml": '--data is "nowhere", but there is no such file or folder',
    "--data little.txt -o run.toml --batch 8": "tokens, but one step of 8 sequences of 64 tokens needs",
    "--tokenizer 'too large' -o run.toml": "but the model has only 1000 rows for them",
    "--data texts -o run.toml --sequence 257": "evenpipe train takes at most 256, the model's longest",
    "--tokenizer nowhere -o run.toml": 'the tokenizer "nowhere" cannot be loaded',
    "--model narrow -o run.toml": "the model has a vocabulary of 200, but a tokenizer that is trained",
    "--model own.toml --data texts -o run.toml": "but own.toml has its own",
    "--model own.toml --tokenizer fits -o run.toml": "but own.toml has its own",
}


def test_what_would_not_run_is_refused_before_the_search(capsys, monkeypatch):
    monkeypatch.setattr(configuration_search, "search_configurations", lambda *_, **__: pytest.fail("it searches"))
    Path("own.toml").write_text('[model]\narchitecture = "llama"\n[data]\nfiles = "little.txt"\n')
    for arguments, words in REFUSED.items():
        out, err = planned(capsys, *SHORT, *shlex.split(arguments), code=2)
        assert out == "" and words in err and err.count("\n") == 1
        assert not Path("run.toml").exists()
