"""Bytes over time: what passes add and release."""

from __future__ import annotations

import pytest

from evenpipe.errors import InputError
from evenpipe.schedule import Costs, Order, forward_only, generate
from evenpipe.simulate import simulate


def curve(text: str, **costs: object) -> tuple[tuple[float, float], ...]:
    memory = simulate(Order.from_csv(text), Costs(**costs)).timeline.memory  # type: ignore[arg-type]
    assert memory is not None
    return memory[0]


@pytest.mark.parametrize(
    ("text", "costs", "wanted"),
    [
        ("0F0,0B0", {"F": 1, "B": 2, "bytes": 8}, ((0, 8), (3, 0))),
        ("0F0,0I0,0W0", {"F": 1, "I": 1, "W": 1, "bytes": 8}, ((0, 8), (3, 0))),
        # I releases a part, and W the rest.
        ("0F0,0I0,0W0", {"F": 1, "I": 1, "W": 1, "memory": {"F": 8, "I": -5, "W": -3}}, ((0, 8), (2, 3), (3, 0))),
        # R makes anew what F did not keep.
        ("0F0,0R0,0B0", {"F": 1, "B": 2, "memory": {"F": 1, "R": 7, "B": -8}}, ((0, 1), (1, 8), (4, 0))),
        ("0F0,0F1,0B0,0B1", {"F": 1, "B": 1, "bytes": 8}, ((0, 8), (1, 16), (3, 8), (4, 0))),
        ("(0F0;0B0)OVERLAP_F_B", {"F": 1, "B": 2, "bytes": 8}, ((0, 8), (3, 0))),
        ("0F0,(0F1;0B0)OVERLAP_F_B,0B1", {"F": 1, "B": 2, "bytes": 8}, ((0, 8), (1, 16), (4, 8), (6, 0))),
        # What takes no time is stored before it is released, too.
        ("0F0,1F0,1B0,0B0", {"F": [1, 0], "B": [1, 0], "bytes": 8}, ((0, 8), (1, 8), (2, 0))),
    ],
)  # fmt: skip
def test_deltas(text: str, costs: dict[str, object], wanted: tuple[tuple[float, float], ...]) -> None:
    assert curve(text, **costs) == wanted


def test_vocabulary_passes_store_per_device() -> None:
    text = "E0,0F0,S0,C0,0B0,T0,G0"
    costs = {"F": 1, "B": 1, "S": 1, "T": 1, "E": 0, "G": 0, "memory": {"F": 4, "B": -4, "S": [6], "T": [-6]}}
    assert curve(text, **costs) == ((0, 4), (1, 10), (3, 6), (4, 0))


def test_receive_buffers() -> None:
    # Device 1 issues 1RECV_F0 at once, at 0, and 1F0 ends at 2; device 0 issues 0RECV_B0 behind 0F0, as predicted.
    costs = Costs(F=1, B=1, memory={"F": 0, "B": 0, "receive": 3})
    memory = simulate(Order.from_csv("0F0,0B0\n1F0,1B0"), costs).timeline.memory
    assert memory == (((1, 3), (4, 0)), ((0, 3), (2, 0)))


def test_evaluation_stores_nothing() -> None:
    order = forward_only(generate("1f1b", 2, 3))
    assert simulate(order, Costs(F=1, B=1, bytes=5)).timeline.peak_bytes == (0, 0)


@pytest.mark.parametrize(
    ("deltas", "message"),
    [
        ({"F": 8, "B": -7}, "memory: 1 bytes are left on device 0"),
        ({"F": 8}, "memory: 8 bytes are left on device 0"),
        ({"F": -8, "B": 8}, "memory: -8 bytes are held by device 0"),
    ],
)
def test_deltas_that_do_not_make_up_0(deltas: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        curve("0F0,0B0", F=1, B=2, memory=deltas)


def test_fractions_of_bytes_end_at_0_too() -> None:
    assert curve("0F0,0F1,0F2,0B0,0B1,0B2", F=1, B=1, memory={"F": 0.1, "B": -0.1})[-1] == (6, 0)
