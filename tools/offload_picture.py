"""Draw docs/offload.svg: one step of 1F1B with all activations on the device, and with its activations on the host.

    python tools/offload_picture.py

4 devices, 8 microbatches; both copies together take half as long as forward and backward. Below each device are its
copies and its memory. A test draws it again and compares, so it shows what the schedule code does.
"""

from __future__ import annotations

from pathlib import Path

from evenpipe.compare.cases import plan_cases
from evenpipe.draw import svg
from evenpipe.schedule import Costs

FILE = Path(__file__).resolve().parent.parent / "docs" / "offload.svg"
COSTS = Costs(F=1, B=2, O=0.75, L=0.75, bytes=2**30)


def draw() -> str:
    """Return the SVG text."""
    found = {}
    for name, offload in (("1f1b", "none"), ("1f1b, activations on the host", "free")):
        (case,) = plan_cases(
            ["1f1b"], devices=4, microbatches=8, vocabularies=["first-last"], costs=COSTS, offload=offload
        )
        found[name] = case.simulation.timeline
    return svg(found, width=960, memory=True, unit="forwards of one stage")


if __name__ == "__main__":
    FILE.write_text(draw(), encoding="utf-8")
