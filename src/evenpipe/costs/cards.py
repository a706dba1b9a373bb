"""Network cards that transfers of different kinds share.

Groups of the same kind never share a card (`collectives`). But while passes exchange keys or rows of experts across
nodes, the same cards carry hops between stages and collectives of vocabulary layers, which overlap with passes. Two
concurrent transfers get half of the card each, so a transfer that is concurrent with others for a fraction d of its
time gets 1 - d / 2 of the bandwidth. Gradients are reduced after the last pass, when the card is otherwise idle.
"""

from __future__ import annotations

from collections.abc import Mapping


def slowdowns(busy: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Return the slowdown of each kind of transfer relative to running alone. busy: by kind, for how much of `seconds`
    it keeps a device's card busy; 0 for kinds that stay inside nodes."""
    everything = sum(busy.values())
    return {
        kind: 1.0 if kind_seconds == 0 else 1 / (1 - min(1.0, (everything - kind_seconds) / seconds) / 2)
        for kind, kind_seconds in busy.items()
    }
