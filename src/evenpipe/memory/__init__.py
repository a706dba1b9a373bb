"""How many bytes every device holds at every moment, before anything runs.

layers.py     closed forms: what one layer saves, from its shape and the kernels      two back-ends
traced.py     the same from the stage itself, run with tensors that have no memory     that must agree
replay.py     a program walked with these bytes: the most that a device holds, when, and what it consists of
estimate.py   all of it for a model, a way of running it in parallel, and a piece of hardware
"""

from __future__ import annotations
