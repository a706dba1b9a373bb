"""Places of the items of a row, by kind and stage: lists over the units, so that whole rows are compared at once.

Items of a row are numbered consecutively. Irregular ones (repeated, of a unit that does not exist) are in `odd`, and
take a slower path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import ge

from .dependencies import End, Rule, What
from .passes import ROLE, SHARDING_KINDS, Item, Kind, Pass, Transfer, parts_of

ABSENT = -1
"""Entry for a unit without a number."""

ROOM = 8
"""Most list entries per item of a row. A file that needs more has mostly empty ones: there, everything is odd."""

Name = tuple[Kind, int | None, int | None, int]
"""Kind, stage, microbatch and slice of a pass."""

Numbers = list[int]
"""By unit, or empty."""


@dataclass(slots=True)
class Places:
    """Numbers of the items of one row.

    slices: of every sequence.
    at: kind and stage -> number by unit, `ABSENT` for missing ones; parts of a joint pass have its number. Kinds that
        are odd or joint have empty lists.
    transfers: the same for transfers, by their end here.
    joint: numbers of OVERLAP_F_B.
    sharding: numbers of passes of `SHARDING_KINDS`, which are about no unit.
    odd: numbers of items that are in none of these, or have a part that is not, each once.
    """

    slices: int = 1
    at: dict[What, Numbers] = field(default_factory=dict)
    transfers: dict[End, Numbers] = field(default_factory=dict)
    joint: list[int] = field(default_factory=list)
    sharding: list[int] = field(default_factory=list)
    odd: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, row: Sequence[Item | None], units: int, first: int = 0, slices: int = 1) -> Places:
        """Return the places of a row whose positions, also of idle slots, are numbered from `first`."""
        places = cls(slices)
        at, transfers, room = places.at, places.transfers, ROOM * len(row) + 1024

        def new_list(item: Item) -> Numbers:
            nonlocal room
            listed = item.kind is not Kind.OVERLAP_F_B and units <= room
            numbers = [ABSENT] * units if listed else []
            room -= len(numbers)
            return numbers

        for number, item in enumerate(row, first):
            if item is None:
                continue
            if item.kind in SHARDING_KINDS:
                places.sharding.append(number)
                continue
            if isinstance(item, Transfer):
                numbers = transfers.get((item.kind, item.stage, item.peer))
                if numbers is None:
                    numbers = transfers[item.kind, item.stage, item.peer] = new_list(item)
            else:
                numbers = at.get((item.kind, item.stage))
                if numbers is None:
                    numbers = at[item.kind, item.stage] = new_list(item)
            if not _put(numbers, item, slices, number):
                (places.joint if item.kind is Kind.OVERLAP_F_B else places.odd).append(number)
        for number in places.joint:
            item = row[number - first]
            assert isinstance(item, Pass)
            if not item.parts:
                places.odd.append(number)
            placed = True
            for part in item.parts:
                numbers = at.get((part.kind, part.stage))
                if numbers is None:
                    numbers = at[part.kind, part.stage] = new_list(part)
                placed &= _put(numbers, part, slices, number)
            if not placed:
                places.odd.append(number)
        return places

    def of_role(self, kind: Kind, stage: int | None) -> Numbers | None:
        """Return the numbers of a kind, or of its role: of I if the row has no B. None if the row has both."""
        if ROLE[kind] is not Kind.B:
            return self.at.get((kind, stage))
        whole, split = self.at.get((Kind.B, stage)), self.at.get((Kind.I, stage))
        return None if whole and split else whole or split


def is_complete(numbers: Numbers | None) -> bool:
    """Return whether every unit has its place."""
    return numbers is not None and len(numbers) > 0 and ABSENT not in numbers


def _put(numbers: Numbers, item: Item, slices: int, number: int) -> bool:
    """Enter `number` at the place of `item`; return False if it has none, or if another item is there."""
    unit = item.microbatch
    if slices > 1 and unit is not None:
        unit = unit * slices + item.slice if item.slice < slices else None
    elif item.slice:
        return False
    if unit is None or not -1 < unit < len(numbers) or numbers[unit] != ABSENT:
        return False
    numbers[unit] = number
    return True


def unmet_in_row(
    places: Places, row: Sequence[Item | None], first: int, rule: Callable[[Kind, int | None], Rule]
) -> Iterator[tuple[int, Pass, int | None]]:
    """Return needs of passes that their own row does not meet: (number, pass, number of the needed pass or None).

    For a joint pass, the pass is the part with the need, which an earlier part may meet. `row` is numbered from
    `first`, as `places` are; `rule` gives that of a kind and stage on this device.
    """
    if not places.odd and all(
        _met(places, numbers, rule(kind, stage)) for (kind, stage), numbers in places.at.items() if numbers
    ):
        return
    where = {
        (ROLE[part.kind], part.stage, part.microbatch, part.slice): (number, turn)
        for number, item in enumerate(row, first)
        if isinstance(item, Pass)
        for turn, part in enumerate(parts_of(item))
    }
    for number, item in enumerate(row, first):
        for turn, part in enumerate(parts_of(item) if isinstance(item, Pass) else ()):
            for needed, optional in needs_in_row(part, rule(part.kind, part.stage), places.slices):
                there = where.get((ROLE[needed[0]], *needed[1:]))
                if not optional if there is None else there > (number, turn):
                    yield number, part, None if there is None else there[0]


def needs_in_row(part: Pass, rule: Rule, slices: int) -> Iterator[tuple[Name, bool]]:
    """Return the passes of the same row that must have run before `part`, and whether the row may lack them. B stands
    for B or I."""
    for kind, stage in rule.after:
        yield (kind, stage, part.microbatch, part.slice), False
    for kind, stage in rule.if_present:
        yield (kind, stage, part.microbatch, part.slice), True
    for kind, stage, step in rule.in_sequence:
        if part.slice < slices and 0 <= part.slice + step < slices:
            yield (kind, stage, part.microbatch, part.slice + step), False


def _met(places: Places, numbers: Numbers, rule: Rule) -> bool:
    """Return whether everything that `numbers` need comes before them; False also if it must be checked one by one, for
    example if a part of a joint pass needs another part."""
    for kind, stage in rule.after:
        there = places.of_role(kind, stage)
        if not there or ABSENT in there or any(map(ge, there, numbers)):
            return False
    for kind, stage in rule.if_present:
        there = places.at.get((kind, stage))
        if there and any(map(ge, there, numbers)):
            return False
    for kind, stage, step in rule.in_sequence if places.slices > 1 else ():
        there = places.of_role(kind, stage)
        if not there or any(there[unit + step] >= numbers[unit] for unit in having(step, places.slices, len(numbers))):
            return False
    return True


def having(step: int, slices: int, units: int) -> Iterator[int]:
    """Return the units whose sequence has a slice `step` further on."""
    return (unit for unit in range(units) if 0 <= unit % slices + step < slices)
