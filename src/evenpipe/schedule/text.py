"""Rows of passes and transfers as CSV, and the properties inferred from them: placement, microbatches, slices and
vocabulary passes.

One line per device, one cell per pass; an empty cell is an idle slot. Cells contain neither the placement nor the
vocabulary mode, but both can be inferred.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from evenpipe.errors import InputError
from evenpipe.words import count

from .passes import BACKWARD_KINDS, VOCABULARY_KINDS, Item, Kind, Pass, Rows, parse_item, parts_in
from .placement import Edge, Placement
from .vocabulary_mode import VocabularyMode


def rows_to_csv(rows: Iterable[Sequence[Item | None]]) -> str:
    """One line per device, ending with a newline."""
    return "".join(",".join("" if item is None else str(item) for item in row) + "\n" for row in rows)


def rows_from_csv(text: str) -> tuple[tuple[Item | None, ...], ...]:
    """The cells of a file. Raises InputError naming row and column, both from 1, of an invalid cell."""
    lines = text.removeprefix("\ufeff").splitlines()
    if not any(map(_has_cells, lines)):
        raise InputError("the file is empty; a schedule has one line per device, such as 0F0,0B0")
    return tuple(tuple(_cells(line, row)) for row, line in enumerate(lines, start=1))


def cell_name(row: int, column: int) -> str:
    """The name of a cell with both numberings: from 1, as in editors, and from 0, as in the checker."""
    return f"row {row}, column {column} (device {row - 1}, position {column - 1})"


def _has_cells(line: str) -> bool:
    return bool(line.strip(", \t"))


def _cells(line: str, row: int) -> Iterator[Item | None]:
    if not _has_cells(line):
        raise InputError(
            f"row {row} is blank; delete it: each line is a device, and every device runs at least one pass"
        )
    for column, cell in enumerate(line.split(","), start=1):
        word = cell.strip(" \t")
        try:
            yield parse_item(word) if word else None
        except InputError as error:
            raise InputError(f"{cell_name(row, column)}: {error}") from None


def infer(rows: Rows, placement: Placement | None, edges: Sequence[Edge], known: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an order besides its rows; fields that are None are inferred from the rows. edges: used if
    the placement is inferred.

    A stage belongs to the device that runs most of its passes, so that one misplaced pass is a fault that the checker
    reports, not a different placement. Raises InputError if a stage below the highest never runs, or if the number of a
    microbatch or slice is too large for the rows.
    """
    passes = [(device, item) for device, row in enumerate(rows) for item in parts_in(row)]
    kinds = {item.kind for _, item in passes}
    vocabulary = VocabularyMode.VOCAB_2 if kinds & VOCABULARY_KINDS else VocabularyMode.FIRST_LAST
    if Kind.T in kinds and Kind.C not in kinds:
        vocabulary = VocabularyMode.VOCAB_1
    slices = _slices(passes) if known["slices"] is None else known["slices"]
    return {
        "placement": _placement(passes, len(rows), tuple(edges)) if placement is None else placement,
        "microbatches": _microbatches(passes, slices) if known["microbatches"] is None else known["microbatches"],
        "vocabulary": vocabulary if known["vocabulary"] is None else known["vocabulary"],
        "forward_only": not kinds & BACKWARD_KINDS if known["forward_only"] is None else known["forward_only"],
        "slices": slices,
    }


def _placement(passes: list[tuple[int, Pass]], devices: int, edges: tuple[Edge, ...]) -> Placement:
    runs: dict[int, Counter[int]] = {}
    for device, item in passes:
        if item.stage is not None:
            runs.setdefault(item.stage, Counter())[device] += 1
    if not runs:
        raise InputError("the rows have no pass of a stage, such as 0F0")
    for stage in range(len(runs)):
        if stage not in runs:
            raise InputError(f"stage {stage} appears in no row, though stage {max(runs)} does")
    stage_device = tuple(runs[stage].most_common(1)[0][0] for stage in range(len(runs)))
    holders = set(stage_device)
    for stage, counts in sorted(runs.items()):
        for device in counts.keys() - holders:
            raise InputError(
                f"device {device} runs only stages of other devices, such as stage {stage}, which belongs to device "
                f"{stage_device[stage]}; every device has stages of its own"
            )
    return Placement(devices, stage_device, edges)


def _slices(passes: list[tuple[int, Pass]]) -> int:
    highest = max((item.slice for _, item in passes), default=0)
    _refuse_high("slice", highest, highest + 1, len(passes))
    return highest + 1


def _microbatches(passes: list[tuple[int, Pass]], slices: int) -> int:
    highest = max((item.microbatch for _, item in passes if item.microbatch is not None), default=-1)
    if highest < 0:
        raise InputError("the rows have no pass of a microbatch, such as 0F0")
    _refuse_high("microbatch", highest, highest * slices + 1, len(passes))
    return highest + 1


def _refuse_high(noun: str, highest: int, units: int, passes: int) -> None:
    """Raise InputError if `units` units would need more forwards than there are passes."""
    if units > max(1, passes):
        leaves = f"{count(passes, 'pass')} {'leaves' if passes == 1 else 'leave'}"
        raise InputError(f"{noun} {highest} appears, but {leaves} no room for all before it")
