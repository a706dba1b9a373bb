"""Iterations that the authors of arXiv 2411.05288 measured, predicted from their pass times.

Within 1.5 % for first-last, redistribute, vocab-1 and vocab-2 and 3 % for interlaced is what is promised. What is
reached: 0.7 % for all 20 rows, and 0.8 % when the one fitted constant has seen the other four methods only.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks/published_profile.py"
REACHED, REACHED_HELD_OUT = 0.7, 0.8


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("published_profile", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["published_profile"] = module
    spec.loader.exec_module(module)
    return module


def test_every_published_iteration(script: ModuleType) -> None:
    profile = json.loads(script.DATA.read_text(encoding="utf-8"))
    rows = script.predict(profile, script.hop_of(profile))
    assert len(rows) == 20
    step = script.fit_step(rows)
    assert 0 < step < 0.015 * min(row.measured for row in rows)
    for row in rows:
        label = (row.method, row.vocabulary)
        assert abs(script.error(row.simulated + step, row.measured)) < REACHED, label
        held_out = script.held_out_step(rows, row.method)
        assert abs(script.error(row.simulated + held_out, row.measured)) < REACHED_HELD_OUT, label
