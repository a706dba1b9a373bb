"""Tokenizers: one that is missing, or of another model, is refused before data is read; how one is trained."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

from evenpipe.cli.main import main
from evenpipe.errors import InputError
from evenpipe.train.config_file import config_from_dict
from evenpipe.train.data import prepare
from evenpipe.train.tokenizer import LONGEST_RUN, _first, _pieces, train_tokenizer

TEXT = "every stage waits for its turn\n" * 200
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}


def model_in(folder: Path, family: str = "llama", vocabulary: int = 300) -> Path:
    heads = {} if family.startswith("gpt") else {"intermediate_size": 32, "num_key_value_heads": 1, "head_dim": 8}
    config = CONFIG_MAPPING[family](vocab_size=vocabulary, pad_token_id=0, **SIZES, **heads)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def tokenizer_in(folder: Path) -> None:
    train_tokenizer([TEXT], 300, "<|endoftext|>").save_pretrained(folder)


def older_files(folder: Path) -> None:
    """As GPT-2 has them: the vocabulary, and what to merge."""
    tokenizer = train_tokenizer([TEXT], 300, "<|endoftext|>")
    tokenizer.backend_tokenizer.model.save(str(folder))
    (folder / "vocab.json").write_text(json.dumps(tokenizer.get_vocab()))


def config_of(folder: Path, model: Path | str, **tokenizer: str) -> Any:
    (folder / "text.txt").write_text(TEXT)
    return config_from_dict(
        {
            "model": {"source": str(model)},
            "data": {"files": [str(folder / "text.txt")], "sequence_length": 16},
            "tokenizer": tokenizer,
            "pipeline": {"processes": 2, "microbatches": 2},
            "output": {"folder": str(folder / "run")},
        }
    )


def refused(config: Any) -> str:
    said: list[str] = []
    with pytest.raises(InputError) as caught:
        prepare(config, said.append)
    assert not list(config.run_folder.glob("data/*/tokens.bin")), "nothing was tokenized"
    assert "\n" not in str(caught.value)
    return str(caught.value)


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


MISSING = [
    # family, what is in the folder beside config and weights, what is missing
    ("llama", [], "has no tokenizer: it has no tokenizer.json or tokenizer.model or vocab.json"),
    ("gemma2", [], "has no tokenizer: it has no tokenizer.json"),
    ("gpt_neox", [tokenizer_in, without("tokenizer.json")], "has no tokenizer: it has no "),
    ("gpt2", [older_files, without("merges.txt")], "has half of a tokenizer: it has no merges.txt"),
    ("qwen2", [older_files, without("vocab.json")], "has half of a tokenizer: it has no vocab.json"),
]
REMEDY = "; give tokenizer.source, a folder or hub name with the tokenizer of the model"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("family", "makers", "words"), MISSING, ids=range(len(MISSING)))
def test_what_is_missing_is_named(tmp_path, family, makers, words, capsys) -> None:
    source = model_in(tmp_path / "model", family)
    for make in makers:
        make(source)
    sentence = refused(config_of(tmp_path, source))
    assert sentence.startswith(f'"{source}" {words}') and sentence.endswith(REMEDY)
    other = tmp_path / "tokenizer"
    tokenizer_in(other)
    prepare(config_of(tmp_path, source, source=str(other)), lambda text: None)
    assert main(["init", "--model", str(source), "-o", str(tmp_path / "new.toml")]) == 2
    assert words in capsys.readouterr().err


def test_a_hub_model_without_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it lies in the hub's cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for module in ("evenpipe.given", "evenpipe.train.tokenizer", "evenpipe.model.config"):
        monkeypatch.setattr(f"{module}.hub_options", lambda: {"local_files_only": True})
    of_hub = tmp_path / "models--some--model"
    model_in(of_hub / "snapshots" / "abc")
    (of_hub / "refs").mkdir()
    (of_hub / "refs" / "main").write_text("abc")
    sentence = refused(config_of(tmp_path, "some/model"))
    assert sentence.startswith('"some/model" has no tokenizer: it has no tokenizer.json') and sentence.endswith(REMEDY)
    tokenizer_in(of_hub / "snapshots" / "abc")
    config = config_of(tmp_path, "some/model")
    prepare(config, lambda text: None)
    for path in (of_hub / "snapshots" / "abc").glob("tokenizer*"):
        assert (config.run_folder / "tokenizer" / path.name).read_bytes() == path.read_bytes()


def test_the_whole_reason_of_a_tokenizer_that_cannot_be_loaded_is_said(tmp_path: Path) -> None:
    source = model_in(tmp_path / "model")
    tokenizer_in(source)
    (source / "tokenizer.json").write_text("{")
    sentence = refused(config_of(tmp_path, source))
    assert sentence.startswith(f'the tokenizer "{source}" cannot be loaded: ') and "line 1" in sentence
    (source / "tokenizer.json").unlink()
    (source / "tokenizer.model").write_bytes(b"no sentences")
    sentence = refused(config_of(tmp_path, source))
    assert "cannot be loaded: " in sentence and not sentence.endswith((":", "one of"))


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    other = tmp_path / "tokenizer"
    train_tokenizer(["ab"], 262, "<|end|>").save_pretrained(other)
    entries = len(json.loads((other / "tokenizer.json").read_text())["model"]["vocab"])
    rows_and_words = {
        entries - 1: f"the model's vocabulary is {entries - 1}; it must be at least {entries}, the size of the",
        entries: None,
        500: None,
        600: "so it is not the tokenizer of these weights; give tokenizer.source",
        50_000: f"has {entries} tokens, but the embedding of model.source = ",
    }
    for rows, words in rows_and_words.items():
        folder = tmp_path / str(rows)
        config = config_of(folder, model_in(folder / "model", vocabulary=rows), source=str(other))
        if words is None:
            prepare(config, lambda text: None)
        else:
            assert words in refused(config)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "phi3", "qwen2"])
def test_a_tokenizer_from_elsewhere_is_the_same_beside_the_model(tmp_path: Path, family: str) -> None:
    """Which class reads the files depends on the config beside them, so some are written anew."""
    source, other = model_in(tmp_path / "model", family), model_in(tmp_path / "other", "gpt2")
    older_files(other)
    config = config_of(tmp_path, source, source=str(other))
    prepare(config, lambda text: None)
    kept = config.run_folder / "tokenizer"
    (kept / "config.json").write_bytes((source / "config.json").read_bytes())
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (other, kept)]
    for text in (TEXT, " ab\n\n c", "\u00fcber 12"):
        assert tokenizers[0](text)["input_ids"] == tokenizers[1](text)["input_ids"]
    assert "is_local" not in (kept / "tokenizer_config.json").read_text()


# ---- what a tokenizer learns from; its training can be ended

PIECES = [
    # text, lengths of the pieces that are learned from
    ("", []),
    ("def f(x):\n    return x  # ünïcode, 123\n" * 1000, [39_000]),
    (" ".join(["a" * LONGEST_RUN] * 3), [3 * LONGEST_RUN + 2]),
    ("_" * LONGEST_RUN + "a" + "\n" * LONGEST_RUN, [2 * LONGEST_RUN + 1]),
    (" " * (LONGEST_RUN + 1), [LONGEST_RUN, 1]),
    ("語" * (2 * LONGEST_RUN), [LONGEST_RUN, LONGEST_RUN]),
    ("short " + "a" * (LONGEST_RUN + 1) + " short", [6 + LONGEST_RUN, 7]),
]


def test_long_runs_are_cut_and_ordinary_text_is_not():
    for text, lengths in PIECES:
        pieces = list(_pieces(text))
        assert "".join(pieces) == text and [len(piece) for piece in pieces] == lengths
    tokenizer = train_tokenizer(["a" * 3_000_000], 300, "<|end|>")
    assert tokenizer.decode(tokenizer("aaa aaaa")["input_ids"]) == "aaa aaaa"


def test_training_reads_only_the_first_characters() -> None:
    assert list(_first(["abc", "de", "f"], 4)) == ["abc", "d"] and not list(_first(["abc"], 0))


def test_a_signal_ends_the_training_and_the_process():
    """Foreign code must not come back to an interpreter that is shutting down: what was registered before shows that
    this one did not begin to."""
    program = """
import atexit, os, signal, threading
from evenpipe.train.tokenizer import LONGEST_RUN, _pieces, train_tokenizer
atexit.register(print, "shutting down")
def ended(number, frame): raise SystemExit(128 + number)
signal.signal(signal.SIGTERM, ended)
def texts():
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait()
    yield "never"
print("said", end=" ")
train_tokenizer(texts(), 300, "<|end|>")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (143, "said ", "")


def test_what_fails_there_is_raised_here():
    with pytest.raises(ZeroDivisionError):
        train_tokenizer((str(1 // number) for number in (1, 0)), 300, "<|end|>")
