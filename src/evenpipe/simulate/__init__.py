"""The full model of a step: transfers that queue, copies beside compute, memory over time, and the critical path.

`simulate` runs a program or an order and returns a `Simulation`, `makespan` only its time. `best_bound` returns a lower
bound for all orders.
"""

from .bounds import Bound, best_bound
from .critical_path import CriticalPath
from .simulation import Simulation, makespan, simulate

__all__ = ["Bound", "CriticalPath", "Simulation", "best_bound", "makespan", "simulate"]
