"""Costs from measurements: traces of real steps become the times that the simulator predicts from.

`costs_of` takes the means of a step, and medians of several steps, `write_costs` makes a cost file of them,
`with_backward` gives orders with every kind of pass to measure.
"""

from __future__ import annotations

from .backwards import BACKWARDS, completed, one_by_one, with_backward
from .cost_file import write_costs
from .fit import costs_of

__all__ = ["BACKWARDS", "completed", "costs_of", "one_by_one", "with_backward", "write_costs"]
