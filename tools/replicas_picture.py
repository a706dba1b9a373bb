"""Draw docs/replicas.svg: a step with replicas that share parameters, gathered once, and freed between uses.

    python tools/replicas_picture.py

4 devices with 2 stages each, 8 microbatches. Below each device are its collectives over replicas and its gathered
parameters. A test draws it again and compares, so it shows what the schedule code does.
"""

from __future__ import annotations

from pathlib import Path

from evenpipe.compare.cases import plan_cases
from evenpipe.draw import svg
from evenpipe.recipe.parallelism import Parallelism
from evenpipe.schedule import Costs
from evenpipe.schedule.links import REPLICAS, Link

FILE = Path(__file__).resolve().parent.parent / "docs" / "replicas.svg"
COSTS = Costs(
    F=1,
    B=2,
    links={REPLICAS: Link(bandwidth=2**30)},
    sharding={"UNSHARD": 2**29, "REDUCE_GRAD": 2**30},
    memory={"UNSHARD": 2**30, "RESHARD": -(2**30)},
)


def draw() -> str:
    """Return the SVG text."""
    found = {}
    for name, prefetch, reshard in (("gathered once", None, False), ("freed between uses", 0, True)):
        replicas = Parallelism(dp=2, data_parallel="shard", prefetch=prefetch, reshard=reshard)
        (case,) = plan_cases(
            ["interleaved"], devices=4, microbatches=8, vocabularies=["first-last"], costs=COSTS, replicas=replicas
        )
        found[f"interleaved, {name}"] = case.simulation.timeline
    return svg(found, width=960, memory=True, unit="forwards of one stage")


if __name__ == "__main__":
    FILE.write_text(draw(), encoding="utf-8")
