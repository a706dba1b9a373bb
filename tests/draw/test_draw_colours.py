"""Colours: kinds stay apart for every kind of colour vision, stages by shade, and numbers can be read in every box."""

from __future__ import annotations

import math
from itertools import combinations, product

from evenpipe.draw.kinds import IDLE, LOOKS, channels, colours_of, for_dark, ink_on, luminance
from evenpipe.schedule import Kind, Pass, TransferKind

# Linear RGB as seen without one kind of cone: Machado, Oliveira, Fernandes (2009), severity 1.0.
VISION = {
    "trichromacy": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
IN_ONE_ROW = [Kind.F, Kind.B, Kind.I, Kind.W, Kind.S, Kind.C, Kind.T, Kind.E, Kind.G, Kind.R]


def seen(colour: str, vision: str) -> tuple[float, float, float]:
    """A colour in OKLab (Ottosson, 2020) as a reader with this vision sees it."""
    linear = [value / 255 for value in channels(colour)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in linear]
    red, green, blue = (min(1.0, max(0.0, sum(a * b for a, b in zip(row, linear)))) for row in VISION[vision])
    long = math.cbrt(0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue)
    middle = math.cbrt(0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue)
    short = math.cbrt(0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue)
    return (
        0.2104542553 * long + 0.7936177850 * middle - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * middle + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * middle - 0.8086757660 * short,
    )


def distance(one: str, other: str, vision: str = "trichromacy") -> float:
    """0.06 is about three just noticeable differences."""
    return math.dist(seen(one, vision), seen(other, vision))


def contrast(a: str, b: str) -> float:
    """WCAG 2.2: 4.5 and more is readable for small text."""
    lighter, darker = sorted((luminance(a), luminance(b)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def test_kinds_in_one_row_stay_apart() -> None:
    colours = {kind.value: LOOKS[kind].colour for kind in IN_ONE_ROW} | {"idle": IDLE}
    weight = colours["W"]
    for vision in VISION:
        close = [pair for pair in combinations(colours, 2) if distance(*map(colours.get, pair), vision) < 0.06]
        assert not close, vision
        assert all(distance(weight, colours[other], vision) > 0.15 for other in "SFI"), "told at a glance"
        dark = [distance(for_dark(weight), for_dark(LOOKS[k].colour), vision) for k in IN_ONE_ROW if k is not Kind.W]
        assert min(dark) >= 0.06, vision


def test_two_stages_of_a_kind_stay_apart() -> None:
    for vision, kind, page in product(VISION, "FBIW", (str, for_dark)):
        first, last = (page(colours_of(Pass(Kind(kind), stage, 0), (0, 7))[0]) for stage in (0, 7))
        assert distance(first, last, vision) > 0.1, (vision, kind)
        assert luminance(first) > luminance(last)


def test_slices_of_a_sequence_differ_in_shade_from_light_to_dark() -> None:
    for kind, page, (held, slices) in product("FBIWST", (str, for_dark), [(1, 2), (1, 4), (1, 16), (2, 4)]):
        stages = (0, 7)[:held] if kind in "FBIW" else (None,)
        passes = [Pass(Kind(kind), stage, 3, part) for stage, part in product(stages, range(slices))]
        shades = [page(colours_of(item, (0, 7)[:held], slices)[0]) for item in passes]
        assert len(set(shades)) == len(shades)
        assert shades == sorted(shades, key=luminance, reverse=True)
        assert distance(shades[0], shades[slices - 1]) > 0.04
        assert all(contrast(shade, ink_on(shade)) >= 4.5 for shade in shades)
    assert len({colours_of(Pass(Kind.F, 0, 0, part), (0, 1), 64) for part in range(64)}) == 8, "many share shades"
    assert colours_of(Pass(Kind.UNSHARD, 0, None), (0,), 4) == (LOOKS[Kind.UNSHARD].colour,), "of replicas: no slices"


def test_every_kind_has_a_colour_in_which_numbers_can_be_read() -> None:
    assert set(LOOKS) == {*Kind, *TransferKind}
    for kind, stages in product(LOOKS, (1, 2, 4)):
        for stage in range(stages):
            item = Pass(kind, stage, 0) if isinstance(kind, Kind) else None
            colours = colours_of(item, tuple(range(stages))) if item else (LOOKS[kind].colour,)
            for colour in (*colours, *map(for_dark, colours)):
                assert contrast(colour, ink_on(colour)) >= 4.5, colour
