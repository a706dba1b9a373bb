"""Checks on a small copy, in one process, that a model computes the same when its rows are split into pieces, and that
documents that share a row do not see each other.

The copy runs on whole rows, and the keys and values of every layer are recorded. Then each piece runs separately, with
the recorded keys and values of the others, and must give its part of the result for the whole row. This detects any
other dependence between tokens (convolutions, recurrences, positions that are counted instead of passed). A row of
separate documents must give what the copy computes for each document alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from evenpipe.attention.function import adopt
from evenpipe.attention.row_context import Alone, Exchange, Keys, Mask, RowContext, activated, documents_of
from evenpipe.errors import InputError
from evenpipe.model.comparison import contains_cast, relative_error, tolerance
from evenpipe.model.copies import copied
from evenpipe.model.description import Description
from evenpipe.model.small_copy import SmallCopies
from evenpipe.model.structure import first_line

BATCH, ROW = 2, 24
SLICES = (7, 9, 8)
CHUNKS = (5, 5, 6, 8)
"""One of two processes has the first and last chunk. Some rotary tables change after `FEW_TOKENS` = 16."""
RESTARTS = ((14,), (10, 22))
"""Positions where further documents of packed rows begin; no document is longer than `FEW_TOKENS`."""
PADDED = 2
"""Tokens of padding: fewer than a window, since with more some families produce NaN in fp64."""
PLAIN = "plain modules do not say where they attend to other tokens; expected"
"""Start of the sentence that rejects plain modules; the accepted value follows."""


def check_pieces(description: Description, option: str, *, slices: bool, separate: bool = False) -> None:
    """Compare a small copy of a model on pieces of rows with the same copy on whole rows, in about a second on a CPU.

    Args:
        option: the option that requires the check, for messages.
        slices: pieces run one after the other; otherwise they are on several processes, each with two chunks.
        separate: documents of a row do not see each other.

    Raises:
        InputError: the pieces do not run, or would compute something else; the message is one sentence.
    """
    refuse = f"{description.architecture} cannot be trained with {option}:"
    with _whole_rows(description, refuse, f"{option}: {PLAIN} 1", "pieces of sequences") as reference:
        for row in reference.rows:
            reference.logits(row, separate=separate)
        _refuse_dropout(description)
        for row in reference.rows:
            recorded = reference.keys(row, separate=separate)
            for queries, keys in _pieces(slices):
                exchange = Others(recorded, queries, len(keys))
                reference.compare("a piece of a sequence", row, queries, keys, exchange, separate=separate)


def needs_our_attention(description: Description, *, on_gpu: bool = False) -> bool:
    """Return whether evenpipe's attention has to separate the documents of a row: if the model's own does not, or on a
    GPU, where the model's would need a mask of all pairs, if ours computes the same. Runs a small copy, which takes
    about a second on a CPU.

    Raises:
        InputError: evenpipe's attention does not separate them either; the message is one sentence.
    """
    setting = 'documents = "separate", only with "joined" (data.documents of a configuration)'
    refuse = f"{description.architecture} cannot be trained with {setting}:"
    plain = f'documents: {PLAIN} "joined"'
    with _whole_rows(description, refuse, plain, "rows of several documents") as reference:
        row = next(row for row in reference.rows if row.documents is not None)
        keeps_separate = (
            relative_error(reference.logits(row, separate=False), reference.logits(row, separate=True))
            <= reference.tolerance
        )
        if keeps_separate and not on_gpu:
            return False
        try:
            _refuse_dropout(description)
            reference.keys(row, separate=True)
        except Exception:  # of any type: see `_whole_rows`
            if keeps_separate:
                return False
            raise
        return True


@contextmanager
def _whole_rows(description: Description, refuse: str, plain: str, runs_on: str) -> Iterator[_WholeRows]:
    """Provide a small copy that takes position ids, on whole rows.

    Args:
        refuse: start of the sentence of any error raised inside.
        plain: the same for plain modules.
        runs_on: what the copy runs on, for messages.
    """
    if description.config is None:
        raise InputError(f"{plain} with them.")
    copy = SmallCopies.of(description).plain
    small = copy.description
    with copy.computing():
        try:
            if small.positions_of(torch.zeros(1, 2, dtype=torch.int64)) is not None or not small.takes("position_ids"):
                raise InputError("it numbers positions in a way of its own, or takes none.")
            yield copy.once(_WholeRows, partial(_WholeRows, small, copy.dtype))
        except InputError as error:
            raise InputError(f"{refuse} {error}") from None
        except Exception as error:  # families raise many types if a mask is not a tensor, or lengths differ
            cause = f"{type(error).__name__}: {first_line(error)}"
            if f"'{Mask.__name__}'" in cause:
                raise InputError(
                    f"{refuse} it computes attention in a way of its own, not transformers' one."
                ) from error
            raise InputError(f"{refuse} a small copy of it does not run on {runs_on} ({cause}).") from error


def _refuse_dropout(description: Description) -> None:
    """Raise InputError for dropout, which the small copy does not have."""
    for name, share in attention_dropout(description):
        raise InputError(f"its attention drops weights ({name} is {share:g} in the model's config; expected 0).")


def attention_dropout(description: Description) -> list[tuple[str, float]]:
    """Return the attention dropout settings of a model's config that are not 0, as (name, probability)."""
    assert description.config is not None
    values = vars(description.config.get_text_config()).items()
    return [
        (name, value) for name, value in values if re.search("att.*drop", name) and isinstance(value, float) and value
    ]


@dataclass(frozen=True, eq=False)
class _Row:
    tokens: Tensor
    positions: Tensor
    mask: Tensor | None = None

    @cached_property
    def documents(self) -> Tensor | None:
        """As `documents_of`; None with padding."""
        return documents_of(self.positions) if self.mask is None else None


