"""How many bytes every device holds at every moment, before anything runs.

Two back-ends that must agree say what a stage needs: `closed` (closed forms of layers, `layers`) and `traced` (the
stage itself, run with tensors that have no memory). `replay` walks a program with these bytes: the most that a device
holds, when, and what it consists of. `estimate` is all of it for a model, a way of running it in parallel, and a card.
"""

from __future__ import annotations
