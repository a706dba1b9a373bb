"""Turns documents into tokens, rows and batches.

One pass over the documents writes one long file of int32 tokens: each document, then the end-of-text token. The rows
are this file cut at the sequence length; the last incomplete row is dropped. (Packing in `datasets.map` drops the rest
of every *batch* of documents, so its rows depend on the batch size and the number of processes.)

A second file contains the offsets at which documents end. They cannot be derived from the tokens, because a text may
contain the end-of-text token. Position ids of separate documents follow from this file and the row number.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch

TOKEN = np.dtype("<i4")
OFFSET = np.dtype("<i8")  # number of tokens from the beginning of the file
PIECE_CHARACTERS = 1 << 20  # longer documents are encoded in pieces, cut after a line end, to bound the memory
BATCH_CHARACTERS = 1 << 22  # encoded together, on the threads of the tokenizer
IGNORED = -100  # label without a loss


def write_tokens(
    texts: Iterable[str], encode: Callable[[list[str]], list[list[int]]], end_of_text: int, path: Path, ends_path: Path
) -> tuple[int, int]:
    """Encode all texts into a file of int32 tokens, and write the end offset of each document into another, as int64.

    `encode` turns a list of texts into their token ids without special tokens.

    Returns (documents, tokens); an empty text does not count as a document.
    """
    documents = tokens = 0
    with path.open("wb") as file, ends_path.open("wb") as ends:
        for batch in _batches(_pieces(texts)):
            encoded = encode([text for text, _ in batch])
            for ids, (text, is_end) in zip(encoded, batch, strict=True):
                if text:
                    file.write(np.asarray([*ids, end_of_text] if is_end else ids, dtype=TOKEN).tobytes())
                    tokens += len(ids) + is_end
                    if is_end:
                        documents += 1
                        ends.write(np.asarray(tokens, dtype=OFFSET).tobytes())
        for stream in (file, ends):
            stream.flush()
            os.fsync(stream.fileno())
    return documents, tokens


def count_tokens(texts: Iterable[str], encode: Callable[[list[str]], list[list[int]]], enough: int) -> int:
    """Return the number of tokens that `write_tokens` would write. Stops reading once there are `enough`."""
    tokens = 0
    for batch in _batches(_pieces(texts)):
        encoded = encode([text for text, _ in batch])
        tokens += sum(len(ids) + is_end for ids, (text, is_end) in zip(encoded, batch, strict=True) if text)
        if tokens >= enough:
            break
    return tokens


def open_rows(path: Path, sequence_length: int) -> np.ndarray[Any, Any]:
    """Map the token file into memory as int32 [rows, sequence_length]."""
    rows = path.stat().st_size // (TOKEN.itemsize * sequence_length)
    if rows == 0:
        return np.empty((0, sequence_length), dtype=TOKEN)
    return np.memmap(path, dtype=TOKEN, mode="r", shape=(rows, sequence_length))


def open_ends(path: Path) -> np.ndarray[Any, Any]:
    """Map the end offsets of documents into memory: int64 [documents], the number of tokens up to each end."""
    return np.memmap(path, dtype=OFFSET, mode="r")


def unread_rows(rows: int, sequence_length: int) -> np.ndarray[Any, Any]:
    """Return an array with the shape of `open_rows` for a process that only counts rows: no file, a single number."""
    return np.broadcast_to(np.array(-1, dtype=TOKEN), (rows, sequence_length))


def split_rows(rows: int, validation_fraction: float) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return (training rows, validation rows). Validation rows are evenly spread, at least one if the fraction is above
    0."""
    held_back = max(1, round(rows * validation_fraction)) if validation_fraction > 0 and rows > 0 else 0
    validation = (np.arange(held_back) * rows + rows // 2) // max(held_back, 1)
    return np.setdiff1d(np.arange(rows), validation, assume_unique=True), validation


class Sequences(NamedTuple):
    """Rows of a batch, as `Pipeline.step` and `evaluate` take them: int64 [rows, sequence_length] each."""

    input_ids: torch.Tensor
    labels: torch.Tensor | None = None
    """None: `input_ids`."""
    position_ids: torch.Tensor | None = None
    """They restart at 0 in every document and every row. None: 0, 1, 2, ..."""


@dataclass(slots=True)
class Batches:
    """Batches in a fixed order: a batch is a pure function of the seed and its position, so resuming needs only these.

    Every epoch takes all training rows in a different order, drawn from (seed, epoch); a batch may contain rows of two
    epochs. A position is the number of training rows before the batch, counted from the beginning of the first epoch.
    """

    rows: np.ndarray[Any, Any]
    """[rows, sequence_length] int32."""
    batch_size: int
    """Sequences per batch."""
    seed: int
    validation_fraction: float
    """Share of the rows that are validation rows; 0 if `validation` has separate ones."""
    validation: np.ndarray[Any, Any] | None = None
    """[rows, sequence_length] int32."""
    ends: np.ndarray[Any, Any] | None = None
    """[documents] int64: the number of tokens in `rows` up to the end of each document, if documents are separate."""
    validation_ends: np.ndarray[Any, Any] | None = None
    """The same for `validation`."""
    training_rows: np.ndarray[Any, Any] = field(init=False)
    validation_rows: np.ndarray[Any, Any] = field(init=False)
    """Numbers of validation rows, in `validation` if it is given, else in `rows`."""
    _order: tuple[int, np.ndarray[Any, Any]] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.training_rows, self.validation_rows = split_rows(len(self.rows), self.validation_fraction)
        assert len(self.training_rows) > 0, "no rows to train on"
        if self.validation is not None:
            assert len(self.validation_rows) == 0, "two kinds of validation rows"
            self.validation_rows = np.arange(len(self.validation))

    @property
    def sequence_length(self) -> int:
        """Tokens per sequence."""
        return int(self.rows.shape[1])

    @property
    def tokens_per_batch(self) -> int:
        """Tokens in a batch."""
        return self.batch_size * self.sequence_length

    def epoch(self, position: int) -> float:
        """Return the passes over the training rows before a position."""
        return position / len(self.training_rows)

    def steps_of(self, epochs: float, position: int = 0) -> int:
        """Return the steps from a position to `epochs` passes over the training rows, at least 0. The last step may
        take rows beyond that."""
        left = Fraction(str(epochs)) * len(self.training_rows) - position  # 0.1 is a tenth, not the nearest float
        return max(0, math.ceil(left / self.batch_size))

    def row_numbers(self, position: int) -> list[int]:
        """Return the rows of the batch at a position."""
        numbers = range(position, position + self.batch_size)
        return [int(self._epoch_order(n // len(self.training_rows))[n % len(self.training_rows)]) for n in numbers]

    def batch(self, position: int, replica: int = 0, replicas: int = 1) -> Sequences:
        """Return one replica's rows of the batch at a position, batch_size / replicas of them."""
        assert self.batch_size % replicas == 0, f"{self.batch_size} sequences for {replicas} replicas"
        each = self.batch_size // replicas
        return _read(self.rows, self.ends, self.row_numbers(position)[replica * each : (replica + 1) * each])

    @property
    def validation_batches(self) -> int:
        """Number of validation batches; the last one may be smaller."""
        return -(-len(self.validation_rows) // self.batch_size)

    def validation_batch(self, index: int, replica: int = 0, replicas: int = 1) -> Sequences:
        """Return one replica's rows of a validation batch, with labels.

        A batch has `batch_size` rows, spread evenly over the replicas. The last batch may have fewer, so means must be
        weighted by valid tokens. A replica without rows gets one whose labels are all ignored, because every
        pipeline takes part.
        """
        rows = self.validation_rows[index * self.batch_size : (index + 1) * self.batch_size]
        assert len(rows) > 0, f"there are {self.validation_batches} validation batches, not {index + 1}"
        local_rows = np.array_split(rows, replicas)[replica]
        numbers = local_rows if len(local_rows) else rows[:1]
        if self.validation is None:
            sequences = _read(self.rows, self.ends, numbers)
        else:
            sequences = _read(self.validation, self.validation_ends, numbers)
        labels = sequences.input_ids.clone()
        labels[len(local_rows) :] = IGNORED
        return sequences._replace(labels=labels)

    def _epoch_order(self, epoch: int) -> np.ndarray[Any, Any]:
        if self._order is None or self._order[0] != epoch:
            # raw words of the bit generator are the same in every version of numpy, unlike Generator.permutation
            words = np.random.PCG64(np.random.SeedSequence([self.seed, epoch])).random_raw(len(self.training_rows))
            self._order = epoch, self.training_rows[np.argsort(words, kind="stable")]
        return self._order[1]


def _read(
    rows: np.ndarray[Any, Any], ends: np.ndarray[Any, Any] | None, numbers: Sequence[int] | np.ndarray[Any, Any]
) -> Sequences:
    import torch

    positions = None if ends is None else torch.from_numpy(positions_of(ends, numbers, rows.shape[1]))
    return Sequences(torch.from_numpy(np.asarray(rows[numbers], dtype=np.int64)), position_ids=positions)


def positions_of(
    ends: np.ndarray[Any, Any], numbers: Sequence[int] | np.ndarray[Any, Any], length: int
) -> np.ndarray[Any, Any]:
    """Return the position ids of rows, by number, of `length` tokens: int64 [rows, length].

    They restart at 0 in every document. A document that is cut at the end of a row restarts at 0 in the next row.
    """
    begins = np.zeros((len(numbers), length), dtype=np.int64)  # for each token, where its document begins in the row
    for row, number in zip(begins, numbers, strict=True):
        start = int(number) * length
        first, last = np.searchsorted(ends, np.array([start + 1, start + length], dtype=OFFSET))
        inside = ends[first:last] - start
        row[inside] = inside
    return np.arange(length) - np.maximum.accumulate(begins, axis=1)


def _pieces(texts: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Iterate over (piece, whether the document ends with it)."""
    for text in texts:
        start = 0
        while len(text) - start > PIECE_CHARACTERS:
            line_end = text.rfind("\n", start, start + PIECE_CHARACTERS)
            stop = line_end + 1 if line_end >= start else start + PIECE_CHARACTERS
            yield text[start:stop], False
            start = stop
        yield text[start:], True


def _batches(pieces: Iterable[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    batch, characters = [], 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece[0])
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
