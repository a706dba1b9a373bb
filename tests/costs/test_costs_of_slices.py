"""Analytic costs of slices, and factors from traces of steps with slices."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from llamas import llama
from test_analytic import setting

from evenpipe.costs import completed
from evenpipe.costs.analytic import layer_time
from evenpipe.costs.slice_fit import slice_factors
from evenpipe.costs.step import Cut, costs_of_cut, costs_of_slices
from evenpipe.costs.work import layers_of
from evenpipe.model import RowWork, slice_ends
from evenpipe.schedule import Costs, Kind, Placement, plan_program
from evenpipe.schedule.trace import DeviceTrace, PassTime, Trace

LENGTH = 16384


@pytest.mark.parametrize("mode", ["first-last", "vocab-2"])
def test_slices_take_the_time_of_the_whole_sequence_and_a_little_more(mode: str) -> None:
    description = llama()
    works, given = layers_of(description), setting(sequence=LENGTH)
    cut = Cut(placement=Placement.linear(8), layers_per_stage=(4,) * 8, checkpointing=("none",) * 32, vocabulary=mode)

    def costs(span: tuple[int, int] | None = None) -> Costs:
        one = given.on(span)
        return costs_of_cut(cut, [layer_time(work, one) for work in works], one, rows=128256, hidden_size=4096)

    whole = costs()
    ends = slice_ends(RowWork.of(description), LENGTH, 4, 1)
    sliced = costs_of_slices(ends, costs)
    tokens = [4 * (end - start) / LENGTH for start, end in zip((0, *ends), ends, strict=False)]
    assert sliced.token_factors == pytest.approx(tokens)
    for name in ("F", "B", "I", "W", "p2p", *(("S", "T") if mode == "vocab-2" else ())):
        one, four = (
            value if isinstance(value, tuple) else (value,) for value in (getattr(whole, name), getattr(sliced, name))
        )
        for of_whole, of_slice in zip(one, four, strict=True):
            assert of_whole * 0.999 <= 4 * of_slice <= of_whole * 1.25, name
    each = sliced.by_slice(4)
    forwards = [one.F[3] for one in each]  # type: ignore[index]
    assert max(forwards) / min(forwards) < 1.1, "cut by FLOPs, and attention is not as fast as products"
    assert [one.W[3] for one in each] == sorted((one.W[3] for one in each), reverse=True)  # type: ignore[index]
    assert [one.I[3] for one in each] == sorted(one.I[3] for one in each), "twice the attention"  # type: ignore[index]


def test_spans_of_a_sequence_have_all_its_keys() -> None:
    description = llama()
    given = setting(sequence=LENGTH)
    (work,) = {id(work): work for work in layers_of(description)}.values()
    spans = [(0, 5000), (5000, 11000), (11000, LENGTH)]
    parts = [given.on(span) for span in spans]
    assert sum(part.tokens for part in parts) == given.tokens
    seen = [part.tokens * part.keys(work.attention) for part in parts]
    assert math.fsum(seen) == pytest.approx(given.tokens * given.keys(work.attention))
    windowed = replace(work.attention, window=4096)
    seen = [part.tokens * part.keys(windowed) for part in parts]
    assert math.fsum(seen) == pytest.approx(given.tokens * given.keys(windowed))


def trace(seconds: dict[Kind, tuple[float, float]]) -> Trace:
    """A trace of 1f1b with two slices, whose passes take these times, one after the other."""
    _, program = plan_program("1f1b", 1, 2, "vocab-2", slices=2)
    clock, passes = 0.0, []
    for item in program.order.passes(0):
        took = seconds.get(item.kind, (0.5, 0.5))[item.slice]
        passes.append(PassTime(item, clock, clock + took, 0.0))
        clock += took
    return Trace(program, (DeviceTrace(0.0, clock, tuple(passes), (), ()),))


def test_factors_of_measured_slices() -> None:
    measured = trace({Kind.F: (1.0, 3.0), Kind.B: (3.0, 5.0), Kind.S: (3.0, 1.0)})
    found = slice_factors([measured])
    assert found == {"F": (0.5, 1.5), "B": (0.75, 1.25), "tokens": (1.5, 0.5)}
    assert slice_factors([measured], [48, 16]) == found
    assert slice_factors([measured], [16, 48])["tokens"] == (0.5, 1.5)


def test_kinds_of_other_orders_keep_their_factors() -> None:
    own = Costs(F=(2.0,), B=(4.0,), slices={"F": (0.5, 1.5), "tokens": (1.0, 1.0)})
    other = Costs(F=(2.0,), I=(2.0,), W=(2.0,), slices={"F": (0.7, 1.3), "I": (0.2, 1.8)})
    assert completed(own, other).slices == {"F": (0.5, 1.5), "I": (0.2, 1.8), "tokens": (1.0, 1.0)}
