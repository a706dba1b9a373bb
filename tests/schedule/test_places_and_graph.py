"""Where rows have everything, and the numbers of a graph."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_oracle import random_costs, random_order

from evenpipe.schedule import (
    EQUAL_COSTS,
    Dependencies,
    Order,
    Pass,
    Placement,
    add_communication,
    add_vocabulary,
    generate,
    time_order,
)
from evenpipe.schedule.graph import Graph
from evenpipe.schedule.passes import parse_item
from evenpipe.schedule.places import Places, unmet_in_row
from evenpipe.schedule.timing import durations, run

# row, places by kind and stage, numbers of joint passes, odd ones; three microbatches, numbered from 10
TABLE = [
    ("0F0 0F1 0B1 0B0", {"0F": [10, 11, -1], "0B": [13, 12, -1]}, [], []),
    ("0F0 . 0F2 0F1", {"0F": [10, 13, 12]}, [], []),
    ("0F0 0F0 0F1", {"0F": [10, 12, -1]}, [], [11]),
    ("0F0 0F3 0F1.1 0F2", {"0F": [10, -1, 13]}, [], [11, 12]),
    ("0F0 0UNSHARD 0UNSHARD", {"0F": [10, -1, -1]}, [], []),
    ("0F0 (0F1;0B0)OVERLAP_F_B 0B1", {"0F": [10, 11, -1], "0B": [11, 12, -1]}, [11], []),
    ("0F1 (0F1;0B0)OVERLAP_F_B", {"0F": [-1, 10, -1], "0B": [11, -1, -1]}, [11], [11]),
    ("S0 0SEND_F0 1SEND_F0 X0", {"S": [10, -1, -1], "0SEND_F": [11] + 2 * [-1], "1SEND_F": [12] + 2 * [-1],
                                 "X": [13, -1, -1]}, [], []),
]  # fmt: skip


@pytest.mark.parametrize(("row", "at", "joint", "odd"), TABLE)
def test_places(row: str, at: dict[str, list[int]], joint: list[int], odd: list[int]) -> None:
    places = Places.of([None if word == "." else parse_item(word) for word in row.split()], 3, 10)
    lists = [*places.at.items(), *places.transfers.items()]
    found = {f"{'' if stage is None else stage}{kind}": numbers for (kind, stage, *_), numbers in lists}
    assert {name: numbers for name, numbers in found.items() if numbers} == at
    assert (places.joint, places.odd) == (joint, odd)


def test_a_row_that_is_mostly_holes_takes_no_room() -> None:
    places = Places.of([Pass.parse("0F0")], 10**12)
    assert (places.odd, any(places.at.values())) == ([0], False)


# row, (number, what stands there, number of what it needs) of each need that is not met
UNMET = [
    ("0F0 0B0", []),
    ("0F0 0I0 0W0", []),
    ("0B0 0F0", [(0, "0B0", 1)]),
    ("0F0 0W0 0I0", [(1, "0W0", 2)]),
    ("0F0 0B0 0B1", [(2, "0B1", None)]),
    ("0F0 0B0 0R0", [(1, "0B0", 2)]),
    ("0F0 0I0 0F1 0B1 0W0", []),
    ("0F0 0I0 0B1 0F1 0W0", [(2, "0B1", 3)]),
    ("0F0 (0F1;0B0)OVERLAP_F_B 0B1", []),
    ("(0F1;0B0)OVERLAP_F_B 0F0 0B1", [(0, "0B0", 1)]),
    ("0F0.1 0B0.1 0B0.2 0F0.2", [(2, "0B0.2", 3)]),
    ("0UNSHARD 0B0 0F0", [(1, "0B0", 2)]),
]


@pytest.mark.parametrize(("row", "expected"), UNMET)
def test_needs_that_a_row_does_not_meet(row: str, expected: list[tuple[int, str, int | None]]) -> None:
    items = [Pass.parse(word) for word in row.split()]
    dependencies = Dependencies(Placement.linear(1))
    unmet = unmet_in_row(Places.of(items, 2), items, 0, lambda kind, stage: dependencies.rule(0, kind, stage))
    assert [(number, str(part), there) for number, part, there in unmet] == expected


def test_numbers_of_an_order() -> None:
    """Passes by device and row; transfers by route and microbatch: 0F -> 1F, then 1B -> 0B."""
    graph = Graph.of(Order.from_csv("0F0,,0F1,0B0,0B1\n1F0,1B0,1F1,1B1"))
    assert list(map(str, graph.items)) == ["0F0", "0F1", "0B0", "0B1", "1F0", "1B0", "1F1", "1B1"]
    assert (graph.first, graph.stop, graph.size) == ([0, 4, 8], [4, 8], 12)
    waits = [[t + graph.offset[n] for t in graph.waits[graph.site[n]]] for n in range(8)]
    feeds = [[t + graph.offset[n] for t in graph.feeds[graph.site[n]]] for n in range(8)]
    assert waits == [[], [], [10], [11], [8], [], [9], []]
    assert feeds == [[8], [9], [], [], [], [10], [], [11]]
    assert [graph.transfers.carried(n)[1] for n in range(8, 12)] == [0, 1, 0, 1]
    assert [graph.transfers.carried(n)[0].kind for n in range(8, 12)] == ["SEND_F", "SEND_F", "SEND_B", "SEND_B"]


def test_slices_have_transfers_of_their_own() -> None:
    order = Order.from_csv("0F0,0F0.1,0B0.1,0B0\n1F0,1F0.1,1B0.1,1B0")
    rows = [" ".join(map(str, row)) for row in add_communication(order).rows]
    assert rows == [
        "0F0 0SEND_F0 0F0.1 0SEND_F0.1 0RECV_B0.1 0RECV_B0 0B0.1 0B0",
        "1RECV_F0 1RECV_F0.1 1F0 1F0.1 1B0.1 1SEND_B0.1 1B0 1SEND_B0",
    ]


def test_passes_run_as_one_wait_and_feed_together() -> None:
    order = Order.from_csv("0F0,0F1,0B0,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1")
    events = time_order(order, EQUAL_COSTS).events
    assert [(event.start, event.end) for event in events[1]] == [(1, 2), (2, 5), (5, 7)]
    assert [event.start for event in events[0]] == [0, 1, 5, 7]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 10**6), st.sampled_from([0, 1, 2]), st.booleans())
def test_what_happened_contradicts_no_need(
    devices: int, microbatches: int, seed: int, barriers: int, split: bool
) -> None:
    placement = Placement.looped(devices, 2)
    order, costs = random_order(seed, placement, microbatches, split=split), random_costs(seed, placement)
    order = add_vocabulary(order, barriers, costs) if barriers else order
    graph = Graph.of(order)
    times = run(order, graph, durations(order, graph, costs))
    sequence = times.sequence()
    assert sorted(times.happened) == list(range(graph.size))
    assert [times.happened[place] for place in sequence] == list(range(graph.size))
    for number, site in enumerate(graph.site):
        for transfer in graph.waits[site]:
            assert sequence[transfer + graph.offset[number]] < sequence[number]
            assert times.end[transfer + graph.offset[number]] <= times.start[number]
        for transfer in graph.feeds[site]:
            assert sequence[transfer + graph.offset[number]] > sequence[number]
            assert times.start[transfer + graph.offset[number]] >= times.end[number]


def test_collectives_are_shared_by_their_members() -> None:
    program = add_communication(add_vocabulary(generate("1f1b", 3, 4), 1))
    found = [[item for item in row if str(item) == "X2"] for row in program.rows]
    assert found[0][0] is found[1][0] is found[2][0]
