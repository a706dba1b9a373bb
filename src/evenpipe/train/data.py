"""Prepares the data of a configuration: tokens on disk, a tokenizer, and batches.

One process calls `prepare` before the workers start; workers call `open_data`. `prepare` writes:

    CACHE/FINGERPRINT/   tokens.bin, documents.bin, tokenizer/, data.json: published by one rename, reused by the next
                         run
    RUN/tokenizer/       a copy for the exported model; for an existing tokenizer, its original files
    RUN/data.json        the data of this run
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from evenpipe.errors import InputError, RunError
from evenpipe.given import plain
from evenpipe.train import tokenizer as tokenizers_
from evenpipe.train.config import Config
from evenpipe.train.files import disk_errors, locked, write_json
from evenpipe.train.input_sections import DEFAULT_END_OF_TEXT
from evenpipe.train.model_source import model_config, pipeline_model
from evenpipe.train.packing import (
    OFFSET,
    TOKEN,
    Batches,
    count_tokens,
    open_ends,
    open_rows,
    split_rows,
    unread_rows,
    write_tokens,
)
from evenpipe.train.run_sections import DEFAULT_STEPS
from evenpipe.train.sources import Documents, FileDocuments, find_documents, find_validation_documents
from evenpipe.words import count

MOST_BYTES = 64
"""Upper bound on file bytes per token that hardly any data exceeds."""

MOST_CHARACTERS = 16
"""Upper bound on the mean characters per token of a tokenizer trained on the text."""

FORMAT = 1  # part of the fingerprint: increase it if the same sources would give other tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedData:
    """The data of a run; the contents of RUN/data.json."""

    folder: str
    """Folder of tokens.bin, documents.bin and tokenizer/."""
    fingerprint: str
    """Hex digest of sources and tokenizer."""
    documents: int
    tokens: int
    tokenizer_size: int
    """Minimum number of rows of the embedding."""
    end_of_text_id: int
    validation: PreparedData | None = None
    """Separate validation data with the same tokenizer, or None."""

    @property
    def tokens_path(self) -> Path:
        """File of int32 tokens."""
        return Path(self.folder) / "tokens.bin"

    @property
    def ends_path(self) -> Path:
        """File of int64: the number of tokens up to the end of each document."""
        return Path(self.folder) / "documents.bin"

    @property
    def tokenizer_folder(self) -> Path:
        """Saved transformers tokenizer."""
        return Path(self.folder) / "tokenizer"

    def is_complete(self) -> bool:
        """Return whether the files exist with their full size."""
        sizes = {self.tokens_path: self.tokens * TOKEN.itemsize, self.ends_path: self.documents * OFFSET.itemsize}
        return (
            all(path.is_file() and path.stat().st_size == size for path, size in sizes.items())
            and (self.tokenizer_folder / "tokenizer_config.json").is_file()
            and (self.validation is None or self.validation.is_complete())
        )

    @classmethod
    def read(cls, path: Path) -> PreparedData:
        """Read data.json. Raises OSError, ValueError or TypeError for any other file."""
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.get("validation") is not None:
            content["validation"] = cls(**content["validation"])
        return cls(**content)


def prepare(config: Config, say: Callable[[str], None] | None = None) -> PreparedData:
    """Check the sources, find or build the tokenizer and tokens, and check that they are enough for one step.

    One process calls it before the workers start; a second process waits for the first. `say` receives progress
    messages (default: standard error). Raises `InputError` for wrong data, `RunError` if the disk is full.
    """
    say = say or (lambda text: print(plain(text), file=sys.stderr, flush=True))
    with disk_errors(config.cache_folder, "preparing data"):
        config.run_folder.mkdir(parents=True, exist_ok=True)
        config.cache_folder.mkdir(parents=True, exist_ok=True)
        with locked(config.cache_folder / "lock"):
            data, tokenizer = _find_or_build(config, say)
        _check_amount(config, data)
        _keep_tokenizer(config, data, tokenizer)
        write_json(config.run_folder / "data.json", asdict(data))
    return data


def open_data(config: Config) -> PreparedData:
    """Return the result of `prepare` in another process of the run. Raises `RunError` if it does not exist."""
    path = config.run_folder / "data.json"
    try:
        data = PreparedData.read(path)
    except (OSError, ValueError, TypeError) as error:
        raise RunError(
            f"the prepared data {path} cannot be read ({error}); all machines must share output.folder"
        ) from None
    if not data.is_complete():
        raise RunError(f"the prepared data in {data.folder} is incomplete; start again to prepare it again")
    return data


def open_batches(config: Config, data: PreparedData, *, reads: bool = True) -> Batches:
    """Return the batches of a run. Only a process that feeds a pipeline `reads` them; the others learn how many there
    are, but open no file."""
    length, separate = config.data.sequence_length, config.documents == "separate"

    def rows_of(prepared: PreparedData) -> np.ndarray[Any, Any]:
        return open_rows(prepared.tokens_path, length) if reads else unread_rows(prepared.tokens // length, length)

    def ends_of(prepared: PreparedData) -> np.ndarray[Any, Any] | None:
        return open_ends(prepared.ends_path) if reads and separate else None

    return Batches(
        rows=rows_of(data),
        batch_size=config.pipeline.sequences_per_step,
        seed=config.training.seed,
        validation_fraction=config.data.held_back,
        validation=None if data.validation is None else rows_of(data.validation),
        ends=ends_of(data),
        validation_ends=None if data.validation is None else ends_of(data.validation),
    )


def planned_steps(config: Config, batches: Batches, steps_done: int = 0, position: int = 0) -> int:
    """Return the total steps of a run that has done `steps_done` steps up to a position in the data. The remainder of
    `training.epochs` follows from the position, because earlier steps may have had another size."""
    training = config.training
    if training.epochs is not None:
        return steps_done + batches.steps_of(training.epochs, position)
    return DEFAULT_STEPS if training.steps is None else training.steps


def data_identity(config: Config, data: PreparedData) -> dict[str, Any]:
    """Return the values that must not change for a resumed run to continue in the same order of the data."""
    return {
        "data": data.fingerprint,
        "data.sequence_length": config.data.sequence_length,
        "data.validation_fraction": config.data.held_back,
        "training.seed": config.training.seed,
        _VALIDATION: None if data.validation is None else data.validation.fingerprint,
        _DOCUMENTS: config.documents,
    }


def changes_of_data(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Describe changes in the data of a resumed run, from the saved and the current `data_identity`."""
    lines = []
    for name, value in current.items():
        earlier = saved.get(name, "joined" if name == _DOCUMENTS else None)
        if earlier == value:
            continue
        if name == _DOCUMENTS:
            lines.append(f"{name} is now {value}, was {earlier}: losses do not compare with earlier ones")
        elif name == _VALIDATION:
            lines.append("the validation data has changed: validation losses do not compare with earlier ones")
        else:
            lines.append(
                f"{name} is now {value}, was {earlier}: the order of the data changes, so some text of this epoch may"
                " be read twice or not at all"
            )
            if name in _DECIDES_VALIDATION and current["data.validation_fraction"]:
                lines[-1] += (
                    "; the validation rows change, too: the run may have trained on some of the new ones, so the"
                    " validation loss may be too low"
                )
    return lines


