"""Lower bounds that no order of the same passes can beat.

If sequences are cut, a microbatch is a slice: work is counted on average over slices, and chains for the shortest.
All of them hold for any order with the given placement, microbatches, kinds of pass and costs, in the event model and
in the full one, which only adds waiting. Each is a few lines of proof, below; `best_bound` takes the largest.

work        A device runs all its passes within its span.
one device  Take any passes of one device d. If each starts at least h after the first pass of device e (because a
            chain of its own microbatch leads from e to it), and each is followed by a chain of at least t that ends on
            e, then e spans h + (their time) + t. With d = e, h = t = 0 it is the work bound; with e = all devices it
            bounds the makespan. The best choice of passes is all whose chains are at least h and t, for some h and t
            (Carlier, The one-machine sequencing problem, EJOR 11, 1982).
rounds      (memory) If a device holds at most k activations of a stage, the (j+k)-th F of that stage starts after the
            j-th release. Of the first j microbatches released one started its F as the j-th or later, so the j-th
            release ends a lifespan L after the start of the j-th F, where L is the longest chain from F to release.
            With m = q k + r and 1 <= r <= k: q L, and then the r others, which is "one device" for r microbatches.
ramps       (memory) A device with one stage runs at most k forwards before its first backward ends, which is a chain c
            after the start of its first forward; and at most k backwards after the start of its last forward, whose
            release ends a chain d later. So it idles for what c and d are longer than these passes, in different
            waits if m > k.
area        (memory) A device that holds at most k activations in all, each for at least its lifespan, spans at least
            m (sum of the lifespans of its stages) / k.
V           (memory) Unit times, V placement, split backward, transfers without time, m >= 2 p, at most k stage
            activations on every device: a span of at least 6 m + 6 p - 3 k - 1 (arXiv 2405.15362, figure 13). Not
            proved here, so applied in that case only. For p = 2, m = 4 and 6, and p = 3, m = 6, a constraint solver
            found nothing shorter for any k; V-Half meets it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from evenpipe.schedule import Costs, Kind, Placement, Program, VocabularyMode
from evenpipe.schedule.check_limit import limits_per_device
from evenpipe.schedule.passes import OFFLOAD_KINDS, parts_in
from evenpipe.words import count, unknown

from .microbatch import UNREACHED, Microbatch

MOST_DEVICES = 16
"""Most devices e for "one device", and for "rounds" and "area"; with up to twice as many devices, all are tried. Each
takes a pass over all nodes of a microbatch."""


_Ways = tuple[list[float], list[float]]
"""By node: the longest path to its start, and from its end."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A lower bound `value`, with the `name` of the argument and `why` as a sum in words."""

    value: float
    name: str
    why: str

    def to_dict(self) -> dict[str, Any]:
        """The bound as a dict for JSON."""
        return {"value": self.value, "name": self.name, "why": self.why}


def best_bound(
    placement: Placement,
    microbatches: int,
    costs: Costs | Sequence[Costs],
    *,
    of: str = "makespan",
    split: bool = False,
    vocabulary: VocabularyMode = VocabularyMode.FIRST_LAST,
    forward_only: bool = False,
    max_in_flight: float | Sequence[float] | None = None,
    again: Sequence[float] = (),
    proved: bool = False,
) -> Bound:
    """The largest known lower bound on the span or makespan (`of`) of all such orders.

    costs: also those of each slice of a sequence; `microbatches` is then the number of slices, of all together. split:
    whether backwards are I and W, or B. vocabulary, forward_only: as in `Order`. max_in_flight: the most stage
    activations of a device from F to B or W, one number or one per device. again: the time of each device per
    microbatch that is in no pass, but between F and backward of any of its stages: recomputation. proved: exclude the
    V bound. Raises InputError if a kind has no time, and for a limit below 1.
    """
    if of not in ("span", "makespan"):
        raise unknown("of", of, ("span", "makespan"))
    each = (costs,) if isinstance(costs, Costs) else tuple(costs)
    graph = Microbatch.of(placement, each, split=split, vocabulary=vocabulary, forward_only=forward_only)
    limits = () if max_in_flight is None else limits_per_device(max_in_flight, placement.devices, least=1)
    bounds = list(_free(microbatches, graph, of, again or [0.0] * placement.devices))
    if limits and not forward_only:
        whole = _ways(graph, None)
        bounds += _rounds(microbatches, graph, limits, of, whole)
        bounds += _ramps(microbatches, graph, limits, of, whole)
        bounds += _area(microbatches, graph, limits)
        if not proved:
            bounds += _v_shape(microbatches, graph, limits, split)
    return max(bounds, key=lambda bound: bound.value)


