"""Generators of orders, one file per family. Each is a pure function of devices and microbatches."""

from __future__ import annotations

from collections.abc import Callable

from evenpipe.schedule.order import Order

from .dualpipe_v import dualpipe_v
from .grouped import gis, gis_h
from .pipe_offload import po_f, po_h
from .v_budget import v_budget
from .v_shape_fixed import v_half, v_min
from .whole_backwards import gpipe, interleaved, looped_bfs, one_f_one_b
from .zbv import zbv
from .zero_bubble import zb_h1, zb_h2
from .zero_bubble_auto import zb_auto

SCHEDULES: dict[str, Callable[..., Order]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "looped-bfs": looped_bfs,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-auto": zb_auto,
    "zbv": zbv,
    "v-half": v_half,
    "v-min": v_min,
    "v-budget": v_budget,
    "gis": gis,
    "gis-h": gis_h,
    "po-h": po_h,
    "po-f": po_f,
    "dualpipe-v": dualpipe_v,
}
"""Generators by name. Each takes devices and microbatches, and the keyword options described in its docstring."""
