"""Generators of orders, one file per family. Each is a pure function of devices and microbatches."""

from __future__ import annotations

from .gpipe import gpipe
from .looped_bfs import looped_bfs
from .one_f_one_b import one_f_one_b
from .zero_bubble import zb_h1, zb_h2

__all__ = ["gpipe", "looped_bfs", "one_f_one_b", "zb_h1", "zb_h2"]
