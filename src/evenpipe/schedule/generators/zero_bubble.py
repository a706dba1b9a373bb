"""ZB-H1 and ZB-H2: the backward split in two, so that weight gradients fill the wait (arXiv 2401.10241)."""

from __future__ import annotations

from collections.abc import Iterator

from evenpipe.schedule.order import Order
from evenpipe.schedule.passes import Kind, Pass
from evenpipe.schedule.placement import Placement

from .split_step import SplitProblem, Step


def zb_h1(devices: int, microbatches: int) -> Order:
    """1F1B with weight gradients computed `devices` - 1 turns after their forwards.

    Any devices >= 1 and microbatches >= 1, one stage per device; times do not matter. With equal stages and W no longer
    than F or I, the bubble is (devices - 1) * (F + I) - (min(microbatches, devices) - 1) * W: (devices - 1) * (F + I -
    W) if microbatches >= devices, a third of 1F1B's at equal times. Every device holds at most min(microbatches,
    devices) activations; on device r only `devices` - r of them are whole, r wait only for W.
    """
    return _lagging(devices, microbatches, 1)


def zb_h2(devices: int, microbatches: int) -> Order:
    """zb-h1 with twice the forwards ahead: no bubble at equal times, for twice the memory.

    Any devices >= 1 and microbatches >= 1, one stage per device; times do not matter. With equal stages and W no longer
    than F or I, the bubble is (devices - 1) * (F + I) - (min(microbatches, 2 * devices - 1) - 1) * W: (devices - 1) *
    (F + I - 2 * W) if microbatches >= 2 * devices - 1. The makespan is then that of zb-h1, so it pays only if devices
    need not synchronise between steps: the span is shorter, but the skew larger. Every device holds at most
    min(microbatches, 2 * devices - 1) activations; on device r 2 * (devices - r) - 1 are whole, 2 * r wait only for W.
    """
    return _lagging(devices, microbatches, 2)


def _lagging(devices: int, microbatches: int, hop: int) -> Order:
    rows: list[list[Pass]] = [[] for _ in range(devices)]
    for device, kind, microbatch in _turns(devices, microbatches, hop):
        rows[device].append(Pass(kind, device, microbatch))
    return Order(Placement.linear(devices), microbatches, tuple(map(tuple, rows)))


def simulate_lagging(problem: SplitProblem, hop: int, bound: float) -> Step | None:
    """Run the same order with the times of `problem`; return None if it does not fit into memory, or once a device is
    later than `bound`."""
    step = Step(problem)
    run = {Kind.F: step.forward, Kind.I: step.backward, Kind.W: step.weight}
    for device, kind, _ in _turns(problem.devices, problem.microbatches, hop):
        if step.latest > bound or (kind is Kind.F and not step.fits(device)):
            return None
        run[kind](device)
    return step


def _turns(devices: int, microbatches: int, hop: int) -> Iterator[tuple[int, Kind, int]]:
    """Device, kind and microbatch of all passes, turn by turn: F of microbatch x, I of an earlier microbatch (by `hop`
    for each later device), and W of microbatch x minus `hop` * (devices - 1)."""
    last = hop * (devices - 1)
    lags = [((Kind.F, 0), (Kind.I, last - hop * device), (Kind.W, last)) for device in range(devices)]
    for turn in range(microbatches + last):
        for device, kinds in enumerate(lags):
            for kind, lag in kinds:
                if lag <= turn < microbatches + lag:
                    yield device, kind, turn - lag
