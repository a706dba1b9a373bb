"""Buffers that one microbatch passes to the next on a CPU: `vocabulary.buffers.Buffers`, as `OutputShard` uses them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from evenpipe.schedule import Item, Pass, parts_of
from evenpipe.schedule.passes import unit_of


class Pool:
    """A buffer is known by the number of the slice that it was made for. tokens: of each slice."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self.free: list[int] = []
        self._used: dict[int, int] = {}
        self._serves: int | None = None

    def take(self, unit: int) -> tuple[list[int], list[int]]:
        """Return the buffers that are made for a unit, and those that go: free ones, if the last unit had another
        size."""
        own = unit % len(self._tokens)
        size, gone = self._tokens[own], []
        if self._serves not in (None, size):
            self.free, gone = [], self.free
        self._serves = size
        fitting = [one for one in self.free if self._tokens[one] >= size]
        if fitting:
            found = min(fitting, key=lambda one: self._tokens[one])
            self.free.remove(found)
        else:
            if self.free:  # outgrown
                found = max(self.free, key=lambda one: self._tokens[one])
                self.free.remove(found)
                gone.append(found)
            found = own
        self._used[unit] = found
        return ([] if fitting else [own]), gone

    def give(self, unit: int) -> None:
        """Take a unit's buffer back."""
        self.free.append(self._used.pop(unit))

    def run(self, row: Sequence[Item | None], change: Callable[[Pass], int]) -> None:
        """Run a step. change: of the number of buffers in use by a pass: 1, -1 or 0."""
        for item in row:
            for part in parts_of(item) if isinstance(item, Pass) else ():
                by = change(part)
                if by:
                    (self.take if by > 0 else self.give)(unit_of(part, len(self._tokens)))
