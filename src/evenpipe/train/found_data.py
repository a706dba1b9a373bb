"""Finds the data in a file or folder that a run can train on, for a new configuration. Imports neither torch nor
transformers.

Every file is examined as the run will read it. Patterns in the configuration match no file that was left out.
"""

from __future__ import annotations

import codecs
import glob
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from evenpipe.errors import InputError
from evenpipe.given import nearest_path, plain
from evenpipe.train.sources import (
    CHAT_FIELDS,
    DatasetDocuments,
    FileDocuments,
    chat_refusal,
    check_file,
    find_files,
    is_saved,
    kind_of,
)
from evenpipe.words import count, show

DEFAULT_FIELD = "text"
"""Default of data.text_field."""
CHECKED_BYTES = 2**26
"""Files are read completely up to this total size; beyond it, only the beginning of each file."""
BEGINNING = 2**16
LONGEST_LINE = 2**26
"""A file with longer lines is not JSON lines: a single line could fill the memory."""
MOST_NAMES = 3
"""Maximum number of left-out files of a kind that a message names."""
CHAT = "chats, on which evenpipe cannot train yet"
"""Reason for leaving a file out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundData:
    """Data for a new configuration."""

    table: Mapping[str, Any]
    """Fields of [data]."""
    documents: FileDocuments | DatasetDocuments
    bytes: int | None
    """Size of the files; None for a dataset."""
    are_tables: bool = True
    """Whether the documents are fields of records, rather than files."""
    remarks: tuple[str, ...] = ()
    """Sentences about the files left out and the field that is read."""

    def texts(self, characters: int) -> tuple[list[str], bool]:
        """Return the first documents, up to at least `characters` characters in total, and whether these are all."""
        texts: list[str] = []
        for text in self.documents:
            if characters <= 0:
                return texts, False
            texts.append(text)
            characters -= len(text)
        return texts, True


def find_data(name: str) -> FoundData:
    """Examine a file, a folder with text, JSON lines or parquet, or a folder that `save_to_disk` wrote.

    Raises:
        InputError: it does not exist, or contains nothing to train on, for example only chats.
    """
    path = Path(name)
    if is_saved(name):
        return _saved(name)
    if not path.exists():
        raise InputError(f"--data is {show(name)}, but there is no such file or folder{nearest_path(name)}")
    seen = _Seen(name)
    if path.is_dir():
        seen.look_at(sorted(_visible(path)))
        patterns = seen.patterns(path)
    else:
        if not path.stat().st_size:
            raise InputError(f"--data is {show(name)}, but that file is empty; expected text to train on")
        seen.look_at([path])
        patterns = [name]
    table: dict[str, Any] = {"files": patterns}
    if seen.text_field != DEFAULT_FIELD:
        table["text_field"] = seen.text_field
    paths = find_files(tuple(patterns))
    documents = FileDocuments(paths, seen.text_field, "strict", count(len(paths), "file"))
    size = _bytes_of(paths)
    are_tables = kind_of(paths[0]) != "text"
    return FoundData(table=table, documents=documents, bytes=size, are_tables=are_tables, remarks=tuple(seen.remarks()))


@dataclass(slots=True)
class _Seen:
    """The files of a folder, or a single file, sorted by kind."""

    name: str
    chosen: list[Path] = field(default_factory=list)
    left_out: defaultdict[str, list[Path]] = field(default_factory=lambda: defaultdict(list))
    """By reason."""
    text_field: str = DEFAULT_FIELD
    other_fields: list[str] = field(default_factory=list)
    """Other text fields of the first record."""
    chat_field: str = ""
    """Field with the messages, in files that contain chats."""
    fault: str = ""
    """What is wrong with the first table that lacks the field."""
    _budget: int = CHECKED_BYTES

    def look_at(self, paths: Iterable[Path]) -> None:
        """Choose texts or tables, whichever have more bytes. Raises InputError if there are neither."""
        of_kind: dict[bool, list[Path]] = {False: [], True: []}
        for path in paths:
            is_table = kind_of(path) != "text"
            reason = self._reason(path, is_table)
            if reason is None:
                of_kind[is_table].append(path)
            else:
                self.left_out[reason].append(path)
        tables = bool(of_kind[True]) and _bytes_of(of_kind[True]) >= _bytes_of(of_kind[False])
        self.chosen = of_kind[tables]
        for path in of_kind[not tables]:
            self.left_out["text beside tables" if tables else f"{path.suffix} beside text"].append(path)
        if tables:
            self._choose_field()
        if _bytes_of(self.left_out.get(CHAT, [])) > _bytes_of(self.chosen):
            raise InputError(chat_refusal(f"--data is {show(self.name)}, which", self.chat_field))
        if not self.chosen:
            raise InputError(self._nothing())

    def _reason(self, path: Path, is_table: bool) -> str | None:
        """Return why a file cannot be trained on, in words that follow "left out", or None."""
        try:
            if not path.is_file():
                return "not a file, or a link to nothing"
            if is_table:
                chat_field = chat_field_of(first_record(path) or {})
                self.chat_field = chat_field or self.chat_field
                return None if chat_field is None else CHAT
            if not path.stat().st_size:
                return "empty"
            is_complete = self._spend(path)
            with path.open("rb") as file:
                return (
                    None
                    if _is_text(file.read() if is_complete else file.read(BEGINNING), is_complete)
                    else "not UTF-8 text"
                )
        except OSError as error:
            return f"cannot be read ({error.strerror or error})"
        except InputError as error:
            return str(error)

    def _spend(self, path: Path) -> bool:
        size = path.stat().st_size
        self._budget -= size
        return self._budget >= 0

    def _choose_field(self) -> None:
        """Choose the text field that the first file suggests, and leave out files without it."""
        first = next(filter(None, map(first_record, self.chosen)), {})
        texts = {key: value for key, value in first.items() if isinstance(value, str)}
        if DEFAULT_FIELD not in texts and texts:
            self.text_field = max(texts, key=lambda key: len(texts[key]))
            self.other_fields = [key for key in texts if key != self.text_field]
        faults = {path: self._fault(path) for path in self.chosen}
        self.chosen = [path for path, fault in faults.items() if fault is None]
        rejected = [path for path, fault in faults.items() if fault is not None]
        if rejected:
            self.left_out[f"without a text in {show(self.text_field)} in every record"] += rejected
            self.fault = faults[rejected[0]] or ""

    def _fault(self, path: Path) -> str | None:
        """Return why a table does not have the field, or None."""
        try:
            if self._spend(path) or kind_of(path) == "parquet":
                check_file(path, self.text_field, "strict")
            else:
                for number, record in enumerate(islice(records(path), 1000), start=1):
                    if not isinstance(record.get(self.text_field), str | None) or self.text_field not in record:
                        raise InputError(f"line {number} has no text {show(self.text_field)}")
        except InputError as error:
            return str(error)
        return None

    def patterns(self, folder: Path) -> list[str]:
        """Return patterns for the chosen files of a folder: by file name extension if no other file has it, else each
        file by name."""
        base, chosen = glob.escape(folder.as_posix()), set(self.chosen)
        if all(not path.suffix for path in chosen) and set(find_files((f"{base}/**/*",))) == chosen:
            return [f"{base}/**/*"]
        by_end: dict[str, list[Path]] = defaultdict(list)
        for path in self.chosen:
            by_end[path.suffix].append(path)
        patterns: list[str] = []
        for end, paths in sorted(by_end.items()):
            pattern = f"{base}/**/*{glob.escape(end)}"
            fits = end and set(find_files((pattern,))) <= chosen
            patterns += [pattern] if fits else [path.as_posix() for path in paths]
        return patterns

    def remarks(self) -> Iterator[str]:
        """Say which field is read, and what was left out."""
        if self.text_field != DEFAULT_FIELD:
            yield _reads(self.text_field, self.other_fields)
        for reason, paths in sorted(self.left_out.items()):
            yield f"left out {count(len(paths), 'file')}, {reason}: {self._names(paths)}"

    def _names(self, paths: list[Path]) -> str:
        folder = Path(self.name)
        names = [plain(path.relative_to(folder) if folder.is_dir() else path) for path in paths[:MOST_NAMES]]
        omitted = len(paths) - len(names)
        return ", ".join(names) + (f" and {omitted} more" if omitted else "")

    def _nothing(self) -> str:
        kind = "folder" if Path(self.name).is_dir() else "file"
        reasons = [f"{self._names(paths)}: {reason}" for reason, paths in sorted(self.left_out.items())]
        explanation = "; ".join([*reasons, self.fault] if self.fault else reasons)
        return f"--data is {show(self.name)}, but that {kind} has no text, JSON lines or parquet" + (
            f" to train on ({explanation})" if explanation else ""
        )


def _bytes_of(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def chat_field_of(record: Mapping[str, Any]) -> str | None:
    """Return the field with a list of messages, in a record without text in the default field."""
    if isinstance(record.get(DEFAULT_FIELD), str):
        return None
    return next((name for name in CHAT_FIELDS if isinstance(record.get(name), list)), None)


def records(path: Path) -> Iterator[dict[str, Any]]:
    """Iterate over the records of a JSON lines file. Raises InputError for anything else."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        while line := file.readline(LONGEST_LINE):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                raise InputError("not one JSON object per line") from None
            if not isinstance(record, dict):
                raise InputError("not one JSON object per line")
            yield record


