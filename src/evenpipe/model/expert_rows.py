"""How many rows, pairs and bytes of a microbatch reach experts that are sharded over the members of a group.

    n tokens of a member, k choices of each, E experts, ep members, s: load of the fullest member over the mean
    local = ceil(E / ep)                        experts of a member; the last members have fewer
    D     = sum of 1 - C(E - e, k) / C(E, k)    members that a token meets if routing is even; e: experts of a member
    R     = s n ep (1 - C(E - local, k) / C(E, k))      rows of the fullest member: s n D where ep divides E
    P     = s n k ep local / E                          its pairs of a row and an expert: s n k

A row travels once to each member that holds any expert of its token, and one row comes back: `experts.layout`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from evenpipe.words import refused

TRANSFERS = {"F": 2, "B": 2, "I": 2, "W": 0, "full": 1, "selective": 0}
"""Trips of rows in a pass, and in the recomputation of a checkpointed layer, which stops where its experts have saved
what they need. R is a forward like F."""

SMALL = {"choices": 4, "weights": 4, "gradients of weights": 4}
"""Bytes per choice of a row that travel with the rows: int32 and fp32, the first two in F."""


def check_skew(skew: float) -> None:
    """Raise InputError for an impossible skew."""
    if not 1 <= skew < math.inf:
        raise refused("skew", skew, "a number of at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRows:
    """A call of a layer's experts, on the fullest member."""

    tokens: int
    """Tokens of each member."""
    choices: int
    experts: int
    """Experts of all members."""
    members: int = 1
    skew: float = 1.0

    @property
    def local(self) -> int:
        """Number of experts of the first members."""
        return -(-self.experts // self.members)

    @property
    def rows(self) -> int:
        """R."""
        return min(self.members * self.tokens, round(self.skew * self.tokens * self.members * self._share(self.local)))

    @property
    def pairs(self) -> int:
        """P."""
        even = self.tokens * self.choices * self.members * self.local / self.experts
        return min(self.rows * min(self.choices, self.local), max(self.rows, round(self.skew * even)))

    @property
    def met(self) -> float:
        """D: members that a token meets."""
        held = (self._held(member) for member in range(self.members))
        return sum(self._share(count) for count in held)

    @property
    def own(self) -> int:
        """Rows that stay on the member."""
        return round(self.tokens * self._share(self.local))

    @property
    def sent(self) -> list[int]:
        """Rows that the first member sends to each member; 0 to itself."""
        return [0, *(round(self.tokens * self._share(self._held(member))) for member in range(1, self.members))]

    def traffic(self, hidden_size: int, element: int, transfers: int = 1) -> int:
        """Return the bytes of rows that a member sends in `transfers` trips (see `TRANSFERS`): n D (ep - 1) / ep h b
        each."""
        return transfers * sum(self.sent) * hidden_size * element

    def _held(self, member: int) -> int:
        return max(0, min(self.local, self.experts - member * self.local))

    def _share(self, count: int) -> float:
        """Return the share of tokens that choose any of `count` experts."""
        misses = math.comb(self.experts - count, self.choices)
        return 1 - misses / math.comb(self.experts, self.choices)
