"""From the configuration to prepared data: tokenizers, the cache, and everything that can be wrong with it."""

from __future__ import annotations

import json
import multiprocessing
import resource
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from evenpipe.errors import InputError, RunError
from evenpipe.model.config import read_config
from evenpipe.train import data as data_module
from evenpipe.train.config_file import config_from_dict
from evenpipe.train.data import changes_of_data, data_identity, open_batches, open_data, planned_steps, prepare
from evenpipe.train.files import locked
from evenpipe.train.start import set_up
from evenpipe.train.tokenizer import tokenizer_size, train_tokenizer

LINES = [f"def f{number}(x):\n\treturn x + {number}  # ü\n" for number in range(60)]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(LINES, 300, "<|end|>")


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number, text in enumerate(LINES):
        (folder / f"{number:02}.py").write_text(text)
    return folder


@pytest.fixture
def config(tmp_path, corpus):
    """Function that makes a configuration with changes per section."""

    def make(**changes):
        tables = {
            "model": {"architecture": "llama"},
            "data": {"files": [f"{corpus}/*.py"], "sequence_length": 16, "validation_fraction": 0.1},
            "tokenizer": {"vocabulary_size": 300},
            "pipeline": {"microbatches": 2, "microbatch_size": 2},
            "output": {"folder": str(tmp_path / "run")},
        }
        for name, values in changes.items():
            tables[name] = {**tables.get(name, {}), **values}
        return config_from_dict(tables)

    return make


def quiet(text):
    """Instead of standard error."""


def tokens_of(data):
    return np.fromfile(data.tokens_path, dtype="<i4")


def test_prepared_data_is_every_document_and_an_end_of_text(config):
    said: list[str] = []
    data = prepare(config(), said.append)
    tokenizer = AutoTokenizer.from_pretrained(data.tokenizer_folder)
    tokens = tokens_of(data)
    assert tokenizer.decode(tokens) == "".join(text + "<|endoftext|>" for text in LINES)
    assert (data.documents, data.tokens) == (60, len(tokens))
    assert (tokens == data.end_of_text_id).sum() == 60
    assert data.tokenizer_size == len(tokenizer) == 300
    assert [text.split(" ")[0] for text in said] == ["reading", "training", "60"]


def test_batches_are_rows_of_the_tokens(config):
    settings = config()
    data = prepare(settings, quiet)
    assert open_data(settings) == data
    batches = open_batches(settings, data)
    rows = data.tokens // 16
    assert len(batches.training_rows) + len(batches.validation_rows) == rows
    batch = batches.batch(0).input_ids
    assert batch.shape == (4, 16)
    expected = tokens_of(data)[: rows * 16].reshape(rows, 16)[batches.row_numbers(0)]
    assert batch.tolist() == expected.tolist()


def test_separate_documents_have_positions_of_their_own(config):
    """A tokenizer that reads the end of text in a text as one token does not end the document there."""
    settings = config(data={"documents": "separate"})
    data = prepare(settings, quiet)
    ends = np.fromfile(data.ends_path, dtype="<i8")
    assert ends.tolist() == [at + 1 for at, token in enumerate(tokens_of(data)) if token == data.end_of_text_id]
    batches = open_batches(settings, data)
    ids, _, positions = batches.batch(0)
    before = torch.cat([torch.full((len(ids), 1), data.end_of_text_id), ids[:, :-1]], 1)
    assert torch.equal(positions == 0, before == data.end_of_text_id)
    assert torch.equal(positions.diff(dim=1)[positions[:, 1:] > 0], torch.ones((positions[:, 1:] > 0).sum().int()))
    assert open_batches(config(data={"documents": "joined"}), data).batch(0).position_ids is None


