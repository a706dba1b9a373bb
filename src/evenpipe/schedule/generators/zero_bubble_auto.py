"""ZB-1p, ZB-2p and similar: a split backward, planned by the times of every stage and the memory of every device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

from evenpipe.schedule.check_limit import limits_per_device
from evenpipe.schedule.costs import EQUAL_COSTS, Costs
from evenpipe.schedule.order import Order
from evenpipe.schedule.passes import Kind, Pass, TransferKind
from evenpipe.schedule.placement import Placement
from evenpipe.words import refused

from .split_step import SplitProblem, Step
from .zero_bubble import simulate_lagging
from .zero_bubble_ready import simulate_ready
from .zero_bubble_turns import WarmUp, simulate_turns


def zb_auto(
    devices: int,
    microbatches: int,
    *,
    costs: Costs | None = None,
    max_in_flight: float | Sequence[float] | None = None,
    weight_share: float = 0.5,
) -> Order:
    """Zero bubble by search: the shortest span found for these times, within a memory limit (arXiv 2401.10241).

    Any devices >= 1 and microbatches >= 1, one stage per device. `costs` give F, I and W, each one number or one per
    stage, and how long a hop takes; equal times by default. `max_in_flight`, one number or one per device and at least
    1, counts stage activations, of which I leaves `weight_share` (0 to 1) until W; with weight_share=1 it limits the
    activations in flight. By default it is `devices`, the memory of 1f1b (the paper's ZB-1p); 2 * devices is ZB-2p.

    At equal times (F = I = W) the bubble is that of zb-h1 with the default limit, and that of zb-h2 from 2 * devices -
    1 on. For other times there is no closed form; with those of the paper's appendix D it reproduces Table 5 to four
    digits. A limit below `devices` costs time in every microbatch; V-schedules do better there.

    It tries all choices of the paper's heuristic (`zero_bubble_turns`), running any ready pass (`zero_bubble_ready`),
    and zb-h1 and zb-h2 if they fit, so it is never longer than these. Time is linear in the number of passes.
    """
    limits = limits_per_device(devices if max_in_flight is None else max_in_flight, devices, least=1)
    if isinstance(weight_share, bool) or not isinstance(weight_share, (int, float)) or not 0 <= weight_share <= 1:
        raise refused("weight_share", weight_share, "a number from 0 to 1")
    placement, costs = Placement.linear(devices), costs or EQUAL_COSTS
    times = forward, inputs, weights = costs.needed_times(placement, _KINDS, "a split backward needs F, I and W")
    tolerance = 1e-9 * (sum(map(max, times)) or 1.0)
    hop = costs.transfer_time(TransferKind.SEND_F)
    problem = SplitProblem(microbatches, forward, inputs, weights, hop, tolerance, limits, weight_share)
    rows = []
    for device, row in enumerate(_best(problem).rows):
        turns = {kind: iter(range(microbatches)) for kind in _KINDS}
        rows.append(tuple(Pass(kind, device, next(turns[kind])) for kind in row))
    return Order(placement, microbatches, tuple(rows))


def _best(problem: SplitProblem) -> Step:
    """The step with the shortest span. Candidates that cannot win are pruned."""
    plays: list[Callable[[float], Step | None]] = [
        *(partial(simulate_turns, problem, *choices) for choices in product(WarmUp, (False, True), (False, True))),
        *(partial(simulate_ready, problem, patience) for patience in (0.0, 0.25, 0.5, 1.0)),
        *(partial(simulate_lagging, problem, hop) for hop in (1, 2)),
    ]
    best: Step | None = None
    for play in plays:
        step = play(best.latest + problem.tolerance if best else math.inf)
        if step and (best is None or step.score < best.score):
            best = step
    assert best, "the first candidate is never pruned"
    return best


_KINDS = (Kind.F, Kind.I, Kind.W)
