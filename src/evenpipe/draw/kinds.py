"""How each kind looks: its words, its colour, and the shades that distinguish a device's stages and the slices of a
sequence.

The colours differ in lightness as well as in hue, so that readers with protanopia, deuteranopia or tritanopia can
distinguish the kinds in a row; a test computes their distances.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from evenpipe.schedule import Item, Kind, Pass, TransferKind, parts_of

MOST_SHADES = 16
"""Maximum number of shades for the stages of a device and the slices of a sequence; more would look alike."""

IDLE = "#e9ecf0"
"""Colour of idle time."""


@dataclass(frozen=True, slots=True)
class Style:
    """words: description of the kind, for legends and tooltips. colour: #rrggbb, before any shade."""

    words: str
    colour: str


STYLES: dict[Kind | TransferKind, Style] = {
    Kind.F: Style("forward", "#3e70d4"),
    Kind.B: Style("backward", "#54ad8b"),
    Kind.I: Style("input gradient", "#98dfc3"),
    Kind.W: Style("weight gradient", "#30505c"),
    Kind.OVERLAP_F_B: Style("forward and backward as one", "#4c92b4"),
    Kind.E: Style("embedding", "#d99be6"),
    Kind.S: Style("output layer, first half", "#f8bb2d"),
    Kind.C: Style("loss from gathered statistics", "#5c2608"),
    Kind.T: Style("output layer, second half", "#cc3f16"),
    Kind.G: Style("embedding gradient", "#74249c"),
    Kind.R: Style("recompute", "#7a6a64"),
    Kind.O: Style("offload to host", "#444b5c"),
    Kind.D: Style("free memory", "#737a89"),
    Kind.L: Style("load from host", "#a4abb8"),
    **dict.fromkeys((Kind.UNSHARD, Kind.UNSHARD_E, Kind.UNSHARD_S), Style("gather parameters", "#8797ad")),
    **dict.fromkeys((Kind.RESHARD, Kind.RESHARD_E, Kind.RESHARD_S), Style("free gathered parameters", "#8797ad")),
    **dict.fromkeys((Kind.REDUCE_GRAD, Kind.REDUCE_GRAD_E, Kind.REDUCE_GRAD_S), Style("sum gradients", "#39424f")),
    TransferKind.SEND_F: Style("send of a forward", "#9db8ee"),
    TransferKind.RECV_F: Style("receive of a forward", "#7399e6"),
    TransferKind.SEND_B: Style("send of a backward", "#a5d4c0"),
    TransferKind.RECV_B: Style("receive of a backward", "#7cc0a5"),
    TransferKind.X: Style("broadcast of hidden states", "#f3d58a"),
    TransferKind.STATISTICS: Style("gather of statistics", "#b98d78"),
    TransferKind.DX: Style("reduce of the hidden gradient", "#e59a84"),
    TransferKind.ROWS: Style("embedding rows", "#e6c6ee"),
    TransferKind.ROW_GRADIENTS: Style("gradients of embedding rows", "#b689cc"),
}
"""The style of every kind, in the order of legends."""


def colours_of(item: Item, stages: tuple[int, ...], slices: int = 1) -> tuple[str, ...]:
    """The colours of a pass on a device that holds `stages`, with sequences of `slices` slices: one colour, or one per
    part of a joint pass."""
    parts = parts_of(item) if isinstance(item, Pass) else (item,)
    return tuple(_shaded(component, stages, slices) for component in parts)


def _shaded(component: Item, stages: tuple[int, ...], slices: int) -> str:
    """The colour of a pass: shades run from the first stage to the last, and in each from the first slice to the
    last."""
    colour = STYLES[component.kind].colour
    if isinstance(component.kind, TransferKind):
        return colour
    position, held = (stages.index(component.stage), len(stages)) if component.stage in stages else (0, 1)
    slices = slices if component.microbatch is not None else 1
    shades_per_stage = min(slices, max(1, MOST_SHADES // held))
    return _shade(
        colour, position * shades_per_stage + component.slice * shades_per_stage // slices, held * shades_per_stage
    )


def _shade(colour: str, position: int, shades: int) -> str:
    """One of several shades of `colour`: light at position 0, for the first stage or slice, dark at the last."""
    if shades < 2:
        return colour
    reach = 0.18 if shades == 2 else 0.3
    amount = (2 * position / (shades - 1) - 1) * reach
    return mix(colour, "#000000", amount) if amount > 0 else mix(colour, "#ffffff", -amount)


def mix(colour: str, target: str, share: float) -> str:
    """`colour` mixed with the given share of `target`, both #rrggbb."""
    pairs = zip(channels(colour), channels(target), strict=True)
    return text_of(tuple(a + (b - a) * share for a, b in pairs))


def channels(colour: str) -> tuple[int, int, int]:
    """#rrggbb as three numbers from 0 to 255."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def text_of(rgb: tuple[float, ...]) -> str:
    """Three numbers from 0 to 255 as #rrggbb."""
    return "#" + "".join(f"{round(value):02x}" for value in rgb)


def luminance(colour: str) -> float:
    """The relative luminance, 0 to 1 (WCAG 2.2)."""
    unit = [value / 255 for value in channels(colour)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in unit]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def ink_on(colour: str) -> str:
    """Black or white, whichever is easier to read on `colour`."""
    return "#ffffff" if luminance(colour) < 0.179 else "#000000"  # luminance at which both have the same contrast


def for_dark(colour: str) -> str:
    """`colour` for a dark page: all shades of dark kinds are lightened equally, so that they stand out from the page
    and stages from each other."""
    return mix(colour, "#ffffff", 0.28) if luminance(_kinds_colour().get(colour, colour)) < 0.1 else colour


@cache
def _kinds_colour() -> dict[str, str]:
    """The colour of the kind that a shade belongs to."""
    positions = [(position, shades) for shades in range(2, MOST_SHADES + 1) for position in range(shades)]
    return {_shade(style.colour, *args): style.colour for style in STYLES.values() for args in positions}
