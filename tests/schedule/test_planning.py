"""Names of schedules and modes, and the way from them to a program."""

from __future__ import annotations

import pytest

from evenpipe.errors import InputError
from evenpipe.schedule import (
    MODES,
    SCHEDULES,
    Costs,
    Order,
    Placement,
    add_vocabulary,
    check_order,
    check_program,
    evaluation_program,
    generate,
    interlace,
    plan_order,
    plan_program,
    time_order,
    vocabulary_mode,
)
from evenpipe.schedule.registry import generate as registered
from evenpipe.schedule.simpler_costs import FINE, in_parts


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("devices", range(1, 8))
@pytest.mark.parametrize("microbatches", [1, 2, 3, 7, 8])
def test_every_schedule_in_every_size(name: str, devices: int, microbatches: int) -> None:
    order = generate(name, devices, microbatches)
    assert check_order(order).ok
    assert (order.devices, order.microbatches, order.barriers) == (devices, microbatches, 0)


def test_the_schedules_themselves() -> None:
    assert generate("gpipe", 2, 3).to_csv() == "0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1F1,1F2,1B0,1B1,1B2\n"
    assert generate("1f1b", 2, 3).to_csv() == "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"
    assert generate("1f1b", 3, 1).to_csv() == "0F0,0B0\n1F0,1B0\n2F0,2B0\n"


@pytest.mark.parametrize(("devices", "microbatches", "options"), [
    (4, 10**20, {}),
    (10**12, 1, {}),
    (100, 10**5, {"stages_per_device": 1000}),
])  # fmt: skip
def test_an_order_that_does_not_fit_into_memory_is_refused(
    devices: int, microbatches: int, options: dict[str, int]
) -> None:
    with pytest.raises(InputError, match="forwards does not fit into memory; take at most 20000000"):
        generate("interleaved", devices, microbatches, **options)


def test_an_option_that_is_none_is_left_at_its_default() -> None:
    assert generate("interleaved", 3, 4, stages_per_device=None, group_size=None) == generate("interleaved", 3, 4)
    assert generate("zb-auto", 3, 4, memory_limit=None, weight_share=None) == generate("zb-auto", 3, 4)
    assert generate("1f1b", 3, 4, stages_per_device=None) == generate("1f1b", 3, 4)


def test_each_mode_is_its_transform() -> None:
    base = generate("1f1b", 3, 4)
    costs = Costs(F=[1, 2, 1], B=[2, 3, 3], S=1, T=1, E=0, G=0)
    for costs in (None, costs):
        assert plan_order("1f1b", 3, 4, "first-last", costs) == base
        assert plan_order("1f1b", 3, 4, "redistribute", costs) == base
        assert plan_order("1f1b", 3, 4, "vocab-2", costs) == add_vocabulary(base, 1, costs)
        assert plan_order("1f1b", 3, 4, "vocab-1", costs) == add_vocabulary(base, 2, costs)
        assert plan_order("1f1b", 3, 4, "interlaced", costs) == interlace(base, costs)
        assert plan_order("1f1b", 3, 4, "balanced", costs) == plan_order("1f1b", 3, 4, costs=costs)
        assert plan_order("1f1b", 3, 4, "balanced", costs) == plan_order("1f1b", 3, 4, "vocab-2", costs)


def test_a_schedule_may_be_a_name_an_order_or_a_function() -> None:
    order, program = plan_program("gpipe", 2, 3, "vocab-2")
    assert program.order == order
    assert plan_program(generate("gpipe", 2, 3), 2, 3, "vocab-2") == (order, program)
    assert plan_program(lambda devices, microbatches: generate("gpipe", devices, microbatches), 2, 3) == (
        order,
        program,
    )
    assert plan_program(order, 2, 3, "vocab-2") == (order, program)


def test_mode_names() -> None:
    assert [vocabulary_mode(name) for name in (*MODES, "balanced")] == [*MODES, "vocab-2"]


