"""The table of effects: what follows from it, written out."""

from __future__ import annotations

import pytest

from evenpipe.schedule import SCHEDULES, Costs, Kind, Placement, TransferKind, plan_order
from evenpipe.schedule.costs import HOST_COSTS
from evenpipe.schedule.effects import EFFECTS, IN_FLIGHT, ON_DEVICE, Kept, changes, effect_of
from evenpipe.schedule.passes import parts_of

FOLLOWS = [
    (IN_FLIGHT, {Kind.F: 1, Kind.B: -1, Kind.W: -1}),
    (ON_DEVICE, {Kind.F: 1, Kind.B: -1, Kind.W: -1, Kind.D: -1, Kind.L: 1}),
    (changes({Kept.ACTIVATIONS}), {Kind.F: 1, Kind.B: -1, Kind.I: -1, Kind.D: -1, Kind.L: 1}),
    (changes({Kept.WEIGHT_INPUTS}), {Kind.I: 1, Kind.W: -1}),
    (changes({Kept.PROBABILITIES}), {Kind.S: 1, Kind.T: -1}),
]


@pytest.mark.parametrize(("found", "expected"), FOLLOWS)
def test_what_follows(found: dict[Kind, int], expected: dict[Kind, int]) -> None:
    assert found == expected


def test_with_two_barriers_t_combines() -> None:
    assert effect_of(Kind.T, 1).takes == () and effect_of(Kind.T, 1).makes == ()
    both = effect_of(Kind.T, 2)
    assert (both.takes, both.makes, both.frees) == (
        (TransferKind.STATISTICS,),
        (TransferKind.DX,),
        (Kept.PROBABILITIES,),
    )


def test_what_is_made_is_taken() -> None:
    made = {flow for effect in EFFECTS.values() for flow in effect.makes}
    assert made == {flow for effect in EFFECTS.values() for flow in effect.takes}


@pytest.mark.parametrize("mode", ["first-last", "vocab-1", "vocab-2"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_step_leaves_nothing(name: str, mode: str) -> None:
    """What passes keep is freed by the end of the row, of every kind and stage, and never freed before."""
    order = plan_order(name, 3, 4, mode, HOST_COSTS)
    for device in range(order.devices):
        held: dict[tuple[Kept, int | None], int] = {}
        for item in order.passes(device):
            for part in parts_of(item):
                effect = effect_of(part.kind, order.barriers)
                for what in effect.frees:
                    held[what, part.stage] -= 1
                    assert held[what, part.stage] >= 0
                for what in effect.keeps:
                    held[what, part.stage] = held.get((what, part.stage), 0) + 1
        assert not any(held.values())


def test_bytes_follow() -> None:
    deltas = Costs(F=1, B=2, bytes=[3, 5]).memory_deltas(Placement.linear(2))
    assert deltas == {
        Kind.F: (3, 5),
        Kind.B: (-3, -5),
        Kind.W: (-3, -5),
        Kind.D: (-3, -5),
        Kind.L: (3, 5),
    }
