"""Buffers for what is received: as many as are in flight, whatever the number of microbatches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from evenpipe.schedule import MODES, SCHEDULES, Kind, Pass, Program, Transfer, TransferKind, parts_of, plan_program

FILLED_AND_EMPTIED = {
    TransferKind.RECV_F: Kind.F,
    TransferKind.RECV_B: Kind.B,
    TransferKind.X: Kind.S,
}
"""A receive takes a buffer, the pass that uses it gives it back (S hands its hidden states on to T)."""


def most_buffers(program: Program, device: int, kind: TransferKind) -> int:
    """The most buffers of one kind that a device has posted and not yet used."""
    held = most = 0
    for item in program.rows[device]:
        if isinstance(item, Transfer) and item.kind is kind:
            held += 1
            most = max(most, held)
        elif isinstance(item, Pass) and item.kind is FILLED_AND_EMPTIED[kind] and held:
            held -= 1
    return most


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("devices", [2, 3, 4, 8])
def test_receives_are_posted_when_data_is_due_and_not_before(mode: str, devices: int) -> None:
    for microbatches in (1, 3, 8, 40):
        _, program = plan_program("1f1b", devices, microbatches, mode)
        for device in range(devices):
            assert most_buffers(program, device, TransferKind.RECV_F) <= 2
            assert most_buffers(program, device, TransferKind.RECV_B) <= 2
            assert most_buffers(program, device, TransferKind.X) <= 2


def per_stage(program: Program, device: int) -> Iterator[tuple[int, int, int, int]]:
    """Of each stage that receives: the most forwards in flight, buffers for hidden states that no F has used yet,
    buffers for gradients that no B or I has used yet, and buffers for hidden states that wait or are the input of a
    forward in flight."""
    forward, backward, in_flight = Counter[int | None](), Counter[int | None](), Counter[int | None]()
    most: list[Counter[int | None]] = [Counter() for _ in range(4)]
    for item in program.rows[device]:
        if isinstance(item, Transfer):
            forward[item.stage] += item.kind is TransferKind.RECV_F
            backward[item.stage] += item.kind is TransferKind.RECV_B
        for part in parts_of(item) if isinstance(item, Pass) else ():
            if part.kind is Kind.F:
                forward[part.stage] -= forward[part.stage] > 0  # a local neighbour needs no buffer
                in_flight[part.stage] += 1
            elif part.kind in {Kind.B, Kind.I}:
                backward[part.stage] -= backward[part.stage] > 0
                in_flight[part.stage] -= 1
        for stage in in_flight.keys() | forward.keys():
            for record, now in zip(
                most,
                (in_flight[stage], forward[stage], backward[stage], forward[stage] + in_flight[stage]),
                strict=True,
            ):
                record[stage] = max(record[stage], now)
    for stage in program.placement.stages_of(device):
        yield tuple(record[stage] for record in most)


@pytest.mark.sampled(24)
@pytest.mark.parametrize("mode", ["first-last", "interlaced", "vocab-1", "vocab-2"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_no_more_buffers_than_in_flight_and_one(name: str, mode: str) -> None:
    """At equal costs. One or two come early, while the forward before them still runs."""
    for devices in (2, 3, 4):
        for microbatches in (1, devices, 2 * devices + 1):
            _, program = plan_program(name, devices, microbatches, mode)
            for device in range(devices):
                for in_flight, forward, backward, with_inputs in per_stage(program, device):
                    assert forward <= in_flight + 1
                    assert backward <= in_flight
                    assert with_inputs <= in_flight + 2
