"""PO-H and PO-F: interleaving with evenly spaced microbatches, and activations on the host (PipeOffload, arXiv
2503.01328, sections 4.3 and 4.4).

Both are GIS in groups of one: a microbatch begins every 3v turns, so the share of an activation in the peak is
proportional to the time that it is held, and the first chunks, which run forward first and backward last, make up most
of it. If M is the size of the activations of the whole model, with d devices and v stages per device, a device holds

    nothing on the host    (v + 1) / (2 v) M
    PO-H                   (v + 2) / (8 v) M       the first half of the chunks
    PO-F                   O(M / (v d))            all of them, if copies are as fast as compute
"""

from __future__ import annotations

from evenpipe.schedule.costs import Costs
from evenpipe.schedule.order import Order
from evenpipe.schedule.transforms.offload import plan_offload

from .grouped import gis


def po_h(devices: int, microbatches: int, *, stages_per_device: int = 2, costs: Costs | None = None) -> Order:
    """GIS in groups of one, with the activations of the first half of each device's stages on the host.

    Any devices >= 1 and microbatches >= 1; placement looped. Half of an odd number of stages is rounded up. Activations
    that cannot make the round trip in time stay on the device. `costs` give the time of copies (`O` and `L`); by
    default both together take half as long as forward and backward. Raises InputError for a number of stages below 1.
    """
    return _offloading(devices, microbatches, stages_per_device, (stages_per_device + 1) // 2, costs)


def po_f(devices: int, microbatches: int, *, stages_per_device: int = 2, costs: Costs | None = None) -> Order:
    """GIS in groups of one, with the activations of all stages on the host.

    As `po_h`. If copies are as fast as compute, a device holds a handful of stage activations, regardless of the number
    of devices, stages and microbatches.
    """
    return _offloading(devices, microbatches, stages_per_device, stages_per_device, costs)


def _offloading(devices: int, microbatches: int, stages_per_device: int, chunks: int, costs: Costs | None) -> Order:
    order = gis(devices, microbatches, stages_per_device=stages_per_device, group_size=1, costs=costs)
    moved = [(stage, microbatch) for stage in range(chunks * devices) for microbatch in range(microbatches)]
    return plan_offload(order, costs, only=moved).order
