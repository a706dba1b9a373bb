"""Costs of a comparison: the same work in another number of stages, times in whole numbers; whose errors are whose."""

from __future__ import annotations

import math

import pytest

from evenpipe.compare.case_report import summary, table
from evenpipe.compare.cases import plan_cases
from evenpipe.compare.stage_costs import costs_for_stages, with_whole_vocabulary
from evenpipe.errors import InputError
from evenpipe.schedule import Costs, Link, Placement, TransferKind
from evenpipe.search.whole_costs import WholeCosts

REPLICAS = {"replicas": Link(bandwidth=1.0)}

CUT = [
    # costs, stages, wanted, costs of the wanted stages
    (Costs(F=2, B=4, bytes=6), 4, 4, Costs(F=2, B=4, bytes=6)),
    (Costs(F=2, I=3, W=1, bytes=6), 4, 8, Costs(F=1, I=1.5, W=0.5, bytes=3)),
    (Costs(F=2, B=4, R=1, O=2, L=3), 8, 4, Costs(F=4, B=8, R=2, O=4, L=6)),
    (Costs(F=(1, 2, 3, 4), B=2), 4, 2, Costs(F=(3, 7), B=4)),
    (Costs(F=1, B=2, S=5, T=6, E=7, G=8, C=9, p2p=3), 2, 4, Costs(F=0.5, B=1, S=5, T=6, E=7, G=8, C=9, p2p=3)),
    (Costs(F=2, B=2, memory={"F": 4, "B": -4, "S": 6}), 2, 4, Costs(F=1, B=1, memory={"F": 2, "B": -2, "S": 6})),
    (
        Costs(F=2, B=2, memory={"L": 4, "D": -4, "UNSHARD": 8, "RESHARD": -8, "UNSHARD_S": 2, "receive": 1}),
        2,
        4,
        Costs(F=1, B=1, memory={"L": 2, "D": -2, "UNSHARD": 4, "RESHARD": -4, "UNSHARD_S": 2, "receive": 1}),
    ),
    (
        Costs(F=2, B=2, links=REPLICAS, sharding={"UNSHARD": 4, "REDUCE_GRAD": (6, 8), "UNSHARD_E": 2}),
        2,
        1,
        Costs(F=4, B=4, links=REPLICAS, sharding={"UNSHARD": 8, "REDUCE_GRAD": (14,), "UNSHARD_E": 2}),
    ),
]


@pytest.mark.parametrize(("costs", "stages", "wanted", "expected"), CUT)
def test_the_same_work_in_other_stages(costs: Costs, stages: int, wanted: int, expected: Costs) -> None:
    assert costs_for_stages(costs, stages, wanted) == expected


def test_a_list_says_nothing_of_parts_of_a_stage() -> None:
    with pytest.raises(InputError, match="F is a list for 2 stages, but schedule 'zbv' has 4"):
        costs_for_stages(Costs(F=(1, 2), B=3), 2, 4, "schedule 'zbv'")
    with pytest.raises(InputError, match="F has 3 numbers for 2 stages"):
        costs_for_stages(Costs(F=(1, 2, 3), B=3), 2, 4)


def test_whole_vocabulary_layers_at_the_ends() -> None:
    costs = Costs(F=1, I=2, W=3, S=(4, 5), T=1, C=0.5, E=0.25, G=0.5)  # in all S + C + T = 12, E = 0.5, G = 1
    whole = with_whole_vocabulary(costs, Placement.linear(2))
    assert (whole.F, whole.I, whole.W, whole.B) == ((1.5, 5), (2, 6), (4, 7), None)
    whole = with_whole_vocabulary(Costs(F=1, B=2, S=3, T=3), Placement.v_shape(1))
    assert (whole.F, whole.B) == ((1, 3), (2, 6))
    assert with_whole_vocabulary(Costs(F=1, B=2), Placement.linear(1)).F == (1,)


def test_what_replicas_send_goes_with_whole_vocabulary_layers() -> None:
    sharding = {"UNSHARD": 10, "UNSHARD_E": 1, "UNSHARD_S": (2, 4), "REDUCE_GRAD_S": 3}
    whole = with_whole_vocabulary(Costs(F=1, B=2, links=REPLICAS, sharding=sharding), Placement.linear(2))
    assert whole.sharding == {"UNSHARD": (12, 16), "REDUCE_GRAD": (0, 6)}


