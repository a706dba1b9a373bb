"""Checks on a small copy, in one process, that a model computes the same when its rows are in pieces, and that
documents that share a row do not see each other.

The copy runs on whole rows, and the keys and values of every layer are recorded. Then each piece runs alone, with the
recorded keys and values of the others: what it computes must be its part of the whole. So whatever else looks at other
tokens (convolutions, recurrences, positions that are counted and not given) is found. A row of documents that are kept
apart must be what the copy computes for each of them alone.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from evenpipe.attention.function import adopt
from evenpipe.attention.sight import Alone, Exchange, Keys, Mask, Sight, documents_of, seeing
from evenpipe.errors import InputError
from evenpipe.model.comparison import PARTLY_FP32, TOLERANCE, contains_cast, one_thread
from evenpipe.model.description import Description
from evenpipe.model.rules import undisturbed
from evenpipe.model.small_model import small_model
from evenpipe.model.structure import first_line

BATCH, ROW = 2, 24
CHUNKS = (0, 5, 10, 16, ROW)
"""Of two processes: the first and the last, and the others. Some rotary tables change after `FEW_TOKENS` = 16."""
RESTARTS = ((14,), (10, 22))
"""Places of the later documents of packed rows; none is longer than `FEW_TOKENS`."""
PADDED = 2
"""Tokens of padding: fewer than a window, beyond which some families make NaN in fp64."""


def check_pieces(description: Description, option: str, *, slices: bool, apart: bool = False) -> None:
    """Compare a small copy of a model on pieces of rows with itself on whole rows. Takes about a second on a CPU.

    Args:
        option: what needs it, for messages.
        slices: pieces follow one after the other; else they are on several processes, each in two chunks.
        apart: documents of a row do not see each other.

    Raises:
        InputError: one sentence: the pieces would compute something else, or do not run.
    """
    refuse = f"{description.architecture} cannot be trained with {option}:"
    with _small_copy(description, refuse, f"{option}: {PLAIN} 1", "pieces of sequences") as (small, dtype):
        rows = list(_rows(small))
        expected = [_alone(small, row) if apart else _logits(small, row) for row in rows]
        tolerance = _tolerance(dtype, expected[0])
        _adopt(small, description)
        for row, whole in zip(rows, expected, strict=True):
            _check_row(small, row, whole.detach(), tolerance, [_whole(), *_pieces(slices)], apart=apart)


def looks_across_documents(description: Description) -> bool:
    """Return whether a model's own attention looks at other documents of a row, so that evenpipe's has to keep them
    apart. Runs a small copy, which takes about a second on a CPU.

    Raises:
        InputError: one sentence: evenpipe's attention does not keep them apart either.
    """
    what = 'documents = "separate", only with "joined" (data.documents of a configuration)'
    refuse = f"{description.architecture} cannot be trained with {what}:"
    plain = f'documents: {PLAIN} "joined"'
    with _small_copy(description, refuse, plain, "rows of several documents") as (small, dtype):
        row = next(row for row in _rows(small) if documents_of(row.positions) is not None)
        alone = _alone(small, row)
        tolerance, alone = _tolerance(dtype, alone), alone.detach()
        if _error(_logits(small, row).detach(), alone, None) <= tolerance:
            return False
        _adopt(small, description)
        _check_row(small, row, alone, tolerance, [_whole()], apart=True)
        return True


PLAIN = "plain modules do not say where they attend to other tokens, expected"
"""Begins the sentence that refuses them; what is accepted follows."""


@contextmanager
def _small_copy(
    description: Description, refuse: str, plain: str, runs_on: str
) -> Iterator[tuple[Description, torch.dtype]]:
    """Make a small copy that takes position ids, and its dtype.

    Args:
        refuse: what the sentence of any error inside begins with.
        plain: the same for plain modules.
        runs_on: what the copy is for.
    """
    if description.config is None:
        raise InputError(f"{plain} with them.")
    with undisturbed(), one_thread():
        small, dtype, _ = small_model(description)
        try:
            if small.positions_of(torch.zeros(1, 2, dtype=torch.int64)) is not None or not small.takes("position_ids"):
                raise InputError("it numbers positions in a way of its own, or takes none.")
            yield small, dtype
        except InputError as error:
            raise InputError(f"{refuse} {error}") from None
        except Exception as error:  # families raise many types when a mask is no tensor, or lengths differ
            told = f"{type(error).__name__}: {first_line(error)}"
            if f"'{Mask.__name__}'" in told:
                raise InputError(
                    f"{refuse} it computes attention in a way of its own, not transformers' one."
                ) from error
            raise InputError(f"{refuse} a small copy of it does not run on {runs_on} ({told}).") from error


def _adopt(small: Description, description: Description) -> None:
    """Make a small copy call evenpipe's attention. Raises InputError for dropout, which the copy does not have."""
    for name, share in attention_dropout(description):
        raise InputError(f"its attention drops weights ({name} is {share:g} in the model's config, expected 0).")
    adopt(small.model)


def attention_dropout(description: Description) -> list[tuple[str, float]]:
    """Return what a model's config says of weights that its attention drops, name and share."""
    assert description.config is not None
    values = vars(description.config.get_text_config()).items()
    return [(name, one) for name, one in values if re.search("att.*drop", name) and isinstance(one, float) and one]


