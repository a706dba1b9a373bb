"""Cost files, and costs that differ between the slices of a sequence: in every timing, in bytes, bounds and files."""

from __future__ import annotations

import json
import math
import random
import re
from fractions import Fraction
from itertools import pairwise
from math import sqrt
from pathlib import Path

import pytest

from evenpipe.compare.stage_costs import costs_for_stages, with_whole_vocabulary
from evenpipe.costs import write_costs
from evenpipe.errors import InputError
from evenpipe.schedule import Costs, Kind, Order, Placement, add_vocabulary, generate, plan_order, time_order
from evenpipe.schedule.costs import PassTimes
from evenpipe.schedule.files import read_costs
from evenpipe.schedule.passes import TransferKind
from evenpipe.simulate import simulate


def test_everything_that_a_file_may_say() -> None:
    costs = Costs.from_dict(
        {
            "F": [1, 2], "B": 3, "I": 1, "W": [1, 2.5], "S": 0.5, "C": [0, 0.1], "T": 1, "E": 0, "G": 0,
            "p2p": 0.1, "collectives": {"broadcast": 0.2, "reduce": 1}, "overlap_slowdown": 1.1, "bytes": [10, 20],
        }
    )  # fmt: skip
    assert costs.F == (1.0, 2.0)
    assert costs.B == 3.0
    assert costs.stage_bytes(Placement.linear(2)) == (10.0, 20.0)
    times = {kind: costs.transfer_time(kind) for kind in TransferKind}
    assert {times[kind] for kind in TransferKind if kind.value[:4] in {"SEND", "RECV"}} == {0.1}
    assert (times[TransferKind.X], times[TransferKind.DX]) == (0.2, 1.0)
    assert (times[TransferKind.STATISTICS], times[TransferKind.ROWS], times[TransferKind.ROW_GRADIENTS]) == (0, 0, 0)


def test_what_the_full_simulator_reads() -> None:
    costs = Costs.from_dict(
        {
            "F": 1, "B": 2, "R": 0.5, "O": [3, 4],
            "links": {"p2p": {"latency": 1, "bandwidth": 4, "bytes": 8}, "F:0>1": {"bandwidth": 2}, "reduce": {}},
            "engine": {"bandwidth": 10, "streams": 2, "shared": [[0, 1]]},
            "bytes": 20, "memory": {"F": [8, 9], "B": -8, "S": 1, "receive": 2}, "contention": 1.25,
        }
    )  # fmt: skip
    replicas = {"links": {"replicas": {"bandwidth": 1}}, "sharding": {"UNSHARD": [1, 2]}, "overlap_slowdown": 1.5}
    for again in (costs, Costs.from_dict({"F": 1, "B": 2, **replicas}), UNEVEN):
        assert Costs.from_dict(json.loads(json.dumps(again.to_dict()))) == again
    assert Costs(F=1, B=2).to_dict() == {"F": 1.0, "B": 2.0}
    placement = Placement.linear(2)
    assert costs.transfer_time(TransferKind.SEND_F) == 1 + 8 / 4
    assert costs.transfer_time(TransferKind.SEND_F, "F:0>1") == 1 + 8 / 2
    assert costs.transfer_time(TransferKind.DX) == 0
    assert costs.link(TransferKind.X) is None
    assert costs.stage_times(placement)[Kind.R] == (0.5, 0.5)
    assert costs.stage_times(placement)[Kind.O] == (0, 0)  # beside compute
    assert costs.copy_times(placement) == {Kind.O: (3, 4), Kind.L: (2, 2)}
    assert costs.memory_deltas(placement) == {Kind.F: (8, 9), Kind.B: (-8, -8), Kind.S: (1, 1)}
    assert costs.receive_bytes == 2
    assert costs.engine.shared == ((0, 1),)


def test_defaults() -> None:
    """A whole backward is its halves, kinds that are not there need no time, and what cannot be added up is nothing."""
    assert time_order(generate("1f1b", 2, 1), Costs.from_dict({"F": 1, "I": [1, 2], "W": 3})).busy == (5.0, 6.0)
    assert time_order(generate("1f1b", 2, 2), Costs.from_dict({"F": 1, "B": 2})).span == 9
    assert Costs(F=[1e-99, 1e-101], p2p=5e-324, B=Fraction(1, 2)) == Costs(F=[1e-99, 0], B=0.5)


