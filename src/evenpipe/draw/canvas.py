"""An SVG document built from shapes with plain attributes, so that it looks the same in every viewer and converter.

A style sheet, which other programs ignore, draws the same shapes on a dark background if the reader prefers it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from typing import NamedTuple

from evenpipe.given import plain

from .kinds import IDLE, for_dark

TEXT, FAINT = "#1c2026", "#5c6570"
"""Colours of normal and of faint text."""

LEGEND_LINE = 22
"""Height of a line of a legend."""
_SAMPLE = 13


class Entry(NamedTuple):
    """An entry of a legend. height: of the bar in its sample; a thin bar is drawn on the colour of idle time."""

    colour: str
    text: str
    height: float = _SAMPLE


_GROUND = "#ffffff"
_IN_THE_DARK = {_GROUND: "#14171c", TEXT: "#e6e9ee", FAINT: "#a0a8b4", IDLE: "#2a2f37"}
_FONT = "Helvetica Neue, Helvetica, Arial, Liberation Sans, sans-serif"


class Canvas:
    """Shapes in the order of drawing. Sizes are in pixels."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._colours: dict[str, None] = {_GROUND: None}

    def rect(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        """Add a filled rectangle."""
        self._colours[colour] = None
        self.lines.append(f'<rect x="{n(x)}" y="{n(y)}" width="{n(width)}" height="{n(height)}" fill="{colour}"/>')

    def path(self, path: str, colour: str) -> None:
        """Add a line of one pixel."""
        self.lines.append(f'<path d="{path}" stroke="{colour}" stroke-width="1" fill="none"/>')

    def area(self, path: str, colour: str, opacity: float) -> None:
        """Add a filled shape."""
        self.lines.append(f'<path d="{path}" fill="{colour}" fill-opacity="{n(opacity)}"/>')

    def text(
        self, x: float, y: float, text: str, size: float, *, fill: str = TEXT, anchor: str = "", weight: str = ""
    ) -> None:
        """Add a line of text, unless it is empty."""
        if not text:
            return
        attributes = f' text-anchor="{anchor}"' if anchor and anchor != "start" else ""
        attributes += f' font-weight="{weight}"' if weight else ""
        self.lines.append(
            f'<text x="{n(x)}" y="{n(y)}" font-size="{n(size)}" fill="{fill}"{attributes}>{escape(plain(text))}</text>'
        )

    def axis(self, marks: Iterable[tuple[float, str]], left: float, right: float, y: float) -> None:
        """Add a line with marks, each given by its x and the text below it."""
        for x, text in marks:
            self.text(x, y + 18, text, 11, fill=FAINT, anchor="middle" if x > left else "start")
            self.path(f"M{n(x)} {n(y)}v5", FAINT)
        self.path(f"M{n(left)} {n(y)}H{n(right)}", FAINT)

    def legend(self, entries: Iterable[Entry], left: float, right: float, top: float) -> float:
        """Add entries in lines; return the top of the last one."""
        x = left
        for colour, text, height in entries:
            size = 20 + text_width(text, 12)
            if x + size > right and x > left:
                x, top = left, top + LEGEND_LINE
            if height < _SAMPLE:
                self.rect(x, top, _SAMPLE, _SAMPLE, IDLE)
            self.rect(x, top + (_SAMPLE - height) / 2, _SAMPLE, height, colour)
            self.text(x + 19, top + 10.5, text, 12)
            x += size + 18
        return top

    def document(self, width: float, height: float, *, name: str, summary: str) -> str:
        """The document, on white, or dark for readers who prefer it. name, summary: for screen readers."""
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" class="evenpipe" width="{n(width)}" height="{n(height)}" '
                f'viewBox="0 0 {n(width)} {n(height)}" font-family="{_FONT}" role="img" aria-labelledby="t d">',
                f'<title id="t">{escape(plain(name))}</title>',
                f'<desc id="d">{escape(plain(summary))}</desc>',
                f"<style>@media (prefers-color-scheme: dark) {{ {' '.join(self._dark())} }}</style>",
                f'<rect width="{n(width)}" height="{n(height)}" fill="{_GROUND}"/>',
                *self.lines,
                "</svg>\n",
            ]
        )

    def _dark(self) -> Iterator[str]:
        """Style rules for this picture only, because a notebook has others in the same document."""
        for colour in self._colours:
            raised = _IN_THE_DARK.get(colour) or for_dark(colour)
            if raised != colour:
                yield f'.evenpipe rect[fill="{colour}"] {{ fill: {raised} }}'
        for colour in (TEXT, FAINT):
            yield f'.evenpipe text[fill="{colour}"] {{ fill: {_IN_THE_DARK[colour]} }}'
            yield f'.evenpipe path[stroke="{colour}"] {{ stroke: {_IN_THE_DARK[colour]} }}'


def text_width(text: str, size: float) -> float:
    """The approximate width of a text in a sans-serif font, overestimated rather than underestimated."""
    narrow = sum(character in " .,:;'|ijlI·" for character in text)
    return size * (0.58 * (len(text) - narrow) + 0.3 * narrow)


def n(value: float) -> str:
    """A coordinate with at most two decimals."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text