def test_the_end_of_text_within_a_document_does_not_end_it(config, corpus):
    texts = ["<|endoftext|>begins with it", "has <|endoftext|> in it\n" * 3]
    for number, text in enumerate(texts):
        (corpus / f"{number:02}.py").write_text(text)
    data = prepare(config(), quiet)
    ends = np.fromfile(data.ends_path, dtype="<i8")
    assert (tokens_of(data) == data.end_of_text_id).sum() == 60 + 4
    assert len(ends) == data.documents == 60
    tokenizer = AutoTokenizer.from_pretrained(data.tokenizer_folder)
    parts = np.split(tokens_of(data), ends[:2])
    assert [tokenizer.decode(part) for part in parts[:2]] == [f"{text}<|endoftext|>" for text in texts]


def test_the_same_text_gives_the_same_tokenizer_and_tokens(config, tmp_path):
    first = prepare(config(), quiet)
    second = prepare(config(data={"cache_folder": str(tmp_path / "elsewhere")}), quiet)
    assert first.fingerprint == second.fingerprint
    assert first.tokens_path.read_bytes() == second.tokens_path.read_bytes()
    names = [path.name for path in first.tokenizer_folder.iterdir()]
    assert "tokenizer.json" in names
    for name in names:
        assert (first.tokenizer_folder / name).read_bytes() == (second.tokenizer_folder / name).read_bytes()


def test_a_second_run_uses_what_is_there(config, monkeypatch):
    first = prepare(config(), quiet)
    written = first.tokens_path.stat()
    monkeypatch.setattr(data_module, "write_tokens", None)
    monkeypatch.setattr(data_module.tokenizers_, "train_tokenizer", None)
    assert prepare(config(), quiet) == first
    longer = prepare(config(data={"sequence_length": 32}), quiet)  # the same tokens, cut into other rows
    assert longer == first
    again = first.tokens_path.stat()
    assert (again.st_ino, again.st_mtime_ns) == (written.st_ino, written.st_mtime_ns)


CHANGES = [
    {"tokenizer": {"vocabulary_size": 299}},
    {"tokenizer": {"vocabulary_size": 300, "end_of_text": "<|other|>"}},
    {"data": {"encoding_errors": "replace"}},
    "content",
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_what_changes_the_tokens_is_prepared_anew(config, corpus, change):
    first = prepare(config(), quiet)
    if change == "content":
        (corpus / "00.py").write_text("print(1)\n")
        change = {}
    second = prepare(config(**change), quiet)
    assert second.fingerprint != first.fingerprint
    assert second.folder != first.folder
    assert first.is_complete()


def damage_truncate(folder):
    with (folder / "tokens.bin").open("r+b") as file:
        file.truncate(100)


def damage_remove(folder):
    (folder / "tokens.bin").unlink()


def damage_ends(folder):
    """Also what was prepared before this file existed."""
    (folder / "documents.bin").unlink()


def damage_json(folder):
    (folder / "data.json").write_text('{"folder": ')


def damage_tokenizer(folder):
    (folder / "tokenizer" / "tokenizer_config.json").unlink()


@pytest.mark.parametrize("damage", [damage_truncate, damage_remove, damage_ends, damage_json, damage_tokenizer])
def test_a_damaged_cache_is_built_again(config, damage):
    first = prepare(config(), quiet)
    intact = first.tokens_path.read_bytes()
    damage(Path(first.folder))
    if damage is not damage_json:
        with pytest.raises(RunError, match="incomplete"):
            open_data(config())
    assert prepare(config(), quiet) == first
    assert first.tokens_path.read_bytes() == intact
    assert len(np.fromfile(first.ends_path, dtype="<i8")) == first.documents


def test_what_a_killed_preparation_left_behind_is_removed(config):
    stale = config().cache_folder / "building.tmp"
    (stale / "tokenizer").mkdir(parents=True)
    (stale / "tokens.bin").write_bytes(b"half")
    data = prepare(config(), quiet)
    assert data.is_complete()
    assert not stale.exists()


def test_data_that_was_never_prepared_cannot_be_opened(config):
    with pytest.raises(RunError, match=r"data\.json cannot be read"):
        open_data(config())


def test_a_second_process_waits_for_the_first(config):
    settings = config()
    settings.cache_folder.mkdir(parents=True)
    done = []
    with locked(settings.cache_folder / "lock"):
        waiting = threading.Thread(target=lambda: done.append(prepare(settings, quiet)))
        waiting.start()
        waiting.join(timeout=0.3)
        assert not done
    waiting.join()
    assert done[0].is_complete()


def hold_and_die(path, ready):
    with locked(Path(path)):
        ready.set()
        threading.Event().wait()


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=hold_and_die, args=(tmp_path / "lock", ready))
    process.start()
    assert ready.wait(timeout=600)
    process.kill()
    process.join()
    with locked(tmp_path / "lock"):
        pass


