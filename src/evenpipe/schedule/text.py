"""Rows of passes and transfers as CSV, and what a file leaves unsaid: placement, microbatches, barriers.

One line per device, one cell per pass; an empty cell is an idle slot. The cells say nothing of who holds which stage
or how many barriers the vocabulary layers have, but it follows from them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from evenpipe.errors import InputError

from .passes import BACKWARD_KINDS, VOCABULARY_KINDS, Item, Kind, Pass, parse_item, parts_of
from .placement import Placement


def rows_to_csv(rows: Iterable[Sequence[Item | None]]) -> str:
    """One line per device, ending with a newline."""
    return "".join(",".join("" if item is None else str(item) for item in row) + "\n" for row in rows)


def rows_from_csv(text: str) -> tuple[tuple[Item | None, ...], ...]:
    """The cells of a file; raises InputError naming row and column (both from 1) of a cell that is not a word."""
    lines = text.removeprefix("\ufeff").splitlines()
    if not lines:
        raise InputError("the file is empty; a schedule has one line per device, such as 0F0,0B0")
    return tuple(tuple(_cells(line, row)) for row, line in enumerate(lines, start=1))


def _cells(line: str, row: int) -> Iterator[Item | None]:
    if not line.strip(", \t"):
        raise InputError(f"row {row} is blank, but every device runs at least one pass")
    for column, cell in enumerate(line.split(","), start=1):
        word = cell.strip(" \t")
        try:
            yield parse_item(word) if word else None
        except InputError as error:
            raise InputError(f"row {row}, column {column}: {error}") from None


@dataclass(frozen=True, slots=True)
class Unsaid:
    """What follows from the rows of a file."""

    placement: Placement
    microbatches: int
    barriers: int
    forward_only: bool


def infer(rows: Sequence[Sequence[Item | None]]) -> Unsaid:
    """Placement, microbatches, barriers and direction of an order or program, from its rows.

    A stage belongs to the device that runs most of its passes, so that one misplaced pass is a fault that the checker
    names, not another placement. Raises InputError when a stage between 0 and the highest is run by nobody, or a
    microbatch has a number that the rows have no room for.
    """
    runs: dict[int, Counter[int]] = {}
    kinds: set[Kind] = set()
    highest = -1
    for device, row in enumerate(rows):
        for item in row:
            for part in parts_of(item) if isinstance(item, Pass) else ():
                kinds.add(part.kind)
                if part.microbatch is not None and part.microbatch > highest:
                    highest = part.microbatch
                if part.stage is not None:
                    runs.setdefault(part.stage, Counter())[device] += 1
    if highest < 0 or not runs:
        raise InputError("the rows hold no pass of a stage, such as 0F0")
    for stage in range(len(runs)):
        if stage not in runs:
            raise InputError(f"stage {stage} appears in no row, though stage {max(runs)} does")
    cells = sum(map(len, rows))
    if highest >= cells:
        raise InputError(f"microbatch {highest} appears, but {cells} cells cannot hold a pass of each one before it")
    placement = Placement(len(rows), tuple(runs[stage].most_common(1)[0][0] for stage in range(len(runs))))
    forward_only = not kinds & BACKWARD_KINDS
    if not kinds & VOCABULARY_KINDS:
        barriers = 0
    else:
        barriers = 2 if Kind.T in kinds and Kind.C not in kinds else 1
    return Unsaid(placement, highest + 1, barriers, forward_only)
