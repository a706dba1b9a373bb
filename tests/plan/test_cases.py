"""From names to figures: what is compared with what, and whose errors are whose."""

from __future__ import annotations

import pytest

from evenpipe.errors import InputError
from evenpipe.plan.case_report import summary, table
from evenpipe.plan.cases import plan_cases
from evenpipe.schedule import Costs


def test_each_device_does_the_same_work_in_every_schedule() -> None:
    cases = plan_cases(["1f1b", "interleaved", "v-half"], devices=4, microbatches=8, costs=Costs(F=4, I=4, W=4))
    assert {case.simulation.timeline.busy for case in cases} == {(96.0,) * 4}
    assert [case.stages_per_device for case in cases] == [1, 2, 2]


def test_whole_vocabulary_layers_weigh_as_much_as_shards_do_together() -> None:
    costs = Costs(F=1, B=2, S=1, T=2, E=0, G=0)
    whole, shards = plan_cases(["1f1b"], devices=3, microbatches=4, vocabularies=["first-last", "vocab-2"], costs=costs)
    assert sum(whole.simulation.timeline.busy) == pytest.approx(sum(shards.simulation.timeline.busy))


ERRORS = [
    (["1f1b", "interleaved"], {"group_size": 3}, "schedule 'interleaved': group_size must be at least the number of"),
    (["interleaved"], {"group_size": 3}, "group_size must be at least the number of"),
    (["1f1b", "v-half"], {"costs": Costs(F=[1, 2, 1, 1], B=2)}, "costs: F is a list for 4 stages, but"),
    (["1f1b", "zb-h1"], {"costs": Costs(F=1, B=2)}, "schedule 'zb-h1': costs: I is missing"),
    (["1f1b", "gpipe"], {"group_size": 4}, "group_size is given, but none of 1f1b, gpipe has this option"),
    (["1f1b", "zz"], {}, "schedule 'zz' is unknown"),
]  # fmt: skip


def test_errors_name_the_schedule_where_there_are_several() -> None:
    for names, given, message in ERRORS:
        options = {name: value for name, value in given.items() if name != "costs"}
        with pytest.raises(InputError) as error:
            plan_cases(names, devices=4, microbatches=8, costs=given.get("costs"), options=options)
        assert str(error.value).startswith(message)


def test_numbers_of_one() -> None:
    cases = plan_cases(["1f1b"], devices=1, microbatches=1)
    assert summary(cases[0], None).startswith("1f1b: 1 device, 1 microbatch, 1 stage\n")
    assert table(cases, None).startswith("1 device, 1 microbatch\n")
