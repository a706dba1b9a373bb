"""Sources of documents: files, a dataset, or the Python standard library.

Files are read without `datasets`: its errors name neither the file nor the line, and its JSON reader infers one schema
for all records and refuses files whose other fields vary.
"""

from __future__ import annotations

import codecs
import functools
import glob
import hashlib
import json
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenpipe.errors import InputError
from evenpipe.train.input_sections import JSON_LINES, PYTHON_DOCUMENTATION, DataConfig
from evenpipe.words import count, nearest, show

READ_BYTES = 1 << 20
LARGEST_DOCUMENT_BYTES = 2**31 - 1  # a document is held in memory as a whole
CHAT_FIELDS = ("messages", "conversations", "conversation")
"""Field names under which datasets store the turns of a chat."""
NOT_IN_CORPUS = frozenset({"test", "tests", "encodings", "idlelib", "lib2to3", "pydoc_data", "site-packages"})


def find_documents(data: DataConfig, cache_folder: Path) -> Documents:
    """Return the training documents, without validation files that the patterns also match.

    `cache_folder`: folder for the locks and downloads of `datasets`.
    """
    if data.dataset is not None:
        return _dataset(data, data.dataset_split, cache_folder)
    if data.corpus == PYTHON_DOCUMENTATION:
        return PythonDocumentation()
    if data.corpus is not None:
        return FileDocuments(_standard_library(data.corpus.partition(":")[2]), data.text_field, "strict", data.corpus)
    evaluated = {path.resolve() for path in find_files(data.validation_files, "data.validation_files")}
    paths = [path for path in find_files(data.files) if path.resolve() not in evaluated]
    if not paths:
        raise InputError(
            f"data.validation_files is {show(data.validation_files)}; it must leave files of data.files to train on"
        )
    return _files(data, paths)


def find_validation_documents(data: DataConfig, cache_folder: Path) -> Documents | None:
    """Return separate validation documents; None if validation rows are a share of the training data."""
    if data.validation_split is not None:
        return _dataset(data, data.validation_split, cache_folder)
    paths = find_files(data.validation_files, "data.validation_files")
    return _files(data, paths) if paths else None


def _dataset(data: DataConfig, split: str, cache_folder: Path) -> DatasetDocuments:
    assert data.dataset is not None
    return DatasetDocuments(data.dataset, data.dataset_config, split, data.text_field, str(cache_folder / "datasets"))


def _files(data: DataConfig, paths: list[Path]) -> FileDocuments:
    return FileDocuments(paths, data.text_field, data.encoding_errors, count(len(paths), "file"))


def find_files(patterns: tuple[str, ...], field: str = "data.files") -> list[Path]:
    """Return the files that the patterns in `field` match, each once, sorted by name."""
    matches: set[str] = set()
    for pattern in patterns:
        if Path(pattern).is_dir():
            raise InputError(f'{field} names the folder {show(pattern)}; it must name files, as "{pattern}/**/*.txt"')
        names = [pattern] if Path(pattern).is_file() else glob.glob(pattern, recursive=True)  # noqa: PTH207
        files = [name for name in names if Path(name).is_file()]
        if not files:
            raise InputError(f"{field} names {show(pattern)}, but there is no such file")
        matches.update(files)
    return [Path(name) for name in sorted(matches)]


@dataclass(frozen=True, slots=True)
class FileDocuments:
    """Documents in local files: texts that can be read repeatedly, always in the same order."""

    paths: list[Path]
    text_field: str
    errors: str
    """"strict" or "replace", for bytes that are not UTF-8."""
    description: str
    """The source, in words for messages."""

    def fingerprint(self) -> str:
        """Return a hex digest that changes when any text changes. Raises `InputError` if a text cannot be read; call it
        before reading the texts."""
        digests = [check_file(path, self.text_field, self.errors) for path in self.paths]
        kinds = [kind_of(path) for path in self.paths]
        return _digest(["files", digests, kinds, self.text_field, self.errors])

    def __iter__(self) -> Iterator[str]:
        for path in self.paths:
            kind = kind_of(path)
            if kind == "parquet":
                yield from _parquet_texts(path, self.text_field)
                continue
            with path.open(encoding="utf-8-sig", errors=self.errors) as file:
                if kind == "text":
                    yield file.read()
                    continue
                for line in file:
                    if line.strip():
                        yield _encodable(json.loads(line)[self.text_field] or "")


