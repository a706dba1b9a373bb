"""Which vocabulary mode does the best plan of each example model take, and how far are the others?

    python benchmarks/vocabulary_modes.py

From the plans of `golden.py`, whose search is free to choose everything: layout, schedule, split of the layers,
recomputation. A mode's column says how much longer the step of its best pipeline is than that of the best plan.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from evenpipe.words import table

PLANS = Path(__file__).resolve().parent / "golden" / "plans.json"
MODES = ("first-last", "redistribute", "vocab-1", "vocab-2")


def main() -> int:
    """Print the table."""
    rows = [("model", "GPUs", "best plan", *MODES)]
    for model, found in json.loads(PLANS.read_text()).items():
        if not found["plans"]:
            rows.append((model, str(found["gpus"]), "none fits", *["-"] * len(MODES)))
            continue
        best = found["plans"][0]
        seconds = {one["vocabulary"]: one["seconds"] for one in found["vocabulary"]}
        more = [f"+{100 * (seconds[mode] / best['seconds'] - 1):.1f} %" if mode in seconds else "-" for mode in MODES]
        rows.append((model, str(found["gpus"]), best["name"], *more))
    print("\n".join(table(rows, left=(0, 2))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