def test_a_full_disk_is_a_failed_run_and_leaves_nothing_behind(config, corpus):
    (corpus / "big.py").write_text("x = 1\n" * 20_000)
    settings = config()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(RunError, match="the disk is full: preparing data in"):
            prepare(settings, quiet)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in settings.cache_folder.iterdir()] == ["lock"]
    assert prepare(settings, quiet).is_complete()


def test_a_run_folder_that_is_a_file_is_refused(config, tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(InputError, match=r"output\.folder is .*run\", but must be a folder that can be written"):
        set_up(config(), force=False)


TOO_LITTLE = [
    ({}, b"", ["the data", "has no text"]),
    ({}, b"a", ["2 tokens", "0 training sequences", "needs 4"]),
    ({"pipeline": {"microbatches": 100}}, None, ["one step needs 200", "pipeline.microbatches"]),
    ({"data": {"sequence_length": 100_000}}, None, ["0 training sequences", "data.sequence_length = 100000"]),
]


@pytest.mark.parametrize(("changes", "content", "words"), TOO_LITTLE)
def test_too_little_data_is_one_sentence(config, corpus, changes, content, words):
    if content is not None:
        for path in corpus.iterdir():
            path.unlink()
        (corpus / "zero.py").write_bytes(content)
    with pytest.raises(InputError) as caught:
        prepare(config(**changes), quiet)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_an_existing_tokenizer_is_used_as_it_is(config, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "mine")
    data = prepare(config(tokenizer={"source": str(tmp_path / "mine"), "vocabulary_size": "none"}), quiet)
    expected = [token for text in LINES for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    assert tokens_of(data).tolist() == expected
    assert data.end_of_text_id == tokenizer.convert_tokens_to_ids("<|end|>")
    again = prepare(config(tokenizer={"source": str(tmp_path / "mine"), "vocabulary_size": "none"}), quiet)
    assert again == data


def test_special_tokens_of_an_existing_tokenizer_are_not_added(config, tokenizer, tmp_path):
    from tokenizers.processors import TemplateProcessing

    tokenizer.save_pretrained(tmp_path / "mine")
    wrapping = AutoTokenizer.from_pretrained(tmp_path / "mine")
    wrapping.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|end|> $A <|end|>", special_tokens=[("<|end|>", tokenizer.eos_token_id)]
    )
    wrapping.save_pretrained(tmp_path / "wrapping")
    assert wrapping("x")["input_ids"][0] == tokenizer.eos_token_id
    data = prepare(config(tokenizer={"source": str(tmp_path / "wrapping"), "vocabulary_size": "none"}), quiet)
    assert (tokens_of(data) == tokenizer.eos_token_id).sum() == len(LINES)


def test_the_end_of_text_of_an_existing_tokenizer(config, tokenizer, tmp_path):
    without = AutoTokenizer.from_pretrained(_saved(tokenizer, tmp_path / "mine"), eos_token=None)
    source = str(_saved(without, tmp_path / "without"))
    with pytest.raises(InputError, match=r"tokenizer\.end_of_text is none.*without"):
        prepare(config(tokenizer={"source": source, "vocabulary_size": "none"}), quiet)
    with pytest.raises(InputError, match=r'tokenizer\.end_of_text is "</s>", but must be a token'):
        prepare(config(tokenizer={"source": source, "vocabulary_size": "none", "end_of_text": "</s>"}), quiet)
    data = prepare(config(tokenizer={"source": source, "vocabulary_size": "none", "end_of_text": "<|end|>"}), quiet)
    assert AutoTokenizer.from_pretrained(data.tokenizer_folder).eos_token == "<|end|>"
    with pytest.raises(InputError, match=r'tokenizer ".*nowhere" cannot be loaded'):
        prepare(config(tokenizer={"source": f"{tmp_path}/nowhere", "vocabulary_size": "none"}), quiet)


def test_a_mistyped_name_is_not_asked_for_again_and_again(config, tokenizer, tmp_path, monkeypatch):
    """Where no network leads to the hub; and what stands beside a folder that does not exist is proposed."""

    def unreachable(*arguments):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it is asked for again"))
    monkeypatch.setattr(socket, "getaddrinfo", unreachable)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    _saved(tokenizer, tmp_path / "runs" / "tokenizer")
    with pytest.raises(
        InputError, match=r'^the tokenizer "runs/tokeniser" cannot be .*did you mean "runs/tokenizer"\?$'
    ):
        prepare(config(tokenizer={"source": "runs/tokeniser", "vocabulary_size": "none"}), quiet)
    with pytest.raises(
        InputError, match=r"model\.source = 'runs/tokeniser' is neither .*did you mean \"runs/tokenizer"
    ):
        read_config("runs/tokeniser", field="model.source")


def _saved(tokenizer, folder):
    tokenizer.save_pretrained(folder)
    return folder


def test_the_run_folder_holds_the_trained_tokenizer(config):
    data = prepare(config(), quiet)
    for path in data.tokenizer_folder.iterdir():
        assert (config().run_folder / "tokenizer" / path.name).read_bytes() == path.read_bytes()


@given(text=st.text())
def test_a_trained_tokenizer_gives_every_text_back(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_small_corpus_gives_a_smaller_tokenizer_with_all_bytes():
    small = train_tokenizer(["ab"], 4000, "<|end|>")
    assert 257 <= tokenizer_size(small) < 300


def test_what_a_checkpoint_compares(config):
    data = prepare(config(), quiet)
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


@pytest.fixture
def other(tmp_path):
    """Documents to evaluate on."""
    folder = tmp_path / "other"
    folder.mkdir()
    texts = [f"class C{number}:\n    pass  # ü\n" for number in range(9)]
    for number, text in enumerate(texts):
        (folder / f"{number}.py").write_text(text)
    return folder, texts


def test_files_to_evaluate_on_get_the_same_tokenizer_and_are_not_trained_on(config, corpus, other, monkeypatch):
    folder, texts = other
    alone = prepare(config(), quiet)
    settings = config(data={"validation_files": [f"{folder}/*.py"], "validation_fraction": "none"})
    said: list[str] = []
    data = prepare(settings, said.append)
    assert (data.fingerprint, data.tokens) == (alone.fingerprint, alone.tokens)
    assert data.validation is not None
    assert tokens_of(data).tolist() == tokens_of(alone).tolist()
    tokenizer = AutoTokenizer.from_pretrained(data.tokenizer_folder)
    assert tokenizer.decode(tokens_of(data.validation)) == "".join(text + "<|endoftext|>" for text in texts)
    assert said[-2] == "reading 9 files to evaluate on"
    assert open_data(settings) == data

    batches = open_batches(settings, data)
    assert len(batches.training_rows) == data.tokens // 16
    assert len(batches.validation_rows) == data.validation.tokens // 16
    count = batches.validation_batches
    rows = [row for index in range(count) for row in batches.validation_batch(index)[0].tolist()]
    assert [token for row in rows for token in row] == tokens_of(data.validation).tolist()[: len(rows) * 16]

    monkeypatch.setattr(data_module, "write_tokens", None)  # the second time both are in the cache
    assert prepare(settings, quiet) == data
    damage_truncate(Path(data.validation.folder))
    with pytest.raises(RunError, match="incomplete"):
        open_data(settings)


def test_a_file_that_both_patterns_name_is_only_evaluated_on(config, corpus):
    """By what the file is, not by how it is written."""
    both = config(data={"validation_files": [f"{corpus}/../corpus/0*.py"], "validation_fraction": 0})
    data = prepare(both, quiet)
    assert (data.documents, data.validation.documents) == (50, 10)
    everything = config(data={"validation_files": [f"{corpus}/*.py"], "validation_fraction": 0})
    with pytest.raises(InputError, match=r"data\.validation_files is .*must leave files of data\.files to train on"):
        prepare(everything, quiet)


def test_data_to_evaluate_on_with_an_existing_tokenizer(config, other, tokenizer, tmp_path):
    source = str(_saved(tokenizer, tmp_path / "mine"))
    folder, texts = other
    data = prepare(
        config(
            data={"validation_files": [f"{folder}/*.py"], "validation_fraction": 0},
            tokenizer={"source": source, "vocabulary_size": "none"},
        ),
        quiet,
    )
    expected = [token for text in texts for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    assert tokens_of(data.validation).tolist() == expected


def test_a_split_to_evaluate_on(config, tmp_path):
    from datasets import Dataset, DatasetDict

    splits = {"train": LINES[:50], "test": LINES[50:]}
    DatasetDict({name: Dataset.from_dict({"text": texts}) for name, texts in splits.items()}).save_to_disk(
        tmp_path / "saved"
    )
    table = {"files": [], "dataset": str(tmp_path / "saved"), "validation_split": "test", "validation_fraction": 0}
    data = prepare(config(data=table), quiet)
    tokenizer = AutoTokenizer.from_pretrained(data.tokenizer_folder)
    assert tokenizer.decode(tokens_of(data.validation)) == "".join(text + "<|endoftext|>" for text in LINES[50:])
    assert data.documents == 50
    with pytest.raises(InputError, match='split "dev"'):
        prepare(config(data={**table, "validation_split": "dev"}), quiet)


def test_wrong_data_to_evaluate_on_is_one_sentence(config, other):
    folder, _ = other
    for data, words in (
        (
            {"validation_files": ["nowhere/*.py"]},
            r'^data\.validation_files names "nowhere/\*\.py", but there is no such',
        ),
        ({"validation_files": [str(folder)]}, r"^data\.validation_files names the folder"),
        (
            {"validation_files": [f"{folder}/1.py"], "sequence_length": 64},
            "^the validation data has .* tokens, but must have at least one sequence",
        ),
    ):
        with pytest.raises(InputError, match=words):
            prepare(config(data={"validation_fraction": 0, **data}), quiet)


def test_what_a_checkpoint_says_of_data_to_evaluate_on(config, corpus, other):
    folder, _ = other
    plain = config(data={"validation_fraction": 0})
    own = config(data={"validation_files": [f"{folder}/*.py"], "validation_fraction": 0})
    fewer = config(data={"validation_files": [f"{folder}/[0-7].py"], "validation_fraction": 0})
    identities = [data_identity(settings, prepare(settings, quiet)) for settings in (plain, own, fewer)]
    line = "the validation data has changed: validation losses do not compare with earlier ones"
    for before, now in ((0, 1), (1, 2), (2, 0)):
        assert changes_of_data(identities[before], identities[now]) == [line]
    assert changes_of_data(identities[1], identities[1]) == []
    del identities[0]["validation data"]  # a checkpoint that was written before there was such data
    assert changes_of_data(identities[0], data_identity(plain, prepare(plain, quiet))) == []


def test_steps_follow_from_epochs_the_data_and_the_batch(config):
    settings = config(training={"epochs": 2.5})
    data = prepare(settings, quiet)
    rows = len(open_batches(settings, data).training_rows)
    assert planned_steps(settings, open_batches(settings, data)) == -(-5 * rows // 8)
    wider = config(training={"epochs": 2.5}, pipeline={"microbatches": 4})
    done, read = 6, 6 * 4  # of a run that is resumed with a batch of another size
    assert planned_steps(wider, open_batches(wider, data), done, read) == done + -(-(5 * rows - 2 * read) // 16)
    assert planned_steps(config(), open_batches(config(), data)) == 1000
    assert planned_steps(config(training={"steps": 7}), open_batches(config(), data), 3, 99) == 7
