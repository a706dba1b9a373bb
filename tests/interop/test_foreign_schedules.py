"""torch's schedules in ours and ours in torch's, and Megatron's layouts. torch runs them in tests/multiprocess."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from refusals import wrong_refusals
from torch_orders import Size, file_of_torch

from evenpipe.errors import InputError
from evenpipe.interop import from_torch, to_torch
from evenpipe.schedule import (
    Costs,
    Order,
    Placement,
    Program,
    add_communication,
    check_program,
    forward_only,
    generate,
    plan_program,
)
from evenpipe.schedule import time_order as timed


def test_an_order_is_written_as_it_stands() -> None:
    text = "0F0,,3F0,(0F1;3I0)OVERLAP_F_B,3W0,0B0,3F1,3B1,0B1\n1F0,2F0,2B0,1B0,1F1,2F1,2B1,1B1,\n"
    assert to_torch(Order.from_csv(text)) == text
    assert from_torch(text) == Order.from_csv(text)


def test_a_lowered_file_is_the_program_and_when_parameters_are_gathered_and_gradients_reduced() -> None:
    order = generate("1f1b", 2, 3)
    rows = add_communication(order).to_csv().splitlines()
    assert to_torch(order, lowered=True).splitlines() == [
        f"0UNSHARD,{rows[0]},0REDUCE_GRAD,0RESHARD",
        rows[1].replace("1F0", "1UNSHARD,1F0").replace("1B2", "1B2,1REDUCE_GRAD,1RESHARD"),
    ]


def test_parameters_of_three_stages_are_gathered_at_a_time() -> None:
    order = Order.from_csv("0F0,1F0,2F0,3F0,3B0,2B0,1I0,1W0,0B0")
    assert to_torch(order, lowered=True) == (
        "0UNSHARD,1UNSHARD,2UNSHARD,0F0,0RESHARD,3UNSHARD,1F0,2F0,3F0,3B0,3REDUCE_GRAD,3RESHARD,0UNSHARD,"
        "2B0,2REDUCE_GRAD,2RESHARD,1I0,1W0,1REDUCE_GRAD,1RESHARD,0B0,0REDUCE_GRAD,0RESHARD\n"
    )


def test_what_a_program_has_already_is_kept() -> None:
    text = "0UNSHARD,0F0,0B0,0F1,0B1,0REDUCE_GRAD,0RESHARD\n"
    program = from_torch(text)
    assert isinstance(program, Program)
    assert to_torch(program) == text
    assert to_torch(program, lowered=False) == "0F0,0B0,0F1,0B1\n"
    without_reduction = from_torch(text.replace("0REDUCE_GRAD,", ""))
    assert to_torch(without_reduction) == text


def test_round_trip() -> None:
    schedules = ("gpipe", "1f1b", "gis", "zb-h1", "zbv", "dualpipe-v")
    for schedule, (devices, microbatches) in itertools.product(schedules, [(1, 3), (2, 5), (4, 8)]):
        order = generate(schedule, devices, microbatches)
        assert from_torch(to_torch(order)) == order
        program = from_torch(to_torch(order, lowered=True))
        assert isinstance(program, Program)
        assert check_program(program).ok
        assert program.placement == order.placement
        assert to_torch(program, lowered=False) == to_torch(order)
        assert to_torch(add_communication(order)) == to_torch(order, lowered=True)


def test_a_file_as_the_csv_module_writes_it() -> None:
    text = '0F0,"0F1",0B0,0B1\r\n1F0,( 1F1 ; 1B0 )OVERLAP_F_B, 1B1\r\n'
    order = from_torch(text)
    assert isinstance(order, Order)
    assert order.placement == Placement.linear(2)
    assert to_torch(order) == "0F0,0F1,0B0,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n"


NO_SCHEDULES = [
    ("0F0,0B0\n1F0,1ALLREDUCE0", "row 2, column 2 (device 1, position 1): '1ALLREDUCE0' is not a pass"),
    ("0F0,0B0\n\n1F0,1B0", "row 2 is blank"),
    ("0F0,0BW0", "row 1, column 2 (device 0, position 1): '0BW0' is from an older torch"),
    ('0F0,"0B0\n1F0,1B0', "row 1, column 2 (device 0, position 1): a quoted cell continues on the next line"),
    (f'"{"0" * 200_000}"', "the file is not CSV: field larger than field limit"),
]


def test_files_that_are_not_schedules() -> None:
    assert not wrong_refusals(from_torch, NO_SCHEDULES)


VOCABULARY = "S0 is a pass of the vocabulary layers, which torch's runtime does not have; take the order without them"


NO_WORD = [
    (Order.from_csv("0F0,S0,C0,T0,0B0"), f"device 0, position 1: {VOCABULARY}"),
    (Order.from_csv("0F0,0R0,0B0"), "device 0, position 1: 0R0 recomputes, offloads or loads activations"),
    (Order.from_csv("0F0,0O0,0D0,0L0,0B0"), "device 0, position 1: 0O0 recomputes, offloads or loads activations"),
    (Order.from_csv("0F0,0F0.1,0B0,0B0.1"), "device 0, position 1: 0F0.1 is for a slice of a sequence"),
    (
        Order.from_csv("0F0\n(1F0;1B0.1)OVERLAP_F_B", microbatches=2),
        "device 1, position 0: 1B0.1 is for a slice of a sequence, but torch's runtime does not cut sequences",
    ),
    (forward_only(generate("1f1b", 2, 2)), "the order only evaluates"),
    (Order.from_csv("0F0,0F1,0B0,0B0"), "0B1 is missing"),
    (Order.from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1"), "deadlock: device 0"),
]


PROGRAMS = [
    (plan_program("1f1b", 2, 2, "vocab-2")[1], "device 0, position 0: E0 is a pass of the vocabulary layers"),
    (Program.from_csv("0F0,X0,0B0\n1F0,1B0"), "position 1: X0 is a collective of the vocabulary layers"),
    (Program.from_csv("0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0"), "1RECV_F0 is missing"),
]


def test_what_torch_has_no_word_for() -> None:
    orders = [
        (order, words, {"lowered": lowered}) for (order, words), lowered in itertools.product(NO_WORD, (True, False))
    ]
    for schedule, words, options in [*orders, *((program, words, {}) for program, words in PROGRAMS)]:
        with pytest.raises(InputError) as error:
            to_torch(schedule, **options)
        assert words in str(error.value), schedule


# --- torch's own schedules, runtime and simulator --------------------------------------------------------------------


def test_dualpipe_v_is_the_same_as_theirs(tmp_path: Path) -> None:
    for devices in (1, 2, 3, 4, 6):
        for microbatches in (2 * devices, 2 * devices + 3):
            theirs = file_of_torch("DualPipeV", Size(devices, 2, microbatches), tmp_path, "compute_only")
            assert generate("dualpipe-v", devices, microbatches) == from_torch(theirs)


def test_ours_are_no_longer_and_hold_no_more(sample, tmp_path: Path) -> None:
    names, times = {"zbv": "ZBVZeroBubble", "dualpipe-v": "DualPipeV"}, ((1, 1, 1), (3, 4, 2), (1, 1, 0.5))
    for schedule, devices, of_passes, extra in sample(itertools.product(names, (2, 3, 4, 8), times, (False, True)), 6):
        costs, microbatches = Costs(**dict(zip("FIW", of_passes, strict=True))), (2 + extra) * devices + extra
        text = file_of_torch(names[schedule], Size(devices, 2, microbatches), tmp_path, "compute_only")
        theirs, ours = timed(from_torch(text), costs), timed(generate(schedule, devices, microbatches), costs)
        assert ours.span <= theirs.span, (schedule, devices, of_passes)
        assert ours.makespan <= theirs.makespan, (schedule, devices, of_passes)
        assert max(ours.peak_in_flight) <= max(theirs.peak_in_flight), (schedule, devices, of_passes)
