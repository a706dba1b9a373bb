"""Network cards that transfers of different kinds share.

Groups of one kind have their own cards at any time (`collectives`). But while passes exchange keys or rows of experts
across nodes, the same cards carry hops between stages and collectives of vocabulary layers, which run beside passes.
Two transfers that meet have half of the card each; so a transfer that meets others during a share d of its time has a
share 1 - d / 2 of the bandwidth. Sums of gradients come after the last pass and meet nothing.
"""

from __future__ import annotations

from collections.abc import Mapping


def slowdowns(busy: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Return how many times as long each kind of transfer takes as alone. busy: by kind, how long it keeps a device's
    card busy of so many seconds; kinds that stay inside nodes do so for 0."""
    everything = sum(busy.values())
    return {
        kind: 1.0 if kind_seconds == 0 else 1 / (1 - min(1.0, (everything - kind_seconds) / seconds) / 2)
        for kind, kind_seconds in busy.items()
    }
