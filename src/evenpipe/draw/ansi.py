"""Escape sequences for colours in a terminal: 24 bits, the 256 colours of xterm, or none."""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import product

from .kinds import channels

DEPTHS = ("none", "256", "truecolor")
_SEQUENCE = re.compile("\033\\[[0-9;]*m")


class Painter:
    """Writes characters in colours. It remembers the current colours, and writes a sequence only when they change."""

    def __init__(self, depth: str) -> None:
        self.depth = depth
        self._current = ""

    @property
    def colourful(self) -> bool:
        """Whether there are colours at all."""
        return self.depth != "none"

    @property
    def reset(self) -> str:
        """The sequence back to the terminal's own colours."""
        self._current = ""
        return "\033[0m" if self.colourful else ""

    def cell(self, character: str, ink: str | None, ground: str | None) -> str:
        """`character` with colour `ink` on `ground`, both #rrggbb; None is the terminal's own background for either."""
        if not self.colourful:
            return character
        if ink is None and ground is None:
            codes = "0"
        elif ink is None:  # the terminal's background as ink: invert
            codes = f"0;7;{self._code(38, ground or '')}"
        else:
            codes = f"0;{self._code(38, ink)}" + (f";{self._code(48, ground)}" if ground else "")
        if codes == self._current:
            return character
        self._current = codes
        return f"\033[{codes}m{character}"

    def bold(self, text: str) -> str:
        """`text` in bold."""
        return f"\033[1m{text}{self.reset}" if self.colourful else text

    def faint(self, text: str) -> str:
        """Faint `text`."""
        return f"\033[2m{text}{self.reset}" if self.colourful else text

    @staticmethod
    def visible_length(text: str) -> int:
        """The number of visible characters of `text`."""
        return len(_SEQUENCE.sub("", text))

    def _code(self, base: int, colour: str) -> str:
        red, green, blue = channels(colour)
        if self.depth == "truecolor":
            return f"{base};2;{red};{green};{blue}"
        return f"{base};5;{_nearest_of_256(red, green, blue)}"


_LEVELS = (0, 95, 135, 175, 215, 255)
_CUBE = [(16 + 36 * r + 6 * g + b, (_LEVELS[r], _LEVELS[g], _LEVELS[b])) for r, g, b in product(range(6), repeat=3)]
_GREYS = [(232 + step, (8 + 10 * step,) * 3) for step in range(24)]


@lru_cache(maxsize=4096)
def _nearest_of_256(red: int, green: int, blue: int) -> int:
    """The number of the nearest colour of xterm. Hue counts more than lightness: a darker blue stays blue."""

    def distance(entry: tuple[int, tuple[int, ...]]) -> float:
        differences = [a - b for a, b in zip((red, green, blue), entry[1], strict=True)]
        lighter = sum(differences) / 3
        return sum((difference - lighter) ** 2 for difference in differences) + 1.2 * lighter**2

    return min((*_CUBE, *_GREYS), key=distance)[0]
