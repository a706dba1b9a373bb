"""Collectives over replicas in simulated time: beside compute, one at a time, on the network of their device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evenpipe.errors import InputError
from evenpipe.schedule import Costs, Program, Timeline
from evenpipe.simulate import Simulation, simulate

COSTS = Costs(
    F=2,
    B=4,
    S=1,
    T=1,
    E=0,
    G=0,
    links={"replicas": {"bandwidth": 1.0}},  # type: ignore[dict-item]
    sharding={"UNSHARD": (3.0, 5.0), "REDUCE_GRAD": 6.0},
)


def program_of(text: str, **given: object) -> Program:
    return Program.from_csv("\n".join(",".join(row.split()) for row in text.split("|")), **given)  # type: ignore[arg-type]


def times(timeline: Timeline, device: int = 0) -> dict[str, tuple[float, float]]:
    events = (*timeline.events[device], *timeline.beside[device])
    return {str(event.item): (event.start, event.end) for event in events}


def simulated(text: str, costs: Costs = COSTS, **given: object) -> Simulation:
    return simulate(program_of(text, **given), costs)


def test_the_first_user_waits_and_the_step_ends_with_the_sums() -> None:
    found = simulated("0UNSHARD 1UNSHARD 0F0 1F0 1B0 1REDUCE_GRAD 1RESHARD 0B0 0REDUCE_GRAD 0RESHARD")
    assert times(found.timeline) == {
        "0UNSHARD": (0, 3),
        "1UNSHARD": (3, 8),  # one at a time
        "0F0": (3, 5),
        "1F0": (8, 10),
        "1B0": (10, 14),
        "1REDUCE_GRAD": (14, 20),
        "1RESHARD": (14, 14),
        "0B0": (14, 18),
        "0REDUCE_GRAD": (20, 26),
        "0RESHARD": (18, 18),
    }
    assert found.makespan == found.span == 26
    assert found.waiting == ({"UNSHARD": 6.0, "end": 8.0},)
    assert sum(found.critical_path.by_kind.values()) == 26
    assert found.critical_path.by_kind == {"UNSHARD": 8, "F": 2, "B": 4, "REDUCE_GRAD": 12}


def test_what_is_gathered_again_is_waited_for_again() -> None:
    found = simulated("0UNSHARD 0F0 0RESHARD 0UNSHARD 0B0 0RESHARD 0REDUCE_GRAD", COSTS_OF_ONE)
    assert [(event.start, event.end) for event in found.timeline.events[0]] == [(3, 5), (8, 12)]
    assert found.makespan == 18


COSTS_OF_ONE = Costs(
    F=2,
    B=4,
    links={"replicas": {"latency": 1.0, "bandwidth": 0.5}},  # type: ignore[dict-item]
    sharding={"UNSHARD": 1.0, "REDUCE_GRAD": 2.5},
)


def test_a_hop_and_a_collective_share_the_network() -> None:
    """1UNSHARD runs from 0 to 11: alone until 2, half as fast from 2 to 8, while the hop of 3 takes 6, then alone."""
    costs = Costs(
        F=2,
        B=4,
        links={"replicas": {"bandwidth": 1.0}, "p2p": {"bandwidth": 1.0, "bytes": 3.0}},  # type: ignore[dict-item]
        sharding={"UNSHARD": (0.0, 8.0)},
    )
    found = simulated("0F0 0SEND_F0 0RECV_B0 0B0|1UNSHARD 1RECV_F0 1F0 1B0 1SEND_B0", costs)
    mine = times(found.timeline, 1)
    assert mine["1UNSHARD"] == (0, 11)
    assert mine["1RECV_F0"] == (2, 8)
    assert mine["1F0"] == (11, 13)
    assert mine["1SEND_B0"] == (17, 20)


def test_without_bytes_nothing_takes_time() -> None:
    text = "0UNSHARD 0F0 0RESHARD 0UNSHARD 0B0 0REDUCE_GRAD 0RESHARD"
    found = simulated(text, Costs(F=2, B=4))
    assert found.makespan == simulated("0F0 0B0", Costs(F=2, B=4)).makespan == 6


def test_parameters_of_vocabulary_layers_are_parts_of_their_own() -> None:
    found = simulated(
        "UNSHARD_E UNSHARD_S E0 0F0 S0 C0 0B0 T0 G0", replace(COSTS, sharding={"UNSHARD_S": 7.0}), barriers=1
    )
    assert times(found.timeline)["S0"] == (7, 8)
    assert times(found.timeline)["0F0"] == (0, 2)


def test_gathered_parameters_are_memory() -> None:
    memory = {"F": 1.0, "B": -1.0, "UNSHARD": 10.0, "RESHARD": -10.0}
    found = simulated("0UNSHARD 0F0 0RESHARD 0UNSHARD 0B0 0RESHARD", Costs(F=2, B=4, memory=memory))
    assert found.timeline.memory == (((0, 11.0), (2, 11.0), (6, 0.0)),)


BAD = [
    ({"sharding": {"UNSHARD": 1.0}}, "links.replicas is missing"),
    ({"sharding": {"GATHER": 1.0}, "links": {"replicas": {"bandwidth": 1.0}}}, "unknown key 'GATHER'"),
    ({"links": {"replicas": {"latency": 1.0}}}, "links.replicas must have a bandwidth and no bytes"),
    ({"links": {"replicas": {"bandwidth": 1.0, "bytes": 5.0}}}, "links.replicas must have a bandwidth and no bytes"),
    ({"sharding": {"UNSHARD": -1.0}, "links": {"replicas": {"bandwidth": 1.0}}}, "sharding.UNSHARD must be"),
]


@pytest.mark.parametrize(("given", "says"), BAD)
def test_bad_costs_are_one_sentence(given: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=says):
        Costs.from_dict({"F": 1, "B": 2, **given})


def test_a_list_has_one_number_per_stage_or_device() -> None:
    costs = Costs(F=1, B=2, links={"replicas": {"bandwidth": 1.0}}, sharding={"UNSHARD": (1.0, 2.0, 3.0)})  # type: ignore[dict-item]
    with pytest.raises(InputError, match=r"sharding.UNSHARD has 3 numbers for 1 stage"):
        simulated("0UNSHARD 0F0 0B0 0RESHARD", costs)
    assert Costs.from_dict(costs.to_dict()) == costs
