"""Decide whether a device may run a forward before its turn, by a plan that is known to fit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


class MemoryPlan:
    """The F, B and W passes of a device in an order that fits, and which of them have run.

    Invariant: if the device ran the remaining plan unchanged, it would never hold more than `limit` activations. Passes
    that release activations may run at any time, a forward if `allows` returns True, which it does in its turn.
    """

    def __init__(self, plan: Sequence[int], holds: Sequence[int], limit: int | None, ahead: int = 0) -> None:
        """`plan` has the numbers of passes, and `holds` the change of each, 1 or -1; unchanged, they stay within
        `limit`.

        A device that only evaluates stores nothing and has no limit: up to `ahead` forwards run before their turn.
        """
        peak = max(accumulate(holds), default=0)
        assert limit is None or peak <= limit
        self._turn = {number: turn for turn, number in enumerate(plan)}
        self._holds = holds
        self._ran = bytearray(len(plan))
        self._limit = limit
        self._room = ahead if limit is None else limit - peak
        self._next = 0  # first turn that has not come
        self._held = 0
        self._early = 0  # forwards that ran before their turn

    def allows(self, forward: int) -> bool:
        """Whether the invariant is still true if `forward` runs now."""
        # At any later turn the device holds at most the activations of the plan plus the early forwards.
        if self._early < self._room or self._turn[forward] == self._next:
            return True
        if self._limit is None:
            return False
        held = self._held + 1
        if held > self._limit:
            return False
        for turn in range(self._next, self._turn[forward]):
            if not self._ran[turn]:
                held += self._holds[turn]
                if held > self._limit:
                    return False
        return True

    def run(self, number: int) -> None:
        """Record that a pass runs now; passes that are not in the plan store nothing."""
        turn, holds, ran = self._turn.get(number), self._holds, self._ran
        if turn is None:
            return
        self._held += holds[turn]
        ran[turn] = 1
        if turn > self._next:
            self._early += holds[turn] > 0
            return
        turn += 1
        while turn < len(ran) and ran[turn]:
            self._early -= holds[turn] > 0
            turn += 1
        self._next = turn
