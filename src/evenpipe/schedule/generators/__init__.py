"""Generators of orders, one file per family. Each is a pure function of devices and microbatches."""

from __future__ import annotations

from .gpipe import gpipe
from .one_f_one_b import one_f_one_b

__all__ = ["gpipe", "one_f_one_b"]
