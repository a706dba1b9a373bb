"""Activations on the host in real runs: the same bits, and nothing that is used too early. What is left on the device
is counted by test_estimated_memory.py.

The judge is the same pipeline with everything on the device, which tests/fuzz compares with transformers in one
process. Memory that is given back is poisoned, copies are late by chance, layers choose at random what becomes of
their activations.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from harness import run_processes
from small_families import CONFIGS
from small_llama import llama

from evenpipe import OffloadOptions, Pipeline
from evenpipe.errors import InputError
from evenpipe.host.memory import return_freed_memory
from evenpipe.host.offload import Activations
from evenpipe.host.pool import FileSlab, Slot
from evenpipe.model import describe
from evenpipe.schedule import SCHEDULES, Kind, Order, add_recompute, offloaded, plan_order

MODES = ("first-last", "vocab-1", "vocab-2")
VOCABULARY = 67
LAYERS = 8
DELAY_SECONDS = 0.002
"""Of a copy, at most."""


@dataclass(frozen=True)
class Case:
    schedule: str
    mode: str
    microbatches: int
    seed: int
    activations: str = "all"


@cache
def described(tied: bool) -> Any:
    return describe(llama(VOCABULARY, tied, torch.float32, LAYERS))


def poison_and_delay(seed: int) -> list[int]:
    """Copies begin late, and memory of the host holds no number as soon as it is given back. Returns how many copies
    there were, as they are made."""
    chance, count = random.Random(seed), [0]
    write, read, load = FileSlab.write, FileSlab.read, Activations.load

    def late_write(slab: FileSlab, slot: Slot, address: int, size: int) -> None:
        count[0] += 1
        time.sleep(chance.uniform(0, DELAY_SECONDS))
        write(slab, slot, address, size)

    def late_read(slab: FileSlab, slot: Slot, address: int, size: int) -> None:
        count[0] += 1
        time.sleep(chance.uniform(0, DELAY_SECONDS))
        read(slab, slot, address, size)
        nothing = torch.full((size // 4 + 1,), torch.nan)
        write(slab, slot, nothing.data_ptr(), size)

    def load_into_nothing(activations: Activations, key: tuple[int, int], label: str) -> None:
        """Fresh memory of the device holds what was there before; here it holds no number until the copy is over."""
        empty = torch.empty
        torch.empty = lambda size, *arguments, **named: empty(size, *arguments, **named).fill_(255)  # type: ignore
        try:
            load(activations, key, label)
        finally:
            torch.empty = empty

    FileSlab.write, FileSlab.read, Activations.load = late_write, late_read, load_into_nothing  # type: ignore
    return count


def choices(seed: int) -> dict[str, Any]:
    """What becomes of the layers' activations, at random."""
    chance = random.Random(seed)
    return {
        "checkpointing": [chance.choice(("none", "full", "selective")) for _ in range(LAYERS)],
        "layers": [chance.choice(("offload", "offload", "keep")) for _ in range(LAYERS)],
        "tied": chance.random() < 0.5,
        "again": chance.random() < 0.25,
        "streams": chance.choice((1, 2)),
    }


def schedule_of(case: Case, again: bool) -> Any:
    if not again:
        return case.schedule

    def recomputed(devices: int, microbatches: int) -> Order:
        return add_recompute(plan_order(case.schedule, devices, microbatches, case.mode, offload="none"))

    return recomputed


