"""The bytes on a device at each position of its row, with updates of ranges: the maximum and its position."""

from __future__ import annotations

from collections.abc import Sequence


class BytesHeld:
    """A list of numbers with range addition and maximum in logarithmic time.

    A binary tree over the positions: each node has the largest number below it, without the additions at its ancestors.
    """

    def __init__(self, values: Sequence[float]) -> None:
        self._size = 1
        while self._size < len(values):
            self._size *= 2
        self._maxima = [0.0] * self._size + list(values) + [float("-inf")] * (self._size - len(values))
        self._added = [0.0] * (2 * self._size)
        for node in range(self._size - 1, 0, -1):
            self._maxima[node] = max(self._maxima[2 * node], self._maxima[2 * node + 1])

    def add(self, first: int, last: int, value: float) -> None:
        """Add `value` to the numbers from `first` up to, but not including, `last`."""
        if first >= last:
            return
        maxima, added = self._maxima, self._added
        low, high = first + self._size, last + self._size
        ends = (low, high - 1)
        while low < high:
            if low & 1:
                maxima[low] += value
                added[low] += value
                low += 1
            if high & 1:
                high -= 1
                maxima[high] += value
                added[high] += value
            low >>= 1
            high >>= 1
        for end in ends:
            node = end >> 1
            while node:
                maxima[node] = max(maxima[2 * node], maxima[2 * node + 1]) + added[node]
                node >>= 1

    @property
    def peak(self) -> float:
        """The largest number; minus infinity if there are none."""
        return self._maxima[1]

    def where(self) -> int:
        """The first position of the largest number."""
        node = 1
        while node < self._size:
            node *= 2
            if self._maxima[node + 1] > self._maxima[node]:
                node += 1
        return node - self._size