def wrong_size() -> Order:
    return generate("1f1b", 3, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1", 2, 2), "schedule '1f1' is unknown, did you mean '1f1b'? Accepted: gpipe, 1f1b"),
        (("", 2, 2), "schedule '' is unknown"),
        (("1f1b", 2, 2, "vocab2"), "vocabulary mode 'vocab2' is unknown, did you mean 'vocab-2'? Accepted: first-last"),
        (("1f1b", 0, 2), "devices must be a whole number of at least 1, not 0"),
        (("1f1b", 2, 0), "microbatches must be a whole number of at least 1, not 0"),
        (("1f1b", 2, 2.0), "microbatches must be a whole number of at least 1, not 2.0"),
        ((wrong_size(), 2, 2), "the order is for 3 devices and 2 microbatches, not 2 and 2"),
        ((lambda devices, microbatches: wrong_size(), 3, 1), "3 devices and 2 microbatches, not 3 and 1"),
        ((lambda devices, microbatches: None, 3, 1), "returned NoneType, expected an Order"),
        ((lambda: None, 2, 2), "schedule: <lambda>(devices, microbatches) cannot be called: too many positional"),
        ((add_vocabulary(wrong_size(), 1), 3, 2, "vocab-1"), "the order has 1 barrier, but vocabulary mode vocab-1"),
        ((add_vocabulary(wrong_size(), 1), 3, 2, "first-last"), "vocabulary mode first-last has 0"),
        ((Order.from_csv("0F0,0B0,0F1\n1F0,1B0,1F1"), 2, 2, "vocab-2"), "the schedule has 2 faults"),
        ((Order.from_csv("0F0\n1F0"), 2, 1), "the order only evaluates"),
        ((Order.from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1"), 2, 2), "the order cannot complete"),
    ],
)
def test_bad_input(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(InputError) as error:
        plan_program(*arguments)
    assert message in str(error.value)


def test_options_of_a_schedule() -> None:
    with pytest.raises(InputError, match="schedule '1f1b' has no option 'group'; its options: none"):
        plan_program("1f1b", 2, 2, group=2)

    def grouped(devices: int, microbatches: int, *, costs: Costs | None = None, group: int = 1) -> Order:
        assert (costs, group) == (Costs(F=1, B=2), 2)
        return generate("1f1b", devices, microbatches)

    SCHEDULES["grouped"] = grouped
    try:
        assert registered("grouped", 2, 2, costs=Costs(F=1, B=2), group=2) == generate("1f1b", 2, 2)
        with pytest.raises(InputError, match="has no option 'groups'; its options: group"):
            registered("grouped", 2, 2, groups=2)
    finally:
        del SCHEDULES["grouped"]


def test_options_reach_the_generator() -> None:
    for mode in MODES:
        order, program = plan_program("interleaved", 2, 4, mode, stages_per_device=3)
        assert order.placement == program.placement == Placement.looped(2, 3)
        assert evaluation_program(order).placement == order.placement


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_first_microbatches_of_an_evaluation_are_a_sound_program(name: str) -> None:
    for mode in MODES:
        for devices in (1, 3):
            whole = evaluation_program(plan_order(name, devices, 6, mode))
            for microbatches in range(1, 7):
                first = whole.of_the_first(microbatches)
                assert check_program(first).ok
                assert first.rows == tuple(
                    tuple(item for item in row if item.microbatch < microbatches) for row in whole.rows
                )
            assert whole.of_the_first(6) == whole


def test_programs_are_checked_for_both_ways_of_queueing() -> None:
    for mode in MODES:
        assert check_program(plan_program("1f1b", 4, 3, mode)[1]).ok


def test_arranging_times_are_whole_parts_of_a_mean_pass() -> None:
    costs = Costs(
        F=(1.0, 2.0), B=3.1, I=1.49, W=1.53, S=0.2, T=1e-8, E=0.0, G=0.0, p2p=0.05, collectives={"reduce": 0.3}
    )
    found = in_parts(costs, Placement.linear(2))
    unit = (1.0 + 2.0 + 2 * 1.49 + 2 * 1.53) / 6 / FINE
    assert (round(1 / unit), round(2 / unit)) == found.F and round(1.49 / unit) == found.I
    assert (found.T, found.R, found.C) == (0.0, None, 0.0)
    assert found.collectives == {"reduce": round(0.3 / unit)}
    assert hash(found) == hash(in_parts(costs, Placement.linear(2)))


def test_the_order_for_equal_passes_is_taken_where_the_one_by_costs_does_worse_with_the_vocabulary() -> None:
    """ZB-V on 8 devices with I longer and W shorter than F: interlaced, its order for equal passes is shorter."""
    costs = Costs(F=1.0, B=2.0, I=1.25, W=0.75, S=0.2, T=0.4, E=0.0, G=0.0)
    spans = {}
    for name, by in (("costs", costs), ("equal", None)):
        order = interlace(generate("zbv", 8, 32, costs=by), costs)
        spans[name] = time_order(order, costs).makespan
    planned = plan_order("zbv", 8, 32, "interlaced", costs)
    assert spans["equal"] < spans["costs"]
    assert time_order(planned, costs).makespan == spans["equal"]
    assert plan_order("zbv", 8, 32, "first-last", costs) == generate("zbv", 8, 32, costs=costs)
