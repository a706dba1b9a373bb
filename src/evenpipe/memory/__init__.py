"""Estimate the memory of every device at every moment, before anything runs.

Two back-ends that must agree give the bytes of a stage: `closed` (closed forms of layers, `layers`) and `traced` (the
stage itself, run with tensors that have no memory). `replay` replays a program with these bytes: the peak of a device,
its moment, and its parts. `estimate` does all of this for a model, a layout and a GPU.
"""

from __future__ import annotations