@dataclass(frozen=True)
class DatasetDocuments:
    """Documents in a dataset of the hub, or in a folder that `datasets` can read."""

    name: str
    config: str | None
    split: str
    text_field: str
    cache_folder: str

    @property
    def description(self) -> str:
        """As for files."""
        return f"dataset {self.name}, {self.split}"

    def fingerprint(self) -> str:
        """As for files."""
        return _digest(["dataset", self._rows._fingerprint, len(self._rows), self.text_field])

    def __iter__(self) -> Iterator[str]:
        for row in self._rows:
            yield _encodable(row[self.text_field] or "")

    @functools.cached_property
    def _rows(self) -> Any:
        datasets = _datasets()
        try:
            loaded = _saved(self.name, self.split) if is_saved(self.name) else self._read()
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            reason = str(error.__cause__ or error).strip().splitlines()[0]
            raise InputError(
                f"data.dataset is {show(self.name)} (config {show(self.config)}, split {show(self.split)}), "
                f"but it cannot be loaded: {reason}"
            ) from error
        feature = loaded.features.get(self.text_field)
        if getattr(feature, "dtype", None) not in ("string", "large_string"):
            raise InputError(_no_text_field(self.text_field, f"dataset {self.name}", list(loaded.features)))
        return loaded.select_columns([self.text_field])

    def _read(self) -> Any:
        datasets = _datasets()
        builder = datasets.load_dataset_builder(self.name, self.config, cache_dir=self.cache_folder)
        options = {"sample_by": "document"} if builder.name == "text" else {}  # else every line would be a document
        return datasets.load_dataset(self.name, self.config, split=self.split, cache_dir=self.cache_folder, **options)


class PythonDocumentation:
    """The topics of Python's language reference, which `help()` shows."""

    description = PYTHON_DOCUMENTATION

    def fingerprint(self) -> str:
        """As for files."""
        return _digest([self.description, *self])

    def __iter__(self) -> Iterator[str]:
        try:
            from pydoc_data.topics import topics
        except ImportError as error:  # some distributions package it separately
            raise InputError(
                f"data.corpus is {show(self.description)}, but this Python has no module pydoc_data"
            ) from error
        yield from topics.values()


Documents = FileDocuments | DatasetDocuments | PythonDocumentation


def is_saved(name: str) -> bool:
    """Return whether `save_to_disk` wrote this folder, for a dataset or for several splits."""
    return any((Path(name) / mark).is_file() for mark in ("state.json", "dataset_dict.json"))


def _saved(name: str, split: str) -> Any:
    """Return a split, or part of a split, from a folder of `save_to_disk`; without splits, any name selects all."""
    datasets = _datasets()
    loaded = datasets.load_from_disk(name)
    if not isinstance(loaded, dict):
        loaded = {re.split(r"\W", split)[0]: loaded}
    lengths = {split_name: len(rows) for split_name, rows in loaded.items()}
    instructions = datasets.ReadInstruction.from_spec(split).to_absolute(lengths)
    return datasets.concatenate_datasets(
        [loaded[instruction.splitname].select(range(instruction.from_, instruction.to)) for instruction in instructions]
    )


def check_file(path: Path, text_field: str, errors: str) -> str:
    """Return the hex sha256 of a file. Raises `InputError`, with the position, if it cannot contain documents."""
    try:
        if kind_of(path) == "parquet":
            _check_parquet(path, text_field)
            return _check_bytes(path, decode=False)
        digest = _check_bytes(path, decode=errors == "strict")
        if kind_of(path) == "jsonl":
            _check_json_lines(path, text_field, errors)
        elif path.stat().st_size > LARGEST_DOCUMENT_BYTES:
            raise InputError(
                f"{show(str(path))} is one document of more than 2 GiB; split it, or write its documents as JSON lines"
            )
    except OSError as error:
        raise InputError(f"the data file {show(str(path))} cannot be read: {error.strerror or error}") from None
    return digest


