"""Lower bounds: by hand where they are met, and never above any order.

| bound      | met by                                                                             |
|------------|------------------------------------------------------------------------------------|
| work       | zb-h2 and zbv, whose busiest device never waits                                    |
| one device | 1f1b, interleaved: the ramp before and behind; zb-h1, zb-h2, zbv: their makespan   |
| rounds     | one microbatch at a time, where only one activation fits                           |
| area       | a V placement with little memory                                                   |
| V          | v-half                                                                             |
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from random_programs import MODES_OF_ROWS, random_program
from simulated_cases import CASES, order_of_case, random_costs

from evenpipe.schedule import Costs, Order, Placement, generate
from evenpipe.simulate import best_bound, simulate

UNIT = Costs(F=1, I=1, W=1)


@pytest.mark.parametrize(
    ("schedule", "of", "value", "name"),
    [
        ("1f1b", "span", 117, "one device"),  # 3 m + 3 (p - 1)
        ("gpipe", "makespan", 117, "one device"),
        ("interleaved", "span", 213, "one device"),  # 6 m + 3 (p - 1)
        ("zb-h1", "makespan", 103, "one device"),  # 3 m + p - 1
        ("zb-h2", "span", 96, "work"),  # 3 m
        ("zb-h2", "makespan", 103, "one device"),
        ("zbv", "span", 192, "work"),  # 6 m
        ("zbv", "makespan", 199, "one device"),
        ("v-half", "span", 209, "V"),  # 6 m + 6 p - 3 k - 1 with k = 10
    ],
)
def test_schedules_that_no_other_can_beat(schedule: str, of: str, value: float, name: str) -> None:
    simulation = simulate(generate(schedule, 8, 32), UNIT)
    assert getattr(simulation, of) == value
    bound = simulation.bounds[of]
    assert (bound.value, bound.name) == (value, name)


@pytest.mark.parametrize(
    ("placement", "microbatches", "options", "value", "name", "why"),
    [
        # One stage of 3 on each of 4 devices, one microbatch at a time: 5 x 12.
        (
            Placement.linear(4),
            5,
            {"max_in_flight": 1},
            60,
            "rounds",
            "60 = 48 in 4 lifespans of 12 + 12 after them on device 0, which holds at most 1 activation of stage 0",
        ),
        # Two at a time, 5 of them: rounds of 12, 12, and 12 for the last; two more on any device make no difference.
        (Placement.linear(4), 5, {"max_in_flight": 2}, 36, "rounds", "36 = 24 in 2 lifespans of 12 + 12 after"),
        # In each round of 3 the other two follow within 3 each: 12 + 12 + 6.
        (Placement.linear(4), 6, {"max_in_flight": 3}, 30, "rounds", ""),
        # As many as the pipeline is long: only the ramp counts.
        (
            Placement.linear(4),
            6,
            {"max_in_flight": 4},
            27,
            "one device",
            "lower bound 27 = 3 ramp-up + 18 busy + 6 ramp-down on device 3",
        ),
        (Placement.linear(4), 6, {"max_in_flight": [4, 1, 1, 1]}, 54 + 4 - 1, "rounds", "device 1"),
        # Device 0 holds stage 0 for 4 p + 1 and the last for 3: 36 in all, with 6 activations at most.
        (
            Placement.v_shape(8),
            100,
            {"split": True, "max_in_flight": 5},
            720,
            "area",
            "100 microbatches x 36 / 5 on device 0, which holds at most 5 activations",
        ),
        (Placement.linear(3), 4, {"forward_only": True}, 6, "one device", ""),
    ],
)
def test_by_hand(
    placement: Placement, microbatches: int, options: dict[str, object], *, value: float, name: str, why: str
) -> None:
    bound = best_bound(placement, microbatches, UNIT, of="makespan", **options)  # type: ignore[arg-type]
    assert (bound.value, bound.name) == (value, name)
    assert why in bound.why


def test_one_microbatch_at_a_time_meets_its_bound() -> None:
    row = "{0}F0,{0}B0,{0}F1,{0}B1,{0}F2,{0}B2"
    simulation = simulate(Order.from_csv("\n".join(row.format(stage) for stage in range(3))), UNIT)
    assert simulation.makespan == simulation.bounds["makespan"].value == simulation.bounds["span"].value == 27
    assert simulation.bounds["makespan"].name == "rounds"


def test_a_slow_device_waits_at_the_start_and_at_the_end() -> None:
    costs = Costs(F=(2, 1, 1, 1), B=(4, 2, 2, 2))
    order = generate("1f1b", 4, 16)
    # Its first backward ends after 15, with 4 forwards before it: 4 * 2 + 4. After the last forward it is busy.
    bound = best_bound(Placement.linear(4), 16, costs, max_in_flight=4)
    assert (bound.value, bound.name) == (16 * 6 + 3, "ramps")
    assert (
        "lower bound 99 = 96 busy + 3 waiting for its first backward on device 0, which holds at most 4 activations"
        in bound.why
    )
    assert simulate(order, costs).makespan == bound.value


def test_recomputation_is_work_but_part_of_no_chain() -> None:
    def bound(*again: float) -> float:
        return best_bound(Placement.linear(2), 4, Costs(F=1, B=2), recomputation=again).value

    assert bound() == bound(0, 0) == 1 + 12 + 2
    assert bound(1, 0) == 16  # of the first device, more than 15
    # Of the second, which could compute again before the gradient is there, but not before its first forward ended.
    assert bound(0, 1) == 1 + 16 + 2


def test_transfers_are_part_of_the_ramp() -> None:
    bound = best_bound(Placement.linear(4), 16, Costs(F=1, B=2, p2p=0.25))
    assert (bound.value, bound.name) == (48 + 9 + 6 * 0.25, "one device")
    # Device 1 of 1f1b has 3 in flight, and hops make each last 10: 5 rounds of 10, the last one, and what is around it.
    rounds = simulate(generate("1f1b", 4, 16), Costs(F=1, B=2, p2p=0.25)).bounds["makespan"]
    assert (rounds.value, rounds.name) == (5 * 10 + 10 + 3 * 1 + 0.5, "rounds")


def keeps_its_bounds(order: Order, costs: Costs) -> bool:
    simulation = simulate(order, costs)
    return all(simulation.bounds[of].value <= getattr(simulation, of) * (1 + 1e-9) for of in ("span", "makespan"))


def test_no_schedule_is_shorter(sample: Callable[..., list[Any]]) -> None:
    for case, seed in sample(product(CASES[::2], (1, 2)), 40):
        order = order_of_case(*case)
        assert order is None or keeps_its_bounds(order, random_costs(order.placement, seed)), (case, seed)


@pytest.mark.parametrize("first", range(0, 300, 60))
@pytest.mark.sampled(1)
def test_no_order_at_all_is_shorter(first: int) -> None:
    unit = Costs(F=1, I=1, W=1, S=1, C=1, T=1, E=1, G=1)
    for seed in range(first, first + 60):
        rng = random.Random(seed)
        devices = rng.randint(1, 3)
        placement = rng.choice([Placement.linear(devices), Placement.looped(devices, 2), Placement.v_shape(devices)])
        order = random_program(rng, placement, rng.randint(1, 5), rng.choice(MODES_OF_ROWS), forward_only=False).order
        for costs in (unit, random_costs(placement, seed)):
            assert keeps_its_bounds(order, costs), seed


def test_copies_to_the_host_lift_the_limit_and_backwards_may_be_whole_or_split() -> None:
    text = "0F0,0O0,0D0,0L0,0B0,0F1,0O1,0D1,0L1,0B1"
    bounds = simulate(Order.from_csv(text), UNIT).bounds
    assert bounds["span"].name == "work" and bounds["makespan"].value == 6
    # A whole backward is shorter than its halves here.
    order = Order.from_csv("0F0,0F1,0B0,0I1,0W1\n1F0,1I0,1F1,1W0,1B1")
    assert keeps_its_bounds(order, Costs(F=1, I=1, W=1.5, B=2))
