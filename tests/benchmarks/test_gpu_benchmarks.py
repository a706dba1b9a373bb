"""The benchmarks of one GPU: what fails, or takes long, costs no other arm its figures."""

from __future__ import annotations

import argparse
import json

import output_layer
import passes
import peers
import shards
import timing
import torch
from timing import Arm, Failure, Results

CPU = torch.device("cpu")


def given(**changed) -> argparse.Namespace:
    usual = {"warm_up": 1, "repetitions": 5, "arm_seconds": 60.0, "output": None, "dtype": "bf16", "labels": "text"}
    return argparse.Namespace(**usual | changed)


def fails_from(run: int) -> Arm:
    """An arm whose runs fail from that one on."""
    runs = iter(range(100))

    def work(_) -> None:
        if next(runs) >= run:
            raise torch.OutOfMemoryError("no memory\nand a second line")

    return Arm(work)


# -- arms that take turns --------------------------------------------------------------------------


def test_an_arm_that_fails_or_takes_long_has_fewer_turns() -> None:
    for run in (0, 1, 4):
        timings, failures = timing.medians({"bad": fails_from(run), "good": Arm(lambda _: None)}, CPU, given())
        assert failures == {"bad": Failure("OutOfMemoryError: no memory")}
        assert {name: one.repetitions for name, one in timings.items()} == {"good": 5}
    timings, _ = timing.medians({"long": Arm(lambda _: None)}, CPU, given(arm_seconds=0.0))
    assert timings["long"].repetitions == timing.LEAST


def test_a_device_that_is_lost_leaves_what_was_timed(monkeypatch) -> None:
    monkeypatch.setattr(timing, "works", lambda device: False)
    arms = {"good": Arm(lambda _: None), "bad": fails_from(1)}
    timings, failures = timing.medians(arms, CPU, given(warm_up=0))
    assert (timings["good"].repetitions, list(failures)) == (2, ["bad"])
    timings, failures = timing.medians(dict(reversed(arms.items())), CPU, given())
    assert (timings, list(failures)) == ({}, ["bad", "good"])


# -- scripts ---------------------------------------------------------------------------------------


def later(hidden, weight, labels, runs=iter(range(100))):
    """A loss that runs while it is looked at, and fails while it is timed."""
    if next(runs) == 3:
        raise RuntimeError("later")
    return peers.eager(hidden, weight, labels)


def test_the_output_layer_without_what_fails(monkeypatch, tmp_path, capsys) -> None:
    def missing():
        raise ModuleNotFoundError("No module named 'missing'")

    losses = {"eager": lambda: peers.eager, "later": lambda: later, "missing": missing}
    monkeypatch.setattr(output_layer, "LOSSES", losses)
    some = given(output=tmp_path / "figures.json", arms=[""], kernels=["torch"], ignored=0.1)
    rows = output_layer.measure("32x16x64", "confident", some, CPU, Results(some, CPU))
    output_layer.show(rows, some)
    reasons = {"later": "RuntimeError: later", "missing": "ModuleNotFoundError: No module named 'missing'"}
    cases = json.loads(some.output.read_text(encoding="utf-8"))["cases"]
    assert {case["name"]: case["reason"] for case in cases if "reason" in case} == reasons
    timed = {case["name"]: case for case in cases if "seconds" in case}
    assert len(timed) == 1 + 4 + 4 + 3 + 3 + 1 and len(cases) == len(timed) + 2
    assert timed["eager"]["share"] > 0 and timed["eager"]["repetitions"] == 5
    assert "did not run: later: RuntimeError: later" in capsys.readouterr().out


def test_a_shard_without_the_pass_that_fails(monkeypatch) -> None:
    embedding_arms = passes.embedding_arms

    def without_gradients(*arguments):
        return {**embedding_arms(*arguments), "G": fails_from(0)}

    monkeypatch.setattr(passes, "embedding_arms", without_gradients)
    some = given(keep="probabilities", kernels="torch", devices=[4])
    rows = list(shards.measure("32x16x64", some, CPU))
    arms = [(mode, devices) for mode in ("vocab-2", "vocab-1") for devices in (1, 4)]
    assert [(row["mode"], row["devices"]) for row in rows] == arms
    for row in rows:
        assert row["efficiency"] > 0 and row["rows_efficiency"] is None
        assert row["reasons"] == {"G": "OutOfMemoryError: no memory"}
        assert len(shards.line(row)) == len(shards.HEADER)
