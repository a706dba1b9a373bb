"""Models the buffers that one microbatch passes to the next on a CPU: `vocabulary.buffers.Buffers` in `OutputShard`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from evenpipe.schedule import Item, Pass, parts_of
from evenpipe.schedule.passes import unit_of


class Pool:
    """A buffer is identified by the index of the slice that it was allocated for. tokens: tokens of each slice."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self.free: list[int] = []
        self._used: dict[int, int] = {}
        self._serves: int | None = None

    def take(self, unit: int) -> tuple[list[int], list[int]]:
        """Return the buffers that are allocated for a unit, and those that are freed: the free ones, if the last unit
        had another size."""
        index = unit % len(self._tokens)
        size, dropped = self._tokens[index], []
        if self._serves not in (None, size):
            self.free, dropped = [], self.free
        self._serves = size
        fitting = [buffer for buffer in self.free if self._tokens[buffer] >= size]
        if fitting:
            buffer = min(fitting, key=lambda candidate: self._tokens[candidate])
            self.free.remove(buffer)
        else:
            if self.free:  # outgrown
                buffer = max(self.free, key=lambda candidate: self._tokens[candidate])
                self.free.remove(buffer)
                dropped.append(buffer)
            buffer = index
        self._used[unit] = buffer
        return ([] if fitting else [index]), dropped

    def give(self, unit: int) -> None:
        """Take a unit's buffer back."""
        self.free.append(self._used.pop(unit))

    def run(self, row: Sequence[Item | None], change: Callable[[Pass], int]) -> None:
        """Run a step. change: returns how a pass changes the number of buffers in use: 1, -1 or 0."""
        for item in row:
            for pass_ in parts_of(item) if isinstance(item, Pass) else ():
                delta = change(pass_)
                if delta:
                    (self.take if delta > 0 else self.give)(unit_of(pass_, len(self._tokens)))
