"""The solver against exhaustive search, closed forms and the checker; what a search reports of it."""

from __future__ import annotations

from contextlib import suppress
from itertools import product

import pytest

from evenpipe.errors import InputError
from evenpipe.schedule import (
    EQUAL_COSTS,
    Costs,
    DeadlockError,
    Kind,
    Order,
    Placement,
    VocabularyMode,
    check_order,
    time_order,
)
from evenpipe.search.named_orders import named_orders
from evenpipe.search.optimal_order import OrderProblem, solve
from evenpipe.search.search import lower_bound, order_problem_of, search

pytest.importorskip("ortools")

UNEVEN = Costs(F=(2, 3), B=(3, 7), I=(2, 3), W=(1, 4), p2p=1)
UNEVEN_3 = Costs(F=(2, 3, 2), I=(2, 3, 4), W=(1, 4, 1), p2p=1)
FLOATS = Costs(F=0.7, I=0.9, W=0.45, S=0.3, C=0.05, T=0.2, E=0, G=0, p2p=0.1, collectives={"broadcast": 0.25})


def best_of_all(problem: OrderProblem) -> float:
    """The smallest value over every order: each device's passes in every sequence that its own needs allow.

    Names of microbatches are exchangeable over all devices at once, so stage 0 begins with microbatch 0.
    """
    best = float("inf")

    def rows(device: int) -> list[tuple]:
        found: list[tuple] = []
        wanted = problem.passes()[device]

        def grow(row: tuple, held: int) -> None:
            if len(row) == len(wanted):
                found.append(row)
            for item in wanted:
                if item in row or (not row and device == 0 and item.microbatch):
                    continue
                needed = {Kind.B: Kind.F, Kind.I: Kind.F, Kind.W: Kind.I}.get(item.kind)
                if needed and not any(
                    (one.kind, one.stage, one.microbatch) == (needed, item.stage, item.microbatch) for one in row
                ):
                    continue
                now = held + (item.kind is Kind.F)
                if problem.max_in_flight and now > problem.max_in_flight[device]:
                    continue
                grow((*row, item), now - (item.kind in {Kind.B, Kind.W}))

        grow((), 0)
        return found

    for chosen in product(*(rows(device) for device in range(problem.placement.devices))):
        order = Order(problem.placement, problem.microbatches, chosen)
        with suppress(DeadlockError):
            best = min(best, problem.value(time_order(order, problem.costs)))
    return best


EXHAUSTIVE = [
    OrderProblem(placement=Placement.linear(2), microbatches=2, costs=EQUAL_COSTS),
    # Times that do not fit a unit are rounded down.
    OrderProblem(placement=Placement.linear(2), microbatches=2, costs=Costs(F=1 / 3, B=(2**0.5, 0.7071067))),
    OrderProblem(placement=Placement.linear(2), microbatches=3, costs=UNEVEN),
    OrderProblem(placement=Placement.linear(2), microbatches=3, costs=UNEVEN, max_in_flight=(2, 1)),
    OrderProblem(placement=Placement.linear(2), microbatches=2, costs=UNEVEN, split_backward=True),
    OrderProblem(
        placement=Placement.linear(2), microbatches=2, costs=UNEVEN, split_backward=True, objective="makespan"
    ),
    OrderProblem(placement=Placement.v_shape(2), microbatches=1, costs=EQUAL_COSTS, split_backward=True),
    OrderProblem(
        placement=Placement(2, (0, 0, 1)), microbatches=2, costs=Costs(F=(1, 2, 2), B=(2, 1, 4)), max_in_flight=(2, 1)
    ),
]


@pytest.mark.parametrize("problem", EXHAUSTIVE)
@pytest.mark.sampled(2)
def test_nothing_is_shorter_among_all_orders(problem: OrderProblem) -> None:
    solution = solve(problem, seconds=60)
    assert solution.order is not None
    value = problem.value(time_order(solution.order, problem.costs))
    best = best_of_all(problem)
    assert value == pytest.approx(best)
    assert solution.bound <= best * (1 + 1e-9)
    assert lower_bound(problem) <= best * (1 + 1e-9)


CLOSED_FORMS = [
    # placement, microbatches, split, memory limit, bubble
    (Placement.linear(4), 6, False, 4, 9),  # 1F1B: (p - 1) (F + B)
    (Placement.linear(4), 6, True, 4, 3),  # ZB-H1: (p - 1) (F + I - W)
    (Placement.linear(4), 7, True, 7, 0),  # ZB-H2 for m >= 2 p - 1
    (Placement.v_shape(2), 4, True, 4, 0),  # ZB-V
]


