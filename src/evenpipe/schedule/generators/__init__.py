"""Generators of orders, one file per family. Each is a pure function of devices and microbatches."""

from __future__ import annotations

from .dualpipe_v import dualpipe_v
from .gpipe import gpipe
from .grouped import gis, gis_h
from .interleaved import interleaved
from .looped_bfs import looped_bfs
from .one_f_one_b import one_f_one_b
from .pipe_offload import po_f, po_h
from .v_budget import v_budget
from .v_shape_fixed import v_half, v_min
from .zbv import zbv
from .zero_bubble import zb_h1, zb_h2
from .zero_bubble_auto import zb_auto

__all__ = [
    "dualpipe_v",
    "gis",
    "gis_h",
    "gpipe",
    "interleaved",
    "looped_bfs",
    "one_f_one_b",
    "po_f",
    "po_h",
    "v_budget",
    "v_half",
    "v_min",
    "zb_auto",
    "zb_h1",
    "zb_h2",
    "zbv",
]
