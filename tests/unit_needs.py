"""What passes need and feed, one by one, as `Dependencies` says it by kind and stage."""

from __future__ import annotations

from evenpipe.schedule import Dependencies, Pass, Transfer, parts_of
from evenpipe.schedule.flows import Site


def waits_for(dependencies: Dependencies, item: Pass, device: int) -> tuple[Transfer, ...]:
    """The transfers that must have completed on `device` before it runs `item`, as that device issues them."""
    return tuple(
        route.transfer(device, part.microbatch, part.slice)
        for part in parts_of(item)
        if part.microbatch is not None
        for route in dependencies.rule(device, part.kind, part.stage).waits
    )


def producers(dependencies: Dependencies, transfer: Transfer, device: int) -> tuple[tuple[int, Pass], ...]:
    """(device, pass) of each pass that produces a part of the data of `transfer`, issued by `device`."""
    route = dependencies.route_of(transfer, device)
    return _passes(transfer, () if route is None else route.producers)


def consumers(dependencies: Dependencies, transfer: Transfer, device: int) -> tuple[tuple[int, Pass], ...]:
    """(device, pass) of each pass that uses the data of `transfer`, issued by `device`."""
    route = dependencies.route_of(transfer, device)
    return _passes(transfer, () if route is None else route.consumers)


def _passes(transfer: Transfer, sites: tuple[Site, ...]) -> tuple[tuple[int, Pass], ...]:
    unit = transfer.microbatch, transfer.slice
    return tuple((site.device, Pass(site.kind, site.stage, *unit)) for site in sites)
