"""An order: for each device, the list of its compute passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evenpipe.errors import InputError

from .passes import Pass, Transfer
from .placement import Edge, Placement
from .text import Shape, cell_name, infer, rows_from_csv, rows_to_csv
from .words import count

if TYPE_CHECKING:
    from .program import Program


@dataclass(frozen=True, slots=True)
class Order:
    """The passes of each device in their order; what each waits for follows from them (`dependencies`).

    `rows[device]` lists its passes; None is an idle slot, which has no effect. `barriers` counts the collectives of
    the vocabulary layers that the backward of the last stage waits for: 0 means that the first and last stage hold
    whole embedding and output layers, 1 is vocab-2, 2 is vocab-1. An order with `forward_only` evaluates: it has F,
    and with barriers also E, S and C. With more than one of `slices` every sequence is cut into so many, and passes
    are about one slice of a microbatch: a unit.
    """

    placement: Placement
    microbatches: int
    rows: tuple[tuple[Pass | None, ...], ...]
    barriers: int = 0
    forward_only: bool = False
    slices: int = 1

    def __post_init__(self) -> None:
        validate_shape(self)

    def __repr__(self) -> str:
        return f"<Order: {size(self)}, {count(sum(item is not None for row in self.rows for item in row), 'pass')}>"

    def _repr_html_(self) -> str:
        """Return the picture of a step, for notebooks."""
        from .picture import html_of_order

        return html_of_order(self, repr(self))

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.placement.devices

    @property
    def units(self) -> int:
        """Number of units: slices of all microbatches. Slice s of microbatch i is unit i * `slices` + s."""
        return self.microbatches * self.slices

    def passes(self, device: int) -> Iterator[Pass]:
        """Return the passes of one device, without idle slots."""
        return (item for item in self.rows[device] if item is not None)

    def to_csv(self) -> str:
        """Return one line per device, readable by `from_csv` and, if torch has all the kinds, by torch's runtime."""
        return rows_to_csv(self.rows)

    @classmethod
    def from_csv(
        cls,
        text: str,
        *,
        placement: Placement | None = None,
        edges: Sequence[Edge] = (),
        microbatches: int | None = None,
        barriers: int | None = None,
        forward_only: bool | None = None,
        slices: int | None = None,
    ) -> Order:
        """Read an order. Missing arguments are inferred from the rows; edges of the stages are a chain by default.

        Raises InputError that names row and column of a cell that is not a pass (only programs have transfers).
        """
        rows: list[tuple[Pass | None, ...]] = []
        for number, row in enumerate(rows_from_csv(text), start=1):
            passes: list[Pass | None] = []
            for column, item in enumerate(row, start=1):
                if isinstance(item, Transfer):
                    raise InputError(f"{cell_name(number, column)}: '{item}' is a transfer; an order has passes only")
                passes.append(item)
            rows.append(tuple(passes))
        found = infer(rows, Shape(placement, microbatches, barriers, forward_only, slices, tuple(edges)))
        return cls(found.placement, found.microbatches, tuple(rows), found.barriers, found.forward_only, found.slices)


def size(schedule: Order | Program) -> str:
    """Return the size of an order or program in words."""
    numbers = (schedule.devices, "device"), (schedule.placement.stages, "stage"), (schedule.microbatches, "microbatch")
    words = ", ".join(count(number, noun) for number, noun in numbers)
    return words if schedule.slices == 1 else f"{words} of {count(schedule.slices, 'slice')}"


def validate_shape(schedule: Order | Program) -> None:
    """Raise InputError unless the numbers can describe an order."""
    if len(schedule.rows) != schedule.devices:
        raise InputError(
            f"there are {len(schedule.rows)} rows for {count(schedule.devices, 'device')}; each device has one"
        )
    for name in ("microbatches", "slices"):
        number = getattr(schedule, name)
        if not isinstance(number, int):
            raise InputError(f"{name} must be a whole number, not {number!r}")
        if number < 1:
            raise InputError(f"{name} must be at least 1, not {number}")
    if schedule.barriers not in (0, 1, 2):
        raise InputError(f"barriers must be 0, 1 or 2, not {schedule.barriers}")
