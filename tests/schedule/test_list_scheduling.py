"""List scheduling, and the memory plan that keeps it within its limits."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_oracle import by_virtual_times, random_costs, random_order, words

from evenpipe.schedule import (
    EQUAL_COSTS,
    Costs,
    Kind,
    Order,
    Pass,
    Placement,
    add_communication,
    add_vocabulary,
    check_order,
    check_program,
    generate,
    time_order,
)
from evenpipe.schedule.transforms.list_scheduling import Length, list_schedule
from evenpipe.schedule.transforms.memory_plan import MemoryPlan
from evenpipe.schedule.transforms.vocabulary import FIXED, LISTS, peak_limits


def test_a_device_runs_what_is_ready() -> None:
    """Device 1 wishes for 1F1 while the slow stage 0 still works on it, and runs 1B0 first."""
    wishes = Order.from_csv("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1")
    listed = list_schedule(wishes, wishes, [2, 2], Costs(F=[3, 1], B=[1, 1]))
    assert listed is not None
    assert words(listed, 1) == "1F0 1B0 1F1 1B1"
    assert words(listed, 0) == "0F0 0F1 0B0 0B1"
    # 0F0 ends at 3, 1B0 at 5, 0F1 at 6, 0B0 at 7, 1B1 at 8, 0B1 at 9
    assert Length.of(listed, Costs(F=[3, 1], B=[1, 1])) == Length(span=9, makespan=9)


@pytest.mark.parametrize(("limit", "row"), [(1, "0F0 0B0 0F1 0B1"), (2, "0F0 0F1 0B0 0B1")])
def test_a_forward_runs_early_only_within_the_limit(limit: int, row: str) -> None:
    plan = Order.from_csv("0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1")
    listed = list_schedule(plan, plan, [limit, 1], EQUAL_COSTS)
    assert listed is not None
    assert words(listed, 0) == row


def test_what_takes_no_time_comes_first() -> None:
    """S0 ends everywhere at the same moment, and C0 takes none: it runs before anything that takes some."""
    base, costs = generate("1f1b", 2, 3), Costs(F=1, B=2, S=1, T=1, E=0, G=0)
    listed = list_schedule(by_virtual_times(base, 1, costs, LISTS[1][0]), base, [3, 2], costs)
    assert listed is not None
    assert words(listed, 0).startswith("E0 E1 0F0 0F1 S0 E2 C0 ")
    assert words(listed, 1).startswith("E0 E1 E2 1F0 S0 C0 1F1 ")


@pytest.mark.parametrize(
    "text",
    [
        "0F0,0R0,0B0",  # recomputation
        "0F0,0O0,0D0,0L0,0B0",  # offload
        "0F0,0F1,0I0,0W0,0I1",  # 0W1 is missing
        "(0F0;0B0)OVERLAP_F_B",  # not taken apart
    ],
)
def test_what_is_not_listed(text: str) -> None:
    order = Order.from_csv(text)
    assert list_schedule(order, order, [9], EQUAL_COSTS) is None


def test_backwards_split_for_some_microbatches_only() -> None:
    order = Order.from_csv("0F0,0F1,0B0,0I1,0W1\n1F0,1I0,1F1,1W0,1B1")
    assert check_order(order).ok
    for barriers in (1, 2):
        lowered = add_vocabulary(order, barriers)
        assert check_order(lowered).ok
        listed = list_schedule(lowered, order, peak_limits(order, barriers), EQUAL_COSTS)
        assert listed is not None
        assert check_order(listed).ok


def test_copies_and_recomputation_are_sorted() -> None:
    order = Order.from_csv("0F0,0O0,0F1,0D0,0L0,0B0,0B1")
    assert add_vocabulary(order, 1) == by_virtual_times(order, 1, EQUAL_COSTS)


def shuffled(row: tuple[Pass | None, ...], seed: int) -> tuple[Pass, ...]:
    """Absurd wishes; only forwards keep their order."""
    passes = [item for item in row if item is not None]
    forwards = iter([item for item in passes if item.kind is Kind.F])
    random.Random(seed).shuffle(passes)
    return tuple(next(forwards) if item.kind is Kind.F else item for item in passes)


@settings(max_examples=150, deadline=None)
@given(
    devices=st.integers(1, 5),
    per_device=st.integers(1, 3),
    v_shape=st.booleans(),
    microbatches=st.integers(1, 7),
    seed=st.integers(0, 10**6),
    barriers=st.sampled_from([1, 2]),
    which=st.integers(0, 3),
    spare=st.integers(0, 2),
    split=st.booleans(),
    equal=st.booleans(),
)
def test_lists_always_come_to_their_end(
    *,
    devices: int,
    per_device: int,
    v_shape: bool,
    microbatches: int,
    seed: int,
    barriers: int,
    which: int,
    spare: int,
    split: bool,
    equal: bool,
) -> None:
    """Whatever the wishes, and even where the limit is what the base order holds already."""
    placement = Placement.v_shape(devices) if v_shape else Placement.looped(devices, per_device)
    base = random_order(seed, placement, microbatches, split=split)
    costs = EQUAL_COSTS if equal else random_costs(seed, placement)
    wishes = by_virtual_times(base, barriers, costs, (*LISTS[barriers], FIXED)[which])
    if seed % 3 == 0:
        wishes = Order(placement, microbatches, tuple(shuffled(row, seed) for row in wishes.rows), barriers)
    limits = [held + spare for held in check_order(base).in_flight]
    listed = list_schedule(wishes, base, limits, costs)
    assert listed is not None
    report = check_order(listed)
    assert report.ok, report.faults[0]
    assert all(held <= limit for held, limit in zip(report.in_flight, limits, strict=True))
    if seed % 3:
        assert check_program(add_communication(listed, costs)).ok


@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(0, 4))
@settings(max_examples=200, deadline=None)
def test_a_memory_plan_keeps_its_promise(seed: int, pairs: int, spare: int) -> None:
    """Against a plan that is walked to its end each time: it allows exactly what keeps within the limit."""
    rng = random.Random(seed)
    plan, waiting, forwards = [], [], list(range(pairs))
    while forwards or waiting:  # a random plan: forward i is pass i, its release is pass pairs + i
        if forwards and (not waiting or rng.random() < 0.6):
            waiting.append(forwards[0])
            plan.append(forwards.pop(0))
        else:
            plan.append(pairs + waiting.pop(rng.randrange(len(waiting))))
    holds = [1 if number < pairs else -1 for number in plan]
    limit = max(accumulate(holds)) + spare
    memory, held, left = MemoryPlan(plan, holds, limit), 0, list(plan)
    while left:
        ran = set(plan) - set(left)
        ready = [number for number in left if number < pairs or number - pairs in ran]
        number = rng.choice(ready)
        if number < pairs:
            rest = [held + 1, *(1 if other < pairs else -1 for other in left if other != number)]
            fits = max(accumulate(rest)) <= limit
            allowed = memory.allows(number)
            assert allowed == fits
            if left[0] == number:
                assert allowed
            if not allowed:
                continue
        memory.run(number)
        held += 1 if number < pairs else -1
        left.remove(number)
        assert held <= limit


def test_rows_of_the_embedding_do_not_pile_up() -> None:
    """E needs nothing, but waits until the first stage has come as near as the wishes had it."""
    order = generate("1f1b", 4, 40)
    costs = Costs(F=[4, 1, 1, 1], B=[4, 1, 1, 1], S=0.1, T=0.1, E=0.1, G=0.1)  # device 3 has nothing but time
    wishes = by_virtual_times(order, 1, costs, LISTS[1][0])
    listed = list_schedule(wishes, order, peak_limits(order, 1), costs)
    assert listed is not None
    ends = {(event.device, event.item): event.start for row in time_order(listed, costs).events for event in row}
    for device in range(4):
        for i in range(8, 40):
            assert ends[device, Pass(Kind.E, None, i)] >= ends[0, Pass(Kind.F, 0, i - 6)] or device == 0
