"""What each kind of pass does with the data and the memory of its device: one table, which all others follow.

    takes, makes   what flows to it and from it (`flows`): along the edges of its stage, or by collectives
    keeps, frees   what it leaves on the device for later passes of the same stage and unit, and what it lets go of

Activations in flight, list scheduling, bytes over time, the memory replay and the assertions of the runtime come from
it. A whole output layer is part of the last stage's F, and of its B, or I and W.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from .passes import Kind, TransferKind


class Kept(StrEnum):
    """What a device holds between passes, once per stage and unit, or per unit for `PROBABILITIES`."""

    ACTIVATIONS = "activations"
    """What a forward leaves for the backward of its stage: the graph, or with R only the input until R has run."""
    WEIGHT_INPUTS = "weight inputs"
    """What I leaves for W."""
    ON_HOST = "activations on the host"
    PROBABILITIES = "probabilities"
    """What S leaves for T."""


@dataclass(frozen=True, slots=True)
class Effect:
    """The effect of one kind of pass. Hops are named by their sending end."""

    takes: tuple[TransferKind, ...] = ()
    makes: tuple[TransferKind, ...] = ()
    keeps: tuple[Kept, ...] = ()
    frees: tuple[Kept, ...] = ()


_FORWARD, _BACK = TransferKind.SEND_F, TransferKind.SEND_B
_TAKEN_BACK, _MADE_BACK = (_BACK, TransferKind.DX), (_BACK, TransferKind.ROW_GRADIENTS)

EFFECTS: Mapping[Kind, Effect] = {
    Kind.F: Effect((_FORWARD, TransferKind.ROWS), (_FORWARD, TransferKind.X), keeps=(Kept.ACTIVATIONS,)),
    Kind.B: Effect(_TAKEN_BACK, _MADE_BACK, frees=(Kept.ACTIVATIONS,)),
    Kind.I: Effect(_TAKEN_BACK, _MADE_BACK, keeps=(Kept.WEIGHT_INPUTS,), frees=(Kept.ACTIVATIONS,)),
    Kind.W: Effect(frees=(Kept.WEIGHT_INPUTS,)),
    Kind.D: Effect(keeps=(Kept.ON_HOST,), frees=(Kept.ACTIVATIONS,)),
    Kind.L: Effect(keeps=(Kept.ACTIVATIONS,), frees=(Kept.ON_HOST,)),
    Kind.E: Effect(makes=(TransferKind.ROWS,)),
    Kind.G: Effect(takes=(TransferKind.ROW_GRADIENTS,)),
    Kind.S: Effect((TransferKind.X,), (TransferKind.STATISTICS,), keeps=(Kept.PROBABILITIES,)),
    Kind.C: Effect((TransferKind.STATISTICS,), (TransferKind.DX,)),
    Kind.T: Effect(frees=(Kept.PROBABILITIES,)),
}
"""Without two barriers. Kinds without an entry have no effect of their own: O only starts a copy, and R makes again
what F did not keep."""


def effect_of(kind: Kind, barriers: int = 0, *, forward_only: bool = False) -> Effect:
    """Return the effect of a kind in an order with these barriers: with two, T does what C does with one."""
    found = EFFECTS.get(kind, _NONE)
    if kind is Kind.T and barriers == 2 and not forward_only:
        combining = EFFECTS[Kind.C]
        return Effect(combining.takes, combining.makes, found.keeps, found.frees)
    return found


def changes(of: Collection[Kept]) -> dict[Kind, int]:
    """Return by how much each kind of pass changes the number of these on its device, without kinds that do not."""
    found = {
        kind: sum(held in of for held in effect.keeps) - sum(held in of for held in effect.frees)
        for kind, effect in EFFECTS.items()
    }
    return {kind: change for kind, change in found.items() if change}


ON_DEVICE = changes({Kept.ACTIVATIONS, Kept.WEIGHT_INPUTS})
"""Stage activations on the device: forwarded, not yet released, and not on the host."""
IN_FLIGHT = changes({Kept.ACTIVATIONS, Kept.WEIGHT_INPUTS, Kept.ON_HOST})
"""Stage activations in flight: forwarded and not yet released by B, or by W if the backward is split."""
_NONE = Effect()
