"""Looped BFS: breadth-first interleaving (arXiv 2211.05953)."""

from __future__ import annotations

from evenpipe.schedule.order import Order
from evenpipe.schedule.passes import Kind, Pass
from evenpipe.schedule.placement import Placement


def looped_bfs(devices: int, microbatches: int, *, stages_per_device: int = 2) -> Order:
    """Every microbatch through a device's first stage, then every one through its second; backwards from the last.

    Looped placement: device r holds stages r, r + devices, and so on. Microbatches keep their order in the backward, as
    in gpipe, so the first loss is known long before it is needed. Any devices >= 1, microbatches >= 1 and
    stages_per_device >= 1.

    With equal stages the bubble is (devices - 1) * (F + B) if microbatches >= devices; for fewer, the last microbatch
    of a stage has passed before its first one returns, and each further stage of a device adds (devices - microbatches)
    * (F + B). Every device holds microbatches * stages_per_device activations at its peak, and runs each of its stages
      once per step and direction, which suits sharded parameters.
    """
    placement = Placement.looped(devices, stages_per_device)
    rows = []
    for device in range(devices):
        stages = placement.stages_of(device)
        row = [Pass(Kind.F, stage, microbatch) for stage in stages for microbatch in range(microbatches)]
        row += [Pass(Kind.B, stage, microbatch) for stage in reversed(stages) for microbatch in range(microbatches)]
        rows.append(tuple(row))
    return Order(placement, microbatches, tuple(rows))
