"""Timelines as pictures: in the terminal, as SVG, as one HTML file to explore, as a trace for Perfetto.

One drawing model (`panel`, `kinds`, `figures`) stands behind all four, and simulated and measured timelines are drawn
by the same code.
"""

from __future__ import annotations

from .files import EXTENSIONS, check_file, draw
from .page import page
from .panel import Timelines
from .svg import svg
from .terminal import terminal
from .trace import trace

__all__ = ["EXTENSIONS", "Timelines", "check_file", "draw", "page", "svg", "terminal", "trace"]