def program_bounds(program: Program, costs: Costs, peak_in_flight: Sequence[int]) -> dict[str, Bound]:
    """The best bounds on "span" and "makespan" of all orders with the kinds of pass of `program`, whose devices
    hold no more stage activations than `peak_in_flight`."""
    passes = [part for row in program.rows for part in parts_in(row)]
    kinds = {part.kind for part in passes}
    split = Kind.I in kinds
    each = costs.by_slice(program.slices) if costs.slices else (costs,)
    if split and Kind.B in kinds:
        each = tuple(either_backward(of_slice, program.placement) for of_slice in each)
    limits = None if kinds & OFFLOAD_KINDS or program.forward_only else [max(1, peak) for peak in peak_in_flight]
    microbatches = len({(part.microbatch, part.slice) for part in passes if part.kind is Kind.F})
    return {
        of: best_bound(
            program.placement,
            microbatches,
            each,
            of=of,
            split=split,
            vocabulary=program.vocabulary,
            forward_only=program.forward_only,
            max_in_flight=limits,
        )
        for of in ("span", "makespan")
    }


def either_backward(costs: Costs, placement: Placement) -> Costs:
    """Times of I and W that a whole backward also takes at least, for an order with both."""
    kinds = (Kind.B, Kind.I, Kind.W)
    whole, inputs, weights = costs.needed_times(placement, kinds, "give a number or a list")
    least = [min(i, b) for i, b in zip(inputs, whole, strict=True)]
    rest = [min(w, b - i) for w, b, i in zip(weights, whole, least, strict=True)]
    return replace(costs, I=tuple(least), W=tuple(rest))


def _free(microbatches: int, graph: Microbatch, of: str, again: Sequence[float]) -> Iterator[Bound]:
    """Bounds without a memory limit."""
    placement = graph.placement
    work = [in_passes + more for in_passes, more in zip(graph.work, again, strict=True)]
    busiest = _busiest(work)
    value = work[busiest] * microbatches
    yield Bound(value, "work", f"lower bound {_sum({'busy': value})} on device {busiest}")
    work_of_all = [microbatches * mean for mean in graph.mean]
    for reference in _references(placement, work, of):
        ways = _ways(graph, reference)
        yield max(
            (
                Bound(
                    value,
                    "one device",
                    f"lower bound {_sum({'ramp-up': head, 'busy': time, 'ramp-down': tail})} on device {device}",
                )
                for device in range(placement.devices)
                for more in [microbatches * again[device]]
                for value, head, time, tail in [_one_device(graph, device, work_of_all, ways, more)]
            ),
            key=lambda bound: bound.value,
        )


def _sum(parts: Mapping[str, float]) -> str:
    """A sum in words, as in "33 = 3 ramp-up + 24 busy + 6 ramp-down"; parts of 0 are left out."""
    terms = [f"{value:g} {name}" for name, value in parts.items() if value] or ["0"]
    return f"{sum(parts.values()):g} = {' + '.join(terms)}"


def _ways(graph: Microbatch, reference: int | None) -> _Ways:
    """The longest path to each node from passes of a device, and from it to their ends; None for all devices."""
    nodes = list(chain.from_iterable(graph.nodes_of)) if reference is None else graph.nodes_of[reference]
    return graph.before(nodes), graph.behind(nodes)


def _references(placement: Placement, work: list[float], of: str) -> list[int | None]:
    """The devices e for "one device"; None for all."""
    if of == "makespan":
        return [None]
    return sorted({placement.first_device, placement.last_device, _busiest(work), *_some(placement)})


def _busiest(work: Sequence[float]) -> int:
    return max(range(len(work)), key=work.__getitem__)