_VALIDATION = "validation data"
_DOCUMENTS = "data.documents"
_DECIDES_VALIDATION = ("data.sequence_length", "data.validation_fraction")


def _find_or_build(config: Config, say: Callable[[str], None]) -> tuple[PreparedData, Any]:
    """Return the cached data of these sources and this tokenizer, built if necessary, and the tokenizer if it existed
    before the run. The cache must be locked."""
    cache = config.cache_folder
    documents = find_documents(config.data, cache)
    validation = find_validation_documents(config.data, cache)
    say(f"reading {documents.description}")
    sources = documents.fingerprint()
    tokenizer, identity = _existing_tokenizer(config)

    def train() -> Any:
        entries = config.trained_tokenizer_entries
        assert entries is not None
        say(f"training a tokenizer of {count(entries, 'entry', ',')}")
        return tokenizers_.train_tokenizer(documents, entries, config.tokenizer.end_of_text or DEFAULT_END_OF_TEXT)

    def trained() -> Any:
        return tokenizers_.load_tokenizer(str(data.tokenizer_folder), None)

    data, is_new = _tokens(cache, documents, sources, identity, train if tokenizer is None else lambda: tokenizer)
    if is_new:
        say(
            f"{count(data.documents, 'document', ',')}, {count(data.tokens, 'token', ',')}, vocabulary of"
            f" {data.tokenizer_size:,}"
        )
    if validation is None:
        return data, tokenizer
    say(f"reading {validation.description} to evaluate on")
    identity = ["trained on", data.fingerprint] if tokenizer is None else identity
    get_tokenizer = trained if tokenizer is None else lambda: tokenizer
    prepared, is_new = _tokens(cache, validation, validation.fingerprint(), identity, get_tokenizer)
    if is_new:
        say(f"{count(prepared.documents, 'document', ',')}, {count(prepared.tokens, 'token', ',')} to evaluate on")
    return replace(data, validation=prepared), tokenizer


def _existing_tokenizer(config: Config) -> tuple[Any, list[Any]]:
    """Return (tokenizer, its identity), or (None, identity of the tokenizer to train)."""
    source, end_of_text = config.tokenizer_source, config.tokenizer.end_of_text
    if source is None:
        return None, ["byte-level BPE", config.trained_tokenizer_entries, end_of_text or DEFAULT_END_OF_TEXT]
    tokenizer = tokenizers_.load_tokenizer(source, end_of_text, config.model.trust_remote_code)
    pipeline_model(config, tokenizers_.tokenizer_size(tokenizer), tokenizer.eos_token_id)  # refuses another model's
    with _building(config.cache_folder) as building:
        tokenizer.save_pretrained(building)
        return tokenizer, ["existing", tokenizers_.folder_digest(building)]


