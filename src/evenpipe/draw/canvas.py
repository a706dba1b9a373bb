"""An SVG document that grows by shapes with plain attributes: every viewer and converter shows the same.

A style sheet, which those that do not know it pass over, turns the same shapes to a dark background where the reader
has one.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from evenpipe.given import plain

from .kinds import IDLE, for_dark

TEXT, FAINT = "#1c2026", "#5c6570"
"""Colours of words, and of those that stand back."""

_GROUND = "#ffffff"
_IN_THE_DARK = {_GROUND: "#14171c", TEXT: "#e6e9ee", FAINT: "#a0a8b4", IDLE: "#2a2f37"}
_FONT = "Helvetica Neue, Helvetica, Arial, Liberation Sans, sans-serif"


class Canvas:
    """Shapes in the order in which they were drawn. Sizes in pixels."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._colours: dict[str, None] = {_GROUND: None}

    def rect(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        """A filled rectangle."""
        self._colours[colour] = None
        self.lines.append(f'<rect x="{n(x)}" y="{n(y)}" width="{n(width)}" height="{n(height)}" fill="{colour}"/>')

    def path(self, path: str, colour: str) -> None:
        """A line of one pixel."""
        self.lines.append(f'<path d="{path}" stroke="{colour}" stroke-width="1" fill="none"/>')

    def area(self, path: str, colour: str, opacity: float) -> None:
        """A filled shape."""
        self.lines.append(f'<path d="{path}" fill="{colour}" fill-opacity="{n(opacity)}"/>')

    def text(
        self, x: float, y: float, text: str, size: float, *, fill: str = TEXT, anchor: str = "", weight: str = ""
    ) -> None:
        """A line of text; nothing for an empty one."""
        if not text:
            return
        more = f' text-anchor="{anchor}"' if anchor and anchor != "start" else ""
        more += f' font-weight="{weight}"' if weight else ""
        self.lines.append(
            f'<text x="{n(x)}" y="{n(y)}" font-size="{n(size)}" fill="{fill}"{more}>{escape(plain(text))}</text>'
        )

    def document(self, width: float, height: float, *, name: str, summary: str) -> str:
        """The whole of it, on white, or dark for readers who prefer it. name, summary: for those who do not see it."""
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
        """Rules for boxes, and for words and lines, of this picture: a notebook has others in the same document."""
        for colour in self._colours:
            raised = _IN_THE_DARK.get(colour) or for_dark(colour)
            if raised != colour:
                yield f'.evenpipe rect[fill="{colour}"] {{ fill: {raised} }}'
        for colour in (TEXT, FAINT):
            yield f'.evenpipe text[fill="{colour}"] {{ fill: {_IN_THE_DARK[colour]} }}'
            yield f'.evenpipe path[stroke="{colour}"] {{ stroke: {_IN_THE_DARK[colour]} }}'


def text_width(text: str, size: float) -> float:
    """About how wide a text is in a sans-serif font, a little on the safe side."""
    narrow = sum(character in " .,:;'|ijlI·" for character in text)
    return size * (0.58 * (len(text) - narrow) + 0.3 * narrow)


def n(value: float) -> str:
    """A coordinate with two decimals at most."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text
