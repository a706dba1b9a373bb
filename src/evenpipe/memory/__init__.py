"""Estimate the memory of every device at every moment, before anything runs.

`traced` measures the bytes of a stage by running it on tensors that have no memory. `replay` replays a program with
these bytes, and returns the peak of a device, its moment, and its parts. `estimate` does all of this for a model, a
layout and a GPU.
"""

from __future__ import annotations
