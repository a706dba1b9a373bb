"""Names of schedules and traces come from others: pictures show them, and nothing in them becomes markup or control."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from drawn_timelines import words
from traced_steps import one_device

from evenpipe.cli.main import main
from evenpipe.draw import Bars, bars_svg, page, svg, terminal, trace
from evenpipe.schedule import EQUAL_COSTS, Timeline, generate, time_order
from evenpipe.schedule.trace_file import write_trace

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


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    return time_order(generate("1f1b", 2, 2), EQUAL_COSTS)


@pytest.mark.parametrize("name", FOREIGN, ids=ascii)
def test_a_name_is_text_in_every_picture(name: str, timeline: Timeline, monkeypatch: pytest.MonkeyPatch) -> None:
    text = page({name: timeline, "other": timeline}, title=name)
    plain = page({"name": timeline, "other": timeline}, title="name")
    tags, plain_tags = ([tag.lower() for tag in re.findall(r"</?\w+|<!--", found)] for found in (text, plain))
    assert tags == plain_tags
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text)
    data = re.search(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', text, re.DOTALL)
    assert data is not None and "<" not in data[1]
    assert json.loads(data[1])["panels"][0]["name"] == name or not name.isprintable()
    for text in (svg({name: timeline}, title=name), bars_svg([Bars(name, ({name: 1.0},))], title=name)):
        names = {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(text).iter()}
        assert names <= {"svg", "title", "desc", "style", "rect", "path", "text", "g"}
        assert name in " ".join(words(text)) or not name.isprintable()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", terminal({name: timeline}))
    json.loads(trace({name: timeline}))


def test_what_a_trace_says_of_itself_is_text(tmp_path, capsys):
    about = {"schedule": "</script><script>alert(1)</script>", "vocabulary": "\x1b[31m", "step": ["\n"]}
    file, drawn, costs = (str(tmp_path / name) for name in ("t.json", "t.html", "costs.toml"))
    write_trace(replace(one_device([1.0]), about=about), tmp_path / "t.json")
    assert main(["draw", file, "-o", drawn]) == 0
    text = (tmp_path / "t.html").read_text()
    assert "<script>alert" not in text
    assert "&lt;/script&gt;&lt;script&gt;alert(1)&lt;/script&gt; + \\x1b[31m" in text
    assert main(["profile", "--from", file, "-o", costs]) == 0
    assert main(["simulate", "--schedule", "1f1b", "--devices", "1", "--microbatches", "1", "--costs", costs]) == 0
    assert main(["profile", "--from", file]) == 0
    shown = capsys.readouterr()
    assert "\x1b" not in shown.out
    assert "vocabulary \\x1b[31m" in shown.out
