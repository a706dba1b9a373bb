"""A program: an order lowered for execution, with every transfer at the position where it is issued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .dependencies import Dependencies
from .flows import PER_PAIR
from .order import Order, size, validate_shape
from .passes import Item, Pass, Transfer
from .placement import Edge, Placement
from .text import Shape, infer, rows_from_csv, rows_to_csv
from .words import count


@dataclass(frozen=True, slots=True)
class Program:
    """What each device computes and communicates. Fields are those of `Order`; rows also contain transfers, and
    `sharing`, one of `SHARING`, says which of them share a communicator.

    A device issues a transfer when it reaches it, without waiting for it to complete; the first pass that uses its data
    waits (`Dependencies.waits_for`).
    """

    placement: Placement
    microbatches: int
    rows: tuple[tuple[Item | None, ...], ...]
    barriers: int = 0
    forward_only: bool = False
    sharing: str = PER_PAIR
    slices: int = 1

    def __post_init__(self) -> None:
        validate_shape(self)

    def __repr__(self) -> str:
        items = [item for row in self.rows for item in row if item is not None]
        transfers = sum(isinstance(item, Transfer) for item in items)
        return f"<Program: {size(self)}, {count(len(items) - transfers, 'pass')}, {count(transfers, 'transfer')}>"

    def _repr_html_(self) -> str:
        """Return the picture of a step, for notebooks."""
        from .picture import html_of_order

        return html_of_order(self.order, repr(self))

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.placement.devices

    @property
    def units(self) -> int:
        """Number of units, as in `Order`."""
        return self.microbatches * self.slices

    @property
    def order(self) -> Order:
        """Return the compute passes alone."""
        rows = tuple(tuple(item for item in row if isinstance(item, Pass)) for row in self.rows)
        return Order(self.placement, self.microbatches, rows, self.barriers, self.forward_only, self.slices)

    @property
    def communicators(self) -> dict[str, tuple[int, ...]]:
        """Return the members of each communicator of the program, by name, in the order of first use by device.

        The members of a communicator for several groups are all of these, ascending.
        """
        groups: dict[str, set[tuple[int, ...]]] = {}
        for row in self.rows:
            for item in row:
                if isinstance(item, Transfer):
                    groups.setdefault(item.communicator, set()).add(item.members)
        return {
            name: next(iter(members)) if len(members) == 1 else tuple(sorted(set().union(*members)))
            for name, members in groups.items()
        }

    def shared(self, sharing: str) -> Program:
        """Return the same transfers at the same positions, with communicators shared as in `sharing`."""
        dependencies = Dependencies.of(self, sharing)

        def readdressed(item: Item | None, device: int) -> Item | None:
            if isinstance(item, Transfer) and (route := dependencies.route_of(item, device)):
                return replace(item, communicator=route.communicator)
            return item

        rows = tuple(tuple(readdressed(item, device) for item in row) for device, row in enumerate(self.rows))
        return replace(self, rows=rows, sharing=sharing)

    def of_the_first(self, microbatches: int) -> Program:
        """The program of so many microbatches, with all that is about them at its place; for one that evaluates.

        It completes where the whole one does: forwards of one microbatch wait for nothing of another.
        """
        assert self.forward_only and 0 < microbatches <= self.microbatches
        rows = tuple(
            tuple(item for item in row if item is not None and (item.microbatch or 0) < microbatches)
            for row in self.rows
        )
        return replace(self, microbatches=microbatches, rows=rows)

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
    ) -> Program:
        """Read a program. Missing arguments are inferred, members and communicators of transfers from the placement;
        edges of the stages are a chain by default.

        A transfer that no pass of this placement needs keeps empty members, for the checker to name. Raises
        InputError that names row and column of a cell that is neither a pass nor a transfer.
        """
        rows = rows_from_csv(text)
        found = infer(rows, Shape(placement, microbatches, barriers, forward_only, slices, tuple(edges)))
        dependencies = Dependencies(found.placement, found.barriers, found.forward_only)

        def addressed(item: Item | None, device: int) -> Item | None:
            if not isinstance(item, Transfer):
                return item
            route = dependencies.route_of(item, device)
            return item if route is None else route.transfer(device, item.microbatch, item.slice)

        filled = tuple(tuple(addressed(item, device) for item in row) for device, row in enumerate(rows))
        return cls(found.placement, found.microbatches, filled, found.barriers, found.forward_only, slices=found.slices)
