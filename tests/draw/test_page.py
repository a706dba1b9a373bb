"""The page in a real browser: headless Chromium points, zooms, clicks, types and searches.

Where there is no Chromium these tests are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from drawn_timelines import EMPTY, tensor_ranks, timeline, two_devices, with_slack
from headless_browser import Browser, find_browser

from evenpipe.draw import draw
from evenpipe.schedule import EQUAL_COSTS, Costs, Timeline, plan_order, time_order

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if (program := find_browser()) is None:
        pytest.skip("no chromium in the path; on Debian: apt-get install chromium")
    with Browser(program, tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def shown(browser: Browser, tmp_path: Path) -> Iterator[Shown]:
    """A page to be opened; when the test is over, it has logged no trouble and asked the network for nothing."""
    browser.events.clear()
    yield Shown(browser, tmp_path)
    assert browser.troubles() == []
    assert browser.requests() == []


class Shown:
    """A page in the browser, and what a person would do to it."""

    def __init__(self, browser: Browser, folder: Path) -> None:
        self.browser, self.folder = browser, folder

    def open(self, timelines: Timeline | dict[str, Timeline], unit_seconds: float | None = None) -> None:
        draw(timelines, self.folder / "page.html", unit_seconds=unit_seconds)
        self.browser.open(self.folder / "page.html")

    def place(self, text: str, panel: int = 0) -> tuple[float, float]:
        """The middle of a pass in the window."""
        return self.browser.middle_of_pass(text, panel)

    def point(self, text: str, panel: int = 0) -> str:
        """Point at a pass; returns the tooltip."""
        self.browser.mouse("mouseMoved", *self.place(text, panel))
        return self.tip

    def click(self, text: str, panel: int = 0) -> None:
        self.browser.click(*self.place(text, panel))

    def wheel(self, x: float, y: float, down: float) -> None:
        self.browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=down)

    def press(self, name: str) -> None:
        """Press the button with this id."""
        self.browser.evaluate(f"document.getElementById('{name}').click()")
        self.browser.frame()

    def search(self, text: str) -> str:
        """Search for a text; returns what the page reports."""
        self.browser.evaluate("document.getElementById('query').select()")
        self.browser.evaluate("document.execCommand('delete')")
        self.browser.type(text)
        self.browser.key("Enter")
        return self.text("found")

    def text(self, name: str) -> str:
        return self.browser.evaluate(f"document.getElementById('{name}').innerText")

    @property
    def tip(self) -> str:
        return "" if self.browser.evaluate("document.getElementById('tip').hidden") else self.text("tip")

    @property
    def range(self) -> tuple[float, float]:
        """The times in view."""
        start, end = self.browser.evaluate("[evenpipe.scene.view.start, evenpipe.scene.view.end]")
        return start, end

    @property
    def kept(self) -> str | None:
        """The pass that was clicked."""
        return self.browser.evaluate("evenpipe.scene.kept && evenpipe.scene.kept.panel.label(evenpipe.scene.kept.i)")

    def drawn(self, name: str) -> int:
        """What the last redraw drew: rectangles, texts or strips."""
        return self.browser.evaluate(f"evenpipe.drawn.{name}")

    def colour(self, x: float, y: float, pixels: int = 1) -> list[float]:
        """Red, green and blue of some pixels of the picture beside each other, at a place in the window: their mean."""
        return self.browser.evaluate(
            f"""(() => {{
                const {{ canvas }} = evenpipe, {{ left, top }} = canvas.getBoundingClientRect();
                const copy = new OffscreenCanvas({pixels}, 1).getContext("2d", {{ willReadFrequently: true }});
                copy.drawImage(canvas, left - {x}, top - {y});
                const {{ data }} = copy.getImageData(0, 0, {pixels}, 1), sum = [0, 0, 0];
                data.forEach((value, k) => {{ if (k % 4 < 3) sum[k % 4] += value / {pixels}; }});
                return sum;
            }})()"""
        )


def vocabulary(devices: int, microbatches: int) -> Timeline:
    return time_order(plan_order("1f1b", devices, microbatches, "vocab-2"), EQUAL_COSTS)


def test_pointing_says_what_a_pass_is_and_what_it_waited_for(shown: Shown) -> None:
    shown.open(two_devices(), unit_seconds=1e-3)
    tip = shown.point("1F0")
    for words in ("1F0 forward", "device 1, stage 1, microbatch 0", "3 ms to 5 ms", "the arrival of 1RECV_F0"):
        assert words in tip
    assert "its device, busy with 1F0" in shown.point("1B0") and "nothing" in shown.point("0F0")
    tip = shown.point("0RECV_B0")
    assert "receive of a backward" in tip and "waited for\tthe end of 1B0 on device 1" in tip
    assert "the arrival of 0RECV_B0, from 1B0 on device 1" in shown.point("0B0")
    shown.browser.mouse("mouseMoved", 5, 5)
    assert shown.tip == ""
    shown.open(tensor_ranks(), unit_seconds=1e-3)
    assert "takes\t2 ms, of which 0.5 ms tensor collectives" in shown.point("1F0")
    assert "takes\t1 ms\n" in shown.point("0W0") + "\n"
    shown.open(timeline("0F0 0.01 1.02, 0B0 5.27 7.3", "1F0 1.1 2, 1B0 2 5"))  # measured: without causes
    assert "idle before\t4.25" in shown.point("0B0") and "waited for" not in shown.tip
    assert "its device, busy with 1F0" in shown.point("1B0")  # the one before ends where it starts


def test_the_wheel_zooms_around_the_pointer_and_keys_zoom_and_move(shown: Shown) -> None:
    shown.open(vocabulary(4, 8))
    x, y = shown.place("2B3")
    start, end = shown.range
    tip = shown.point("2B3")
    for _ in range(5):
        shown.wheel(x, y, -300)
    closer = shown.range
    assert closer[1] - closer[0] < (end - start) / 10 and start < closer[0] < closer[1] < end
    assert shown.tip == tip  # the same pass is still under the pointer
    shown.browser.evaluate("document.getElementById('stage').focus()")
    shown.browser.key("0")
    assert shown.range == (start, end)
    for key in ("+", "+", "ArrowRight"):
        shown.browser.key(key)
    closer = shown.range
    assert closer[1] - closer[0] == pytest.approx((end - start) * 0.36) and closer[0] > start


def test_clicks_and_keys_walk_back_the_chain(shown: Shown) -> None:
    shown.open(two_devices())
    shown.click("0B0")
    assert "waited for the arrival of 0RECV_B0" in shown.text("chosen")
    assert "Chain of 6 back to 0" in shown.text("chosen")
    shown.click("0B0")  # again: on to what it waited for
    walked = [shown.kept]
    for key in ("w", "w", "w", "w", "w", "b", "Escape"):  # 0F0 waited for nothing
        shown.browser.key(key)
        walked.append(shown.kept)
    assert walked == ["0RECV_B0", "1B0", "1F0", "1RECV_F0", "0F0", "0F0", "1RECV_F0", None]
    shown.press("critical")
    assert shown.kept == "0B0"


def test_search_finds_passes_microbatches_and_devices(shown: Shown) -> None:
    shown.open({"first": vocabulary(3, 4), "second": vocabulary(3, 4)})
    shown.browser.evaluate("document.getElementById('stage').focus()")
    shown.browser.key("/")
    for typed, report, kept in (
        ("2F3", "1 of 2: device 2, first", "2F3"),
        ("2f3", "1 of 2: device 2, first", "2F3"),
        ("", "", "2F3"),
        ("S1", "1 of 6: device 0, first", "S1"),
        ("9F9", "no 9F9", "S1"),
        ("3", "microbatch 3", "S1"),
        ("7", "no microbatch 7", "S1"),
        ("device 2", "device 2", "S1"),
        ("nonsense", "expected a pass such as 2F3", "S1"),
    ):
        assert (shown.search(typed), shown.kept) == (report, kept), typed
    shown.search("S1")
    for number, where in ((2, "device 1, first"), (3, "device 2, first"), (4, "device 0, second")):
        shown.browser.key("Enter")
        assert shown.text("found") == f"{number} of 6: {where}"


def test_slices_of_a_sequence_are_found(shown: Shown) -> None:
    costs = Costs(F=1, B=2, slices={"layers": [1.2, 1.0, 0.8], "tokens": [1.5, 1.0, 0.5]})
    shown.open(time_order(plan_order("1f1b", 3, 2, "first-last", costs, slices=3), costs))
    shown.browser.evaluate("document.getElementById('stage').focus()")
    shown.browser.key("/")
    for typed, report in (("2F0.1", "1 of 1: device 2"), ("2b1.2", "1 of 1: device 2"), ("2F0.3", "no 2F0.3")):
        assert shown.search(typed) == report
    shown.browser.key("Escape")
    assert "slice 1" in shown.point("0F0.1")


def test_two_schedules_share_one_zoom_above_and_beside_each_other(shown: Shown) -> None:
    shown.open({"a": vocabulary(2, 4), "b": vocabulary(2, 6)})
    above = [shown.place("1F2", panel) for panel in (0, 1)]
    assert above[0][0] == pytest.approx(above[1][0], abs=20)  # one axis of time
    assert above[0][1] < above[1][1]
    shown.press("sides")
    beside = [shown.place("1F2", panel) for panel in (0, 1)]
    assert beside[0][1] == beside[1][1] and beside[1][0] - beside[0][0] > 400
    shown.wheel(*beside[1], -500)
    assert "1F2" in shown.point("1F2", 1) and "1F2" in shown.point("1F2", 0)


def test_switches_and_the_legend_hide_what_they_name(shown: Shown) -> None:
    shown.open(two_devices())
    lanes = "evenpipe.scene.boxes[0].lanes.length"
    assert shown.browser.evaluate(lanes) == 6  # compute, communication and memory of two devices
    shown.press("memory")
    assert shown.browser.evaluate(lanes) == 4
    shown.press("transfers")
    assert shown.browser.evaluate(lanes) == 2
    x, y = shown.place("1B0")
    before = shown.colour(x - 20, y)
    shown.browser.evaluate("document.querySelector('#legend [data-kind=B]').click()")
    shown.browser.frame()
    assert shown.colour(x - 20, y) != before
    assert shown.point("1B0") == ""  # what is hidden cannot be pointed at


def test_far_away_rows_show_mean_colours(shown: Shown) -> None:
    """Halves of blue and green, too narrow to see, become their mean; an idle half becomes paler."""
    passes = ", ".join(f"0F{k} {2 * k} {2 * k + 1}, 0B{k} {2 * k + 1} {2 * k + 2}" for k in range(4000))
    idle = ", ".join(f"1F{k} {2 * k} {2 * k + 1}" for k in range(4000))
    shown.open(timeline(passes, idle))
    y = [shown.place(text)[1] for text in ("0F0", "1F0")]
    forward, backward, nothing = (0x3E, 0x70, 0xD4), (0x54, 0xAD, 0x8B), (0xE9, 0xEC, 0xF0)
    assert shown.drawn("strips") == 2
    assert shown.colour(600, y[0], 50) == pytest.approx([(a + b) / 2 for a, b in zip(forward, backward)], abs=2)
    assert shown.colour(600, y[1], 50) == pytest.approx([(a + b) / 2 for a, b in zip(forward, nothing)], abs=2)


def test_odd_sizes_open_without_trouble(shown: Shown) -> None:
    many = timeline(*(f"{device}F0 {device} {device + 1}" for device in range(400)))
    for odd in (*EMPTY.values(), timeline("S0 3 3"), many):
        shown.open(odd)
        for key in ("+", "c", ".", "0"):
            shown.browser.key(key)
        shown.browser.click(500, 300)
        assert shown.browser.evaluate("document.getElementById('trouble').hidden")


def test_pointing_says_how_much_later_a_pass_could_end_and_who_waits(shown: Shown) -> None:
    shown.open(with_slack(two_devices()))
    assert "could end later by\t1, until 1F0 on device 1 must start" in shown.point("0F0")
    assert "could end later by\tnothing: the step ends with it" in shown.point("0B0")
    assert "could end later" not in shown.point("1F0")  # not known, as in measured steps


def test_a_limit_is_a_line_over_the_curves_in_their_unit(shown: Shown) -> None:
    shown.open(replace(two_devices(), limit=(4096.0, 4096.0)))
    assert "memory limit: 4 KiB" in shown.text("legend")
    rectangles = shown.drawn("rectangles")
    # From the base of the curve of device 0 up: its area, then the page, and the line at a limit four times as high.
    lanes = "evenpipe.scene.boxes[0].lanes.slice(0, 3).map(({ top, height }) => [top, height])"
    compute, _, (top, height) = shown.browser.evaluate(lanes)
    x, y = shown.place("0F0")
    bottom = y - compute[1] / 2 - compute[0] + top + height
    black, white = (0x1C, 0x20, 0x26), (0xFF, 0xFF, 0xFF)
    column = [tuple(shown.colour(x, bottom - up)) for up in range(1, int(height))]
    assert column.count(black) == 1 and column.index(black) > height * 0.7 and white in column
    shown.browser.mouse("mouseMoved", x, bottom - 2)
    assert "limit\t4 KiB" in shown.tip
    shown.open(two_devices())
    assert "limit" not in shown.text("legend") and shown.drawn("rectangles") == rectangles - 2


def test_the_legend_explains_thin_bars_and_shades(shown: Shown) -> None:
    shown.open(two_devices())
    assert "waits for RECV_F\nwaits for RECV_B" in shown.text("legend") and "lighter" not in shown.text("legend")
    words = "[...document.querySelectorAll('#legend .entry')].map(({ title }) => title)"
    assert shown.browser.evaluate(words) == ["receive of a forward", "receive of a backward"]
    shown.open(timeline("0F0 0 1, 3F0 1 2", "1F0 1 2"))
    assert "lighter to darker: from the first to the last stage of a device" in shown.text("legend")
    assert "waits" not in shown.text("legend")


def test_two_orders_of_the_same_passes_show_who_stands_elsewhere(shown: Shown) -> None:
    first = "0F0 0 4, 0F1 4 8, 0F2 8 12, 0B0 12 20, 0B1 20 28, 0B2 28 36"
    second = "0F0 0 4, 0B0 12 20, 0F1 20 24, 0F2 24 28, 0B1 28 36, 0B2 36 44"
    shown.open({"all forwards first": timeline(first), "early": timeline(second)})
    panel = "evenpipe.scene.panels[1]"
    moves = f"[...Array(6).keys()].map((i) => [{panel}.label(i), evenpipe.scene.move({panel}, i)])"
    assert dict(shown.browser.evaluate(moves)) == {"0F0": 0, "0B0": -2, "0F1": 1, "0F2": 1, "0B1": 0, "0B2": 0}
    assert "order\t2 places earlier than in all forwards first" in shown.point("0B0", 1)
    assert "order\t1 place later than in all forwards first" in shown.point("0F2", 1)
    assert "order\t1 place earlier than in early" in shown.point("0F2", 0) and "order" not in shown.point("0B1", 1)
    x, y = shown.place("0F0", 1)
    before = shown.colour(x - 20, y)
    shown.press("moves")
    assert shown.colour(x - 20, y) != before  # the same place: faint
    assert "◂3: 3 places earlier on its device than in the other schedule" in shown.text("legend")
    shown.browser.evaluate("document.getElementById('stage').focus()")
    shown.browser.key("d")
    assert shown.colour(x - 20, y) == before and "◂" not in shown.text("legend")
    hidden = "document.getElementById('moves').hidden"
    assert not shown.browser.evaluate(hidden)
    for others in ({"a": first, "b": first}, {"a": first, "b": first.replace("B2", "I2")}, {"a": first}):
        shown.open({name: timeline(row) for name, row in others.items()})
        assert shown.browser.evaluate(hidden), "nothing stands elsewhere, or the passes are others"
