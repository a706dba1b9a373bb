"""Lower bounds that no order of the same passes can beat.

If sequences are cut, a microbatch here is a slice: work is averaged over slices, and chains are those of the shortest.
All bounds hold for any order with the given placement, microbatches, kinds of pass and costs, both in the event model
and in the full model, which only adds waiting. Their proofs take a few lines each, below; `best_bound` returns the
largest bound.

work        A device runs all its passes within its span.
one device  Take any set of passes of a device d. If each starts at least h after the first pass of device e (because
            a chain of its own microbatch leads from e to it), and each is followed by a chain of at least t that ends
            on e, then the span of e is at least h + (time of these passes) + t. With d = e and h = t = 0 this is the
            work bound; with all devices in place of e it bounds the makespan. The best sets are those of all passes
            whose chains are at least h and t, for some h and t (Carlier, The one-machine sequencing problem, EJOR 11,
            1982).
rounds      (memory) If a device holds at most k activations of a stage, the (j+k)-th F of that stage starts after the
            j-th release. Among the first j microbatches that are released, at least one started its F as the j-th or
            later, so the j-th release ends at least a lifespan L after the start of the j-th F, where L is the longest
            chain from F to release. With m = q k + r and 1 <= r <= k, this gives q L plus the time of the remaining r
            microbatches, for which the bound "one device" is used.
ramps       (memory) A device with one stage runs at most k forwards before its first backward ends, which is a chain c
            after the start of its first forward; and at most k backwards after the start of its last forward, whose
            release ends a chain d later. So the device idles for the time by which c and d exceed these passes; the
            two idle times are distinct if m > k.
area        (memory) A device that holds at most k activations in total, each for at least its lifespan, has a span of
            at least m (sum of the lifespans of its stages) / k.
V           (memory) With unit times, V placement, split backward, transfers that take no time, m >= 2 p and at most k
            stage activations on every device, the span is at least 6 m + 6 p - 3 k - 1 (arXiv 2405.15362, figure 13).
            This is not proved here, so it is applied in that case only. For p = 2, m = 4 and 6, and p = 3, m = 6, a
            constraint solver found nothing shorter for any k; V-Half attains it.
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

MAX_DEVICES = 16
"""Maximum number of devices e for "one device", and of devices for "rounds" and "area"; all are tried if there are
fewer than twice as many. Each requires a traversal of all nodes of a microbatch."""


_Paths = tuple[list[float], list[float]]
"""The longest path to the start of each node, and that from the end of each node."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A lower bound `value`, with the `name` of the argument behind it and `why` as a sum in words."""

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
    recomputation: Sequence[float] = (),
    proved: bool = False,
) -> Bound:
    """The largest known lower bound on the span or makespan (`of`) of all such orders.

    costs: alternatively one per slice of a sequence; `microbatches` is then the total number of slices. split: whether
    backwards are I and W, or B. vocabulary, forward_only: as in `Order`. max_in_flight: maximum number of stage
    activations that a device holds from F to B or W, one number or one per device. recomputation: time of recomputation
    of each device per microbatch that is part of no pass but lies between F and backward of any of its stages. proved:
    exclude the V bound. Raises InputError if a kind has no time, and for a limit below 1.
    """
    if of not in ("span", "makespan"):
        raise unknown("of", of, ("span", "makespan"))
    each = (costs,) if isinstance(costs, Costs) else tuple(costs)
    graph = Microbatch.of(placement, each, split=split, vocabulary=vocabulary, forward_only=forward_only)
    limits = () if max_in_flight is None else limits_per_device(max_in_flight, placement.devices, least=1)
    bounds = list(_free(microbatches, graph, of, recomputation or [0.0] * placement.devices))
    if limits and not forward_only:
        all_paths = _longest_paths(graph, None)
        bounds += _rounds(microbatches, graph, limits, of, all_paths)
        bounds += _ramps(microbatches, graph, limits, of, all_paths)
        bounds += _area(microbatches, graph, limits)
        if not proved:
            bounds += _v_shape(microbatches, graph, limits, split)
    return max(bounds, key=lambda bound: bound.value)


