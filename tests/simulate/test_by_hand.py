"""Small steps by hand: when passes, transfers, copies and collectives run, what they wait for, and what they store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from text_tables import order_of

from evenpipe.errors import InputError
from evenpipe.schedule import (
    Cause,
    Costs,
    Event,
    Kind,
    Pass,
    Placement,
    Program,
    Timeline,
    VocabularyMode,
    forward_only,
    generate,
)
from evenpipe.simulate import Simulation, best_bound, simulate

Costly = dict[str, Any]
ONES: Costly = {"F": 1, "B": 1}
ALONE = "0F0 0O0 0F1 0O1 0D0 0L0 0B0 0D1 0L1 0B1"
PAIR = "0F0 0O0 0D0 0L0 0B0|1F0 1O0 1D0 1L0 1B0"
HOPS = "0F0 0F1 0B0 0F2 0B1 0B2|1F0 1B0 1F1 1B1 1F2 1B2"
COPIES = {**ONES, "O": 2, "L": 2}
SHARED = {"engine": {"shared": [[0, 1]]}}
TWO_STREAMS = {"engine": {"streams": 2}}
REPLICAS = {"links": {"replicas": {"bandwidth": 1.0}}}
VOCABULARY = (
    "E0 ROWS0 0F0 0SEND_F0 X0 S0 STATISTICS0 C0 DX0 T0 0RECV_B0 0B0 ROW_GRADIENTS0 G0|"
    "E0 ROWS0 1RECV_F0 1F0 X0 S0 STATISTICS0 C0 DX0 1B0 1SEND_B0 T0 ROW_GRADIENTS0 G0"
)


def p2p(**link: float) -> dict[str, Any]:
    return {"links": {"p2p": link}}


def simulated(text: str, costs: Costly, **given: Any) -> Simulation:
    """Rows without transfers are those of an order, which gets them."""
    program = any(word in text for word in ("SEND", "ROWS", "UNSHARD", "REDUCE"))
    rows = text.replace(" ", ",").replace("|", "\n")
    return simulate(Program.from_csv(rows, **given) if program else order_of(text, **given), Costs(**costs))


def events_of(timeline: Timeline, device: int | None = None) -> dict[str, Event]:
    devices = range(timeline.devices) if device is None else [device]
    return {str(e.item): e for here in devices for e in (*timeline.events[here], *timeline.concurrent[here])}


def times(timeline: Timeline, device: int | None = None) -> dict[str, tuple[float, float]]:
    return {name: (event.start, event.end) for name, event in events_of(timeline, device).items()}


TIMES: dict[str, tuple[str, Costly, str]] = {
    # rows, costs, some of the times
    # --- transfers
    "a fixed time: nothing queues": (HOPS, {**ONES, "p2p": 3}, "0SEND_F0 1-4, 1RECV_F0 1-4, 1RECV_F1 2-5"),
    "one at a time": (HOPS, {**ONES, **p2p(latency=3)}, "0SEND_F0 1-4, 1RECV_F0 1-4, 1RECV_F1 4-7"),
    "bytes over bandwidth": (
        HOPS,
        {**ONES, **p2p(latency=1, bandwidth=5, bytes=10)},
        "0SEND_F0 1-4, 1RECV_F0 1-4, 1RECV_F1 4-7",
    ),
    "a link of one hop": (
        HOPS,
        {**ONES, "links": {"p2p": {"bandwidth": 5, "bytes": 10}, "F:0>1": {"latency": 1}}},
        "1RECV_F0 1-4",
    ),
    "directions have links of their own": (
        "0F0 0B0|1F0 1B0",
        {**ONES, "links": {"p2p": {"latency": 2}, "B:1>0": {"latency": 9}}},
        "0SEND_F0 1-3, 0RECV_B0 5-14",
    ),
    "one device has no transfers": ("0F0 0B0", {"F": 1, "B": 2, "p2p": 5}, "0F0 0-1, 0B0 1-3"),
    # --- devices that compute at once
    "both take twice as long, and alone nothing changes": (
        "0F0 0F1|1F0 1F1",
        {**ONES, "contention": 2},
        "0F0 0-1, 0F1 1-3, 1F0 1-3, 1F1 3-4",
    ),
    # 1F0 (3) runs beside 0F1 (1): 1 of it takes 2, until 3; the other 2 take 2.
    "faster when the other device is done": (
        "0F0 0F1|1F0 1F1",
        {"F": (1, 3), "B": 1, "contention": 2},
        "1F0 1-5, 1F1 5-8",
    ),
    # Beside 1F0 by a factor of 2, beside 1F1 and 2F0 of 3.
    "some of the others count in proportion": (
        "0F0 0F1 0F2|1F0 1F1 1F2|2F0 2F1 2F2",
        {**ONES, "contention": 3},
        "0F1 1-3, 0F2 3-6",
    ),
    # --- copies
    "nothing says how long copies take": (ALONE, ONES, "0O0 1-1, 0L0 2-2, 0B0 2-3, 0B1 3-4"),
    # 0L0 waits behind 0O1. 0L1 stands behind 0B0, which issues it when it has ended.
    "one stream": (ALONE, COPIES, "0O0 1-3, 0O1 3-5, 0L0 5-7, 0B0 7-8, 0L1 8-10, 0B1 10-11"),
    "two streams": (ALONE, {**COPIES, **TWO_STREAMS}, "0O0 1-3, 0O1 3-5, 0L0 3-5, 0B0 5-6, 0L1 6-8, 0B1 8-9"),
    "bytes over the bandwidth of the engine": (
        ALONE,
        {**ONES, "bytes": 10, "engine": {"bandwidth": 10}},
        "0O0 1-2, 0O1 2-3, 0L0 3-4",
    ),
    "a time that is given counts before it": (
        ALONE,
        {**ONES, "bytes": 10, "L": 4, "engine": {"bandwidth": 10}},
        "0O0 1-2, 0O1 2-3, 0L0 3-7",
    ),
    # 0O1 ends at 6, before 0L1 is issued: the stream of loads has run 0L0 and has nothing to do.
    "a stream that has emptied goes on": (
        "0F0 0O0 0D0 0L0 0B0 0F1 0O1 0F2 0F3 0D1 0L1 0B1 0B2 0B3",
        {**ONES, "O": 1, "L": 1, **TWO_STREAMS},
        "0L0 2-3, 0O1 5-6, 0L1 7-8, 0B1 8-9",
    ),
    "own links": (PAIR, {**ONES, "O": 3, "L": 1}, "0O0 1-4, 1O0 2-5, 0L0 4-5, 1L0 5-6, 1B0 6-7, 0B0 7-8"),
    # 1O0 waits for 0O0. Directions do not wait for each other.
    "a shared link": (
        PAIR,
        {**ONES, "O": 3, "L": 1, **SHARED},
        "0O0 1-4, 1O0 4-7, 0L0 4-5, 1L0 7-8, 1B0 8-9, 0B0 9-10",
    ),
    "a group of one": (PAIR, {**ONES, "O": 3, "L": 1, "engine": {"shared": [[1]]}}, "0O0 1-4, 1O0 2-5"),
    "recomputation waits for its input to come back": (
        "0F0 0O0 0D0 0L0 0R0 0B0",
        {**ONES, "O": 2, "L": 1, "R": 5},
        "0F0 0-1, 0O0 1-3, 0D0 3-3, 0L0 3-4, 0R0 4-9, 0B0 9-10",
    ),
    # --- collectives over replicas
    "one at a time, and the first user waits": (
        "0UNSHARD 1UNSHARD 0F0 1F0 1B0 1REDUCE_GRAD 1RESHARD 0B0 0REDUCE_GRAD 0RESHARD",
        {"F": 2, "B": 4, **REPLICAS, "sharding": {"UNSHARD": (3.0, 5.0), "REDUCE_GRAD": 6.0}},
        "0UNSHARD 0-3, 1UNSHARD 3-8, 0F0 3-5, 1F0 8-10, 1B0 10-14, 1REDUCE_GRAD 14-20, 1RESHARD 14-14, 0B0 14-18, "
        "0REDUCE_GRAD 20-26, 0RESHARD 18-18",
    ),
    "what is gathered again is waited for again": (
        "0UNSHARD 0F0 0RESHARD 0UNSHARD 0B0 0RESHARD 0REDUCE_GRAD",
        {"F": 2, "B": 4, "sharding": {"UNSHARD": 1.0, "REDUCE_GRAD": 2.5}}
        | {"links": {"replicas": {"latency": 1.0, "bandwidth": 0.5}}},
        "0F0 3-5, 0B0 8-12, 0REDUCE_GRAD 12-18",
    ),
    # 1UNSHARD runs alone until 2, half as fast from 2 to 8, while the hop of 3 takes 6, then alone.
    "a hop and a collective share the network": (
        "0F0 0SEND_F0 0RECV_B0 0B0|1UNSHARD 1RECV_F0 1F0 1B0 1SEND_B0",
        {"F": 2, "B": 4, "sharding": {"UNSHARD": (0.0, 8.0)}}
        | {"links": {"replicas": {"bandwidth": 1.0}, "p2p": {"bandwidth": 1.0, "bytes": 3.0}}},
        "1UNSHARD 0-11, 1RECV_F0 2-8, 1F0 11-13, 1SEND_B0 17-20",
    ),
    "without bytes nothing takes time": (
        "0UNSHARD 0F0 0RESHARD 0UNSHARD 0B0 0REDUCE_GRAD 0RESHARD",
        {"F": 2, "B": 4},
        "0F0 0-2, 0B0 2-6, 0REDUCE_GRAD 6-6",
    ),
    "parameters of vocabulary layers are parts of their own": (
        "UNSHARD_E UNSHARD_S E0 0F0 S0 C0 0B0 T0 G0",
        {"F": 2, "B": 4, "S": 1, "T": 1, "E": 0, "G": 0, **REPLICAS, "sharding": {"UNSHARD_S": 7.0}},
        "0F0 0-2, S0 7-8",
    ),
}


@pytest.mark.parametrize("name", TIMES)
def test_when_everything_runs(name: str) -> None:
    rows, costs, expected = TIMES[name]
    found = times(simulated(rows, costs).timeline)
    for words in expected.split(", "):
        item, span = words.split()
        start, end = map(float, span.split("-"))
        assert found[item] == (start, end), item


def test_a_collective_starts_when_its_last_member_has_issued_it() -> None:
    """Device 1 needs 3 for S0 and device 0 needs 1, so the statistics of device 0 wait for those of device 1."""
    costs = {"F": 2, "B": 2, "S": [1, 3], "C": 1, "T": 1, "E": 0, "G": 0}
    simulation = simulated(VOCABULARY, {**costs, "collectives": {"statistics": 0.5, "broadcast": 0.25}})
    for device in (0, 1):
        found = times(simulation.timeline, device)
        assert found["X0"] == (4, 4.25)
        # Device 1 has made X, so it runs S0 from 4 on; device 0 waits for X.
        assert found["STATISTICS0"] == (7, 7.5)
    assert times(simulation.timeline, 0)["S0"] == (4.25, 5.25)
    assert simulation.waiting[0]["STATISTICS"] == 7.5 - 5.25
    assert events_of(simulation.timeline, 0)["STATISTICS0"].cause == Cause("device", Pass(Kind.S, None, 0), 1)


def test_compute_is_slowed_for_exactly_as_long_as_a_collective_runs() -> None:
    """dX runs from 5.5 to 7.5 and T0 of device 0 beside it: alone it takes 3, here 2 of them at half speed."""
    costs = {"F": 2, "B": 2, "S": 1, "C": 0.5, "T": 3, "E": 0, "G": 0, "collectives": {"reduce": 2}}
    simulation = simulated(VOCABULARY, {**costs, "overlap_slowdown": 2})
    found = times(simulation.timeline, 0)
    assert (found["DX0"], found["T0"], simulation.slowed) == ((5.5, 7.5), (5.5, 9.5), (1, 0))
    order = generate("1f1b", 3, 4)  # hops slow nothing
    slowed, alone = (simulate(order, Costs(F=1, B=2, p2p=1.5, overlap_slowdown=factor)) for factor in (4, 1))
    assert slowed.makespan == alone.makespan and slowed.slowed == (0, 0, 0)


# --- what was waited for ----------------------------------------------------------------------------------------------


def test_causes() -> None:
    def causes(text: str, costs: Costly, device: int = 0) -> dict[str, str]:
        found = events_of(simulated(text, costs).timeline, device)
        return {name: f"{event.cause.resource} {event.cause.item}" for name, event in found.items()}

    slow = {**ONES, **p2p(latency=3)}
    assert causes(HOPS, slow).items() >= {"0F0": "start None", "0F1": "device 0F0"}.items()
    arrivals = {"1F0": "transfer 1RECV_F0", "1RECV_F0": "device 0F0", "1RECV_F1": "communicator 1RECV_F0"}
    assert causes(HOPS, slow, 1).items() >= arrivals.items()
    assert causes(PAIR, {**ONES, "O": 3, "L": 1, **SHARED}, 1)["1O0"] == "link 0O0"
    alone = {"0O0": "device", "0O1": "engine", "0L0": "engine", "0L1": "device"}
    found = causes(ALONE, COPIES)
    assert {name: found[name].split()[0] for name in alone} == alone
    two = {"0D0": "transfer 0O0", "0L0": "device 0D0"}
    assert causes(ALONE, {**COPIES, **TWO_STREAMS}).items() >= two.items()


def test_waiting_and_the_critical_path() -> None:
    simulation = simulated(ALONE, COPIES)
    assert [str(event.item) for event in simulation.timeline.events[0]] == ["0F0", "0F1", "0D0", "0B0", "0D1", "0B1"]
    assert (simulation.timeline.busy, simulation.waiting) == ((4,), ({"O": 1, "L": 6},))
    assert simulation.critical_path.by_resource == {"device": 2, "engine": 4, "transfer": 4, "end": 1}
    simulation = simulated(*TIMES["one at a time, and the first user waits"][:2])
    assert simulation.makespan == simulation.span == 26
    assert simulation.waiting == ({"UNSHARD": 6.0, "end": 8.0},)
    assert simulation.critical_path.by_kind == {"UNSHARD": 8, "F": 2, "B": 4, "REDUCE_GRAD": 12}


# --- memory -----------------------------------------------------------------------------------------------------------

SPLIT = {"F": 1, "I": 1, "W": 1}
TWO = {"F": 1, "B": 2}
MEMORY: list[tuple[str, Costly, list[tuple[tuple[float, float], ...]]]] = [
    # rows, costs, bytes of each device from some times on
    ("0F0 0B0", {**TWO, "bytes": 8}, [((0, 8), (3, 0))]),
    ("0F0 0I0 0W0", {**SPLIT, "bytes": 8}, [((0, 8), (3, 0))]),
    # I releases a part, and W the rest.
    ("0F0 0I0 0W0", {**SPLIT, "memory": {"F": 8, "I": -5, "W": -3}}, [((0, 8), (2, 3), (3, 0))]),
    # R makes anew what F did not keep.
    ("0F0 0R0 0B0", {**TWO, "memory": {"F": 1, "R": 7, "B": -8}}, [((0, 1), (1, 8), (4, 0))]),
    ("0F0 0F1 0B0 0B1", {**ONES, "bytes": 8}, [((0, 8), (1, 16), (3, 8), (4, 0))]),
    ("(0F0;0B0)OVERLAP_F_B", {**TWO, "bytes": 8}, [((0, 8), (3, 0))]),
    ("0F0 (0F1;0B0)OVERLAP_F_B 0B1", {**TWO, "bytes": 8}, [((0, 8), (1, 16), (4, 8), (6, 0))]),
    # What takes no time is stored before it is released, too.
    ("0F0 1F0 1B0 0B0", {"F": [1, 0], "B": [1, 0], "bytes": 8}, [((0, 8), (1, 8), (2, 0))]),
    # Vocabulary passes store per device.
    (
        "E0 0F0 S0 C0 0B0 T0 G0",
        {**ONES, "S": 1, "T": 1, "E": 0, "G": 0, "memory": {"F": 4, "B": -4, "S": [6], "T": [-6]}},
        [((0, 4), (1, 10), (3, 6), (4, 0))],
    ),
    # Device 1 issues 1RECV_F0 at once, at 0, and 1F0 ends at 2; device 0 issues 0RECV_B0 behind 0F0, as predicted.
    ("0F0 0B0|1F0 1B0", {**ONES, "memory": {"F": 0, "B": 0, "receive": 3}}, [((1, 3), (4, 0)), ((0, 3), (2, 0))]),
    # 0D0 waits until 3, and 0L0 is issued, though its copy starts at 5. 0O1 ends at 5; what it copied stays until 0D1,
    # at 8, where 0B0 releases and 0L1 takes.
    (ALONE, {**COPIES, "bytes": 10}, [((0, 10), (1, 20), (3, 20), (8, 10), (11, 0))]),
    (
        "0UNSHARD 0F0 0RESHARD 0UNSHARD 0B0 0RESHARD",
        {"F": 2, "B": 4, "memory": {"F": 1.0, "B": -1.0, "UNSHARD": 10.0, "RESHARD": -10.0}},
        [((0, 11.0), (2, 11.0), (6, 0.0))],
    ),
]


def test_bytes_over_time() -> None:
    for rows, costs, expected in MEMORY:
        assert simulated(rows, costs).timeline.memory == tuple(expected), rows
    tenths = simulated("0F0 0F1 0F2 0B0 0B1 0B2", {**ONES, "memory": {"F": 0.1, "B": -0.1}}).timeline.memory
    assert tenths is not None and tenths[0][-1] == (6, 0), "fractions end at 0, too"
    order = forward_only(generate("1f1b", 2, 3))
    assert simulate(order, Costs(F=1, B=1, bytes=5)).timeline.peak_bytes == (0, 0), "evaluation stores nothing"


# --- what is refused --------------------------------------------------------------------------------------------------

UNIT = Costs(F=1, I=1, W=1)


def ask(**options: Any) -> object:
    return best_bound(Placement.linear(3), 4, **{"costs": UNIT, **options})


def sharding(**given: Any) -> object:
    return Costs.from_dict({"F": 1, "B": 2, **given})


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: simulated("0F0 0B0", {**TWO, "memory": {"F": 8, "B": -7}}), "memory: 1 bytes are left on device 0"),
    (lambda: simulated("0F0 0B0", {**TWO, "memory": {"F": 8}}), "memory: 8 bytes are left on device 0"),
    (lambda: simulated("0F0 0B0", {**TWO, "memory": {"F": -8, "B": 8}}), "memory: -8 bytes are held by device 0"),
    (
        lambda: simulated(ALONE, {**ONES, "engine": {"bandwidth": 10}}),
        "bytes is missing, but engine.bandwidth needs it; or give O",
    ),
    (lambda: simulated(HOPS, {**ONES, "links": {"B:4>3": {}}}), "links.B:4>3 is not a hop; devices are 0 to 1"),
    (
        lambda: simulated(HOPS, {**ONES, "engine": {"shared": [[0], [2]]}}),
        "engine.shared has device 2; devices are 0 to 1",
    ),
    (lambda: Costs(F=1, B=2, contention=0.5), r"contention is 0\.5; it must be a number of at least 1"),
    (lambda: sharding(sharding={"UNSHARD": 1.0}), "links.replicas is missing"),
    (lambda: sharding(sharding={"GATHER": 1.0}, **REPLICAS), 'costs.sharding has no field "GATHER"'),
    (lambda: sharding(sharding={"UNSHARD": -1.0}, **REPLICAS), "sharding.UNSHARD is -1.0; it must be"),
    *[
        (lambda link=link: sharding(links={"replicas": link}), "links.replicas must have a bandwidth and no bytes")
        for link in ({"latency": 1.0}, {"bandwidth": 1.0, "bytes": 5.0})
    ],
    (
        lambda: simulated("0UNSHARD 0F0 0B0 0RESHARD", {**TWO, **REPLICAS, "sharding": {"UNSHARD": (1.0, 2.0)}}),
        "sharding.UNSHARD has 2 numbers for 1 stage",
    ),
    (
        lambda: ask(max_in_flight=0),
        "max_in_flight is 0; it must be a finite number of at least 1, in stage activations",
    ),
    (lambda: ask(max_in_flight=[1, 2]), "max_in_flight has 2 numbers for 3 devices"),
    (lambda: ask(of="time"), 'of is "time"; it must be one of span, makespan'),
    (lambda: ask(vocabulary=VocabularyMode.VOCAB_2, costs=Costs(F=1, B=1)), "is missing, but a lower bound needs it"),
]


def test_what_is_refused() -> None:
    for call, message in REFUSED:
        with pytest.raises(InputError, match=message):
            call()
