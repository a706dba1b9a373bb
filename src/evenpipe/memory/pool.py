"""Buffers that one microbatch passes to the next, on a CPU: `vocabulary.buffers.Buffers` without memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from evenpipe.schedule import Item, Pass, parts_of
from evenpipe.schedule.passes import unit_of


class Pool:
    """A buffer is known by the slice that it was made for.

    Args:
        tokens: of each slice, to which buffers are proportional.
        free: buffers that are there.
    """

    def __init__(self, tokens: Sequence[int], free: Iterable[int] = ()) -> None:
        self._tokens = tokens
        self.free = list(free)
        self._used: dict[int, int] = {}
        self.is_new = not self.free

    def take(self, unit: int) -> tuple[list[int], list[int]]:
        """Return the buffers that are made for a unit, and those that go."""
        own = unit % len(self._tokens)
        fitting = [one for one in self.free if self._tokens[one] >= self._tokens[own]]
        made: list[int] = []
        gone: list[int] = []
        if fitting:
            found = min(fitting, key=lambda one: self._tokens[one])
            self.free.remove(found)
        else:
            if self.free:  # outgrown
                gone.append(max(self.free, key=lambda one: self._tokens[one]))
                self.free.remove(gone[0])
            found = own
            made.append(own)
        self._used[unit] = found
        return made, gone

    def give(self, unit: int) -> None:
        """Take a unit's buffer back."""
        self.free.append(self._used.pop(unit))


def left_over(
    row: Sequence[Item | None], tokens: Sequence[int], change: Callable[[Pass], int], *, steps: int = 4
) -> list[int]:
    """Return the buffers that are free between steps, after some of them.

    change: of buffers in use by a pass: 1, -1 or 0.
    """
    free: list[int] = []
    for _ in range(steps if len(tokens) > 1 else 1):
        pool = Pool(tokens, free)
        for item in row:
            for part in parts_of(item) if isinstance(item, Pass) else ():
                by = change(part)
                if by > 0:
                    pool.take(unit_of(part, len(tokens)))
                elif by < 0:
                    pool.give(unit_of(part, len(tokens)))
        free = pool.free
    return free