def program_bounds(program: Program, costs: Costs, peak_in_flight: Sequence[int]) -> dict[str, Bound]:
    """The best bounds on "span" and "makespan" of all orders that have the kinds of pass of `program` and whose devices
    hold no more stage activations than `peak_in_flight`."""
    passes = [component for row in program.rows for component in parts_in(row)]
    kinds = {component.kind for component in passes}
    split = Kind.I in kinds
    each = costs.by_slice(program.slices) if costs.slices else (costs,)
    if split and Kind.B in kinds:
        each = tuple(either_backward(of_slice, program.placement) for of_slice in each)
    limits = None if kinds & OFFLOAD_KINDS or program.forward_only else [max(1, peak) for peak in peak_in_flight]
    microbatches = len({(component.microbatch, component.slice) for component in passes if component.kind is Kind.F})
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
    """Times of I and W that are lower bounds for a full backward too, for an order with both kinds of backward."""
    kinds = (Kind.B, Kind.I, Kind.W)
    full_backward, inputs, weights = costs.needed_times(placement, kinds, "give a number or a list")
    input_times = [min(i, b) for i, b in zip(inputs, full_backward, strict=True)]
    weight_times = [min(w, b - i) for w, b, i in zip(weights, full_backward, input_times, strict=True)]
    return replace(costs, I=tuple(input_times), W=tuple(weight_times))


def _free(microbatches: int, graph: Microbatch, of: str, recompute: Sequence[float]) -> Iterator[Bound]:
    """Bounds without a memory limit."""
    placement = graph.placement
    work = [in_passes + recomputed for in_passes, recomputed in zip(graph.work, recompute, strict=True)]
    busiest = _busiest(work)
    value = work[busiest] * microbatches
    yield Bound(value, "work", f"lower bound {_sum({'busy': value})} on device {busiest}")
    work_of_all = [microbatches * mean for mean in graph.mean]
    for reference in _references(placement, work, of):
        paths = _longest_paths(graph, reference)
        yield max(
            (
                Bound(
                    value,
                    "one device",
                    f"lower bound {_sum({'ramp-up': head, 'busy': time, 'ramp-down': tail})} on device {device}",
                )
                for device in range(placement.devices)
                for recomputed in [microbatches * recompute[device]]
                for value, head, time, tail in [_one_device(graph, device, work_of_all, paths, recomputed)]
            ),
            key=lambda bound: bound.value,
        )


def _sum(parts: Mapping[str, float]) -> str:
    """A sum in words, as in "33 = 3 ramp-up + 24 busy + 6 ramp-down"; parts of 0 are left out."""
    terms = [f"{value:g} {name}" for name, value in parts.items() if value] or ["0"]
    return f"{sum(parts.values()):g} = {' + '.join(terms)}"


def _longest_paths(graph: Microbatch, reference: int | None) -> _Paths:
    """The longest path to each node from passes of a device, and from each node to their ends; None for all devices."""
    nodes = list(chain.from_iterable(graph.nodes_of)) if reference is None else graph.nodes_of[reference]
    return graph.longest_from(nodes), graph.longest_to(nodes)


def _references(placement: Placement, work: list[float], of: str) -> list[int | None]:
    """The devices e for "one device"; None for all."""
    if of == "makespan":
        return [None]
    return sorted({placement.first_device, placement.last_device, _busiest(work), *_some(placement)})


def _busiest(work: Sequence[float]) -> int:
    return max(range(len(work)), key=work.__getitem__)