NUMBER = "a number of at least 0"
BAD = [
    # values of a file, what the message says
    ({}, "costs.F is missing"),
    ({"F": 1}, "costs.B is missing; give B, or I and W"),
    ({"F": 1, "I": 1}, "costs.B is missing"),
    ([1, 2], "costs is [1, 2]; it must be a table of F, B"),
    ({"f": 1}, 'costs has no field "f"; known: F, B, I, W'),
    ({"p2q": 1}, 'did you mean "p2p"?'),
    ({"F": -1}, f"costs.F is -1; it must be {NUMBER}, a list of them or none"),
    ({"F": [1, -2]}, f"costs.F[1] is -2; it must be {NUMBER}"),
    ({"F": math.nan}, "costs.F is nan; it must be a finite number"),
    ({"F": 10**400}, "; it must be a finite number below 1e+100"),
    ({"F": "1"}, f'costs.F is "1"; it must be {NUMBER}'),
    ({"F": True}, f"costs.F is true; it must be {NUMBER}"),
    ({"F": [1, None]}, f"costs.F[1] is none; it must be {NUMBER}"),
    ({"F": []}, f"costs.F is []; it must be {NUMBER}"),
    ({"p2p": [1]}, f"costs.p2p is [1]; it must be {NUMBER}"),
    ({"overlap_slowdown": 0.9}, "costs.overlap_slowdown is 0.9; it must be a number of at least 1"),
    ({"collectives": 3}, "costs.collectives is 3; it must be a table of broadcast"),
    ({"collectives": {"brodcast": 3}}, 'costs.collectives has no field "brodcast"; known: broadcast, statistics,'),
    ({"links": 3}, "costs.links is 3; it must be a table"),
    ({"links": {"p2q": {}}}, 'costs.links has no field "p2q"; known: p2p, broadcast,'),
    ({"links": {"p2p": {"speed": 3}}}, 'costs.links.p2p has no field "speed"; known: latency, bandwidth, bytes'),
    ({"links": {"p2p": {"latency": -3}}}, f"costs.links.p2p.latency is -3; it must be {NUMBER}"),
    ({"links": {"p2p": {"bandwidth": 0}}}, "costs.links.p2p.bandwidth is 0; it must be a number above 0 or none"),
    ({"links": {"reduce": {"bandwidth": 9}}}, "costs.links.reduce has a bandwidth but no bytes"),
    ({"links": {"F:0>1": {"bandwidth": 9}}}, "costs.links.F:0>1 has a bandwidth but no bytes"),
    ({"p2p": 1, "links": {"p2p": {"latency": 3}}}, "costs.p2p and links.p2p both give its duration"),
    (
        {"collectives": {"reduce": 1}, "links": {"reduce": {"latency": 3}}},
        "costs.collectives.reduce and links.reduce both give its duration",
    ),
    ({"engine": []}, "costs.engine is []; it must be a table of bandwidth, streams, shared"),
    ({"engine": {"bandwidth": 0}}, "costs.engine.bandwidth is 0; it must be a number above 0"),
    ({"engine": {"streams": 3}}, "costs.engine.streams is 3; it must be 1 or 2"),
    ({"engine": {"streams": True}}, "costs.engine.streams is true; it must be 1 or 2"),
    ({"engine": {"shared": [0, 1]}}, "costs.engine.shared[0] is 0; it must be a list of integers"),
    ({"engine": {"shared": [[0, "1"]]}}, 'costs.engine.shared[0][1] is "1"; it must be an integer of at least 0'),
    ({"engine": {"shared": [[0, 1], [1, 2]]}}, "it must be groups of different devices, such as"),
    ({"memory": {"X": 8}}, 'costs.memory has no field "X"'),
    ({"memory": {"F": math.inf}}, "costs.memory.F is inf; it must be a finite number"),
    ({"memory": {"receive": -1}}, f"costs.memory.receive is -1.0; it must be {NUMBER}"),
    ({"slices": {"layer": [1, 2]}}, 'no field "layer"; known: layers, tokens, F, B, I, W, R; did you mean "layers"?'),
    ({"slices": {"tokens": 2}}, f"costs.slices.tokens is 2; it must be a non-empty list, each {NUMBER}"),
    ({"slices": {"tokens": []}}, "costs.slices.tokens is []; it must be a non-empty list"),
    ({"slices": {"tokens": [1, [1, 2]]}}, f"costs.slices.tokens[1] is [1.0, 2.0]; it must be {NUMBER}"),
    ({"slices": {"layers": [[1, 2], [1, -1]]}}, f"costs.slices.layers[1][1] is -1; it must be {NUMBER}"),
    ({"slices": {"layers": [1, 1], "tokens": [1]}}, "as many factors in each list, one per slice, not 2 in layers, 1"),
]


