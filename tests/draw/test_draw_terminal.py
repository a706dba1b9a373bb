"""The terminal: letters without colour, blocks with it, and never a line that is too long."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from drawn_timelines import EMPTY, tensor_ranks, timeline, two_devices

from evenpipe.draw import terminal
from evenpipe.errors import InputError
from evenpipe.schedule import EQUAL_COSTS, plan_order, time_order

SEQUENCE = re.compile("\033\\[[0-9;]*m")


def step(devices: int, microbatches: int, mode: str = "first-last"):
    return time_order(plan_order("1f1b", devices, microbatches, mode), EQUAL_COSTS)


ROWS = ("0F0 0 4, 0F1 4 8, 0B0 16 24, 0B1 28 36", "1F0 4 8, 1B0 8 16, 1F1 16 20, 1B1 20 28")
WIDTH = 9 + 36 + 6  # names, a column per unit of time, percentages


def test_letters_say_kind_and_microbatch() -> None:
    assert terminal({"first": timeline(*ROWS)}, width=WIDTH, colour="none") == (
        "first\n"
        "lost 33.3 %, step 36, peak 2 in flight, span 36\n"
        "bubble of the slowest device 33.3 %\n"
        "device 0 F0--F1--........B0------....B1------  67 %\n"
        "device 1 ....F0--B0------F1--B1------........  67 %\n"
        "         0                   20\n"
        "F forward  B backward\n"
    )


def test_time_goes_on_below_where_passes_would_have_no_room_for_their_microbatch() -> None:
    row = "0F8 0 2, 0F9 2 4, 0B8 10 12, 0B9 12 14, 0F10 20 22, 0B10 36 40"
    lines = terminal(timeline(row), width=9 + 31 + 6, colour="none").splitlines()
    assert lines[2:-1] == [
        "device 0 F8-F9-.........B8--B9-.........  35 %",
        "         0               10             20",
        "device 0 F10......................B10---  35 %",
        "         20             30              40",
    ]
    lines = terminal(timeline(row), width=9 + 31 + 6, colour="none", overview=True).splitlines()
    (line,) = [line for line in lines if line.startswith("device 0")]
    assert re.findall(r"[FB]\d*", line[9:]) == ["F8", "F", "B", "B9", "F", "B10"]


def test_every_microbatch_can_be_read_and_no_number_is_cut() -> None:
    """In lines of 100 characters: bands that microbatches of eight devices take. 200 would take too many."""
    for microbatches, bands in {8: 2, 24: 4, 100: 12, 200: 1}.items():
        text = terminal(step(8, microbatches), width=100, colour="none")
        rows = [line[9:-6] for line in text.splitlines() if line.startswith("device")]
        assert len(rows) == 8 * bands
        numbers = {int(number) for row in rows for number in re.findall(r"F(\d+)", row)}
        assert numbers == (set(range(microbatches)) if bands > 1 else set())


LETTERS: dict[str, tuple[str, str, str]] = {
    # a row, with a column per unit of time; the same in letters; the end of the legend
    "lower case is the second stage": (
        "0F0 0 2, 0F1 2 4, 3F0 4 6, 3I0 6 8, 0I0 8 10, 3W0 10 12, 0W0 12 14",
        "F0F1f0i0I0w0W0",
        "lower case: second stage of a device",
    ),
    "more stages have numbers": (
        "0F0 0 4, 2F0 4 8, 4F0 8 12, 4B0 12 20, 2B10 20 28, 0B0 28 36",
        "F0/0F2/0F4/0B4/0----B2/10---B0/0----",
        "F4/3: stage 4, microbatch 3",
    ),
    "both of two that run as one": (
        "0F1 0 4, (0F2;1B1)OVERLAP_F_B 4 12, (1F0;0B0)OVERLAP_F_B 12 20",
        "F1--F2&b1---f0&B0---",
        "lower case: second stage of a device",
    ),
    "short passes stay apart": (
        "0F0 0 4, S0 4 6, T10 6 9, S1 9 11, 0B0 11 15",
        "F0--S0T10S1B0--",
        "T output layer, second half",
    ),
}


@pytest.mark.parametrize("case", LETTERS)
def test_letters_name_every_pass(case: str) -> None:
    row, expected, legend = LETTERS[case]
    lines = terminal(timeline(row, "9F9 39 40"), width=9 + 40 + 6, colour="none", overview=True).splitlines()
    (line,) = [line for line in lines if line.startswith("device 0")]
    assert line[9:49] == expected.ljust(40, ".")
    assert legend in " ".join(lines[-3:])


def test_narrow_columns_keep_the_letter_and_the_case_that_says_the_stage() -> None:
    row = ", ".join(f"{3 * (k % 2)}F{k} {k} {k + 1}" for k in range(50))
    assert "Ff" * 25 in terminal(timeline(row), width=9 + 50 + 6, colour="none", overview=True)
    joint = ", ".join(f"(0F{k};3B{k})OVERLAP_F_B {2 * k} {2 * k + 2}" for k in range(25))
    assert "&-" * 25 in terminal(timeline(joint), width=9 + 50 + 6, colour="none", overview=True)


def test_vocabulary_passes_get_room_for_their_microbatch_if_a_screen_has_it() -> None:
    for microbatches, has_room in ((6, True), (40, False)):
        text = terminal(step(4, microbatches, "vocab-2"), width=100, colour="none")
        rows = [line[9:-6] for line in text.splitlines() if line.startswith("device")]
        numbered = {letter: {int(k) for row in rows for k in re.findall(rf"{letter}(\d+)", row)} for letter in "FST"}
        assert len(rows) <= 48 or not has_room
        assert numbered["F"] == set(range(microbatches))
        assert (numbered["S"] == numbered["T"] == set(range(microbatches))) == has_room


def test_memory_has_a_line_per_device() -> None:
    lines = terminal(timeline(*ROWS), width=WIDTH, colour="none", memory=True).splitlines()
    assert lines[3].split() == ["=" * 4 + "#" * 20 + "=" * 12, "2"]
    assert lines[5].split() == ["=" * 24, "1"] and lines[5].index("=") == 9 + 4


@pytest.mark.parametrize("colour", ["none", "256", "truecolor"])
@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize(("devices", "microbatches"), [(1, 1), (4, 8), (32, 64)])
@pytest.mark.sampled(9)
def test_no_line_is_longer_than_the_terminal(devices: int, microbatches: int, width: int, colour: str) -> None:
    timelines = {"a": step(devices, microbatches), "b": step(devices, microbatches, "vocab-2")}
    text = terminal(timelines, width=width, colour=colour, memory=True, overview=True)
    assert text.endswith("\n")
    assert max(map(len, terminal(timelines, width=width, colour="none", memory=True).splitlines())) <= max(width, 40)
    for line in text.splitlines():
        assert not SEQUENCE.findall(line) or SEQUENCE.findall(line)[-1] == "\033[0m", "a line ends without colour"
    lines = SEQUENCE.sub("", text).splitlines()
    assert max(map(len, lines)) <= max(width, 40)
    assert sum(line.startswith("device ") for line in lines) == 2 * devices


def test_blocks_have_the_microbatch_and_passes_that_run_as_one_both_colours() -> None:
    text = terminal(timeline("0F10 0 10, 0B10 10 30"), width=60, colour="truecolor")
    row = next(line for line in SEQUENCE.sub("", text).splitlines() if line.startswith("device"))
    assert row.split() == ["device", "0", "10", "10", "100", "%"]
    joint = timeline("(0F1;0B0)OVERLAP_F_B 0 4")
    text = terminal(joint, width=60, colour="truecolor")
    assert "38;2;62;112;212;48;2;84;173;139m▀" in text
    # 1 on the colour of F, 0 on that of B.
    assert "48;2;62;112;212m1" in text and "48;2;84;173;139m0" in text
    assert "& forward and backward as one" in terminal(joint, width=60, colour="none")
    two = timeline("0F3 0 15, 1F3 15 30, 1B3 30 45")
    text = terminal(two, width=60, colour="truecolor")
    row = next(line for line in SEQUENCE.sub("", text).splitlines() if line.startswith("device"))
    assert row.split() == ["device", "0", "F3", "f3", "b3", "100", "%"]
    assert text.splitlines()[-1] == "lighter to darker: from the first to the last stage of a device"


@pytest.mark.parametrize(
    ("environment", "is_terminal", "sequences"),
    [
        ({"TERM": "xterm-256color"}, True, "38;5;"),
        ({"TERM": "xterm", "COLORTERM": "truecolor"}, True, "38;2;"),
        ({"TERM": "xterm", "COLORTERM": "truecolor", "NO_COLOR": "1"}, True, ""),
        ({"TERM": "dumb"}, True, ""),
        ({"TERM": "xterm", "COLORTERM": "truecolor"}, False, ""),
    ],
)
def test_colour_follows_the_output(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], is_terminal: bool, sequences: str
) -> None:
    for name in ("NO_COLOR", "COLORTERM", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    monkeypatch.setattr("sys.stdout", SimpleNamespace(encoding="utf-8", isatty=lambda: is_terminal))
    text = terminal(two_devices(), width=80)
    assert (sequences in text) if sequences else "\033" not in text


def test_the_width_is_that_of_the_terminal_and_the_legend_says_what_tensor_ranks_exchange(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "123")
    lines = terminal(tensor_ranks(), colour="none").splitlines()
    assert {len(line) for line in lines if line.startswith("device")} == {123}
    for colour in ("none", "truecolor"):
        last = terminal(tensor_ranks(), width=80, colour=colour).splitlines()[-1]
        assert last == "tensor collectives: 25.0 % of F, 37.5 % of I, 50.0 % of S"


def test_odd_timelines_are_drawn_and_odd_depths_of_colour_refused() -> None:
    for odd in (*EMPTY.values(), timeline("S0 3 3")):
        for colour in ("none", "truecolor"):
            assert terminal(odd, width=80, colour=colour, memory=True)
    with pytest.raises(InputError, match='colour is "red"; it must be one of none, 256, truecolor'):
        terminal(two_devices(), colour="red")
