"""Copies to the host and back run beside compute, on one stream or two, and may share a link."""

from __future__ import annotations

import pytest

from evenpipe.errors import InputError
from evenpipe.schedule import Costs, Order
from evenpipe.simulate import Simulation, simulate

ALONE = "0F0,0O0,0F1,0O1,0D0,0L0,0B0,0D1,0L1,0B1"
PAIR = "0F0,0O0,0D0,0L0,0B0\n1F0,1O0,1D0,1L0,1B0"


def run(text: str, **costs: object) -> Simulation:
    return simulate(Order.from_csv(text), Costs(F=1, B=1, **costs))  # type: ignore[arg-type]


def when(simulation: Simulation) -> dict[str, tuple[float, float]]:
    rows = (*simulation.timeline.events, *simulation.timeline.beside)
    return {str(event.item): (event.start, event.end) for row in rows for event in row}


@pytest.mark.parametrize(
    ("costs", "wanted"),
    [
        # Nothing says how long copies take.
        ({}, {"0O0": (1, 1), "0L0": (2, 2), "0B0": (2, 3), "0B1": (3, 4)}),
        # One stream: 0L0 waits behind 0O1. 0L1 stands behind 0B0, which issues it when it has ended.
        (
            {"O": 2, "L": 2},
            {"0O0": (1, 3), "0O1": (3, 5), "0L0": (5, 7), "0B0": (7, 8), "0L1": (8, 10), "0B1": (10, 11)},
        ),
        # Two: 0L0 waits for nothing but the end of 0O0.
        (
            {"O": 2, "L": 2, "engine": {"streams": 2}},
            {"0O0": (1, 3), "0O1": (3, 5), "0L0": (3, 5), "0B0": (5, 6), "0L1": (6, 8), "0B1": (8, 9)},
        ),
        # Bytes over bandwidth; a time that is given counts before it.
        ({"bytes": 10, "engine": {"bandwidth": 10}}, {"0O0": (1, 2), "0O1": (2, 3), "0L0": (3, 4)}),
        ({"bytes": 10, "L": 4, "engine": {"bandwidth": 10}}, {"0O0": (1, 2), "0O1": (2, 3), "0L0": (3, 7)}),
    ],
    ids=["no time", "one stream", "two streams", "bandwidth", "time before bandwidth"],
)
def test_streams(costs: dict[str, object], wanted: dict[str, tuple[float, float]]) -> None:
    assert when(run(ALONE, **costs)).items() >= wanted.items()


def test_a_stream_that_has_emptied_goes_on_with_what_is_issued_later() -> None:
    # 0O1 ends at 6, before 0L1 is issued: the stream of loads has run 0L0 and has nothing to do.
    simulation = run("0F0,0O0,0D0,0L0,0B0,0F1,0O1,0F2,0F3,0D1,0L1,0B1,0B2,0B3", O=1, L=1, engine={"streams": 2})
    assert when(simulation).items() >= {"0L0": (2, 3), "0O1": (5, 6), "0L1": (7, 8), "0B1": (8, 9)}.items()


def test_copies_take_no_compute_time() -> None:
    simulation = run(ALONE, O=2, L=2)
    assert [str(event.item) for event in simulation.timeline.events[0]] == ["0F0", "0F1", "0D0", "0B0", "0D1", "0B1"]
    assert simulation.timeline.busy == (4,)
    assert simulation.waiting == ({"O": 1, "L": 6},)
    assert simulation.critical_path.by_resource == {"device": 2, "engine": 4, "transfer": 4, "end": 1}


def test_device_bytes_are_given_back_at_D_and_taken_when_a_copy_is_issued() -> None:
    simulation = run(ALONE, O=2, L=2, bytes=10)
    # 0D0 waits until 3, and 0L0 is issued, though its copy starts at 5. 0O1 ends at 5; what it copied stays until 0D1,
    # at 8, where 0B0 releases and 0L1 takes.
    assert simulation.timeline.memory == (((0, 10), (1, 20), (3, 20), (8, 10), (11, 0)),)
    assert simulation.timeline.peak_bytes == (20,)


@pytest.mark.parametrize(
    ("engine", "wanted"),
    [
        ({}, {"0O0": (1, 4), "1O0": (2, 5), "0L0": (4, 5), "1L0": (5, 6), "1B0": (6, 7), "0B0": (7, 8)}),
        # One link to the host: 1O0 waits for 0O0. Directions do not wait for each other.
        (
            {"shared": [[0, 1]]},
            {"0O0": (1, 4), "1O0": (4, 7), "0L0": (4, 5), "1L0": (7, 8), "1B0": (8, 9), "0B0": (9, 10)},
        ),
        ({"shared": [[1]]}, {"0O0": (1, 4), "1O0": (2, 5)}),
    ],
    ids=["own links", "shared link", "a group of one"],
)
def test_devices_that_share_a_link(engine: dict[str, object], wanted: dict[str, tuple[float, float]]) -> None:
    simulation = run(PAIR, O=3, L=1, engine=engine)
    assert when(simulation).items() >= wanted.items()


def test_what_a_copy_waited_for() -> None:
    shared = run(PAIR, O=3, L=1, engine={"shared": [[0, 1]]})
    waited = {str(event.item): event.cause for event in shared.timeline.beside[1]}
    assert (waited["1O0"].resource, str(waited["1O0"].item), waited["1O0"].device) == ("link", "0O0", 0)
    alone = {str(event.item): event.cause.resource for event in run(ALONE, O=2, L=2).timeline.beside[0]}
    assert alone == {"0O0": "device", "0O1": "engine", "0L0": "engine", "0L1": "device"}
    two = run(ALONE, O=2, L=2, engine={"streams": 2}).timeline
    causes = {str(event.item): event.cause for event in (*two.events[0], *two.beside[0])}
    assert (causes["0D0"].resource, str(causes["0D0"].item)) == ("transfer", "0O0")
    assert (causes["0L0"].resource, str(causes["0L0"].item)) == ("device", "0D0")


def test_recomputation_waits_for_its_input_to_come_back() -> None:
    simulation = run("0F0,0O0,0D0,0L0,0R0,0B0", O=2, L=1, R=5)
    times = {"0F0": (0, 1), "0O0": (1, 3), "0D0": (3, 3), "0L0": (3, 4), "0R0": (4, 9), "0B0": (9, 10)}
    assert when(simulation) == times


def test_a_bandwidth_needs_bytes() -> None:
    with pytest.raises(InputError, match=r"bytes is missing, but engine.bandwidth needs it; or give O"):
        run(ALONE, engine={"bandwidth": 10})
