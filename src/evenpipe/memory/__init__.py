"""Estimate the memory of every device at every moment, before anything runs.

`traced` gives the bytes of a stage: the stage itself runs with tensors that have no memory. `replay` replays a program
with these bytes: the peak of a device, its moment, and its parts. `estimate` does all of this for a model, a layout and
a GPU.
"""

from __future__ import annotations
