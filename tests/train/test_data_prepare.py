"""From the configuration to prepared data: tokenizers, the cache, and everything that can be wrong with it."""

from __future__ import annotations

import json
import resource
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import wrong_refusals
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from evenpipe.errors import InputError, RunError
from evenpipe.model.config import read_config
from evenpipe.train import data as data_module
from evenpipe.train.config import Config
from evenpipe.train.config_file import config_from_dict
from evenpipe.train.data import PreparedData, changes_of_data, data_identity, open_batches, open_data
from evenpipe.train.data import prepare as prepare_loudly
from evenpipe.train.files import locked
from evenpipe.train.start import set_up
from evenpipe.train.tokenizer import tokenizer_size, train_tokenizer

LINES = [f"def f{number}(x):\n\treturn x + {number}  # ü\n" for number in range(60)]
OTHER_LINES = [f"class C{number}:\n    pass  # ü\n" for number in range(9)]
END = "<|endoftext|>"
Configured = Callable[..., Config]


def write(folder: Path, texts: list[str]) -> Path:
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number:02}.py").write_text(text)
    return folder


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer(LINES, 300, "<|end|>")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write(tmp_path / "corpus", LINES)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Documents to evaluate on."""
    return write(tmp_path / "other", OTHER_LINES)


@pytest.fixture
def config(tmp_path: Path, corpus: Path) -> Configured:
    """Function that makes a configuration with changes per section."""

    def make(**changes: dict[str, Any]) -> Config:
        tables: dict[str, dict[str, Any]] = {
            "model": {"architecture": "llama"},
            "data": {"files": [f"{corpus}/*.py"], "sequence_length": 16, "validation_fraction": 0.1},
            "tokenizer": {"vocabulary_size": 300},
            "pipeline": {"microbatches": 2, "microbatch_size": 2},
            "output": {"folder": str(tmp_path / "run")},
        }
        return config_from_dict(
            {name: {**tables.get(name, {}), **changes.get(name, {})} for name in {**tables, **changes}}
        )

    return make


def prepare(config: Config) -> PreparedData:
    return prepare_loudly(config, lambda text: None)


def with_tokenizer(config: Configured, source: str | Path, **changes: Any) -> Config:
    return config(
        tokenizer={"source": str(source), "vocabulary_size": "none", **changes.pop("tokenizer", {})}, **changes
    )


def tokens_of(data: PreparedData) -> np.ndarray:
    return np.fromfile(data.tokens_path, dtype="<i4")


def ends_of(data: PreparedData) -> np.ndarray:
    return np.fromfile(data.ends_path, dtype="<i8")


def decoded(data: PreparedData, tokenizer_folder: Path) -> str:
    return AutoTokenizer.from_pretrained(tokenizer_folder).decode(tokens_of(data))


def test_prepared_data_is_every_document_and_an_end_of_text(config):
    said: list[str] = []
    data = prepare_loudly(config(), said.append)
    tokens = tokens_of(data)
    assert decoded(data, data.tokenizer_folder) == "".join(text + END for text in LINES)
    assert (data.documents, data.tokens, data.tokenizer_size) == (60, len(tokens), 300)
    assert (tokens == data.end_of_text_id).sum() == 60
    assert [text.split(" ")[0] for text in said] == ["reading", "training", "60"]
    batch, rows = open_batches(config(), data), data.tokens // 16
    assert batch.batch(0).input_ids.tolist() == tokens[: rows * 16].reshape(rows, 16)[batch.row_numbers(0)].tolist()
    for path in data.tokenizer_folder.iterdir():
        assert (config().run_folder / "tokenizer" / path.name).read_bytes() == path.read_bytes()


def test_the_end_of_text_within_a_document_does_not_end_it(config, corpus):
    texts = [f"{END}begins with it", f"has {END} in it\n" * 3]
    for number, text in enumerate(texts):
        (corpus / f"{number:02}.py").write_text(text)
    data = prepare(config())
    assert (tokens_of(data) == data.end_of_text_id).sum() == 60 + 4
    assert len(ends_of(data)) == data.documents == 60
    tokenizer = AutoTokenizer.from_pretrained(data.tokenizer_folder)
    parts = np.split(tokens_of(data), ends_of(data)[:2])
    assert [tokenizer.decode(part) for part in parts[:2]] == [f"{text}{END}" for text in texts]


# ---- the cache


def test_a_second_run_uses_what_is_there(config, monkeypatch):
    first = prepare(config())
    written = first.tokens_path.stat()
    monkeypatch.setattr(data_module, "write_tokens", None)
    monkeypatch.setattr(data_module.tokenizers_, "train_tokenizer", None)
    assert prepare(config()) == first
    assert prepare(config(data={"sequence_length": 32})) == first, "the same tokens, cut into other rows"
    again = first.tokens_path.stat()
    assert (again.st_ino, again.st_mtime_ns) == (written.st_ino, written.st_mtime_ns)


def test_what_changes_the_tokens_is_prepared_anew(config, corpus):
    runs = [
        config(),
        config(tokenizer={"vocabulary_size": 299}),
        config(tokenizer={"end_of_text": "<|other|>"}),
        config(data={"encoding_errors": "replace"}),
    ]
    prepared = [prepare(run) for run in runs]
    (corpus / "00.py").write_text("print(1)\n")
    prepared.append(prepare(config()))
    assert len({data.fingerprint for data in prepared}) == len({data.folder for data in prepared}) == 5
    assert prepared[0].is_complete()


def truncate(folder: Path) -> None:
    with (folder / "tokens.bin").open("r+b") as file:
        file.truncate(100)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": truncate,
    "without tokens": lambda folder: (folder / "tokens.bin").unlink(),
    "prepared before documents.bin existed": lambda folder: (folder / "documents.bin").unlink(),
    "half a description": lambda folder: (folder / "data.json").write_text('{"folder": '),
    "without a part of the tokenizer": lambda folder: (folder / "tokenizer" / "tokenizer_config.json").unlink(),
}


def test_a_damaged_cache_is_built_again(config):
    with pytest.raises(RunError, match=r"data\.json cannot be read"):
        open_data(config())
    stale = config().cache_folder / "building.tmp" / "tokenizer"
    stale.mkdir(parents=True)
    first = prepare(config())
    assert not stale.parent.exists(), "what a killed preparation left behind"
    intact = first.tokens_path.read_bytes()
    for name, damage in DAMAGES.items():
        damage(Path(first.folder))
        if name != "half a description":  # the folder of the run has its own
            with pytest.raises(RunError, match="incomplete"):
                open_data(config())
        assert prepare(config()) == first, name
        assert first.tokens_path.read_bytes() == intact and len(ends_of(first)) == first.documents


def test_a_second_process_waits_for_the_first(config):
    run = config()
    run.cache_folder.mkdir(parents=True)
    done: list[PreparedData] = []
    with locked(run.cache_folder / "lock"):
        waiting = threading.Thread(target=lambda: done.append(prepare(run)))
        waiting.start()
        waiting.join(timeout=0.3)
        assert not done
    waiting.join()
    assert done[0].is_complete()


def test_a_full_disk_is_a_failed_run_and_leaves_nothing_behind(config, corpus):
    (corpus / "big.py").write_text("x = 1\n" * 20_000)
    run = config()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(RunError, match="the disk is full: preparing data in"):
            prepare(run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in run.cache_folder.iterdir()] == ["lock"]
    assert prepare(run).is_complete()


def test_too_little_data_and_a_folder_that_is_a_file_are_one_sentence(config, corpus, tmp_path):
    little = [
        (config(pipeline={"microbatches": 100}), ["one step needs 200", "pipeline.microbatches"]),
        (config(data={"sequence_length": 100_000}), ["0 training sequences", "data.sequence_length = 100000"]),
    ]
    assert not wrong_refusals(prepare, little)
    for path in corpus.iterdir():
        path.unlink()
    for content, words in ((b"", ["the data", "has no text"]), (b"a", ["2 tokens", "0 training sequences", "needs 4"])):
        (corpus / "zero.py").write_bytes(content)
        assert not wrong_refusals(prepare, [(config(), words)])
    (tmp_path / "file").touch()
    run = config(output={"folder": str(tmp_path / "file")})
    with pytest.raises(InputError, match=r"output\.folder is .*file\"; it must be a folder that can be written"):
        set_up(run, force=False)


# ---- tokenizers


def test_an_existing_tokenizer_is_used_as_it_is(config, tokenizer, other, tmp_path):
    """Also for data to evaluate on, and without the special tokens that it would add."""
    from tokenizers.processors import TemplateProcessing

    tokenizer.save_pretrained(tmp_path / "mine")
    wrapping = AutoTokenizer.from_pretrained(tmp_path / "mine")
    wrapping.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|end|> $A <|end|>", special_tokens=[("<|end|>", tokenizer.eos_token_id)]
    )
    wrapping.save_pretrained(tmp_path / "wrapping")
    assert wrapping("x")["input_ids"][0] == tokenizer.eos_token_id
    for name in ("mine", "wrapping"):
        evaluated = {"validation_files": [f"{other}/*.py"], "validation_fraction": 0}
        data = prepare(with_tokenizer(config, tmp_path / name, data=evaluated))
        for tokenized, texts in ((data, LINES), (data.validation, OTHER_LINES)):
            expected = [token for text in texts for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
            assert tokens_of(tokenized).tolist() == expected
        assert data.end_of_text_id == tokenizer.convert_tokens_to_ids("<|end|>")
        assert prepare(with_tokenizer(config, tmp_path / name, data=evaluated)) == data


def test_the_end_of_text_of_an_existing_tokenizer(config, tokenizer, tmp_path):
    source = tmp_path / "without"
    tokenizer.save_pretrained(tmp_path / "mine")
    AutoTokenizer.from_pretrained(tmp_path / "mine", eos_token=None).save_pretrained(source)
    refused = [
        (with_tokenizer(config, source), ["tokenizer.end_of_text is none", "without"]),
        (
            with_tokenizer(config, source, tokenizer={"end_of_text": "</s>"}),
            'tokenizer.end_of_text is "</s>"; it must be a token',
        ),
        (with_tokenizer(config, tmp_path / "nowhere"), ['nowhere" cannot be loaded']),
    ]
    assert not wrong_refusals(prepare, refused)
    data = prepare(with_tokenizer(config, source, tokenizer={"end_of_text": "<|end|>"}))
    assert AutoTokenizer.from_pretrained(data.tokenizer_folder).eos_token == "<|end|>"


def test_a_mistyped_name_is_not_asked_for_again_and_again(config, tokenizer, tmp_path, monkeypatch):
    """Where no network leads to the hub; and what stands beside a folder that does not exist is proposed."""

    def unreachable(*arguments: Any) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it is asked for again"))
    monkeypatch.setattr(socket, "getaddrinfo", unreachable)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.chdir(tmp_path)
    tokenizer.save_pretrained(tmp_path / "runs" / "tokenizer")
    meant = r'did you mean "runs/tokenizer"\?$'
    with pytest.raises(InputError, match=rf'^the tokenizer "runs/tokeniser" cannot be .*{meant}'):
        prepare(with_tokenizer(config, "runs/tokeniser"))
    with pytest.raises(InputError, match=rf"model\.source = 'runs/tokeniser' is neither .*{meant}"):
        read_config("runs/tokeniser", field="model.source")


@settings(max_examples=50)
@given(text=st.text())
def test_a_trained_tokenizer_gives_every_text_back(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_small_corpus_gives_a_smaller_tokenizer_with_all_bytes():
    assert 257 <= tokenizer_size(train_tokenizer(["ab"], 4000, "<|end|>")) < 300


# ---- data to evaluate on


def evaluated_on(config: Configured, *patterns: str | Path, **data: Any) -> Config:
    files = [str(pattern) for pattern in patterns]
    return config(data={"validation_files": files, "validation_fraction": 0, **data})


def test_files_to_evaluate_on_get_the_same_tokenizer_and_are_not_trained_on(config, other):
    alone = prepare(config())
    run = evaluated_on(config, other / "*.py")
    said: list[str] = []
    data = prepare_loudly(run, said.append)
    assert said[-2] == "reading 9 files to evaluate on"
    assert (data.fingerprint, data.tokens) == (alone.fingerprint, alone.tokens)
    assert tokens_of(data).tolist() == tokens_of(alone).tolist()
    assert decoded(data.validation, data.tokenizer_folder) == "".join(text + END for text in OTHER_LINES)
    assert open_data(run) == data

    batches = open_batches(run, data)
    assert len(batches.training_rows) == data.tokens // 16
    assert len(batches.validation_rows) == data.validation.tokens // 16
    count = batches.validation_batches
    rows = [row for index in range(count) for row in batches.validation_batch(index)[0].tolist()]
    assert [token for row in rows for token in row] == tokens_of(data.validation).tolist()[: len(rows) * 16]

    truncate(Path(data.validation.folder))
    with pytest.raises(RunError, match="incomplete"):
        open_data(run)


def test_a_file_that_both_patterns_name_is_only_evaluated_on(config, corpus):
    """By what the file is, not by how it is written."""
    data = prepare(evaluated_on(config, f"{corpus}/../corpus/0*.py"))
    assert (data.documents, data.validation.documents) == (50, 10)


def test_a_split_to_evaluate_on(config, tmp_path):
    from datasets import Dataset, DatasetDict

    splits = {"train": LINES[:50], "test": LINES[50:]}
    saved = str(tmp_path / "saved")
    DatasetDict({name: Dataset.from_dict({"text": texts}) for name, texts in splits.items()}).save_to_disk(saved)
    table = {"files": [], "dataset": saved, "validation_split": "test", "validation_fraction": 0}
    data = prepare(config(data=table))
    assert decoded(data.validation, data.tokenizer_folder) == "".join(text + END for text in LINES[50:])
    assert data.documents == 50
    with pytest.raises(InputError, match='split "dev"'):
        prepare(config(data={**table, "validation_split": "dev"}))


def test_wrong_data_to_evaluate_on_is_one_sentence(config, corpus, other):
    cases = [
        (evaluated_on(config, "nowhere/*.py"), 'data.validation_files names "nowhere/*.py", but there is no such'),
        (evaluated_on(config, other), "data.validation_files names the folder"),
        (
            evaluated_on(config, other / "01.py", sequence_length=64),
            ["the validation data has", "tokens; it must have at least one sequence"],
        ),
        (
            evaluated_on(config, corpus / "*.py"),
            ["data.validation_files is ", "must leave files of data.files to train on"],
        ),
    ]
    assert not wrong_refusals(prepare, cases)


# ---- what a checkpoint compares


def test_what_a_checkpoint_compares(config):
    data = prepare(config())
    identity = data_identity(config(), data)
    assert json.loads(json.dumps(identity)) == identity
    for change, line, mixes in (
        ({"training": {"seed": 1}}, "training.seed is now 1, was 0: the order of the data changes", False),
        ({"data": {"sequence_length": 32}}, "data.sequence_length is now 32, was 16: the order", True),
        ({"data": {"validation_fraction": 0.2}}, "data.validation_fraction is now 0.2, was 0.1: the order", True),
        ({"data": {"validation_fraction": 0}}, "data.validation_fraction is now 0.0, was 0.1: the order", False),
    ):
        (said,) = changes_of_data(identity, data_identity(config(**change), data))
        assert said.startswith(line)
        assert ("the run may have trained on some of the new ones" in said) == mixes
    for sizes in ({"microbatches": 4, "microbatch_size": 1}, {"microbatches": 4}):  # the position counts rows
        assert changes_of_data(identity, data_identity(config(pipeline=sizes), data)) == []
    separate = data_identity(config(data={"documents": "separate"}), data)
    before_the_option = {name: value for name, value in identity.items() if name != "data.documents"}
    for earlier in (identity, before_the_option):
        assert changes_of_data(earlier, identity) == []
        assert changes_of_data(earlier, separate) == [
            "data.documents is now separate, was joined: losses do not compare with earlier ones"
        ]


def test_what_a_checkpoint_says_of_data_to_evaluate_on(config, other):
    plain = config(data={"validation_fraction": 0})
    runs = [plain, evaluated_on(config, other / "*.py"), evaluated_on(config, other / "0[0-7].py")]
    identities = [data_identity(run, prepare(run)) for run in runs]
    line = "the validation data has changed: validation losses do not compare with earlier ones"
    for before, now in ((0, 1), (1, 2), (2, 0)):
        assert changes_of_data(identities[before], identities[now]) == [line]
    assert changes_of_data(identities[1], identities[1]) == []
    del identities[0]["validation data"]  # a checkpoint that was written before there was such data
    assert changes_of_data(identities[0], data_identity(plain, prepare(plain))) == []