@pytest.mark.parametrize(("placement", "microbatches", "split", "limit", "bubble"), CLOSED_FORMS)
@pytest.mark.sampled(2)
def test_what_is_known_to_be_best_is_found(placement, microbatches, split, limit, bubble) -> None:
    problem = OrderProblem(
        placement=placement,
        microbatches=microbatches,
        costs=EQUAL_COSTS,
        split_backward=split,
        max_in_flight=(limit,) * placement.devices,
    )
    result = search(problem, seconds=60)
    assert result is not None and result.proved
    assert result.timeline.bubble == pytest.approx(bubble)
    assert result.named[0].value == pytest.approx(result.value)


@pytest.mark.parametrize("mode", ["first-last", "vocab-2", "vocab-1"])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.sampled(2)
def test_what_is_found_is_sound_and_never_longer_than_what_has_a_name(mode: str, split: bool) -> None:
    problem = OrderProblem(
        placement=Placement.linear(3),
        microbatches=3,
        costs=FLOATS,
        vocabulary=VocabularyMode(mode),
        split_backward=split,
    )
    named = named_orders(problem)
    solution = solve(problem, hint=named[0].order, seconds=5)
    assert solution.order is not None and solution.exact
    assert check_order(solution.order).ok
    assert solution.order.vocabulary == mode
    value = problem.value(time_order(solution.order, problem.costs))
    assert solution.bound * (1 - 1e-9) <= value <= named[0].value * (1 + 1e-9)


def test_a_memory_limit_holds_on_every_device_or_nothing_fits() -> None:
    problem = OrderProblem(
        placement=Placement.v_shape(3), microbatches=4, costs=EQUAL_COSTS, split_backward=True, max_in_flight=(3, 4, 5)
    )
    result = search(problem, seconds=5)
    assert result is not None
    assert all(peak <= limit for peak, limit in zip(result.timeline.peak_in_flight, (3, 4, 5), strict=True))
    impossible = OrderProblem(placement=Placement.v_shape(2), microbatches=2, costs=EQUAL_COSTS, max_in_flight=(1, 2))
    assert search(impossible, seconds=5) is None


def test_a_search_that_ends_gives_the_same_order_again() -> None:
    problem = OrderProblem(placement=Placement.linear(3), microbatches=4, costs=UNEVEN_3, split_backward=True)
    first, second = (solve(problem, seconds=60, seed=3) for _ in range(2))
    assert first == second


def test_without_anything_named_in_the_placement_the_solver_starts_from_nothing() -> None:
    result = search(order_problem_of(devices=2, microbatches=2, placement="1,0,0"), seconds=30)
    assert result is not None and result.proved
    assert (result.named, result.source) == ((), "search")
    assert "no named schedule" in result.text()


def test_a_slow_link_of_one_hop_proves_nothing_about_orders_timed_without_it() -> None:
    even = Costs(F=1, B=2, links={"p2p": {"latency": 1}})
    uneven = Costs(F=1, B=2, links={"p2p": {"latency": 1}, "F:0>1": {"latency": 50}})
    size = {"devices": 2, "microbatches": 3, "vocabulary": "first-last"}
    bounds = [lower_bound(order_problem_of(**size, costs=costs)) for costs in (even, uneven)]
    assert bounds[0] == bounds[1]


def test_when_nothing_takes_time_the_first_order_is_best() -> None:
    result = search(order_problem_of(devices=2, microbatches=2, vocabulary="first-last", costs=Costs(F=0, B=0)))
    assert result is not None
    assert (result.value, result.gap, result.proved) == (0, 0, True)
    assert "span 0: no order is shorter" in result.text()


WRONG = [
    ({"microbatches": 10**9}, "this one has 4000000000 passes; expected at most 4000"),
    (
        {"costs": Costs(F=1, B=1)},
        "E is missing, but vocabulary mode vocab-2 has such passes; .* or take mode first-last",
    ),
    ({"costs": Costs(F=1), "vocabulary": "first-last"}, "B is missing"),
    ({"costs": Costs(F=1, B=(1, 1, 1)), "vocabulary": "first-last"}, "B has 3 numbers for 2 stages"),
    ({"vocabulary": "interlaced"}, "not interlaced"),
    ({"placement": "0,1,1,0", "stages_per_device": 1}, "has 4 stages, not 1 on each of 2 devices"),
    ({"max_in_flight": [1, 2, 3]}, "max_in_flight has 3 numbers"),
]


def test_what_cannot_be_searched() -> None:
    for arguments, message in WRONG:
        with pytest.raises(InputError, match=message):
            search(order_problem_of(**{"devices": 2, "microbatches": 2, **arguments}))
    with pytest.raises(InputError, match="F of stage 0 takes no time"):
        solve(order_problem_of(devices=2, microbatches=2, vocabulary="first-last", costs=Costs(F=0, B=1)))
