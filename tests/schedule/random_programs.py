"""Random programs: whatever dependencies allow, with recomputation, copies to the host and vocabulary passes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from evenpipe.schedule import SHARING, Item, Kind, Pass, Placement, Program, Route, Rules, VocabularyMode

MODES_OF_ROWS = (VocabularyMode.FIRST_LAST, VocabularyMode.VOCAB_2, VocabularyMode.VOCAB_1)
"""All others have the passes of one of these."""
Node = tuple[int, Pass] | tuple[Route, int]
"""A pass and its device, or a transfer by its route and microbatch."""


def random_program(
    rng: random.Random, placement: Placement, microbatches: int, mode: VocabularyMode, forward_only: bool
) -> Program:
    """Passes and transfers one after the other, each when chance will have it, once what it needs is there."""
    sharing = rng.choice(SHARING)
    rules = Rules(placement, mode, forward_only=forward_only)
    passes = dict.fromkeys(random_passes(rng, placement, microbatches, mode, forward_only))
    needs: dict[Node, list[Node]] = {(route, i): [] for route in rules.routes for i in range(microbatches)}
    for device, item in passes:
        rule, i = rules.of_pass(device, item.kind, item.stage), item.microbatch
        assert i is not None
        own = [(device, Pass(need.kind, need.stage, i)) for need in rule.needs if need.step == 0]
        own += [(device, replace(one, kind=Kind.I)) for _, one in own if one.kind is Kind.B]
        needs[device, item] = [*(one for one in own if one in passes), *((route, i) for route in rule.uses)]
        for route in rule.feeds:
            needs[route, i].append((device, item))
    followers: dict[Node, list[Node]] = {node: [] for node in needs}
    for node, needed in needs.items():
        for one in needed:
            followers[one].append(node)
    missing = {node: len(needed) for node, needed in needs.items()}
    ready = [node for node, count in missing.items() if not count]
    rows: list[list[Item]] = [[] for _ in range(placement.devices)]
    while ready:
        node = ready.pop(rng.randrange(len(ready)))
        match node:
            case int(device), Pass() as item:
                rows[device].append(item)
            case Route() as route, int(i):
                for device in route.members:
                    rows[device].append(route.transfer(device, i, sharing=sharing))
        for one in followers[node]:
            missing[one] -= 1
            if not missing[one]:
                ready.append(one)
    assert not any(missing.values())
    return Program(placement, microbatches, tuple(map(tuple, rows)), mode, forward_only, sharing=sharing)


def random_passes(
    rng: random.Random, placement: Placement, microbatches: int, mode: VocabularyMode, forward_only: bool
) -> Iterator[tuple[int, Pass]]:
    """All passes, each with its device: backwards whole and split, some forwards twice, some activations moved."""
    split, again, moved = rng.choice([0.0, 0.5, 1.0]), rng.random() / 2, rng.random() / 2
    for i in range(microbatches):
        for device in range(placement.devices):
            for kind in sorted(mode.kinds(forward_only=forward_only)):
                yield device, Pass(kind, None, i)
        for stage, device in enumerate(placement.stage_device):
            kinds = [Kind.F]
            if not forward_only:
                kinds += [Kind.I, Kind.W] if rng.random() < split else [Kind.B]
                kinds += [Kind.R] if rng.random() < again else []
                kinds += [Kind.O, Kind.D, Kind.L] if rng.random() < moved else []
            for kind in kinds:
                yield device, Pass(kind, stage, i)
