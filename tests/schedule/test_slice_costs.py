"""Costs that differ between the slices of a sequence: in every timing, in bytes, in bounds and in files."""

from __future__ import annotations

import random
import re
from itertools import pairwise
from math import sqrt
from pathlib import Path

import pytest

from evenpipe.costs import write_costs
from evenpipe.errors import InputError
from evenpipe.plan.stage_costs import costs_for_stages, with_whole_vocabulary
from evenpipe.schedule import Costs, Kind, Order, Placement, plan_order, time_order
from evenpipe.schedule.costs import PassTimes
from evenpipe.schedule.files import read_costs
from evenpipe.simulate import simulate

TIMES = {"F": (1, 2), "I": 1, "W": 1, "S": 0.5, "C": 0, "T": 0.25, "E": 0.125, "G": 0.125, "p2p": 0.25}
UNEVEN = Costs(
    **TIMES,
    bytes=8,
    slices={"layers": [1.25, 0.75], "W": [1.5, 0.5], "F": [[1.5, 1.0], [0.5, 1.0]], "tokens": [1.5, 0.5]},
)


def sliced(attention: float, slices: int, by: str, vocabulary: float = 0.0) -> Costs:
    """Costs of slices of equal "length", equal "time" of layers, or equal "total" time with the vocabulary.

    attention: its share of a whole row's forward. vocabulary: its share of all work.
    """
    # The work of the layers on a row's first x tokens, of 1: a x + b x^2. Cuts are at equal steps of c x + d x^2.
    a, b = 1 - attention, attention
    c, d = {
        "length": (1.0, 0.0),
        "time": (a, b),
        "total": (a * (1 - vocabulary) + vocabulary, b * (1 - vocabulary)),
    }[by]
    steps = [j / slices for j in range(slices + 1)]
    ends = [(-c + sqrt(c**2 + 4 * d * step)) / (2 * d) if d else step for step in steps]
    head = vocabulary / (1 - vocabulary) * 3  # beside layers that take F + I + W = 3
    times = {"F": 1, "B": 2, "I": 1, "W": 1, "S": head * 2 / 3, "T": head / 3, "C": 0, "E": 0, "G": 0}
    return Costs(
        **times,
        slices={
            "layers": [slices * (a * (end - start) + b * (end**2 - start**2)) for start, end in pairwise(ends)],
            "tokens": [slices * (end - start) for start, end in pairwise(ends)],
        },
    )


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


def test_equal_layer_time_is_better_than_equal_total_time_beside_the_vocabulary() -> None:
    found = []
    for by in ("time", "total", "length"):
        costs = sliced(0.6, 4, by, vocabulary=0.25)
        order = plan_order("1f1b", 8, 8, "vocab-2", costs.on_average, slices=4)
        found.append(round(stretch(order, costs), 3))
        arranged = plan_order("1f1b", 8, 8, "vocab-2", costs, slices=4)
        assert stretch(arranged, costs) <= found[-1] + 0.0005, "arranged by these costs it is not longer"
    assert found == [1.165, 1.201, 1.397]


def test_one_slice_at_a_time() -> None:
    assert Costs.from_dict(UNEVEN.to_dict()) == UNEVEN
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
    for slices, message in (
        ({"layer": [1, 2]}, "costs: slices: unknown key 'layer', did you mean layers? Accepted: layers, tokens, F,"),
        ({"tokens": 2}, "costs: slices.tokens must be a list of one factor per slice, not 2"),
        ({"tokens": []}, "costs: slices.tokens must be a list of one factor per slice, not []"),
        ({"tokens": [1, [1, 2]]}, "costs: slices.tokens[1] must be a finite number of at least 0, not [1, 2]"),
        ({"layers": [1, -1]}, "costs: slices.layers[1] must be a finite number of at least 0, not -1"),
        ({"layers": [1, 1], "tokens": [1]}, "as many factors in each list, one per slice, not 2 in layers, 1 in tok"),
    ):
        with pytest.raises(InputError, match=re.escape(message)):
            Costs.from_dict({"F": 1, "B": 2, "slices": slices})
    order = plan_order("1f1b", 2, 2, "first-last", slices=3)
    for call, message in (
        (lambda: time_order(order, UNEVEN), "slices has factors for 2 slices, but sequences have 3 slices"),
        (lambda: PassTimes(UNEVEN, Placement.linear(2)), "factors for 2 slices, but sequences have 1 slice"),
        (lambda: Costs(F=(1, 1, 1), B=2, slices={"F": [[1, 1], 1]}).by_slice(2), "slices.F has 2 factors for 3"),
    ):
        with pytest.raises(InputError, match=message):
            call()