def _some(placement: Placement) -> range:
    """Evenly spaced devices, or all if there are few."""
    return range(0, placement.devices, max(1, placement.devices // MOST_DEVICES))


def _one_device(
    graph: Microbatch, device: int, work: list[float], ways: _Ways, again: float = 0.0
) -> tuple[float, float, float, float]:
    """The largest head + time + tail over sets of passes of `device`, and these three; `work`: the time of all
    passes of a node; ways: as of `_ways`; again: the time of all recomputation, which can be of any stage."""
    before, behind = ways
    nodes = [
        (before[node], behind[node], work[node])
        for node in graph.nodes_of[device]
        if before[node] > UNREACHED and behind[node] > UNREACHED
    ]
    if again:
        stages = graph.placement.stages_of(device)
        head = min(before[node] + graph.takes[node] for node in (graph.forward[stage] for stage in stages))
        nodes.append((head, min(behind[graph.backward[stage]] for stage in stages), again))
    best = (0.0, 0.0, 0.0, 0.0)
    nodes.sort(key=lambda node: -node[1])
    for least in {head for head, _, _ in nodes}:
        time = 0.0
        for head, tail, takes in nodes:  # by falling tail: each prefix is a candidate
            if head >= least:
                time += takes
                best = max(best, (least + time + tail, least, time, tail))
    return best


def _rounds(microbatches: int, graph: Microbatch, limits: tuple[float, ...], of: str, whole: _Ways) -> Iterator[Bound]:
    """The bounds "rounds". whole: `_ways` of all devices."""
    placement = graph.placement
    ends = {device: _ways(graph, device) for device in {placement.first_device, placement.last_device}}
    for device in _some(placement):
        stage = placement.stages_of(device)[0]  # the first device: its activations live longest
        forward, release = graph.forward[stage], graph.release[stage]
        before, behind = graph.before([forward]), graph.behind([release])
        lifespan = before[release] + graph.takes[release]
        most = math.floor(limits[device])
        rounds, rest = divmod(microbatches - 1, most)
        work = [(rest + 1) * least for least in graph.takes]
        last = max(_one_device(graph, other, work, (before, behind))[0] for other in range(placement.devices))
        # Time before the first of these forwards, and after the last of these releases.
        around = [head[forward] + tail[release] for head, tail in ([whole] if of == "makespan" else ends.values())]
        parts = {f"in {count(rounds, 'lifespan')} of {lifespan:g}": rounds * lifespan}
        parts |= {"after them": max(last, lifespan), "ramp-up and ramp-down": max(0.0, *around)}
        yield Bound(
            sum(parts.values()),
            "rounds",
            f"lower bound {_sum(parts)} on device {device}, which holds at most {count(most, 'activation')} of stage"
            f" {stage}",
        )


def _ramps(microbatches: int, graph: Microbatch, limits: tuple[float, ...], of: str, whole: _Ways) -> Iterator[Bound]:
    """The bounds "ramps". whole: `_ways` of all devices."""
    placement, takes = graph.placement, graph.takes
    if placement.stages > placement.devices or takes != graph.mean:
        return
    earliest, latest = whole
    for device in {placement.first_device, _busiest(graph.work)}:
        most = math.floor(limits[device])
        if most >= microbatches:
            continue
        (stage,) = placement.stages_of(device)
        forward, backward, release = graph.forward[stage], graph.backward[stage], graph.release[stage]
        of_forward, of_backward = graph.before([forward]), graph.before([backward])
        to_release = graph.behind([release])
        after = [node for node in graph.nodes_of[device] if of_forward[node] > UNREACHED]
        # The others may run at any time behind the forward. Without them less is certain to run, but more waits.
        needed = [node for node in after if to_release[node] > UNREACHED]
        for nodes in (after, needed):
            before = takes[backward] + most * sum(takes[node] for node in nodes if of_backward[node] == UNREACHED)
            behind = takes[forward] + sum(
                (most if to_release[node] > UNREACHED else microbatches) * takes[node]
                for node in nodes
                if node != forward
            )
            idle = [
                max(0.0, of_forward[backward] + takes[backward] - before),
                max(0.0, of_forward[release] + takes[release] - behind),
            ]
            around = earliest[forward] + min(latest[node] for node in nodes) if of == "makespan" else 0.0
            parts = {"ramp-up and ramp-down": around, "busy": microbatches * sum(takes[node] for node in nodes)}
            parts |= {"waiting for its first backward": idle[0], "waiting after its last forward": idle[1]}
            yield Bound(
                sum(parts.values()),
                "ramps",
                f"lower bound {_sum(parts)} on device {device}, which holds at most {count(most, 'activation')}",
            )


def _area(microbatches: int, graph: Microbatch, limits: tuple[float, ...]) -> Iterator[Bound]:
    for device in _some(graph.placement):
        lifespan = 0.0
        for stage in graph.placement.stages_of(device):
            release = graph.release[stage]
            lifespan += graph.before([graph.forward[stage]])[release] + graph.takes[release]
        value = lifespan * microbatches / limits[device]
        yield Bound(
            value,
            "area",
            f"lower bound {value:g} = {count(microbatches, 'microbatch')} x {lifespan:g} / {limits[device]:g} on device"
            f" {device}, which holds at most {count(limits[device], 'activation', 'g')}, those of a microbatch for"
            f" {lifespan:g}",
        )


def _v_shape(microbatches: int, graph: Microbatch, limits: tuple[float, ...], split: bool) -> Iterator[Bound]:
    if graph.takes != graph.mean:
        return
    unit = graph.takes[graph.forward[0]]
    passes = {graph.takes[node] for node, device in enumerate(graph.device) if device >= 0}
    transfers = any(graph.takes[node] for node, device in enumerate(graph.device) if device < 0)
    p = graph.placement.devices
    if (
        split
        and graph.placement == Placement.v_shape(p)
        and passes == {unit}
        and not transfers
        and microbatches >= 2 * p
    ):
        most = math.floor(max(limits))
        value = (6 * microbatches + 6 * p - 3 * most - 1) * unit
        peak = count(most, "stage activation")
        yield Bound(value, "V", f"lower bound {value:g} of V schedules with a peak of {peak} (arXiv 2405.15362)")