WHOLE = [
    # costs, whole F and B, unit, exact
    (Costs(F=1, B=2), (1, 2), 1, True),
    (Costs(F=20, B=40), (1, 2), 20, True),
    (Costs(F=0.4, B=1), (2, 5), 0.2, True),
    (Costs(F=18.522, B=36.1), (9261, 18050), 0.002, True),
    (Costs(F=1 / 3, B=2 / 3), (1, 2), 1 / 3, True),
    (Costs(F=1 / 3, B=0.5**0.5), (471_404, 1_000_000), 0.5**0.5 / 1e6, False),
    (Costs(F=0, B=2), (0, 1), 2, True),
    (Costs(F=0, B=0), (0, 0), 1, True),
]


@pytest.mark.parametrize(("costs", "times", "unit", "exact"), WHOLE)
def test_times_in_whole_numbers(costs: Costs, times: tuple[int, int], unit: float, exact: bool) -> None:
    whole = WholeCosts.of(costs)
    assert whole.exact == exact
    assert whole.unit == pytest.approx(unit)
    for scaled, expected, time in zip((whole.costs.F, whole.costs.B), times, (costs.F, costs.B), strict=True):
        assert scaled == pytest.approx(expected, abs=1)
        assert scaled == math.floor(scaled)
        assert scaled * whole.unit <= time * (1 + 1e-12)


def test_the_unit_fits_the_kinds_that_are_used() -> None:
    costs = Costs(F=2, I=4, W=6, S=0.4, T=0.4, E=0.1, G=0.1, collectives={"reduce": 0.3})
    assert WholeCosts.of(costs, "FIW").unit == 2
    assert WholeCosts.of(costs).unit == pytest.approx(0.1)


def test_transfers_over_links_take_as_long_in_whole_numbers() -> None:
    costs = Costs(F=1, B=2, links={"p2p": {"latency": 0.5, "bandwidth": 4, "bytes": 2}}, collectives={"reduce": 3})
    whole = WholeCosts.of(costs)
    assert whole.costs.transfer_time(TransferKind.SEND_F) * whole.unit == costs.transfer_time(TransferKind.SEND_F) == 1
    assert whole.costs.transfer_time(TransferKind.DX) * whole.unit == 3


# --- comparisons of schedules ----------------------------------------------------------------------------------------


def test_each_device_does_the_same_work_in_every_schedule() -> None:
    size = {"devices": 4, "microbatches": 8, "vocabularies": ["first-last"]}
    cases = plan_cases(["1f1b", "interleaved", "v-half"], **size, costs=Costs(F=4, I=4, W=4))
    assert {case.simulation.timeline.busy for case in cases} == {(96.0,) * 4}
    assert [case.stages_per_device for case in cases] == [1, 2, 2]


def test_whole_vocabulary_layers_weigh_as_much_as_shards_do_together() -> None:
    costs = Costs(F=1, B=2, S=1, T=2, E=0, G=0)
    whole, shards = plan_cases(["1f1b"], devices=3, microbatches=4, vocabularies=["first-last", "vocab-2"], costs=costs)
    assert sum(whole.simulation.timeline.busy) == pytest.approx(sum(shards.simulation.timeline.busy))


ERRORS = [
    (["1f1b", "interleaved"], {"group_size": 3}, "schedule 'interleaved': group_size is 3; it must be at least 4, the"),
    (["interleaved"], {"group_size": 3}, "group_size is 3; it must be at least 4, the"),
    (["1f1b", "v-half"], {"costs": Costs(F=[1, 2, 1, 1], B=2)}, "costs.F is a list for 4 stages, but"),
    (["1f1b", "zb-h1"], {"costs": Costs(F=1, B=2)}, "schedule 'zb-h1': costs.I is missing"),
    (["1f1b", "gpipe"], {"group_size": 4}, "group_size is given, but none of 1f1b, gpipe has this option"),
    (["1f1b", "zz"], {}, 'schedule is "zz"; it must be one of'),
]  # fmt: skip


def test_errors_name_the_schedule_where_there_are_several() -> None:
    for names, given, message in ERRORS:
        options = {name: value for name, value in given.items() if name != "costs"}
        with pytest.raises(InputError) as error:
            modes = ["first-last"] if "costs" in given else []
            plan_cases(names, devices=4, microbatches=8, vocabularies=modes, costs=given.get("costs"), options=options)
        assert str(error.value).startswith(message)


def test_numbers_of_one() -> None:
    cases = plan_cases(["1f1b"], devices=1, microbatches=1)
    assert summary(cases[0], None).startswith("1f1b, vocab-2: 1 device, 1 microbatch, 1 stage\n")
    assert table(cases, None).text().startswith("1 device, 1 microbatch\n")
