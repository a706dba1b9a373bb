"""R stands right before each backward of the stages chosen, and the order stays sound in every mode."""

from __future__ import annotations

import pytest

from evenpipe.errors import InputError
from evenpipe.schedule import (
    MODES,
    SCHEDULES,
    Kind,
    Order,
    add_communication,
    add_recompute,
    check_order,
    check_program,
    evaluation_program,
    parts_of,
    plan_order,
    plan_program,
)

TABLE = [
    # order, stages, with R
    ("0F0,0F1,0B0,0B1", None, "0F0,0F1,0R0,0B0,0R1,0B1"),
    ("0F0,0I0,0W0", None, "0F0,0R0,0I0,0W0"),
    ("0F0,1F0,1B0,0B0", (1,), "0F0,1F0,1R0,1B0,0B0"),
    ("0F0,1F0,1B0,0B0", (), "0F0,1F0,1B0,0B0"),
    ("0F0,0R0,0F1,0B0,0B1", None, "0F0,0R0,0F1,0B0,0R1,0B1"),
    ("0F0,,(0F1;0B0)OVERLAP_F_B,0B1", None, "0F0,,0R0,(0F1;0B0)OVERLAP_F_B,0R1,0B1"),
    ("0F0,(0F1;0B1)OVERLAP_F_B,0B0", None, "0F0,(0F1;0B1)OVERLAP_F_B,0R0,0B0"),
]


@pytest.mark.parametrize(("before", "stages", "after"), TABLE)
def test_where_it_stands(before: str, stages: tuple[int, ...] | None, after: str) -> None:
    assert add_recompute(Order.from_csv(before), stages).to_csv().strip() == after


@pytest.mark.parametrize("stage", [-1, 2])
def test_a_stage_that_there_is_not(stage: int) -> None:
    with pytest.raises(InputError, match=f"recompute: stage {stage}, expected 0 to 1"):
        add_recompute(Order.from_csv("0F0,1F0,1B0,0B0"), [stage])


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.sampled(8)
def test_every_schedule_stays_sound_with_it(name: str, mode: str) -> None:
    """Whether it is added before the vocabulary passes or after them."""
    for devices, microbatches in ((1, 3), (2, 3), (3, 5)):
        plain = plan_order(name, devices, microbatches, mode)
        for stages in (None, [0], range(1, plain.placement.stages)):
            order = add_recompute(plain, stages)
            assert check_order(order).ok
            program = add_communication(order)
            assert check_program(program).ok
            assert add_recompute(order, stages) == order
            kinds = [part.kind for row in order.rows for item in row if item for part in parts_of(item)]
            chosen = plain.placement.stages if stages is None else len(stages)
            assert kinds.count(Kind.R) == chosen * microbatches
            assert not any(item.kind is Kind.R for row in evaluation_program(order).order.rows for item in row)
            base = add_recompute(plan_order(name, devices, microbatches, "first-last"), stages)
            again, _ = plan_program(base, devices, microbatches, mode)
            assert sum(item.kind is Kind.R for row in again.rows for item in row if item) == chosen * microbatches
