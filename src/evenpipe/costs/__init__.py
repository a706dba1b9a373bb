"""Costs from measurements: traces of real steps become the times for the simulator.

`costs_of` takes means within a step and medians over steps, `write_costs` writes the result to a cost file, and
`with_backward` returns orders for measuring every kind of pass.
"""

from __future__ import annotations

from .backwards import BACKWARDS, completed, one_by_one, with_backward
from .cost_file import write_costs
from .fit import costs_of

__all__ = ["BACKWARDS", "completed", "costs_of", "one_by_one", "with_backward", "write_costs"]
