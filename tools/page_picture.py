"""Photograph docs/page.png for the README: the page of `evenpipe draw`, with the pointer on a pass.

    python tools/page_picture.py

1f1b above zbv, 8 devices, 16 microbatches, the vocabulary layers on all devices (vocab-2). S + T takes a quarter of the
layers' time, so that vocabulary passes are visible. Without Chromium it says so and keeps the old picture. Fonts differ
between machines, so no test compares the picture.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from evenpipe.compare.cases import plan_cases
from evenpipe.draw import draw
from evenpipe.schedule import Costs

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / folder) for folder in ("draw", "multiprocess")]

from headless_browser import Browser, find_browser  # noqa: E402

FILE = ROOT / "docs" / "page.png"
WIDTH, HEIGHT = 1300, 860
COSTS = Costs(F=4, I=4, W=4, S=2, C=0, T=1, E=0, G=0, bytes=1.2e9)
PANEL, PASS = 0, "2F7"
"""The pointer is on this pass of 1f1b, which waits for one on another device, and for which one waits."""


def photograph(program: str) -> None:
    """Write the picture with the browser `program`."""
    cases = plan_cases(["1f1b", "zbv"], devices=8, microbatches=16, vocabularies=["vocab-2"], costs=COSTS)
    timelines = {f"{case.name}, {case.mode}": case.simulation.timeline_with_slack for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        draw(timelines, file, title="8 devices, 16 microbatches")
        with Browser(program, Path(folder) / "profile", width=WIDTH, height=HEIGHT) as browser:
            browser.open(file)
            browser.mouse("mouseMoved", *browser.middle_of_pass(PASS, PANEL))
            browser.screenshot(FILE)


if __name__ == "__main__":
    found = find_browser()
    if found is None:
        print("no Chromium in the path, so the picture stays unchanged; on Debian: apt-get install chromium")
    else:
        photograph(found)
        print(f"wrote {FILE.relative_to(ROOT)}")
