"""Timelines as pictures: in the terminal, as SVG, as one interactive HTML file, as a trace for Perfetto.

All outputs share one drawing model (`panel`, `kinds`, `figures`), and the same code draws simulated and measured
timelines.
"""

from .bars import Bars, bars_svg
from .files import EXTENSIONS, check_file, draw
from .loads import loads_svg
from .page import page
from .panel import Timelines
from .svg import svg
from .terminal import terminal
from .trace import trace

__all__ = [
    "EXTENSIONS",
    "Bars",
    "Timelines",
    "bars_svg",
    "check_file",
    "draw",
    "loads_svg",
    "page",
    "svg",
    "terminal",
    "trace",
]