def test_bad_files() -> None:
    for values, message in BAD:
        if isinstance(values, dict) and not {*values} <= {"F", "B", "I"}:
            values = {"F": 1, "B": 2, **values}
        with pytest.raises(InputError) as error:
            Costs.from_dict(values)
        assert message in str(error.value) and "\n" not in str(error.value), values


def test_costs_that_do_not_fit_the_order() -> None:
    order = add_vocabulary(generate("1f1b", 2, 1), "vocab-2")
    for values, message in (
        ({"F": [1, 1, 1], "B": 2}, "F has 3 numbers for 2 stages; give one number, or 2"),
        ({"F": 1, "B": [2]}, "B has 1 number for 2 stages"),
        ({"F": 1, "B": 2, "S": [1], "T": 1, "E": 0, "G": 0}, "S has 1 number for 2 devices"),
        ({"F": 1, "B": 2, "T": 1, "E": 0, "G": 0}, "S is missing, but the order has S0"),
        ({"F": 1, "B": 2, "S": 1, "E": 0, "G": 0}, "T is missing, but the order has T0"),
    ):
        with pytest.raises(InputError, match=re.escape(message)):
            time_order(order, Costs.from_dict(values))


# --- costs that differ between slices ---------------------------------------------------------------------------------

TIMES = {"F": (1, 2), "I": 1, "W": 1, "S": 0.5, "C": 0, "T": 0.25, "E": 0.125, "G": 0.125, "p2p": 0.25}
UNEVEN = Costs(
    **TIMES,
    bytes=8,
    slices={"layers": [1.25, 0.75], "W": [1.5, 0.5], "F": [[1.5, 1.0], [0.5, 1.0]], "tokens": [1.5, 0.5]},
)


def sliced(attention: float, slices: int, by: str) -> Costs:
    """Costs of slices of equal "length" or "time"; attention is that share of a whole row's forward."""
    # The work of the layers on a row's first x tokens, of 1: a x + b x^2. Cuts are at equal steps of c x + d x^2.
    a, b = 1 - attention, attention
    c, d = (1.0, 0.0) if by == "length" else (a, b)
    steps = [j / slices for j in range(slices + 1)]
    ends = [(-c + sqrt(c**2 + 4 * d * step)) / (2 * d) if d else step for step in steps]
    layers = [slices * (a * (end - start) + b * (end**2 - start**2)) for start, end in pairwise(ends)]
    tokens = [slices * (end - start) for start, end in pairwise(ends)]
    return Costs(F=1, B=2, I=1, W=1, slices={"layers": layers, "tokens": tokens})


# p 8, m 8: makespan / work, by slices, for attention of 40 % and 70 % of a whole row's forward in slices of equal
# length, and for both in slices of equal time.
TABLE = {
    "1f1b": {2: (1.70, 1.90, 1.44), 4: (1.55, 1.79, 1.22), 8: (1.45, 1.71, 1.11)},
    "zb-h1": {2: (1.28, 1.42, 1.15), 4: (1.19, 1.34, 1.08), 8: (1.11, 1.25, 1.05)},
}


def stretch(order: Order, costs: Costs) -> float:
    """The makespan over the work of the busiest device, equal in both models."""
    timeline, simulation = time_order(order, costs), simulate(order, costs)
    assert simulation.makespan == pytest.approx(timeline.makespan)
    assert simulation.bounds["makespan"].value <= timeline.makespan * (1 + 1e-9)
    assert sum(step.end - step.start for step in simulation.critical_path.steps) == pytest.approx(simulation.makespan)
    return timeline.makespan / max(timeline.busy)


@pytest.mark.parametrize("slices", [2, 4, 8])
@pytest.mark.parametrize("name", TABLE)
@pytest.mark.sampled(2)
def test_slices_of_equal_time_are_better_than_of_equal_length(name: str, slices: int) -> None:
    def found(attention: float, by: str) -> float:
        costs = sliced(attention, slices, by)
        return stretch(plan_order(name, 8, 8, "first-last", costs, slices=slices), costs)

    of_length = tuple(found(attention, "length") for attention in (0.4, 0.7))
    of_time = {round(found(attention, "time"), 9) for attention in (0.4, 0.7)}
    assert len(of_time) == 1
    assert (*of_length, *of_time) == pytest.approx(TABLE[name][slices], abs=0.0051)


