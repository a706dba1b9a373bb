"""Numbers of bytes as linear functions of the microbatch size, so that one trace covers all sizes.

A trace runs with a prime number of sequences. Tensors whose bytes are divisible by it grow with the sequences; all
others have the same size for any microbatch. So the bytes of a sum of tensors are a line, `base + slope * sequences`,
encoded as one integer, `slope * 2**80 + base`: lines are added and subtracted by adding and subtracting these integers.
Which line is the highest depends on the number of sequences, so a peak is a set of lines.
"""

from __future__ import annotations

from collections.abc import Iterable

PRIMES = (10007, 10009, 10037, 10039)

_SHIFT = 80
_HALF = 1 << (_SHIFT - 1)


def prime_for(constant: Iterable[int]) -> int:
    """A prime that divides none of these sizes, which do not depend on the number of sequences."""
    sizes = list(constant)
    return next(prime for prime in PRIMES if all(size % prime for size in sizes if size))


def line_of(size: int, sequences: int) -> int:
    """The line of a tensor that has this size if `sequences` is the prime number of sequences."""
    return size // sequences << _SHIFT if size % sequences == 0 else size


def parts(line: int) -> tuple[int, int]:
    """The base and the slope of a line."""
    base = (line + _HALF) % (2 * _HALF) - _HALF
    return base, (line - base) >> _SHIFT


def at(line: int, sequences: int) -> int:
    """The bytes for a number of sequences."""
    base, slope = parts(line)
    return base + slope * sequences


def highest(lines: Iterable[int], sequences: int) -> int:
    """The bytes of the highest of these lines."""
    return max((at(line, sequences) for line in lines), default=0)


class Peak:
    """Of all lines seen, those that are the highest for some number of sequences."""

    def __init__(self, first: int) -> None:
        self._parts = [parts(first)]

    def see(self, line: int) -> None:
        base, slope = parts(line)
        if any(base <= other_base and slope <= other_slope for other_base, other_slope in self._parts):
            return
        self._parts = [pair for pair in self._parts if pair[0] > base or pair[1] > slope]
        self._parts.append((base, slope))

    def above(self, start: int) -> tuple[int, ...]:
        """The lines relative to another."""
        return tuple((slope << _SHIFT) + base - start for base, slope in self._parts)
