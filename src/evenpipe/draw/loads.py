"""How busy every expert of every layer is: a table of colours, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from evenpipe.errors import InputError

from .canvas import FAINT, Canvas, Entry, text_width
from .kinds import IDLE

SCALE = (
    (0.0, "#444b5c", "no token"),
    (0.5, "#3e70d4", "less than half"),
    (0.8, "#a9c4f0", "less than 0.8"),
    (1.25, IDLE, "0.8 to 1.25"),
    (2.0, "#f8bb2d", "up to 2"),
    (float("inf"), "#cc3f16", "more than 2"),
)
"""Upper bound of the load relative to the mean, colour and text. Bounds are exclusive, except for the first one."""
_ROW, _GAP, _RIGHT = 14.0, 2.0, 150.0
_WIDE = 6.0
"""Columns at least this wide are separated by gaps; narrower neighbours of the same colour are drawn as one."""


def loads_svg(layers: Mapping[str, Sequence[float]], *, title: str = "", width: int = 1000) -> str:
    """An SVG document with a row per layer and a column per expert, coloured by its tokens relative to the mean of the
    layer.

    layers: tokens of each expert, by the name of the layer. Raises InputError if there is nothing to draw.
    """
    if not any(layers.values()):
        raise InputError("there are no experts to draw")
    width = max(400, width)
    canvas, top = Canvas(), 8.0
    left = 20 + max(text_width(name, 11) for name in layers)
    if title:
        canvas.text(12, 22, title, 17, weight="bold")
        top += 30
    for name, tokens in layers.items():
        shares = _shares(tokens)
        canvas.text(left - 8, top + 11, name, 11, fill=FAINT, anchor="end")
        size, column = (width - left - _RIGHT) / max(1, len(shares)), 0
        colours = list(map(_colour, shares))
        gap = 1.0 if size >= _WIDE else 0.0
        alike = [1] * len(colours) if gap else [len(list(same)) for _, same in groupby(colours)]
        for count in alike:
            canvas.rect(left + column * size, top, count * size - gap, _ROW, colours[column])
            column += count
        canvas.text(width - _RIGHT + 8, top + 11, _figures(shares), 11, fill=FAINT)
        top += _ROW + _GAP
    canvas.text(left, top + 14, "experts, from the first to the last; tokens over the mean of the layer:", 12)
    entries = [Entry(colour, text) for _, colour, text in SCALE]
    bottom = canvas.legend(entries, left, width - 10, top + 26) + 24
    summary = "; ".join(f"{name}: {_figures(_shares(tokens))}" for name, tokens in layers.items())
    return canvas.document(width, bottom, name=title or "Tokens of every expert", summary=summary)


def _shares(tokens: Sequence[float]) -> list[float]:
    mean = sum(tokens) / len(tokens) if tokens else 0.0
    return [count / mean if mean else 0.0 for count in tokens]


def _colour(share: float) -> str:
    if share <= 0:
        return SCALE[0][1]
    return next(colour for upper, colour, _ in SCALE[1:] if share < upper)


def _figures(shares: Sequence[float]) -> str:
    return f"most {max(shares):.2f}, least {min(shares):.2f}" if shares else ""
