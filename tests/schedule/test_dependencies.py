"""Who waits for whom."""

from __future__ import annotations

import pytest
import unit_needs
from schedule_oracle import needs, random_order

from evenpipe.schedule import (
    Dependencies,
    Kind,
    Order,
    Pass,
    Placement,
    add_vocabulary,
    forward_only,
    generate,
    interlace,
)

# order, device, pass -> transfers that it waits for, transfers that it feeds, passes of its device that it needs
TABLE = [
    ("none", 0, "0F0", "", "0SEND_F0", ""),
    ("none", 1, "1F0", "1RECV_F0", "1SEND_F0", ""),
    ("none", 2, "2F0", "2RECV_F0", "", ""),
    ("none", 2, "2B0", "", "2SEND_B0", "2F0"),
    ("none", 1, "1B0", "1RECV_B0", "1SEND_B0", "1F0"),
    ("none", 1, "1I0", "1RECV_B0", "1SEND_B0", "1F0"),
    ("none", 1, "1W0", "", "", "1I0"),
    ("none", 0, "0B0", "0RECV_B0", "", "0F0"),
    ("none", 0, "0R0", "", "", "0F0"),
    ("none", 0, "0O0", "", "", "0F0"),
    ("none", 0, "0D0", "", "", "0O0"),
    ("none", 0, "0L0", "", "", "0D0"),
    ("none", 0, "S0", "", "", ""),
    ("none", 0, "1F0", "", "", ""),
    ("vocab-2", 0, "E3", "", "ROWS3", ""),
    ("vocab-2", 0, "0F3", "ROWS3", "0SEND_F3", ""),
    ("vocab-2", 2, "2F3", "2RECV_F3", "X3", ""),
    ("vocab-2", 0, "S3", "X3", "STATISTICS3", ""),
    ("vocab-2", 2, "S3", "", "STATISTICS3", "2F3"),
    ("vocab-2", 1, "C3", "STATISTICS3", "DX3", "S3"),
    ("vocab-2", 1, "T3", "", "", "C3"),
    ("vocab-2", 2, "2B3", "DX3", "2SEND_B3", "2F3"),
    ("vocab-2", 2, "2I3", "DX3", "2SEND_B3", "2F3"),
    ("vocab-2", 0, "0B3", "0RECV_B3", "ROW_GRADIENTS3", "0F3"),
    ("vocab-2", 0, "G3", "", "", "0B3"),
    ("vocab-2", 1, "G3", "ROW_GRADIENTS3", "", ""),
    ("vocab-1", 1, "T3", "STATISTICS3", "DX3", "S3"),
    ("vocab-1", 2, "2B3", "DX3", "2SEND_B3", "2F3"),
    ("evaluation", 0, "0F0", "ROWS0", "0SEND_F0", ""),
    ("evaluation", 2, "2F0", "2RECV_F0", "X0", ""),
    ("evaluation", 1, "C0", "STATISTICS0", "", "S0"),
    ("evaluation of vocab-1", 1, "C0", "STATISTICS0", "", "S0"),
]
BARRIERS = {"none": 0, "vocab-2": 1, "vocab-1": 2, "evaluation": 1, "evaluation of vocab-1": 2}


@pytest.mark.parametrize(("mode", "device", "item", "waits", "feeds", "after"), TABLE)
def test_table(*, mode: str, device: int, item: str, waits: str, feeds: str, after: str) -> None:
    dependencies = Dependencies(Placement.linear(3), BARRIERS[mode], forward_only="evaluation" in mode)
    found = Pass.parse(item)
    assert " ".join(map(str, unit_needs.waits_for(dependencies, found, device))) == waits
    assert " ".join(map(str, unit_needs.feeds(dependencies, found, device))) == feeds
    assert " ".join(map(str, unit_needs.after(dependencies, found, device))) == after


@pytest.mark.parametrize(
    ("device", "kind", "uses", "waits"),
    [
        (1, Kind.S, ["X"], ["X"]),
        (2, Kind.S, ["X"], []),
        (1, Kind.G, ["ROW_GRADIENTS"], ["ROW_GRADIENTS"]),
        (0, Kind.G, ["ROW_GRADIENTS"], []),
        (2, Kind.C, ["STATISTICS"], ["STATISTICS"]),
    ],
)
def test_a_device_sends_its_own_share_before_it_is_used_up(
    device: int, kind: Kind, uses: list[str], waits: list[str]
) -> None:
    rule = Dependencies(Placement.linear(3), 1).rule(device, kind, None)
    assert ([route.kind.value for route in rule.uses], [route.kind.value for route in rule.waits]) == (uses, waits)


def test_passes_run_as_one_need_and_give_what_their_parts_do() -> None:
    dependencies = Dependencies(Placement.linear(3))
    both = Pass.parse("(1F1;1B0)OVERLAP_F_B")
    assert list(map(str, unit_needs.waits_for(dependencies, both, 1))) == ["1RECV_F1", "1RECV_B0"]
    assert list(map(str, unit_needs.feeds(dependencies, both, 1))) == ["1SEND_F1", "1SEND_B0"]


