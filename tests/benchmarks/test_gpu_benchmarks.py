"""The benchmarks of one GPU: what fails, or takes long, costs no other arm its figures; and what is timed."""

from __future__ import annotations

import argparse
import json
from types import SimpleNamespace

import output_layer
import passes
import peers
import pytest
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


def test_failures_keep_their_reason(monkeypatch) -> None:
    """Of a case that ends early, and of one behind which the cache cannot be emptied."""
    assert list(timing.attempts(iter([1, 2]))) == [1, 2]
    by_zero = Failure("ZeroDivisionError: integer division or modulo by zero")
    assert list(timing.attempts(4 // number for number in (2, 0, 1))) == [2, by_zero]

    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "empty_cache", broken)
    assert timing.attempt(lambda: 1 // 0) == by_zero


# -- what is timed ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("queued", "seconds"), [(0.0, 0.0005), (0.002, 0.004), (9.0, 0.05)])
def test_the_stream_is_held_up_until_all_is_queued(queued: float, seconds: float, monkeypatch) -> None:
    done: list[object] = []
    now = iter([0.0, queued])

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            done.append("event")

        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            done.append("wait")

        def elapsed_time(self, _) -> float:
            return 3000.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda count: done.append(count))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    clock = timing.Clock(CPU)
    clock._cuda, clock._flushed = True, SimpleNamespace(zero_=lambda: done.append("flush"))
    arm = Arm(lambda _: done.append("run"), lambda _: done.append("prepare"))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(now))
    held_up = clock.hold_up(arm)
    done.clear()
    assert clock.seconds(arm, 0, held_up) == (3.0, False)
    cycles = pytest.approx(seconds * timing.CYCLES_PER_SECOND)
    assert done == ["prepare", "flush", cycles, "event", "run", "event", "wait"]


def test_labels_as_in_text() -> None:
    weight = passes.random_weight(1000, 16, torch.float32, CPU)

    def share_of_first(drawn: str) -> float:
        (batch,) = passes.random_batches(1, 20_000, weight, drawn=drawn)
        return float((batch.labels == 0).double().mean())

    harmonic = sum(1 / rank for rank in range(1, 1001))
    assert share_of_first("text") == pytest.approx(1 / harmonic, rel=0.1)
    assert share_of_first("even") == pytest.approx(1 / 1000, abs=0.001)


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


def test_without_bare_products_or_a_reference_the_rest_is_timed(monkeypatch) -> None:
    def no_memory(*_) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(output_layer, "bare_products", no_memory)
    monkeypatch.setattr(output_layer.Exact, "of", no_memory)
    some = given(arms=["F.cross_entropy"], kernels=["torch"], ignored=0.0)
    monkeypatch.setattr(output_layer, "LOSSES", {"F.cross_entropy": lambda: peers.eager})
    rows = output_layer.measure("32x16x64", "random", some, CPU, Results(some, CPU))
    output_layer.show(rows, some)
    assert [row.get("reason") for row in rows] == ["OutOfMemoryError: no memory", None]
    assert rows[1]["seconds"] > 0 and rows[1]["share"] is None


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
