"""Orders and programs as CSV files."""

from __future__ import annotations

import pytest

from evenpipe.errors import InputError
from evenpipe.schedule import MODES, Order, Placement, Program, evaluation_program, forward_only, generate, plan_program


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("devices", "microbatches"), [(1, 1), (1, 3), (2, 1), (3, 5), (4, 8)])
def test_round_trip(mode: str, devices: int, microbatches: int) -> None:
    order, program = plan_program("1f1b", devices, microbatches, mode)
    assert Order.from_csv(order.to_csv()) == order
    assert Program.from_csv(program.to_csv()) == program
    evaluation = evaluation_program(order)
    assert Order.from_csv(forward_only(order).to_csv()) == forward_only(order)
    assert Program.from_csv(evaluation.to_csv()) == evaluation


def test_a_file_as_torch_writes_it() -> None:
    text = "0F0,0F1,,0B0,0B1\r\n,1F0,1B0,1F1,1B1\r\n"
    order = Order.from_csv(text)
    assert order.placement == Placement.linear(2)
    assert order.microbatches == 2
    assert order.rows[1][0] is None
    assert [str(item) for item in order.passes(1)] == ["1F0", "1B0", "1F1", "1B1"]
    assert order.to_csv() == text.replace("\r\n", "\n")


def test_spaces_round_cells_and_a_missing_last_newline_do_not_matter() -> None:
    assert Order.from_csv(" 0F0 ,\t0B0").to_csv() == "0F0,0B0\n"


def test_stages_and_passes_run_as_one_and_split_backwards() -> None:
    text = "0F0,3F0,(0F1;3I0)OVERLAP_F_B,3W0,0B0,3F1,3B1,0B1,0UNSHARD\n1F0,2F0,2B0,1B0,1F1,2F1,2B1,1B1,\n"
    order = Order.from_csv(text)
    assert order.placement == Placement(2, (0, 1, 1, 0))
    assert order.microbatches == 2
    assert order.to_csv() == text


def test_a_misplaced_pass_does_not_move_its_stage() -> None:
    order = Order.from_csv("0F0,0F1,1B1,0B0,0B1\n1F0,1F1,1B0\n")
    assert order.placement == Placement.linear(2)


def test_what_is_given_is_not_inferred() -> None:
    order = Order.from_csv("0F0,0B0\n", microbatches=2, barriers=1, forward_only=True, placement=Placement(1, (0, 0)))
    assert (order.microbatches, order.barriers, order.forward_only) == (2, 1, True)
    assert order.placement.stages == 2


@pytest.mark.parametrize(
    ("text", "barriers", "evaluates"),
    [
        ("0F0,0B0", 0, False),
        ("0F0", 0, True),
        ("E0,0F0,S0,C0,T0,0B0,G0", 1, False),
        ("E0,0F0,S0,T0,0B0,G0", 2, False),
        ("E0,0F0,S0,C0", 1, True),
    ],
)
def test_barriers_and_direction_follow_from_the_kinds(text: str, barriers: int, evaluates: bool) -> None:
    order = Order.from_csv(text)
    assert (order.barriers, order.forward_only) == (barriers, evaluates)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("\n", "the file is empty; a schedule has one line per device"),
        (" , ,\n\n", "the file is empty"),
        ("0F0,0B0\n\n1F0,1B0\n", "row 2 is blank"),
        ("0F0,0B0\n , ,\n", "row 2 is blank"),
        ("0F0,0B0x", "row 1, column 2 (device 0, position 1): '0B0x' is not a pass"),
        ("0F0,0B0\n1F0,1B0 1F1", "row 2, column 2 (device 1, position 1): '1B0 1F1' is not a pass"),
        ('0F0,0B0\n1F0,,"1B0"', "row 2, column 3"),
        ("0F0,0B0;", "row 1, column 2"),
        ("0F0,0SEND_F0", "row 1, column 2 (device 0, position 1): '0SEND_F0' is a transfer"),
        ("S0,T0", "no pass of a stage"),
        ("0UNSHARD", "no pass of a microbatch"),
        ("0F0,2F0", "stage 1 appears in no row, though stage 2 does"),
        ("0F0,0F999999999", "microbatch 999999999 appears, but 2 passes"),
        ("999999999F0", "stage 0 appears in no row"),
        ("0F0,1F0\nS0,S1", "device 1 holds no stage"),
        ("0F0,0B0\n0F0,0B0", "device 1 runs only stages of other devices, such as stage 0, which belongs to device 0"),
    ],
)
def test_errors_name_row_and_column(text: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        Order.from_csv(text)
    assert message in str(error.value)


def test_a_program_file_says_who_takes_part() -> None:
    program = Program.from_csv(plan_program("1f1b", 3, 2, "vocab-2")[1].to_csv())
    assert program.communicators == {
        "ROWS": (0, 1, 2),
        "F:0>1": (0, 1),
        "F:1>2": (1, 2),
        "X": (0, 1, 2),
        "STATISTICS": (0, 1, 2),
        "DX": (0, 1, 2),
        "B:1>0": (1, 0),
        "B:2>1": (2, 1),
    }
    with pytest.raises(
        InputError, match=r"row 1, column 2 \(device 0, position 1\): 'SEND0' is not a pass or transfer"
    ):
        Program.from_csv("0F0,SEND0")


def test_a_transfer_that_no_pass_needs_stays_without_members() -> None:
    program = Program.from_csv("0F0,X0,0B0\n1F0,1B0")
    assert program.rows[0][1].members == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": ()}, "the order has 0 rows for 2 devices"),
        ({"microbatches": 0}, "microbatches must be at least 1, not 0"),
        ({"barriers": 3}, "barriers must be 0, 1 or 2, not 3"),
    ],
)
def test_impossible_orders(change: dict[str, object], message: str) -> None:
    order = generate("1f1b", 2, 2)
    fields = {"placement": order.placement, "microbatches": 2, "rows": order.rows, "barriers": 0} | change
    for cls in (Order, Program):
        with pytest.raises(InputError, match=message):
            cls(**fields)
