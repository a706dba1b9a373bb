"""Experts over the members of a group, each a thread, against transformers' loop over the experts of one process."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expert_layers import WIDTH, experts_of
from families import EXPERTS
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from evenpipe.experts import function
from evenpipe.experts.function import Call, Overlap, first_of, run
from evenpipe.experts.layout import Layout, alone, spread
from evenpipe.experts.load import Load
from evenpipe.layers.checkpointing import Switch, checkpointed
from evenpipe.layers.weight_gradients import WeightGradients
from evenpipe.memory.tracker import Tracker
from evenpipe.parallel.running import Running
from evenpipe.processes.signs import cause_of
from evenpipe.tensor.threads import in_threads


class Member:
    """The `Exchange` of a thread; those of a group meet at a barrier, and each sees what all brought."""

    def __init__(self, rank: int, barrier: threading.Barrier, table: list[Any]) -> None:
        self.rank, self.size, self.barrier, self.table = rank, len(table), barrier, table
        self.bytes, self.log = 0, []

    def meet(self, brought: Any) -> list[Any]:
        self.table[self.rank] = brought
        self.barrier.wait(60)
        table = list(self.table)
        self.barrier.wait(60)
        return table

    def counts(self, own: Tensor) -> tuple[list[list[int]], list[list[int]]]:
        return own.tolist(), [table[self.rank].tolist() for table in self.meet(own.clone())]

    def start(self, output: Tensor, rows: Tensor, received: Sequence[int], sent: Sequence[int], what: str) -> Any:
        assert sum(received) == len(output) and sum(sent) == len(rows) and not sent[self.rank]
        assert output.dtype == rows.dtype and output.shape[1:] == rows.shape[1:]
        self.bytes += rows.nbytes
        self.log.append(what)
        messages = self.meet((what, rows.split(list(sent))))
        assert {name for name, _ in messages} == {what}, "members exchange different things"
        parts = [parts[self.rank] for _, parts in messages]
        assert [len(part) for part in parts] == list(received)
        output.copy_(torch.cat(parts))
        return SimpleNamespace(wait=lambda: None)

    def leave(self) -> None:
        self.barrier.abort()


def in_group(size: int, work: Callable[[Member], Any]) -> tuple[list[Any], list[Member]]:
    """What `work` returns on each member."""
    barrier, table = threading.Barrier(size), [None] * size
    members = [Member(rank, barrier, table) for rank in range(size)]
    return in_threads(members, lambda rank: work(members[rank])), members


def local(experts: Any, size: int, rank: int) -> Any:
    """What our function reads of the module, with a member's experts only."""
    count = getattr(experts, first_of(experts)).shape[0]
    own = -(-count // size)
    chosen = slice(min(rank * own, count), min((rank + 1) * own, count))
    parameters = {
        name: torch.nn.Parameter(whole.detach()[chosen].clone())
        for name, whole in experts.named_parameters(recurse=False)
    }
    return SimpleNamespace(
        **parameters,
        parameters=lambda recurse: iter(parameters.values()),
        **{name: getattr(experts, name) for name in ("is_transposed", "has_bias", "has_gate", "_apply_gate")},
        act_fn=getattr(experts, "act_fn", None),
    )


ROUTES = ("even", "one expert", "one member", "nobody", "no token", "no expert")


def tokens_of(route: str, rank: int, size: int, experts: int, *, choices: int, seed: int) -> tuple[Tensor, ...]:
    """(hidden, index, weights, gradient) of a member."""
    generator = torch.Generator().manual_seed(seed * 64 + rank)
    tokens = 0 if route == "nobody" or (route == "no token" and rank == 0) else 5 + 3 * rank
    scores = torch.rand(tokens, experts, generator=generator, dtype=torch.float64)
    among = {"one expert": [1], "one member": list(range(experts))[-(-(experts) // size) :]}.get(route)
    if among:
        scores[:, among] += 1.0
    weights, index = scores.topk(choices, dim=-1)
    if route == "no expert":
        index = torch.where(torch.rand(index.shape, generator=generator) < 0.3, experts, index)
    hidden, gradient = torch.randn(2, tokens, WIDTH, generator=generator, dtype=torch.float64)
    return hidden, index, weights, gradient


def reference(experts: Any, tokens: list[tuple[Tensor, ...]]) -> dict[str, list[Tensor]]:
    """Of all members' tokens in one process."""
    experts.zero_grad()
    count = getattr(experts, first_of(experts)).shape[0]
    results: dict[str, list[Tensor]] = {"output": [], "hidden": [], "weights": []}
    for hidden, index, weights, gradient in tokens:
        hidden, weights = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
        present = index < count  # a choice of no expert is like one with weight 0, which every family understands
        chosen, weight = torch.where(present, index, 0), torch.where(present, weights, 0)
        output = type(experts).forward.__wrapped__(experts, hidden, chosen, weight)
        if output.requires_grad:  # transformers' loop has no graph if nobody meets an expert
            output.backward(gradient)
        gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in (hidden, weights)]
        for values, value in zip(results.values(), (output.detach(), *gradients), strict=True):
            values.append(value)
    return results | {
        name: [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()]
        for name, parameter in experts.named_parameters(recurse=False)
    }


def ours(experts: Any, tokens: list[tuple[Tensor, ...]], overlap: Overlap, *, split: bool) -> dict[str, list[Tensor]]:
    """The same over as many members."""
    size = len(tokens)
    count = getattr(experts, first_of(experts)).shape[0]

    def work(member: Member) -> dict[str, Tensor]:
        own = local(experts, size, member.rank)
        hidden, index, weights, gradient = tokens[member.rank]
        hidden, weights = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
        layout = spread(index, count, member) if size > 1 else alone(index, count)
        if size > 1:
            met = [(index < count) & (index // -(-count // size) == member.rank) for _, index, _, _ in tokens]
            assert layout.pairs == sum(int(chosen.sum()) for chosen in met)
            assert layout.rows == sum(int(chosen.any(1).sum()) for chosen in met), "rows travel once"
            assert layout.expert.tolist() == sorted(layout.expert.tolist())
        queue = WeightGradients() if split else None
        if queue is not None:
            queue.begin((0, 0))
        output = run(Call(own, layout, member if size > 1 else None, overlap, queue), hidden, weights)
        output.backward(gradient)
        if queue is not None:
            assert all(parameter.grad is None for parameter in own.parameters(False)), "nothing before W"
            queue.compute((0, 0))
        results = {"output": output.detach(), "hidden": hidden.grad, "weights": weights.grad}
        return results | {name: getattr(own, name).grad for name, _ in experts.named_parameters(recurse=False)}

    results, _ = in_group(size, work)
    of_tokens = {name: [result[name] for result in results] for name in ("output", "hidden", "weights")}
    return of_tokens | {
        name: [torch.cat([result[name] for result in results])] for name, _ in experts.named_parameters(recurse=False)
    }


def differences(actual: dict[str, list[Tensor]], expected: dict[str, list[Tensor]], tolerance: float) -> list[str]:
    assert actual.keys() == expected.keys()
    names = []
    for name, wanted in expected.items():
        for tensor, other in zip(actual[name], wanted, strict=True):
            assert tensor.shape == other.shape, name
            scale = max(1.0, float(other.abs().max())) if other.numel() else 1.0
            if other.numel() and not float((tensor - other).abs().max()) <= tolerance * scale:
                names.append(name)
    return names


OVERLAPS = (Overlap(), Overlap(columns=3), Overlap(arrivals=2), Overlap(columns=2, arrivals=True))


def test_gradients_of_all_members_are_those_of_one_process(sample) -> None:
    """In all families, for every route; a single member exchanges nothing, so there is nothing to overlap."""
    cached_experts = cache(experts_of)

    @cache
    def expected_of(family: str, route: str, size: int, choices: int) -> tuple[Any, ...]:
        experts = cached_experts(family)
        count = getattr(experts, first_of(experts)).shape[0]
        tokens = [tokens_of(route, rank, size, count, choices=choices, seed=choices) for rank in range(size)]
        return tokens, reference(experts, tokens)

    cases = itertools.product(EXPERTS, ROUTES, (1, 2, 3, 4), (1, 2, 3), OVERLAPS, (False, True))
    wrong = []
    for case in sample(case for case in cases if case[2] > 1 or case[4] == Overlap()):
        family, route, size, choices, overlap, split = case
        tokens, expected = expected_of(family, route, size, choices)
        names = differences(ours(cached_experts(family), tokens, overlap, split=split), expected, 1e-12)
        if names:
            wrong.append((*case, names))
    assert wrong == []


@pytest.mark.parametrize("choice", ["none", "full", "selective"])
def test_what_travels(choice) -> None:
    """Rows and their weights travel once more with "full"; nothing does that "selective" repeats."""
    experts, size = experts_of("gpt_oss"), 2
    tokens = [tokens_of("even", rank, size, 4, choices=2, seed=1) for rank in range(size)]

    def work(member: Member) -> dict[str, Tensor]:
        hidden, index, weights, gradient = tokens[member.rank]
        hidden, weights = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
        call = Call(local(experts, size, member.rank), spread(index, 4, member), member, Overlap())

        def forward(hidden: Tensor, weights: Tensor) -> Tensor:
            return run(call, hidden.tanh(), weights)

        if choice != "none":
            forward = checkpointed(forward, choice, Switch(), torch.device("cpu"))
        output = forward(hidden, weights)
        output.backward(gradient)
        return {"output": output.detach(), "weights": weights.grad}

    results, members = in_group(size, work)
    again = ["rows", "weights"] if choice == "full" else []
    expected = ["choices", "rows", "weights", "sums", *again, "gradients", "gradients of weights", "sums"]
    assert [member.log for member in members] == [expected] * size
    plain = ours(experts, [(hidden.tanh(), *others) for hidden, *others in tokens], Overlap(), split=False)
    for rank, result in enumerate(results):
        assert all(torch.equal(tensor, plain[name][rank]) for name, tensor in result.items())


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_bytes_that_are_kept_and_that_travel(family, size) -> None:
    """b (R h + P F) + b P are kept from F to B, b (2 R h + P (F + f)) + b P from I to W, both beside integers. Rows
    travel twice in F and twice in I, never in W; beside those of F an int32 and a weight of each choice, and in I the
    gradient of each weight."""
    experts, choices = experts_of(family), 2
    tokens = [tokens_of("even", rank, size, 4, choices=choices, seed=5) for rank in range(size)]

    def work(member: Member) -> tuple[Layout, dict[str, int], list[int]]:
        own, live, sent = local(experts, size, member.rank), {}, []
        hidden, index, weights, gradient = tokens[member.rank]
        hidden, weights = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
        queue = WeightGradients()
        queue.begin((0, 0))
        with Tracker() as tracker:
            tracker.add(hidden, index, weights, gradient, *own.parameters(False))

            def after(moment: str) -> None:
                member.meet(None)  # nobody holds what others have sent
                live[moment] = tracker.live
                sent.append(member.bytes)

            after("begin")
            layout = spread(index, 4, member)
            layout.by_row, layout.by_token
            after("layout")
            output = run(Call(own, layout, member, Overlap(), queue), hidden, weights)
            edge = get_gradient_edge(output)
            del output
            after("F")
            torch.autograd.backward((edge,), (gradient,))
            del edge
            hidden.grad = weights.grad = None
            after("I")
            queue.compute((0, 0))
            for parameter in own.parameters(False):
                parameter.grad = None
            after("W")
        return layout, live, sent

    results, _ = in_group(size, work)
    b, f = 8, 96
    for layout, live, sent in results:
        rows, pairs = layout.rows * WIDTH, layout.pairs
        kept = b * (rows + pairs * 2 * f) + b * pairs
        queued = b * (2 * rows + pairs * 3 * f) + b * pairs
        assert (live["F"] - live["layout"], live["I"] - live["layout"]) == (kept, queued)
        assert live["W"] == live["layout"]
        goes, comes = sum(layout.sent), sum(layout.received)
        sides = layout.own + goes
        integers = 8 * (4 * pairs + layout.rows) + 8 * (2 * sides + layout.tokens) + choices * sides
        assert live["layout"] - live["begin"] == integers + 4 * len(layout.groups.ends)
        by_pass = [late - early for early, late in itertools.pairwise(sent)]
        small = 4 * choices * goes  # which experts
        back = comes * (WIDTH * b + choices * b)
        assert by_pass == [small, goes * (WIDTH + choices) * b + comes * WIDTH * b, goes * WIDTH * b + back, 0]


@pytest.mark.parametrize(
    ("broken", "split"), [("grouped_product", False), ("grouped_outer", False), ("grouped_outer", True)]
)
def test_the_error_of_exhausted_memory_says_whose_rows_are_too_many(monkeypatch, broken: str, split: bool) -> None:
    """In F, in the backward, and in W."""

    def exhausted(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    hidden, index, weights, _ = tokens_of("even", 0, 1, 4, choices=2, seed=0)
    queue = WeightGradients()
    queue.begin((0, 0))
    call = Call(
        experts_of("mixtral"), alone(index, 4), None, Overlap(), queue if split else None, name="layers.3.experts"
    )
    monkeypatch.setattr(function, broken, exhausted)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        run(call, hidden.requires_grad_(), weights).sum().backward()
        queue.compute((0, 0))
    tokens = len(hidden)
    note = f"in layers.3.experts: {tokens} rows, {2 * tokens} pairs of a row and an expert, for {tokens} tokens"
    assert raised.value.__notes__ == [f"{note} of its own"]
    assert cause_of(raised.value, 2).text == f"process 2 failed: OutOfMemoryError: out of memory; {note} of its own"


def test_choices_of_a_failed_step_are_not_counted_in_the_next_one() -> None:
    running = Running(step=1, place=(0, 0))
    load = Load(["layers.0"], 3, running, torch.device("cpu"))
    load.add("layers.0", torch.tensor([[0, 1]]))
    load.add("layers.0", torch.tensor([[2, 2]]))  # repeated
    running.step = 2  # the first one has failed
    load.add("layers.0", torch.tensor([[1, 2], [1, 3]]))  # 3: no expert
    assert load.take().tolist() == [[0, 2, 1]]
    assert load.take().tolist() == [[0, 0, 0]]