def first_record(path: Path) -> dict[str, Any] | None:
    """Return the first record of a table; None if it is empty. Raises InputError if it is not a table."""
    if kind_of(path) == "jsonl":
        return next(records(path), None)
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            rows = next(file.iter_batches(batch_size=1), None)
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"not a parquet file ({str(error).splitlines()[0]})") from None
    row_dicts = [] if rows is None else rows.to_pylist()
    return row_dicts[0] if row_dicts else None


def _saved(name: str) -> FoundData:
    """Examine a folder that `save_to_disk` wrote: its split "train", or else its first split."""
    folder = Path(name)
    try:
        splits = json.loads((folder / "dataset_dict.json").read_bytes())["splits"] if _has_splits(folder) else []
        split = "train" if "train" in splits or not splits else splits[0]
        features = json.loads((folder / (split if splits else ".") / "dataset_info.json").read_bytes())["features"]
        texts = [name for name, feature in features.items() if _is_text_feature(feature)]
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise InputError(f"--data is {show(name)}, which save_to_disk has not written completely") from None
    chats = [field for field in CHAT_FIELDS if field in features]
    if DEFAULT_FIELD not in texts and chats:
        raise InputError(chat_refusal(f"--data is {show(name)}, which", chats[0]))
    if not texts:
        raise InputError(f"--data is {show(name)}, but no column of it is text; it has {', '.join(features)}")
    table, remarks, text_field = {"dataset": name}, [], DEFAULT_FIELD
    if split != "train":
        table["dataset_split"] = split
    if DEFAULT_FIELD not in texts:
        text_field = table["text_field"] = texts[0]
        remarks.append(_reads(text_field, texts[1:]))
    documents = DatasetDocuments(name, None, split, text_field, "")
    return FoundData(table=table, documents=documents, bytes=None, remarks=tuple(remarks))


def _has_splits(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file()


def _is_text_feature(feature: Any) -> bool:
    return isinstance(feature, dict) and feature.get("dtype") in ("string", "large_string")


def _reads(text_field: str, other_fields: list[str]) -> str:
    exclusion = f", not in {', '.join(map(show, other_fields))}" if other_fields else ""
    return f"the text in {show(text_field)} of each record is read{exclusion}; data.text_field names another field"


def _visible(folder: Path) -> Iterator[Path]:
    """Iterate over the files that patterns match: no names that begin with a dot; symbolic links are followed."""
    visited: set[str] = set()
    for parent, folders, files in os.walk(folder, followlinks=True):
        real_path = os.path.realpath(parent)
        folders[:] = [] if real_path in visited else [name for name in folders if not name.startswith(".")]
        if real_path not in visited:
            yield from (Path(parent, name) for name in files if not name.startswith("."))
        visited.add(real_path)


def _is_text(content: bytes, is_complete: bool) -> bool:
    """Return whether bytes are UTF-8 text, or the beginning of such text."""
    try:
        return "\0" not in codecs.getincrementaldecoder("utf-8")().decode(content, final=is_complete)
    except UnicodeDecodeError:
        return False
