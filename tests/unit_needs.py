"""What passes need and feed, one by one, as `Rules` says it by kind and stage."""

from __future__ import annotations

from evenpipe.schedule import Pass, Rules, Transfer, parts_of
from evenpipe.schedule.rules import PassGroup


def waits_for(rules: Rules, item: Pass, device: int) -> tuple[Transfer, ...]:
    """The transfers that must have completed on `device` before it runs `item`, as that device issues them."""
    return tuple(
        route.transfer(device, part.microbatch, part.slice)
        for part in parts_of(item)
        if part.microbatch is not None
        for route in rules.of_pass(device, part.kind, part.stage).waits
    )


def producers(rules: Rules, transfer: Transfer, device: int) -> tuple[tuple[int, Pass], ...]:
    """(device, pass) of each pass that produces a part of the data of `transfer`, issued by `device`."""
    route = rules.route(device, transfer)
    return _passes(transfer, () if route is None else route.producers)


def consumers(rules: Rules, transfer: Transfer, device: int) -> tuple[tuple[int, Pass], ...]:
    """(device, pass) of each pass that uses the data of `transfer`, issued by `device`."""
    route = rules.route(device, transfer)
    return _passes(transfer, () if route is None else route.consumers)


def _passes(transfer: Transfer, groups: tuple[PassGroup, ...]) -> tuple[tuple[int, Pass], ...]:
    unit = transfer.microbatch, transfer.slice
    return tuple((group.device, Pass(group.kind, group.stage, *unit)) for group in groups)
