"""A program: an order lowered for execution, with every transfer at the position where it is issued."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from evenpipe.words import count

from .order import DeviceRows
from .passes import Item, Rows, Transfer
from .rules import PER_PAIR, Rules
from .vocabulary_mode import VocabularyMode


@dataclass(frozen=True, slots=True)
class Program(DeviceRows):
    """What each device computes and communicates. Rows also contain transfers, and `sharing`, one of `SHARING`, says
    which of them share a communicator.

    A device issues a transfer when it reaches it, without waiting for it to complete; the first pass that uses its data
    waits (`Rule.waits`).
    """

    sharing: str = PER_PAIR

    def __repr__(self) -> str:
        items = [item for row in self.rows for item in row if item is not None]
        transfers = sum(isinstance(item, Transfer) for item in items)
        return f"<Program: {self.size}, {count(len(items) - transfers, 'pass')}, {count(transfers, 'transfer')}>"

    @property
    def communicators(self) -> dict[str, tuple[int, ...]]:
        """The members of each communicator of the program, by name, in the order of first use by device.

        The members of a communicator for several groups are those of all groups, ascending.
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
        """The same transfers at the same positions, with communicators shared as in `sharing`."""
        rules = Rules.of(self)

        def readdressed(item: Item | None, device: int) -> Item | None:
            if isinstance(item, Transfer) and (route := rules.route(device, item)):
                return replace(item, communicator=route.communicator(sharing))
            return item

        rows = tuple(tuple(readdressed(item, device) for item in row) for device, row in enumerate(self.rows))
        return replace(self, rows=rows, sharing=sharing)

    def of_the_first(self, microbatches: int) -> Program:
        """The part of an evaluation program that processes the first `microbatches` microbatches, in the same order.

        It completes if the full program does: forwards of a microbatch do not wait for another.
        """
        assert self.forward_only and 0 < microbatches <= self.microbatches
        rows = tuple(
            tuple(item for item in row if item is not None and (item.microbatch or 0) < microbatches)
            for row in self.rows
        )
        return replace(self, microbatches=microbatches, rows=rows)

    @classmethod
    def _addressed(cls, rows: Rows, fields: dict[str, Any]) -> Any:
        rules = Rules(fields["placement"], VocabularyMode.of(fields["vocabulary"]), forward_only=fields["forward_only"])

        def addressed(item: Item | None, device: int) -> Item | None:
            if not isinstance(item, Transfer):
                return item
            route = rules.route(device, item)
            return item if route is None else route.transfer(device, item.microbatch, item.slice)

        return tuple(tuple(addressed(item, device) for item in row) for device, row in enumerate(rows))
