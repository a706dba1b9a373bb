"""Buffers for what is received: as many as are in flight, whatever the number of microbatches."""

from __future__ import annotations

import pytest

from evenpipe.schedule import MODES, Kind, Pass, Program, Transfer, TransferKind, plan_program

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