def test_one_slice_at_a_time() -> None:
    first, second = UNEVEN.by_slice(2)
    assert (first.F, second.F) == ((1.5, 2.0), (0.5, 2.0))
    assert (first.I, second.I, first.W, second.W) == (1.25, 0.75, 1.5, 0.5)
    times = first.stage_times(Placement.linear(2))
    assert (times[Kind.B], times[Kind.R]) == ((2.75, 2.75), (1.5, 2.0))  # I + W, and as long as F
    assert (first.S, second.T, first.p2p, second.bytes, second.slices) == (0.75, 0.125, 0.375, 4.0, {})
    assert UNEVEN.on_average.slices == {} and UNEVEN.on_average.F == UNEVEN.F
    assert Costs(F=1, B=2).by_slice(3) == (Costs(F=1, B=2),) * 3
    own = Costs(F=1, I=1, W=2, R=None, slices={"B": [1.2, 0.8], "R": [0.5, 1.5]}).by_slice(2)[0]
    assert (pytest.approx(3.6), 0.5, 1) == (own.B, own.R, own.I)


def test_tokens_count_for_links_tables_and_bytes() -> None:
    costs = Costs(
        F=1,
        B=2,
        links={"p2p": {"latency": 1, "bandwidth": 2, "bytes": 8}},
        collectives={"reduce": 2},
        memory={"F": 6, "B": -6, "receive": 2},
        tensor_exchange={"F": 0.5},
        slices={"tokens": [1.5, 0.5]},
    )
    first, second = costs.by_slice(2)
    assert (first.links["p2p"].time, second.links["p2p"].time) == (1 + 12 / 2, 1 + 4 / 2)
    assert (first.collectives["reduce"], first.receive_bytes, first.tensor_exchange["F"]) == (3, 3, 0.75)
    assert first.memory == {"F": 9, "B": -9, "receive": 3} and first.F == 1
    costs = Costs(F=1, B=2, bytes=10, slices={"tokens": [1.5, 0.5]})
    for name, microbatches, expected in (("gpipe", 1, (20.0, 20.0)), ("1f1b", 3, (35.0, 30.0))):
        order = plan_order(name, 2, microbatches, "first-last", costs, slices=2)
        peaks = time_order(order, costs).peak_bytes
        assert simulate(order, costs).timeline.peak_bytes == peaks
        assert peaks == expected


@pytest.mark.parametrize("mode", ["first-last", "interlaced", "vocab-1", "vocab-2"])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-auto", "v-half", "interleaved"])
@pytest.mark.sampled(3)
def test_random_factors_agree_in_both_models_and_meet_bounds(name: str, mode: str) -> None:
    rng = random.Random(f"{name} {mode}")
    slices = rng.randint(2, 4)
    for _ in range(3):
        table = {key: [rng.uniform(0.3, 2) for _ in range(slices)] for key in ("layers", "W", "tokens")}
        costs = Costs(F=1, I=1.2, W=0.8, S=0.4, C=0.1, T=0.3, E=0.1, G=0.1, p2p=0.2, bytes=1, slices=table)
        order = plan_order(name, 3, 3, mode, costs, slices=slices)
        stretch(order, costs)
        limited = plan_order(name, 3, 3, mode, costs, slices=slices, offload="all")
        assert simulate(limited, costs).timeline.peak_bytes is not None


def test_costs_of_other_stages_and_whole_vocabularies_keep_the_slices() -> None:
    merged = costs_for_stages(UNEVEN, 2, 1)
    for one, other in zip(merged.by_slice(2), UNEVEN.by_slice(2), strict=True):
        assert isinstance(other.F, tuple)
        assert pytest.approx((sum(other.F),)) == one.F
    whole = with_whole_vocabulary(UNEVEN, Placement.linear(2))
    first, second = whole.by_slice(2)
    assert pytest.approx((1.5 + 2 * 0.1875, 2 + 2 * 1.125 / 3)) == first.F
    assert pytest.approx((0.5 + 2 * 0.0625, 2 + 2 * 0.375 / 3)) == second.F


def test_files(tmp_path: Path) -> None:
    write_costs(UNEVEN, tmp_path / "costs.toml")
    assert read_costs(tmp_path / "costs.toml") == UNEVEN


def test_refused() -> None:
    order = plan_order("1f1b", 2, 2, "first-last", slices=3)
    for call, message in (
        (lambda: time_order(order, UNEVEN), "slices has factors for 2 slices, but sequences have 3 slices"),
        (lambda: PassTimes(UNEVEN, Placement.linear(2)), "factors for 2 slices, but sequences have 1 slice"),
        (lambda: Costs(F=(1, 1, 1), B=2, slices={"F": [[1, 1], 1]}).by_slice(2), "slices.F has 2 factors for 3 stages"),
    ):
        with pytest.raises(InputError, match=message):
            call()
