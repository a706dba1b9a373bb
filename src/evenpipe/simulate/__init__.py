"""The full model of a step: transfers that queue, copies beside compute, memory over time, and the critical path.

`simulate` runs a program, or an order, and returns a `Simulation`.
"""

from __future__ import annotations

from .critical_path import CriticalPath
from .simulation import Simulation, simulate

__all__ = ["CriticalPath", "Simulation", "simulate"]