def _tolerance(dtype: torch.dtype, logits: Tensor) -> float:
    return max(TOLERANCE[dtype], PARTLY_FP32 if contains_cast(logits) else 0.0)


_Piece = tuple[Tensor, Tensor]
"""Places of queries and of keys."""


def _whole() -> _Piece:
    return torch.arange(ROW), torch.arange(ROW)


def _pieces(slices: bool) -> list[_Piece]:
    every = torch.arange(ROW)
    if slices:
        return [(every[start:end], every[:end]) for start, end in ((0, 7), (7, 16), (16, ROW))]
    first, second, third, fourth = (every[start:end] for start, end in itertools.pairwise(CHUNKS))
    return [(torch.cat([first, fourth]), every), (torch.cat([second, third]), every)]


@dataclass(frozen=True, slots=True)
class _Row:
    tokens: Tensor
    positions: Tensor
    mask: Tensor | None = None


def _rows(small: Description) -> Iterator[_Row]:
    """Yield rows of one document, of several, and with padding."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, small.vocabulary_size, (BATCH, ROW), generator=generator)
    places = torch.arange(ROW).expand(BATCH, -1)
    yield _Row(tokens, places)
    restarted = places.clone()
    for row, restarts in zip(restarted, RESTARTS, strict=True):
        for restart in restarts:
            row[restart:] = torch.arange(ROW - restart)
    yield _Row(tokens, restarted)
    if small.takes("attention_mask"):
        mask = torch.ones_like(tokens)
        mask[1, -PADDED:] = 0
        yield _Row(tokens, places, mask)


def _logits(small: Description, row: _Row, places: Tensor | slice = slice(None), *, masked: bool = True) -> Tensor:
    given = {"attention_mask": row.mask} if masked and row.mask is not None else {}
    logits: Tensor = small.model(
        input_ids=row.tokens[:, places],
        position_ids=row.positions[:, places],
        use_cache=False,
        return_dict=True,
        **given,
    ).logits
    return logits


def _alone(small: Description, row: _Row) -> Tensor:
    """Return the logits of rows whose documents run one by one."""
    documents = documents_of(row.positions)
    if documents is None or row.mask is not None:
        return _logits(small, row)
    found = []
    for tokens, positions, numbers in zip(row.tokens, row.positions, documents, strict=True):
        _, lengths = numbers.unique_consecutive(return_counts=True)
        parts = zip(tokens.split(lengths.tolist()), positions.split(lengths.tolist()), strict=True)
        found.append(torch.cat([_logits(small, _Row(one[None], ids[None])) for one, ids in parts], 1))
    return torch.cat(found)


def _check_row(
    small: Description, row: _Row, whole: Tensor, tolerance: float, pieces: Sequence[_Piece], *, apart: bool
) -> None:
    """Compare pieces of rows, the first of which is whole, with `whole`, the logits [batch, row, vocabulary]."""
    recorded = Recorded()
    for queries, keys in pieces:
        exchange = recorded if len(queries) == ROW else Others(recorded, queries, len(keys))
        sight = _sight(row, queries, keys, exchange, apart=apart)
        with torch.no_grad(), seeing(sight):
            found = _logits(small, row, queries, masked=False)
        error = _error(found, whole[:, queries], row.mask if row.mask is None else row.mask[:, queries])
        if not error <= tolerance:
            whole_rows = "a document beside others" if apart and sight.documents is not None else "its attention"
            what = whole_rows if len(queries) == ROW else "a piece of a sequence"
            raise InputError(
                f"{what} computes something else in a small copy (relative error {error:.1e}); tokens depend on others"
                " by more than attention, or positions are not those that it is given."
            )


def _sight(row: _Row, queries: Tensor, keys: Tensor, exchange: Exchange, *, apart: bool) -> Sight:
    packed = documents_of(row.positions) if row.mask is None else None
    valid = None if row.mask is None else row.mask.bool()
    return Sight(queries, keys, exchange, ROW, positions=row.positions, documents=packed, valid=valid, apart=apart)


def _error(found: Tensor, expected: Tensor, mask: Tensor | None) -> float:
    if mask is not None:
        found, expected = found[mask.bool()], expected[mask.bool()]
    return float((found - expected).norm() / expected.norm())


@dataclass(slots=True)
class Recorded(Alone):
    """Keeps the keys and values of every layer on whole rows."""

    by_layer: dict[int, Keys] = field(default_factory=dict)

    def keys(self, layer: int, key: Tensor, value: Tensor) -> Keys:
        if layer in self.by_layer:
            raise InputError("its layers attend more than once, or do not say which layer they are.")
        self.by_layer[layer] = key, value
        return key, value


class Others(Alone):
    """The keys of a piece, and the recorded ones of all others."""

    def __init__(self, recorded: Recorded, queries: Tensor, length: int) -> None:
        self._recorded, self._queries, self._length = recorded, queries, length

    def keys(self, layer: int, key: Tensor, value: Tensor) -> Keys:
        whole = [one[:, :, : self._length].clone() for one in self._recorded.by_layer[layer]]
        for one, own in zip(whole, (key, value), strict=True):
            one[:, :, self._queries] = own
        return whole[0], whole[1]
