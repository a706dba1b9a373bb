"""One random run with a fault: what runs, and who fails where and how. Drawn from a seed alone."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from typing import Any

from evenpipe.errors import InputError
from evenpipe.recipe.layout import runnable_order
from evenpipe.recipe.recipe import Recipe
from evenpipe.schedule import SCHEDULES, add_slices, without_offload

MODES = ("first-last", "redistribute", "interlaced", "vocab-1", "vocab-2")

LAYERS = 8

FIRST_WITH_TENSOR_RANKS = 10_000
"""Cases of this seed and later ones have two tensor ranks on each device."""
FIRST_WITH_CONTEXT_RANKS = 50_000
"""Cases of this seed and later ones have two context ranks on each device instead, and some of them slices."""

FIRST_WITH_EXPERTS = 70_000
"""Cases of this seed and later ones have two replicas instead, which share the experts of every layer."""

FAULTS = {
    # how: (the victim's end as the others see it, as the one who started them may see it too)
    "SIGKILL": (r"process V \(pid \d+\) has died", r"process V \(pid \d+\) was killed by signal 9 \(SIGKILL\)"),
    "SIGSEGV": (r"process V \(pid \d+\) has died", r"process V \(pid \d+\) was killed by signal 11 \(SIGSEGV\)"),
    "SIGTERM": (
        r"process V \(pid \d+\) (has died|was ended by signal 15)",
        r"process V \(pid \d+\) was killed by signal 15",
    ),
    "SIGSTOP": (r"process V gave no sign of life for", r"process V \(pid \d+\) was stopped for"),
    "freezes": (r"process V gave no sign of life for", r"process V \(pid \d+\) gave no sign of life for"),
    "hangs": (r"timed out awaiting .*process V (does not wait|awaits)",) * 2,  # it may have announced a wait
    "os._exit(7)": (r"process V \(pid \d+\) has died", r"process V \(pid \d+\) ended with exit code 7"),
    "sys.exit(5)": (r"process V \(pid \d+\) has (ended while others|died)", r"process V failed: SystemExit: 5"),
    # With a colon: as whoever saves a checkpoint puts it.
    "ArithmeticError": (r"process V(:| failed:) ArithmeticError: a bad number",) * 2,
    "MemoryError": (r"process V(:| failed:) MemoryError",) * 2,
    "KeyboardInterrupt": (r"process V failed: KeyboardInterrupt",) * 2,
    "InputError": (r"loss: a bad number; expected a good one",) * 2,
    "OSError": (r"process V(:| failed: OSError: \[Errno 28\]) no space left on device",) * 2,
}
"""By how a process fails, what must be said about process V: by the others, and by who started them."""

PLACES = {
    # where: weight
    "start": 2,  # before and after processes meet, and round the making of the default group
    "build": 2,  # stages, communicators, their warm-up
    "step": 6,  # before, inside and after passes, and between them
    "wait": 4,  # announced, and about to wait or in it
    "issue": 4,  # before and after the library is given a transfer
    "optimizer": 1,
    "checkpoint": 2,
    "evaluate": 1,
    "close": 1,
}

CHANGES_NOTHING = {("close", "hangs"), ("wait", "hangs")}
"""Nobody waits any more for one that hangs at its end; one that hangs in a wait is waiting."""

NOBODY_LEFT = {("close", "SIGSTOP"), ("close", "freezes")}
"""Under torchrun the others may have ended by then, and its agent waits for ever."""


@dataclass(frozen=True)
class Case:
    """A run and its fault."""

    seed: int
    started_by: str
    """"launch" or "torchrun"."""
    processes: int
    schedule: str
    vocabulary: str
    microbatches: int
    victim: int
    how: str
    where: str
    share: float
    """Which of the places of that kind: this far along. The first one beside a stopped process, which would soon keep
    the victim from going on."""
    also_stopped: int | None
    """Another process that is stopped (SIGSTOP) just before, and must not outlive the run or hold up its end."""
    tp: int = 1
    cp: int = 1
    context_exchange: str = "keys"
    slices: int = 1
    ep: int = 1

    @property
    def place(self) -> str:
        """What messages say of the victim beside its number, once there is a pipeline."""
        ranks = self.tp * self.cp
        if self.ep > 1:
            return f"replica {self.victim % 2}, device {self.victim // 2}"
        if ranks == 1:
            return ""
        kind = "tensor rank" if self.tp > 1 else "context rank"
        return f"device {self.victim // ranks}, {kind} {self.victim % ranks}"

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str) -> Case:
        return Case(**json.loads(text))


def draw(seed: int, started_by: str | None = None) -> Case:
    """The case of a seed."""
    dice = random.Random(seed)
    starter = dice.choices(("launch", "torchrun"), (3, 1))[0]
    starter = started_by or starter
    ranks = 2 if seed >= FIRST_WITH_TENSOR_RANKS else 1
    while True:
        devices, microbatches = dice.randint(2, 4) if ranks == 1 else dice.randint(1, 2), dice.randint(1, 9)
        schedule, vocabulary = dice.choice(list(SCHEDULES)), dice.choice(MODES)
        where = dice.choices(list(PLACES), list(PLACES.values()))[0]
        how = dice.choice(list(FAULTS))
        impossible = CHANGES_NOTHING | (NOBODY_LEFT if starter == "torchrun" else set())
        if (where, how) not in impossible and _runs(schedule, devices, microbatches):
            break
    pieces: dict[str, Any] = {}
    if seed >= FIRST_WITH_EXPERTS:
        pieces = {"ep": ranks}
    elif seed >= FIRST_WITH_CONTEXT_RANKS:
        pieces = {"cp": ranks, "context_exchange": dice.choice(("keys", "heads"))}
        pieces["slices"] = dice.choice((1, 2)) if _runs(schedule, devices, microbatches, 2) else 1
    processes = devices * ranks
    victim, share = dice.randrange(processes), dice.random()
    others = [rank for rank in range(processes) if rank != victim]
    stops = len(others) > 1 and where not in ("start", "close") and dice.random() < 0.15
    also = dice.choice(others) if stops and how not in ("SIGSTOP", "freezes", "hangs") else None
    return Case(
        seed,
        starter,
        processes,
        schedule,
        vocabulary,
        microbatches,
        victim,
        how,
        where,
        share if also is None else 0.0,
        also,
        **pieces or {"tp": ranks},
    )


def _runs(schedule: str, devices: int, microbatches: int, slices: int = 1) -> bool:
    try:
        order = runnable_order(Recipe.of(pp=devices, microbatches=microbatches * slices, schedule=schedule))
        return add_slices(without_offload(order), slices).placement.stages <= LAYERS
    except InputError:
        return False
