"""The time axis: round marks, as many as fit."""

from __future__ import annotations

from .figures import Scale


def ticks(length: float, scale: Scale, most: float) -> list[tuple[float, str]]:
    """Return (time, text) of round times from 0 to `length`, about `most` of them."""
    step = round_step(length / max(1.0, most), scale.unit_seconds)
    if step <= 0:
        return [(0.0, scale.text(0.0))]
    return [(number * step, scale.text(number * step)) for number in range(int(length / step + 1e-9) + 1)]


def round_step(step: float, unit_seconds: float | None = None) -> float:
    """Return the next of 1, 2, 5, 10, 20, ... from `step` on, in seconds if `unit_seconds` is known; 0 for 0."""
    if step <= 0:
        return 0.0
    unit = unit_seconds or 1.0
    wanted = step * unit
    power = 1.0
    while power > wanted:
        power /= 10
    while power * 10 <= wanted:
        power *= 10
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= wanted * (1 - 1e-9)) / unit