def _check_bytes(path: Path, decode: bool) -> str:
    """Return the digest of the bytes; with `decode`, an error names the first byte that is not UTF-8."""
    digest, decoder, position = hashlib.sha256(), codecs.getincrementaldecoder("utf-8")(), 0
    with path.open("rb") as file:
        while True:
            block = file.read(READ_BYTES)
            digest.update(block)
            if decode:
                pending = len(decoder.getstate()[0])
                try:
                    decoder.decode(block, final=not block)
                except UnicodeDecodeError as error:
                    raise InputError(
                        f"{show(str(path))} is not UTF-8 at byte {position - pending + error.start}; convert it, or "
                        'set data.encoding_errors to "replace"'
                    ) from None
            position += len(block)
            if not block:
                return digest.hexdigest()


def _check_json_lines(path: Path, text_field: str, errors: str) -> None:
    with path.open(encoding="utf-8-sig", errors=errors) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{show(str(path))}, line {number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{where} is not JSON: {error}") from None
            if not isinstance(record, dict):
                raise InputError(f"{where} must be a JSON object with the field {show(text_field)}")
            if text_field not in record:
                raise InputError(_no_text_field(text_field, where, list(record)))
            if text_field in CHAT_FIELDS and isinstance(record[text_field], list):
                raise InputError(chat_refusal(f"data.text_field is {show(text_field)}, but {where}", text_field))
            if not isinstance(record[text_field], str | None):
                raise InputError(f"{where}: the field {show(text_field)} must be text, not {line[:40].strip()}...")


def _check_parquet(path: Path, text_field: str) -> None:
    import pyarrow
    from pyarrow import parquet

    try:
        schema = parquet.read_schema(path)
    except pyarrow.ArrowException as error:
        raise InputError(f"{show(str(path))} is not a parquet file: {str(error).splitlines()[0]}") from None
    if text_field not in schema.names or str(schema.field(text_field).type) not in ("string", "large_string"):
        raise InputError(_no_text_field(text_field, show(str(path)), schema.names))


def _parquet_texts(path: Path, text_field: str) -> Iterator[str]:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        for rows in file.iter_batches(columns=[text_field]):
            yield from (text or "" for text in rows.column(0).to_pylist())


def chat_refusal(where: str, field: str) -> str:
    """Return the sentence about data with a list of messages per record."""
    return (
        f"{where} has chats, lists of messages in the field {show(field)}, on which evenpipe cannot train yet; expected"
        ' one text per record, such as {"text": "..."}, as a chat template makes of the messages'
    )


def _no_text_field(text_field: str, where: str, names: list[str]) -> str:
    chats = [name for name in CHAT_FIELDS if name in names]
    if chats:
        return chat_refusal(f"data.text_field is {show(text_field)}, but {where}", chats[0])
    return (
        f"data.text_field is {show(text_field)}, but {where} has no text of that name"
        f"{nearest(text_field, names)}; it has {', '.join(names) or 'nothing'}"
    )


def _standard_library(selection: str) -> list[Path]:
    """Return UTF-8 sources of the running Python's library, without tests and character tables.

    `selection`: names of modules and packages, separated by commas, or "" for all.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        path
        for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix())
        if not NOT_IN_CORPUS & set(path.relative_to(root).parts[:-1]) and _is_utf8(path)
    ]
    if selection:
        modules = {_module(path, root) for path in files}
        selected = [name.strip() for name in selection.split(",")]
        for name in selected:
            if name not in modules:
                raise InputError(
                    f"data.corpus names {show(name)}, but the Python standard library has no such module or package"
                    f"{nearest(name, modules)}"
                )
        files = [path for path in files if _module(path, root) in selected]
    if not files:
        raise InputError(f"data.corpus is the Python standard library, but {root} has no sources")
    return files


def _module(path: Path, root: Path) -> str:
    return path.relative_to(root).parts[0].removesuffix(".py")


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def kind_of(path: Path) -> str:
    """Return "jsonl", "parquet" or "text", depending on the file name."""
    suffix = path.suffix.lower()
    return "jsonl" if suffix in JSON_LINES else "parquet" if suffix == ".parquet" else "text"


def _encodable(text: str) -> str:
    """Replace lone surrogates, which JSON can contain but UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _datasets() -> Any:
    """Return the `datasets` library without its progress bars and warnings, which would mix with ours."""
    import datasets

    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity_error()
    return datasets


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