def _rows(small: Description) -> Iterator[_Row]:
    """Yield rows with one document, with several, and with padding."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, small.vocabulary_size, (BATCH, ROW), generator=generator)
    positions = torch.arange(ROW).expand(BATCH, -1)
    yield _Row(tokens, positions)
    restarted = positions.clone()
    for row, restarts in zip(restarted, RESTARTS, strict=True):
        for restart in restarts:
            row[restart:] = torch.arange(ROW - restart)
    yield _Row(tokens, restarted)
    if small.takes("attention_mask"):
        mask = torch.ones_like(tokens)
        mask[1, -PADDED:] = 0
        yield _Row(tokens, positions, mask)


def _pieces(slices: bool) -> list[tuple[Tensor, Tensor]]:
    """Return the positions of the queries and keys of each piece."""
    every = torch.arange(ROW)
    if slices:
        return [(queries, every[: queries[-1] + 1]) for queries in every.split(SLICES)]
    first, second, third, fourth = every.split(CHUNKS)
    return [(torch.cat([first, fourth]), every), (torch.cat([second, third]), every)]


class _WholeRows:
    """Results of a small copy on whole rows, each computed once."""

    def __init__(self, small: Description, dtype: torch.dtype) -> None:
        self.rows = list(_rows(small))
        parameters = {id(parameter): parameter for parameter in small.model.parameters()}
        # Copies, since long rows change rotary tables.
        self._theirs, self._ours = (copied(small.model, dict(parameters)) for _ in range(2))
        adopt(self._ours)
        self._dtype = dtype
        self._logits: dict[tuple[_Row, bool], Tensor] = {}
        self._keys: dict[tuple[_Row, bool], Recorded] = {}

    @cached_property
    def tolerance(self) -> float:
        """The largest relative error of correct logits."""
        return tolerance(self._dtype, rounds=contains_cast(_logits(self._theirs, self.rows[0])))

    def logits(self, row: _Row, *, separate: bool) -> Tensor:
        """Return the logits [batch, row, vocabulary] of the family's own attention; with `separate`, each document runs
        alone."""
        one_by_one = separate and row.documents is not None
        if (row, one_by_one) not in self._logits:
            with torch.no_grad():
                self._logits[row, one_by_one] = (_logits_alone if one_by_one else _logits)(self._theirs, row)
        return self._logits[row, one_by_one]

    def keys(self, row: _Row, *, separate: bool) -> Recorded:
        """Return the keys and values of every layer. Raises InputError if evenpipe's attention gives another result."""
        if (row, separate) not in self._keys:
            every, recorded = torch.arange(ROW), Recorded()
            subject = "a document beside others" if separate and row.documents is not None else "its attention"
            self.compare(subject, row, every, every, recorded, separate=separate)
            self._keys[row, separate] = recorded
        return self._keys[row, separate]

    def compare(
        self, subject: str, row: _Row, queries: Tensor, keys: Tensor, exchange: Exchange, *, separate: bool
    ) -> None:
        """Raise InputError if evenpipe's attention gives another result for some tokens."""
        valid = None if row.mask is None else row.mask.bool()
        row_context = RowContext(queries, keys, exchange, ROW, row.positions, row.documents, valid, separate=separate)
        local_row = _Row(row.tokens[:, queries], row.positions[:, queries])
        with torch.no_grad(), activated(row_context):
            result = _logits(self._ours, local_row)
        expected = self.logits(row, separate=separate)[:, queries]
        if valid is not None:
            result, expected = result[valid[:, queries]], expected[valid[:, queries]]
        error = relative_error(result, expected)
        if not error <= self.tolerance:
            raise InputError(
                f"{subject} computes something else in a small copy (relative error {error:.1e}); tokens depend on"
                " others by more than attention, or positions are not those that it is given."
            )


def _logits(model: Any, row: _Row) -> Tensor:
    mask_kwargs = {} if row.mask is None else {"attention_mask": row.mask}
    logits: Tensor = model(
        input_ids=row.tokens, position_ids=row.positions, use_cache=False, return_dict=True, **mask_kwargs
    ).logits
    return logits


def _logits_alone(model: Any, row: _Row) -> Tensor:
    """Return the logits of rows, running each document alone."""
    assert row.documents is not None
    logits = []
    for tokens, positions, documents in zip(row.tokens, row.positions, row.documents, strict=True):
        lengths = documents.unique_consecutive(return_counts=True)[1].tolist()
        parts = zip(tokens.split(lengths), positions.split(lengths), strict=True)
        logits.append(
            torch.cat([_logits(model, _Row(ids[None], position_ids[None])) for ids, position_ids in parts], 1)
        )
    return torch.cat(logits)


@dataclass(slots=True)
class Recorded(Alone):
    """Records the keys and values of every layer on whole rows."""

    by_layer: dict[int, Keys] = field(default_factory=dict)

    def keys(self, layer: int, key: Tensor, value: Tensor) -> Keys:
        if layer in self.by_layer:
            raise InputError("its layers attend more than once, or do not say which layer they are.")
        self.by_layer[layer] = key, value
        return key, value


class Others(Alone):
    """The keys of a piece, and the recorded keys of all others."""

    def __init__(self, recorded: Recorded, queries: Tensor, length: int) -> None:
        self._recorded, self._queries, self._length = recorded, queries, length

    def keys(self, layer: int, key: Tensor, value: Tensor) -> Keys:
        result = [tensor[:, :, : self._length].clone() for tensor in self._recorded.by_layer[layer]]
        for tensor, local in zip(result, (key, value), strict=True):
            tensor[:, :, self._queries] = local
        return result[0], result[1]
