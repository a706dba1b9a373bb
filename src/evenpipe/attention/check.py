"""Checks on a small copy, in one process, that a model computes the same when its rows are in pieces.

The copy runs on whole rows, and the keys and values of every layer are recorded. Then each piece runs alone, with the
recorded keys and values of the others: what it computes must be its part of the whole. So whatever else looks at other
tokens (convolutions, recurrences, positions that are counted and not given) is found.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
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
RESTART = 10
"""Place of the second document of a packed row."""
PADDED = 2
"""Tokens of padding: fewer than a window, beyond which some families make NaN in fp64."""


def check_pieces(description: Description, option: str, *, slices: bool) -> None:
    """Compare a small copy of a model on pieces of rows with itself on whole rows. Takes about a second on a CPU.

    Args:
        option: what needs it, for messages.
        slices: pieces follow one after the other; else they are on several processes, each in two chunks.

    Raises:
        InputError: one sentence: the pieces would compute something else, or do not run.
    """
    if description.config is None:
        raise InputError(f"{option}: plain modules do not say where they attend to other tokens, expected 1 with them.")
    refuse = f"{description.architecture} cannot be trained with {option}:"
    with undisturbed(), one_thread():
        small, dtype, _ = small_model(description)
        if small.positions_of(torch.zeros(1, 2, dtype=torch.int64)) is not None or not small.takes("position_ids"):
            raise InputError(f"{refuse} it numbers positions in a way of its own, or takes none.")
        expected = [_logits(small, row) for row in _rows(small)]
        rounds = contains_cast(expected[0])
        tolerance = max(TOLERANCE[dtype], PARTLY_FP32 if rounds else 0.0)
        adopt(small.model)
        try:
            for row, whole in zip(_rows(small), expected, strict=True):
                _check_row(small, row, whole.detach(), tolerance, slices=slices)
        except InputError as error:
            raise InputError(f"{refuse} {error}") from None
        except Exception as error:  # families raise many types when a mask is no tensor, or lengths differ
            told = f"{type(error).__name__}: {first_line(error)}"
            if f"'{Mask.__name__}'" in told:
                raise InputError(
                    f"{refuse} it computes attention in a way of its own, not transformers' one."
                ) from error
            raise InputError(f"{refuse} a small copy of it does not run on pieces of sequences ({told}).") from error


@dataclass(frozen=True, slots=True)
class _Row:
    tokens: Tensor
    positions: Tensor
    mask: Tensor | None = None


def _rows(small: Description) -> Iterator[_Row]:
    """Yield rows of one document, of two, and with padding."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, small.vocabulary_size, (BATCH, ROW), generator=generator)
    places = torch.arange(ROW).expand(BATCH, -1)
    yield _Row(tokens, places)
    restarted = places.clone()
    restarted[1, RESTART:] -= RESTART
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


def _check_row(small: Description, row: _Row, whole: Tensor, tolerance: float, *, slices: bool) -> None:
    recorded = Recorded()
    every = torch.arange(ROW)
    pieces = [(every, every)]
    if slices:
        pieces += [(every[start:end], every[:end]) for start, end in ((0, 7), (7, 16), (16, ROW))]
    else:
        first, second, third, fourth = (every[start:end] for start, end in itertools.pairwise(CHUNKS))
        pieces += [(torch.cat([first, fourth]), every), (torch.cat([second, third]), every)]
    for queries, keys in pieces:
        exchange = recorded if len(queries) == ROW else Others(recorded, queries, len(keys))
        sight = _sight(row, queries, keys, exchange)
        with torch.no_grad(), seeing(sight):
            found = _logits(small, row, queries, masked=False)
        error = _error(found, whole[:, queries], row.mask if row.mask is None else row.mask[:, queries])
        if not error <= tolerance:
            what = "its attention" if len(queries) == ROW else "a piece of a sequence"
            raise InputError(
                f"{what} computes something else in a small copy (relative error {error:.1e}); tokens depend on others"
                " by more than attention, or positions are not those that it is given."
            )


def _sight(row: _Row, queries: Tensor, keys: Tensor, exchange: Exchange) -> Sight:
    packed = documents_of(row.positions) if row.mask is None else None
    valid = None if row.mask is None else row.mask.bool()
    return Sight(queries, keys, exchange, ROW, positions=row.positions, documents=packed, valid=valid)


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
