"""Files: the suffix says what is drawn; the page fetches nothing; and foreign names become no markup and no control."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from drawn_timelines import EMPTY, timeline, two_devices, with_slack, words
from headless_browser import find_browser
from traced_steps import one_device

from evenpipe.cli.main import main
from evenpipe.draw import Bars, bars_svg, check_file, draw, page, svg, terminal, trace
from evenpipe.draw.encode import StyleTable, encode
from evenpipe.draw.figures import Scale
from evenpipe.draw.panel import Panel
from evenpipe.errors import InputError
from evenpipe.schedule import EQUAL_COSTS, plan_order, time_order
from evenpipe.schedule.trace_file import write_trace

BEGINNINGS = {".html": "<!DOCTYPE html>", ".json": '{"displayTimeUnit"', ".svg": "<svg "}


@pytest.mark.parametrize("suffix", [*BEGINNINGS, ".SVG"])
def test_the_suffix_says_what_is_drawn(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"step{suffix}"
    draw({"a": two_devices()}, file, title="A step", memory=True, unit_seconds=1.0)
    assert file.read_text(encoding="utf-8").startswith(BEGINNINGS[suffix.lower()])


@pytest.mark.slow
def test_png_is_the_picture_in_twice_as_many_pixels(tmp_path: Path) -> None:
    if find_browser() is None:
        pytest.skip("no chromium in the path; on Debian: apt-get install chromium")
    file = tmp_path / "step.png"
    draw(two_devices(), file)
    header = file.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    size = re.search(r'width="(\d+)" height="(\d+)"', svg(two_devices()))
    assert size is not None
    assert struct.unpack(">II", header[16:]) == (2 * int(size[1]), 2 * int(size[2]))
    assert list(tmp_path.iterdir()) == [file]


def test_png_without_a_browser_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        InputError, match=r"\.png needs Chromium or Chrome .*apt-get install chromium.*\.svg needs nothing"
    ):
        check_file(tmp_path / "step.png")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written(tmp_path: Path) -> None:
    for name in ("step.pdf", "step", ".svg"):
        with pytest.raises(InputError, match=r"must end in \.html .*, \.svg or \.png .* or \.json "):
            draw(two_devices(), tmp_path / name)
    with pytest.raises(InputError, match="no timeline"):
        page({})
    assert list(tmp_path.iterdir()) == []


def test_the_page_admits_its_own_script_and_style_and_no_connection() -> None:
    text = page(two_devices())
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    for kind, content in (("style", style), ("script", script)):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy[1]
    assert policy[1].startswith("default-src 'none'")
    assert re.findall(r"(?:https?:)?//[\w.]+\.\w+", text.replace("//www.w3.org", "")) == []


def test_figures_are_there_without_scripts() -> None:
    text = page({"first": two_devices(), "second": timeline("0F0 0 1, 0B0 4 6")})
    tables = re.sub(r"<[^>]+>", " ", text[text.index("<section") : text.index('<script type="application/json"')])
    for line in (
        "step 12 6 From the first start",
        "bubble of the slowest device 58.3 % 50.0 %",
        "1 41.7 % 2 KiB 16.7 % 25.0 %",
    ):
        assert line in " ".join(tables.split())


def unpacked(text: str, count: int) -> list[list[int]]:
    """Columns as decode.js reads them, before differences are summed."""
    raw = zlib.decompress(base64.b64decode(text))
    columns = []
    for start in range(0, len(raw), 4 * count):
        planes = [raw[start + plane * count : start + (plane + 1) * count] for plane in range(4)]
        columns.append([int.from_bytes(bytes(four), "little", signed=True) for four in zip(*planes)])
    return columns


def test_events_are_columns_of_integers() -> None:
    encoded = encode(Panel("", with_slack(two_devices())), StyleTable(), Scale())
    assert encoded["rows"] == [(0, 0, 0), (1, 0, 2), (0, 1, 4), (1, 1, 5)]
    columns = unpacked(encoded["columns"], encoded["count"])
    starts, durations, _, stages, _, _, causes, resources, _, slacks, firsts = columns
    step = encoded["step"]
    assert [sum(starts[: number + 1]) * step for number in range(6)] == pytest.approx([0, 9, 3, 5, 8, 2])
    assert [duration * step for duration in durations] == pytest.approx([2, 3, 2, 3, 1, 1])
    assert stages == [0, 0, 1, 1, 0, 1]
    assert [number - cause if cause else None for number, cause in enumerate(causes)] == [None, 4, 5, 2, 3, 0]
    assert resources == [1, 3, 3, 2, 3, 3]
    assert [slack * step if slack >= 0 else None for slack in slacks] == [1, 0, None, None, None, None]
    assert [number - first if first else None for number, first in enumerate(firsts)] == [
        2,
        None,
        None,
        None,
        None,
        None,
    ]


def test_a_page_may_be_empty_and_grows_by_a_few_bytes_per_pass() -> None:
    for empty in EMPTY.values():
        assert page(empty).endswith("</html>\n")
    steps = [time_order(plan_order("1f1b", 8, microbatches, "vocab-2"), EQUAL_COSTS) for microbatches in (100, 200)]
    sizes = [len(page(step)) for step in steps]
    assert (sizes[1] - sizes[0]) / (100 * 8 * 7) < 3


LIMITS = [
    # arguments of draw, what the picture says of a limit
    (["--schedule", "v-budget", "--max-in-flight", "6"], "memory limit: 6 in flight"),
    (["--schedule", "v-budget", "--max-in-flight", "6,7,8"], "memory limit: 6 in flight, 7 in flight, 8 in flight"),
    (["--compare", "1f1b,v-budget", "--max-in-flight", "6"], "memory limit: 6 in flight"),
    (["--schedule", "1f1b", "--offload", "2"], "memory limit: 2 on the device"),  # of one byte each
    (["--schedule", "1f1b", "--offload", "2048", "--costs", "costs.toml"], "memory limit: 2 KiB"),
    # Of another unit than the curve: stage activations beside bytes, and in flight beside those on the device.
    (["--schedule", "v-budget", "--max-in-flight", "6", "--costs", "costs.toml"], None),
    (["--schedule", "v-budget", "--max-in-flight", "6", "--offload", "free"], None),
    (["--schedule", "1f1b"], None),
]


@pytest.mark.parametrize(("arguments", "expected"), LIMITS)
def test_a_limit_is_drawn_over_a_curve_of_its_unit(
    arguments: list[str], expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("costs.toml").write_text("F = 1\nI = 1\nW = 1\nO = 0.5\nL = 0.5\nS = 1\nT = 1\nE = 0\nG = 0\nbytes = 1024\n")
    size = ["--devices", "3", "--microbatches", "6", "--memory"]
    assert main(["draw", *arguments, *size, "-o", "step.svg"]) == 0
    shown = [text for text in words(Path("step.svg").read_text()) if "limit" in text]
    assert shown == ([] if expected is None else [expected])


# --- foreign names ----------------------------------------------------------------------------------------------------

FOREIGN = [
    "<script>alert(1)</script>",
    "</script><script>alert(1)//",
    '"><img src=x onerror=alert(1)>',
    "--><!--",
    "@@SCRIPT@@",
    "]]>",
    "\x1b[31m\x07\0",
    "a & b < c",
]


@pytest.mark.parametrize("name", FOREIGN, ids=ascii)
def test_a_name_is_text_in_every_picture(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = two_devices()
    text = page({name: step, "other": step}, title=name)
    plain = page({"name": step, "other": step}, title="name")
    tags, plain_tags = ([tag.lower() for tag in re.findall(r"</?\w+|<!--", found)] for found in (text, plain))
    assert tags == plain_tags
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text)
    data = re.search(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', text, re.DOTALL)
    assert data is not None and "<" not in data[1]
    assert json.loads(data[1])["panels"][0]["name"] == name or not name.isprintable()
    for text in (svg({name: step}, title=name), bars_svg([Bars(name, ({name: 1.0},))], title=name)):
        names = {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(text).iter()}
        assert names <= {"svg", "title", "desc", "style", "rect", "path", "text", "g"}
        assert name in " ".join(words(text)) or not name.isprintable()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", terminal({name: step}))
    json.loads(trace({name: step}))


def test_what_a_trace_says_of_itself_is_text(tmp_path, capsys):
    about = {"schedule": "</script><script>alert(1)</script>", "vocabulary": "\x1b[31m", "step": ["\n"]}
    file, drawn, costs = (str(tmp_path / name) for name in ("t.json", "t.html", "costs.toml"))
    write_trace(replace(one_device([1.0]), about=about), tmp_path / "t.json")
    assert main(["draw", file, "-o", drawn]) == 0
    text = (tmp_path / "t.html").read_text()
    assert "<script>alert" not in text
    assert "&lt;/script&gt;&lt;script&gt;alert(1)&lt;/script&gt; + \\x1b[31m" in text
    assert main(["profile", "--from", file, "-o", costs]) == 0
    case = ["--schedule", "1f1b", "--devices", "1", "--microbatches", "1", "--vocabulary", "first-last"]
    assert main(["simulate", *case, "--costs", costs]) == 0
    assert main(["profile", "--from", file]) == 0
    shown = capsys.readouterr()
    assert "\x1b" not in shown.out
    assert "vocabulary \\x1b[31m" in shown.out