def _some(placement: Placement) -> range:
    """Evenly spaced devices, or all if there are few."""
    return range(0, placement.devices, max(1, placement.devices // MAX_DEVICES))


def _one_device(
    graph: Microbatch, device: int, work: list[float], paths: _Paths, recompute: float = 0.0
) -> tuple[float, float, float, float]:
    """The largest head + time + tail over sets of passes of `device`, followed by these three terms.

    work: by node, the time of all its passes. paths: from `_longest_paths`. recompute: time of all recomputation, which
    may belong to any stage.
    """
    heads, tails = paths
    nodes = [
        (heads[node], tails[node], work[node])
        for node in graph.nodes_of[device]
        if heads[node] > UNREACHED and tails[node] > UNREACHED
    ]
    if recompute:
        stages = graph.placement.stages_of(device)
        head = min(heads[node] + graph.takes[node] for node in (graph.forward[stage] for stage in stages))
        nodes.append((head, min(tails[graph.backward[stage]] for stage in stages), recompute))
    best = (0.0, 0.0, 0.0, 0.0)
    nodes.sort(key=lambda node: -node[1])
    for min_head in {head for head, _, _ in nodes}:
        time = 0.0
        for head, tail, takes in nodes:  # by falling tail: each prefix is a candidate
            if head >= min_head:
                time += takes
                best = max(best, (min_head + time + tail, min_head, time, tail))
    return best


def _rounds(
    microbatches: int, graph: Microbatch, limits: tuple[float, ...], of: str, all_paths: _Paths
) -> Iterator[Bound]:
    """The bounds "rounds". all_paths: `_longest_paths` of all devices."""
    placement = graph.placement
    end_paths = {device: _longest_paths(graph, device) for device in {placement.first_device, placement.last_device}}
    for device in _some(placement):
        stage = placement.stages_of(device)[0]  # the activations of its first stage live longest
        forward, release = graph.forward[stage], graph.release[stage]
        from_forward, to_release = graph.longest_from([forward]), graph.longest_to([release])
        lifespan = from_forward[release] + graph.takes[release]
        max_held = math.floor(limits[device])
        rounds, remainder = divmod(microbatches - 1, max_held)
        work = [(remainder + 1) * seconds for seconds in graph.takes]
        last = max(
            _one_device(graph, candidate, work, (from_forward, to_release))[0] for candidate in range(placement.devices)
        )
        # Time before the first of these forwards and after the last of these releases.
        ramps = [
            head[forward] + tail[release] for head, tail in ([all_paths] if of == "makespan" else end_paths.values())
        ]
        terms = {f"in {count(rounds, 'lifespan')} of {lifespan:g}": rounds * lifespan}
        terms |= {"after them": max(last, lifespan), "ramp-up and ramp-down": max(0.0, *ramps)}
        yield Bound(
            sum(terms.values()),
            "rounds",
            f"lower bound {_sum(terms)} on device {device}, which holds at most {count(max_held, 'activation')} of"
            f" stage {stage}",
        )


def _ramps(
    microbatches: int, graph: Microbatch, limits: tuple[float, ...], of: str, all_paths: _Paths
) -> Iterator[Bound]:
    """The bounds "ramps". all_paths: `_longest_paths` of all devices."""
    placement, takes = graph.placement, graph.takes
    if placement.stages > placement.devices or takes != graph.mean:
        return
    earliest, latest = all_paths
    for device in {placement.first_device, _busiest(graph.work)}:
        max_held = math.floor(limits[device])
        if max_held >= microbatches:
            continue
        (stage,) = placement.stages_of(device)
        forward, backward, release = graph.forward[stage], graph.backward[stage], graph.release[stage]
        from_forward, from_backward = graph.longest_from([forward]), graph.longest_from([backward])
        to_release = graph.longest_to([release])
        successors = [node for node in graph.nodes_of[device] if from_forward[node] > UNREACHED]
        # Other successors may run at any time after the forward. Without them the busy time is shorter, but the waits
        # are longer.
        needed = [node for node in successors if to_release[node] > UNREACHED]
        for nodes in (successors, needed):
            busy_before = takes[backward] + max_held * sum(
                takes[node] for node in nodes if from_backward[node] == UNREACHED
            )
            busy_after = takes[forward] + sum(
                (max_held if to_release[node] > UNREACHED else microbatches) * takes[node]
                for node in nodes
                if node != forward
            )
            idle = [
                max(0.0, from_forward[backward] + takes[backward] - busy_before),
                max(0.0, from_forward[release] + takes[release] - busy_after),
            ]
            ramps = earliest[forward] + min(latest[node] for node in nodes) if of == "makespan" else 0.0
            terms = {"ramp-up and ramp-down": ramps, "busy": microbatches * sum(takes[node] for node in nodes)}
            terms |= {"waiting for its first backward": idle[0], "waiting after its last forward": idle[1]}
            yield Bound(
                sum(terms.values()),
                "ramps",
                f"lower bound {_sum(terms)} on device {device}, which holds at most {count(max_held, 'activation')}",
            )


def _area(microbatches: int, graph: Microbatch, limits: tuple[float, ...]) -> Iterator[Bound]:
    for device in _some(graph.placement):
        lifespan = 0.0
        for stage in graph.placement.stages_of(device):
            release = graph.release[stage]
            lifespan += graph.longest_from([graph.forward[stage]])[release] + graph.takes[release]
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
        max_held = math.floor(max(limits))
        value = (6 * microbatches + 6 * p - 3 * max_held - 1) * unit
        peak = count(max_held, "stage activation")
        yield Bound(value, "V", f"lower bound {value:g} of V schedules with a peak of {peak} (arXiv 2405.15362)")
