"""Which device holds which stage."""

from __future__ import annotations

import pickle

import pytest

from evenpipe.errors import InputError
from evenpipe.schedule import Placement
from evenpipe.schedule.dependencies import dependencies_of

PLACEMENTS = [
    (Placement.linear(4), (0, 1, 2, 3)),
    (Placement.linear(1), (0,)),
    (Placement.looped(3, 2), (0, 1, 2, 0, 1, 2)),
    (Placement.looped(1, 3), (0, 0, 0)),
    (Placement.v_shape(3), (0, 1, 2, 2, 1, 0)),
    (Placement.v_shape(1), (0, 0)),
]


@pytest.mark.parametrize(("placement", "stage_device"), PLACEMENTS)
def test_tables(placement: Placement, stage_device: tuple[int, ...]) -> None:
    assert placement.stage_device == stage_device
    assert placement.stages == len(stage_device)
    assert (placement.first_device, placement.last_device) == (stage_device[0], stage_device[-1])
    for device in range(placement.devices):
        assert all(placement.device_of(stage) == device for stage in placement.stages_of(device))
    assert sorted(s for device in range(placement.devices) for s in placement.stages_of(device)) == list(
        range(placement.stages)
    )


def test_stages_form_a_chain() -> None:
    placement = Placement.v_shape(2)
    assert [placement.predecessors(stage) for stage in range(4)] == [(), (0,), (1,), (2,)]
    assert [placement.successors(stage) for stage in range(4)] == [(1,), (2,), (3,), ()]


@pytest.mark.parametrize(
    ("devices", "table", "message"),
    [
        (0, (), "devices must be at least 1, not 0"),
        (2, (0, 2), "stage 1 is placed on device 2"),
        (2, (0, -1), "stage 1 is placed on device -1"),
        (3, (0, 2), "device 1 holds no stage"),
    ],
)
def test_impossible_tables(devices: int, table: tuple[int, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Placement(devices, table)


def test_stages_per_device_must_be_positive() -> None:
    with pytest.raises(InputError, match="stages per device must be at least 1, not 0"):
        Placement.looped(2, 0)


def test_a_placement_travels_without_what_is_derived() -> None:
    placement = Placement.v_shape(64)
    alone = len(pickle.dumps(placement))
    dependencies_of(placement, barriers=1)
    copied = pickle.loads(pickle.dumps(placement))
    assert copied == placement and not copied.derived
    assert len(pickle.dumps(placement)) == alone
