"""Cost files."""

from __future__ import annotations

import math
import re

import pytest

from evenpipe.errors import InputError
from evenpipe.schedule import Costs, Kind, Placement, add_vocabulary, generate, time_order
from evenpipe.schedule.passes import TransferKind


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
            "bytes": 20, "memory": {"F": [8, 9], "B": -8, "S": 1, "receive": 2},
        }
    )  # fmt: skip
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
    assert Costs(F=[1e-99, 1e-101], p2p=5e-324) == Costs(F=[1e-99, 0])


BAD = [
    # values of a file, what the message says
    ({}, "F is missing"),
    ({"B": 2}, "F is missing"),
    ({"F": 1}, "B is missing; give B, or I and W"),
    ({"F": 1, "I": 1}, "B is missing"),
    ({"F": 1, "B": 2, "f": 1}, "unknown key 'f', did you mean"),
    ({"F": 1, "B": 2, "p2q": 1}, "unknown key 'p2q', did you mean p2p? Accepted: F, B, I, W"),
    ({"F": -1, "B": 2}, "F must be a finite number of at least 0, not -1"),
    ({"F": [1, -2], "B": 2}, "F[1] must be a finite number of at least 0, not -2"),
    ({"F": math.nan, "B": 2}, "F must be a finite number of at least 0, not nan"),
    ({"F": math.inf, "B": 2}, "F must be a finite number of at least 0, not inf"),
    ({"F": 10**400, "B": 2}, "F must be a finite number of at least 0, not 1000"),
    ({"F": 1e101, "B": 2}, "F must be at most 1e+100, in any unit, not 1e+101"),
    ({"F": {}, "B": 2}, "F must be a finite number of at least 0, not {}"),
    ({"F": "1", "B": 2}, "F must be a finite number of at least 0, not '1'"),
    ({"F": True, "B": 2}, "F must be a finite number of at least 0, not True"),
    ({"F": [1, None], "B": 2}, "F[1] must be a finite number of at least 0, not None"),
    ({"F": [], "B": 2}, "F is an empty list"),
    ({"F": 1, "B": 2, "p2p": [1]}, "p2p must be a finite number"),
    ({"F": 1, "B": 2, "p2p": None}, "p2p must be a finite number"),
    ({"F": 1, "B": 2, "overlap_slowdown": 0.9}, "overlap_slowdown must be at least 1, not 0.9"),
    ({"F": 1, "B": 2, "collectives": 3}, "collectives must be a table of broadcast"),
    ({"F": 1, "B": 2, "collectives": {"brodcast": 3}}, "unknown key 'brodcast', did you mean broadcast?"),
    ({"F": 1, "B": 2, "collectives": {"reduce": -3}}, "collectives.reduce must be a finite number"),
    ({"F": 1, "B": 2, "bytes": [-1]}, "bytes[0] must be a finite number"),
    ({"F": 1, "B": 2, "O": -1}, "O must be a finite number of at least 0, not -1"),
    ({"F": 1, "B": 2, "links": 3}, "links must be a table of p2p, broadcast"),
    ({"F": 1, "B": 2, "links": {"p2q": {}}}, "links: unknown key 'p2q', did you mean p2p?"),
    ({"F": 1, "B": 2, "links": {"F:0-1": {}}}, "links: unknown key 'F:0-1'"),
    ({"F": 1, "B": 2, "links": {"p2p": 3}}, "links.p2p must be a table of latency, bandwidth, bytes, not 3"),
    ({"F": 1, "B": 2, "links": {"p2p": {"speed": 3}}}, "links.p2p: unknown key 'speed'"),
    ({"F": 1, "B": 2, "links": {"p2p": {"latency": -3}}}, "links.p2p.latency must be a finite number"),
    ({"F": 1, "B": 2, "links": {"p2p": {"bandwidth": 0, "bytes": 1}}}, "links.p2p.bandwidth must be above 0"),
    ({"F": 1, "B": 2, "links": {"reduce": {"bandwidth": 9}}}, "links.reduce has a bandwidth but no bytes"),
    ({"F": 1, "B": 2, "links": {"F:0>1": {"bandwidth": 9}}}, "links.F:0>1 has a bandwidth but no bytes"),
    ({"F": 1, "B": 2, "p2p": 1, "links": {"p2p": {"latency": 3}}}, "p2p and links.p2p both give its duration"),
    ({"F": 1, "B": 2, "collectives": {"reduce": 1}, "links": {"reduce": {"latency": 3}}}, "links.reduce both give its"),
    ({"F": 1, "B": 2, "engine": []}, "engine must be a table of bandwidth, streams, shared"),
    ({"F": 1, "B": 2, "engine": {"bandwidth": 0}}, "engine.bandwidth must be above 0"),
    ({"F": 1, "B": 2, "engine": {"bandwidth": "9"}}, "engine.bandwidth must be a finite number"),
    ({"F": 1, "B": 2, "engine": {"streams": 3}}, "engine.streams must be 1 or 2, not 3"),
    ({"F": 1, "B": 2, "engine": {"streams": True}}, "engine.streams must be 1 or 2, not True"),
    ({"F": 1, "B": 2, "engine": {"streams": [2]}}, "engine.streams must be 1 or 2, not [2]"),
    ({"F": 1, "B": 2, "engine": {"shared": [0, 1]}}, "engine.shared must be a list of groups of devices"),
    ({"F": 1, "B": 2, "engine": {"shared": [[0, "1"]]}}, "and '1' is not a device"),
    ({"F": 1, "B": 2, "engine": {"shared": [[0, 1], [1, 2]]}}, "and device 1 appears twice"),
    ({"F": 1, "B": 2, "memory": 8}, "memory must be a table of F, B, I"),
    ({"F": 1, "B": 2, "memory": {"X": 8}}, "memory: unknown key 'X'"),
    ({"F": 1, "B": 2, "memory": {"F": math.inf}}, "memory.F must be a finite number, not inf"),
    ({"F": 1, "B": 2, "memory": {"receive": -1}}, "memory.receive must be a finite number of at least 0"),
    ([1, 2], "costs must be a table"),
]


def test_bad_files() -> None:
    for values, message in BAD:
        with pytest.raises(InputError) as error:
            Costs.from_dict(values)
        assert message in str(error.value) and "\n" not in str(error.value)


def test_costs_that_do_not_fit_the_order() -> None:
    order = add_vocabulary(generate("1f1b", 2, 1), 1)
    for values, message in (
        ({"F": [1, 1, 1], "B": 2}, "F has 3 numbers for 2 stages; give one number, or 2"),
        ({"F": 1, "B": [2]}, "B has 1 number for 2 stages"),
        ({"F": 1, "B": 2, "S": [1], "T": 1, "E": 0, "G": 0}, "S has 1 number for 2 devices"),
        ({"F": 1, "B": 2, "T": 1, "E": 0, "G": 0}, "S is missing, but the order has S0"),
        ({"F": 1, "B": 2, "S": 1, "E": 0, "G": 0}, "T is missing, but the order has T0"),
    ):
        with pytest.raises(InputError, match=re.escape(message)):
            time_order(order, Costs.from_dict(values))