def test_transfers_say_who_takes_part() -> None:
    dependencies = Dependencies(Placement.linear(3), 1)
    found = {
        str(transfer): (transfer.members, transfer.root, transfer.communicator)
        for route in dependencies.routes
        for transfer in [route.transfer(route.members[0], 0)]
    }
    everyone = (0, 1, 2)
    assert found == {
        "0SEND_F0": ((0, 1), None, "F:0>1"),
        "1SEND_F0": ((1, 2), None, "F:1>2"),
        "1SEND_B0": ((1, 0), None, "B:1>0"),
        "2SEND_B0": ((2, 1), None, "B:2>1"),
        "ROWS0": (everyone, 0, "ROWS"),
        "X0": (everyone, 2, "X"),
        "STATISTICS0": (everyone, None, "STATISTICS"),
        "DX0": (everyone, 2, "DX"),
        "ROW_GRADIENTS0": (everyone, 0, "ROWS"),
    }


def test_the_two_ends_of_a_hop() -> None:
    dependencies = Dependencies(Placement.linear(3))
    (sent,) = unit_needs.feeds(dependencies, Pass.parse("1F4"), 1)
    (received,) = unit_needs.waits_for(dependencies, Pass.parse("2F4"), 2)
    assert (str(sent), str(received)) == ("1SEND_F4", "2RECV_F4")
    assert sent.members == received.members == (1, 2)
    assert dependencies.route_of(sent, 1) is dependencies.route_of(received, 2)
    assert unit_needs.producers(dependencies, received, 2) == ((1, Pass.parse("1F4")),)
    assert unit_needs.consumers(dependencies, sent, 1) == ((2, Pass.parse("2F4")),)
    assert dependencies.route_of(sent, 2) is None


def test_collectives_have_producers_and_consumers_on_every_device() -> None:
    dependencies = Dependencies(Placement.linear(3), 1)
    (statistics,) = unit_needs.feeds(dependencies, Pass.parse("S1"), 0)
    assert unit_needs.producers(dependencies, statistics, 0) == tuple((device, Pass.parse("S1")) for device in range(3))
    assert unit_needs.consumers(dependencies, statistics, 0) == tuple((device, Pass.parse("C1")) for device in range(3))


def test_one_device_needs_no_transfers() -> None:
    dependencies = Dependencies(Placement.linear(1), 1)
    assert dependencies.routes == ()
    expected = {"0F0": "E0", "S0": "0F0", "C0": "S0", "T0": "C0", "0B0": "0F0 C0", "G0": "0B0"}
    assert {
        word: " ".join(map(str, unit_needs.after(dependencies, Pass.parse(word), 0))) for word in expected
    } == expected


def test_stages_on_one_device_need_no_hop() -> None:
    dependencies = Dependencies(Placement.v_shape(2), 1)
    assert unit_needs.waits_for(dependencies, Pass.parse("2F0"), 1) == ()
    assert unit_needs.after(dependencies, Pass.parse("2F0"), 1) == (Pass.parse("1F0"),)
    assert list(map(str, unit_needs.waits_for(dependencies, Pass.parse("3F0"), 0))) == ["3RECV_F0"]
    assert [str(item) for item in unit_needs.after(dependencies, Pass.parse("S0"), 0)] == ["3F0"]
    assert list(map(str, unit_needs.waits_for(dependencies, Pass.parse("S0"), 1))) == ["X0"]


def orders() -> list[Order]:
    result = []
    for placement in (Placement.linear(1), Placement.linear(3), Placement.looped(2, 2), Placement.v_shape(3)):
        for split in (False, True):
            base = random_order(3, placement, 3, split=split)
            result += [base, add_vocabulary(base, 1), add_vocabulary(base, 2), interlace(base)]
    result += [forward_only(order) for order in result]
    return [*result, generate("gpipe", 4, 5), add_vocabulary(generate("1f1b", 4, 5), 1)]


@pytest.mark.parametrize("order", orders())
def test_agree_with_the_rules_written_out(order: Order) -> None:
    """Following local needs and the producers of awaited transfers gives exactly the needs of the second opinion."""
    dependencies = Dependencies.of(order)
    everything = {(device, item) for device in range(order.devices) for item in order.passes(device)}

    def present(device: int, item: Pass) -> tuple[int, Pass]:
        split = Pass.parse(str(item).replace("B", "I"))
        return (device, item) if (device, item) in everything else (device, split)

    for (device, item), expected in needs(order).items():
        found = {present(device, earlier) for earlier in unit_needs.after(dependencies, item, device)}
        for transfer in unit_needs.waits_for(dependencies, item, device):
            found |= {present(*producer) for producer in unit_needs.producers(dependencies, transfer, device)}
        assert found == set(expected)


@pytest.mark.parametrize("order", orders())
def test_feeding_and_waiting_are_two_views_of_one_thing(order: Order) -> None:
    dependencies = Dependencies.of(order)
    fed, awaited = set(), set()
    for device in range(order.devices):
        for item in order.passes(device):
            fed |= {
                (dependencies.route_of(t, device), t.microbatch) for t in unit_needs.feeds(dependencies, item, device)
            }
            awaited |= {
                (dependencies.route_of(t, device), t.microbatch)
                for t in unit_needs.waits_for(dependencies, item, device)
            }
    assert fed == awaited == {(route, i) for route in dependencies.routes for i in range(order.microbatches)}
