"""Result files say on which commit, day and processor their figures were measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

from figures import FIGURES

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_every_result_file_has_its_provenance() -> None:
    files = sorted(RESULTS.iterdir())
    assert len(files) > 20
    for file in files:
        figures = json.loads(file.read_text())
        assert re.fullmatch(r"[0-9a-f]{8,}(-dirty)?", figures["commit"]), file.name
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", figures["date"]), file.name
        assert figures["machine"], file.name


def test_every_result_of_make_figures_is_quoted() -> None:
    pages = "".join(page.read_text() for page in (RESULTS.parents[1] / "docs").glob("*.md"))
    assert [name for name in FIGURES if (RESULTS / f"{name}.json").exists() and f"{name}.json" not in pages] == []
