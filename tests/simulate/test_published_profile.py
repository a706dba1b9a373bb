"""Iterations that the authors of arXiv 2411.05288 measured, predicted from their pass times.

Within 1.5 % for first-last, redistribute, vocab-1 and vocab-2 and 3 % for interlaced is what is promised. What is
reached: 0.7 % for all 20 rows, and 0.8 % when the one fitted constant has seen the other four methods only.
"""

from __future__ import annotations

import json

import published_profile as script


def test_every_published_iteration() -> None:
    profile = json.loads(script.DATA.read_text(encoding="utf-8"))
    rows = script.predict(profile, script.hop_of(profile))
    assert len(rows) == 20
    step = script.fit_step(rows)
    assert 0 < step < 0.015 * min(row.measured for row in rows)
    for row in rows:
        label = (row.method, row.vocabulary)
        assert abs(script.error(row.simulated + step, row.measured)) < 0.7, label
        held_out = script.held_out_step(rows, row.method)
        assert abs(script.error(row.simulated + held_out, row.measured)) < 0.8, label