def _keep_tokenizer(config: Config, data: PreparedData, tokenizer: Any) -> None:
    """Copy the tokenizer into the run's folder. tokenizer: the loaded tokenizer; None if the run has trained it."""
    source, target = config.tokenizer_source, config.run_folder / "tokenizer"
    if source is None:
        tokenizers_.copy_tokenizer(data.tokenizer_folder, target)
        return
    model_type = None if source == config.model.source else model_config(config.model).model_type
    tokenizers_.keep_tokenizer(
        tokenizer, source, target, end_of_text=config.tokenizer.end_of_text, model_type=model_type
    )


def _tokens(
    cache: Path, documents: Documents, sources: str, tokenizer_identity: list[Any], get_tokenizer: Callable[[], Any]
) -> tuple[PreparedData, bool]:
    """Return the data of these documents, whose fingerprint is `sources`, and whether it had to be built."""
    fingerprint = hashlib.sha256(json.dumps([FORMAT, sources, tokenizer_identity]).encode()).hexdigest()
    folder = cache / fingerprint[:16]
    try:
        data = replace(PreparedData.read(folder / "data.json"), folder=str(folder.absolute()))
        if data.is_complete():
            return data, False
    except (OSError, ValueError, TypeError):
        pass
    with _building(cache) as building:
        tokenizer = get_tokenizer()
        tokenizer.save_pretrained(building / "tokenizer")
        number, tokens = write_tokens(
            documents, _encode(tokenizer), tokenizer.eos_token_id, building / "tokens.bin", building / "documents.bin"
        )
        if tokens == 0:
            raise InputError(f"the data ({documents.description}) has no text; it must have at least one token")
        data = PreparedData(
            folder=str(folder.absolute()),
            fingerprint=fingerprint,
            documents=number,
            tokens=tokens,
            tokenizer_size=tokenizers_.tokenizer_size(tokenizer),
            end_of_text_id=tokenizer.eos_token_id,
        )
        write_json(building / "data.json", asdict(data))
        shutil.rmtree(folder, ignore_errors=True)
        building.rename(folder)
    return data, True


def _encode(tokenizer: Any) -> Callable[[list[str]], list[list[int]]]:
    def encode(texts: list[str]) -> list[list[int]]:
        encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    return encode


@contextlib.contextmanager
def _building(cache: Path) -> Iterator[Path]:
    """Make a temporary folder, and remove it afterwards unless it was renamed."""
    building = cache / "building.tmp"  # an existing one is from a killed run, because the cache is locked
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    try:
        yield building
    finally:
        shutil.rmtree(building, ignore_errors=True)


def check_enough(config: Config, sequences: int) -> None:
    """Refuse data that is not enough for one step of `sequences` sequences. Nothing is written, and the data is read
    only as far as needed. Raises `InputError` like `prepare`."""
    length, held_back = config.data.sequence_length, config.data.held_back
    rows = int(sequences / (1 - held_back))
    while len(split_rows(rows, held_back)[0]) < sequences:
        rows += 1
    with tempfile.TemporaryDirectory() as folder:
        documents = find_documents(config.data, Path(folder))
        if isinstance(documents, FileDocuments):
            size = sum(path.stat().st_size for path in documents.paths)
            if size >= MOST_BYTES * rows * length:
                return
        documents.fingerprint()
        if config.tokenizer_source is not None:
            end_of_text, trusted = config.tokenizer.end_of_text, config.model.trust_remote_code
            tokenizer = tokenizers_.load_tokenizer(config.tokenizer_source, end_of_text, trusted)
        else:
            texts, characters = [], 0
            for text in documents:
                texts.append(text)
                characters += len(text)
                if characters >= MOST_CHARACTERS * rows * length:
                    return
            entries = config.trained_tokenizer_entries
            assert entries is not None
            tokenizer = tokenizers_.train_tokenizer(texts, entries, DEFAULT_END_OF_TEXT)
        tokens = count_tokens(documents, _encode(tokenizer), rows * length)
    if tokens < rows * length:
        raise InputError(
            f"the data has {tokens:,} tokens, but one step of {count(sequences, 'sequence')} of {length:,} tokens needs"
            f" {rows * length:,}, with those to validate on: plan with a smaller --batch or --sequence, or with more"
            " data"
        )


def _check_amount(config: Config, data: PreparedData) -> None:
    length, batch_size = config.data.sequence_length, config.pipeline.sequences_per_step
    rows = data.tokens // length
    training, _ = split_rows(rows, config.data.held_back)
    if len(training) < batch_size:
        raise InputError(
            f"the data has {count(data.tokens, 'token', ',')}, that is {count(len(training), 'training sequence')} of"
            f" data.sequence_length = {length}, but one step needs {batch_size} (pipeline.dp *"
            " pipeline.microbatches * pipeline.microbatch_size)"
        )
    if data.validation is not None and data.validation.tokens < length:
        raise InputError(
            f"the validation data has {count(data.validation.tokens, 'token', ',')}; it must have at least one"
            f" sequence of data.sequence_length = {length}"
        )