def gradients(case: Case, activations: str) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Losses of two steps of other sizes, the sums of their gradients, and how many forwards of this device were
    moved."""
    given = choices(case.seed)
    pipeline = Pipeline(
        described(given["tied"]),
        schedule=schedule_of(case, given["again"]),
        vocabulary=case.mode,
        microbatches=case.microbatches,
        activation_checkpointing=given["checkpointing"],
        offload=OffloadOptions(activations=activations, layers=given["layers"], streams=given["streams"]),
        self_check=False,
    )
    losses = []
    for sequences, tokens in ((2, 6), (1, 9)):
        ids, labels = reference.batches(VOCABULARY, sequences * case.microbatches, tokens, 1, seed=tokens)[0]
        losses.append(pipeline.step(ids, labels).loss)
    found = pipeline.full_gradients()
    held = pipeline._executor.walker._activations
    assert held is None or (held.pool.used == 0 and held.left == ())
    moved = len({item for item in pipeline.order.rows[pipeline.device] if item and item.kind is Kind.O})
    pipeline.close()
    return losses, found, moved


def faults_of_all(cases: list[Case]) -> tuple[list[str], int, int]:
    """What is wrong, how many forwards were moved, and how many copies were made."""
    Activations.smallest_bytes = 1
    kept = [gradients(case, "none") for case in cases]
    count = poison_and_delay(os.getpid())
    faults, forwards = [], 0
    for case, (losses, wanted, _) in zip(cases, kept, strict=True):
        try:
            found_losses, found, moved = gradients(case, case.activations)
        except Exception as error:
            error.add_note(str(case))
            raise
        forwards += moved
        others = [name for name, tensor in wanted.items() if not torch.equal(tensor, found[name])]
        faults += [f"{case}: other bits in {others}"] * bool(others)
        faults += [f"{case}: losses {found_losses}, not {losses}"] * (found_losses != losses)
    return faults, forwards, count[0]


def every_schedule(processes: int) -> list[Case]:
    numbers, cases = (1, 3, processes + 1, 2 * processes), []
    for turn, (number, name) in itertools.product(range(2), enumerate(SCHEDULES)):
        place = number + turn
        cases.append(Case(name, MODES[place % 3], numbers[place % 4], 31 * number + turn))
    return cases


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.sampled(1)
def test_every_schedule_gives_the_same_bits_with_everything_on_the_host(processes: int, sample) -> None:
    """Also two schedules that have copies of their own."""
    several = Case("1f1b", "vocab-2", 2 * processes, 1)
    scheduled = [Case(name, mode, 6, seed, "scheduled") for name in ("po-h", "po-f") for seed, mode in enumerate(MODES)]
    cases = [several, *sample(every_schedule(processes), 3), *sample(scheduled, 1)]
    results = run_processes(faults_of_all, processes, cases)
    assert not any(faults for faults, _, _ in results), "\n".join(fault for faults, _, _ in results for fault in faults)
    assert sum(moved for _, moved, _ in results) >= processes * several.microbatches
    assert sum(copies for _, _, copies in results) >= 20 * processes


# --- memory -----------------------------------------------------------------------------------------------------


def resident() -> int:
    """Bytes of the process that no file stands behind."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def grown_in_a_step(activations: str) -> int:
    config = CONFIGS["llama"](hidden_size=256, intermediate_size=512, max_position_embeddings=256)
    options = {"schedule": "gpipe", "microbatches": 16, "offload": OffloadOptions(activations=activations)}
    pipeline = Pipeline(config, self_check=False, **options)
    return_freed_memory()  # with everything on the device too
    ids = torch.zeros(16, 256, dtype=torch.int64)
    pipeline.step(ids)
    before, seen, over = resident(), [], threading.Event()

    def watch() -> None:
        while not over.wait(0.001):
            seen.append(resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    pipeline.step(ids)
    over.set()
    watcher.join()
    return max(seen) - before


@pytest.mark.slow
def test_resident_memory_falls() -> None:
    """To that of a microbatch, and the gradients of the last hidden states, which forwards of GPipe make."""
    on_device, on_host = (run_processes(grown_in_a_step, 1, activations)[0] for activations in ("none", "all"))
    assert on_device > 2**26 and on_host < on_device / 4


# --- what a user may give ---------------------------------------------------------------------------------------

WRONG: list[tuple[Any, str]] = [
    (OffloadOptions(activations=1e9), "a limit needs costs with bytes"),
    (OffloadOptions(layers=("keep", "keep")), "it must be one choice, or one for each of the 8 layers"),
    ({"activations": "all"}, "it must be an OffloadOptions"),
]


def given_by_a_user(order: Order) -> None:
    for options, text in WRONG:
        with pytest.raises(InputError) as error:
            Pipeline(described(False), offload=options, self_check=False)
        assert text in str(error.value)
    pipeline = Pipeline(described(False), schedule=order, self_check=False)
    ids, labels = reference.batches(VOCABULARY, 6, 6, 1)[0]
    pipeline.step(ids, labels)
    assert pipeline.order == order
    pipeline.close()


def test_wrong_options_are_refused_by_every_process_and_an_order_with_copies_runs_as_it_stands() -> None:
    order = plan_order("1f1b", 2, 6, "vocab-2", offload="all")
    assert offloaded(order)
    run_processes(given_by_a_user, 2, order)
