"""Experts over the members of a group, each a thread, against transformers' loop over the experts of one process."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import EXPERTS, tiny_config, whole_model
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from evenpipe.experts import function
from evenpipe.experts.function import Call, Overlap, first_of, run
from evenpipe.experts.layout import Layout, alone, spread
from evenpipe.layers.checkpointing import Switch, checkpointed
from evenpipe.layers.weight_gradients import WeightGradients
from evenpipe.memory.tracker import Tracker
from evenpipe.processes.signs import cause_of

WIDTH = 64


class Members:
    """An `Exchange` of each thread with the others."""

    def __init__(self, size: int) -> None:
        self.barrier, self.table = threading.Barrier(size), [None] * size
        self.bytes = [0] * size
        self.log: list[list[str]] = [[] for _ in range(size)]

    def met(self, rank: int, given: Any) -> list[Any]:
        self.table[rank] = given
        self.barrier.wait(60)
        found = list(self.table)
        self.barrier.wait(60)
        return found


class Member:
    def __init__(self, members: Members, rank: int) -> None:
        self.members, self.size, self.rank = members, len(members.table), rank

    def counts(self, own: Tensor) -> tuple[list[list[int]], list[list[int]]]:
        found = self.members.met(self.rank, own.clone())
        return own.tolist(), [one[self.rank].tolist() for one in found]

    def start(self, output: Tensor, rows: Tensor, received: Sequence[int], sent: Sequence[int], what: str) -> Any:
        assert sum(received) == len(output) and sum(sent) == len(rows) and not sent[self.rank]
        assert output.dtype == rows.dtype and output.shape[1:] == rows.shape[1:]
        self.members.bytes[self.rank] += rows.nbytes
        self.members.log[self.rank].append(what)
        found = self.members.met(self.rank, (what, rows.split(list(sent))))
        assert {name for name, _ in found} == {what}, "members exchange different things"
        parts = [parts[self.rank] for _, parts in found]
        assert [len(part) for part in parts] == list(received)
        output.copy_(torch.cat(parts))
        return SimpleNamespace(wait=lambda: None)


def in_group(size: int, work: Callable[[Member], Any]) -> tuple[list[Any], Members]:
    """What `work` returns on each member."""
    members, results = Members(size), [None] * size
    errors: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            results[rank] = work(Member(members, rank))
        except BaseException as error:
            errors.append(error)
            members.barrier.abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results, members


def experts_of(family: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """The experts of the last layer of a tiny model, which run as transformers' loop."""
    config = tiny_config(family, **changes)
    config._experts_implementation = "eager"
    model = whole_model(config, dtype)
    return next(module for module in model.base_model.layers[-1].modules() if hasattr(module, "_apply_gate"))


def local(experts: Any, size: int, rank: int) -> Any:
    """What our function reads of the module, with a member's experts only."""
    count = getattr(experts, first_of(experts)).shape[0]
    own = -(-count // size)
    chosen = slice(min(rank * own, count), min((rank + 1) * own, count))
    parameters = {
        name: torch.nn.Parameter(one.detach()[chosen].clone()) for name, one in experts.named_parameters(recurse=False)
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


def reference(experts: Any, given: list[tuple[Tensor, ...]]) -> dict[str, Any]:
    """Of all members' tokens in one process."""
    experts.zero_grad()
    count = getattr(experts, first_of(experts)).shape[0]
    found: dict[str, list[Any]] = {"output": [], "hidden": [], "weights": []}
    for hidden, index, weights, gradient in given:
        hidden, weights = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
        present = index < count  # a choice of no expert is like one with weight 0, which every family understands
        chosen, weight = torch.where(present, index, 0), torch.where(present, weights, 0)
        output = type(experts).forward.__wrapped__(experts, hidden, chosen, weight)
        if output.requires_grad:  # transformers' loop has no graph if nobody meets an expert
            output.backward(gradient)
        zeros = [torch.zeros_like(one) if one.grad is None else one.grad for one in (hidden, weights)]
        for name, one in zip(found, (output.detach(), *zeros), strict=True):
            found[name].append(one)
    return found | {
        name: torch.zeros_like(one) if one.grad is None else one.grad
        for name, one in experts.named_parameters(recurse=False)
    }


def ours(experts: Any, given: list[tuple[Tensor, ...]], overlap: Overlap, *, split: bool) -> dict[str, Any]:
    """The same over as many members."""
    size = len(given)
    count = getattr(experts, first_of(experts)).shape[0]

    def work(member: Member) -> tuple[Any, ...]:
        own = local(experts, size, member.rank)
        hidden, index, weights, gradient = given[member.rank]
        hidden, weights = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
        layout = spread(index, count, member) if size > 1 else alone(index, count)
        queue = WeightGradients() if split else None
        if queue is not None:
            queue.begin((0, 0))
        output = run(Call(own, layout, member if size > 1 else None, overlap, queue), hidden, weights)
        output.backward(gradient)
        if queue is not None:
            assert all(one.grad is None for one in own.parameters(False)), "nothing before W"
            queue.compute((0, 0))
        return (
            output.detach(),
            hidden.grad,
            weights.grad,
            {name: getattr(own, name).grad for name, _ in experts.named_parameters(recurse=False)},
        )

    results, _ = in_group(size, work)
    found: dict[str, Any] = {
        name: [one[place] for one in results] for place, name in enumerate(("output", "hidden", "weights"))
    }
    return found | {
        name: torch.cat([one[3][name] for one in results]) for name, _ in experts.named_parameters(recurse=False)
    }


def assert_equal(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        pairs = zip(found[name], wanted, strict=True) if isinstance(wanted, list) else [(found[name], wanted)]
        for one, other in pairs:
            assert one.shape == other.shape, name
            scale = max(1.0, float(other.abs().max())) if other.numel() else 1.0
            assert not other.numel() or float((one - other).abs().max()) <= tolerance * scale, name


@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gradients_of_all_members_are_those_of_one_process(family, route, size) -> None:
    experts = experts_of(family)
    count = getattr(experts, first_of(experts)).shape[0]
    for seed, choices in enumerate((1, 2, 3)):
        given = [tokens_of(route, rank, size, count, choices=choices, seed=seed) for rank in range(size)]
        expected = reference(experts, given)
        for overlap in (Overlap(), Overlap(columns=3), Overlap(arrivals=2), Overlap(columns=2, arrivals=True)):
            for split in (False, True):
                assert_equal(ours(experts, given, overlap, split=split), expected, 1e-12)


def brute(index: list[Tensor], experts: int, size: int) -> list[set[tuple[int, int, int]]]:
    """For each member, (source, token, expert) of all pairs that it computes."""
    own = -(-experts // size)
    found: list[set[tuple[int, int, int]]] = [set() for _ in range(size)]
    for source, table in enumerate(index):
        for token, chosen in enumerate(table.tolist()):
            for expert in chosen:
                if expert < experts:
                    found[expert // own].add((source, token, expert))
    return found


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("experts", [5, 7, 8, 16])
@pytest.mark.parametrize("route", ROUTES)
def test_every_pair_is_computed_once_and_rows_travel_once(size, experts, route) -> None:
    given = [tokens_of(route, rank, size, experts, choices=2, seed=7) for rank in range(size)]
    index = [one[1] for one in given]

    def work(member: Member) -> tuple[Layout, Tensor]:
        layout = spread(index[member.rank], experts, member)
        assert layout.token_of_row is not None
        origin = torch.stack([torch.full_like(layout.token_of_row, member.rank), layout.token_of_row], 1)
        there = origin.new_empty(layout.rows, 2)
        there[: layout.own] = origin[: layout.own]
        member.start(there[layout.own :], origin[layout.own :], layout.received, layout.sent, "origin")
        return layout, there

    results, _ = in_group(size, work)
    own = -(-experts // size)
    for rank, ((layout, origin), expected) in enumerate(zip(results, brute(index, experts, size), strict=True)):
        pairs = [
            (*origin[row].tolist(), expert + rank * own) for row, expert in zip(layout.row, layout.expert, strict=True)
        ]
        pairs = [tuple(map(int, one)) for one in pairs]
        assert len(pairs) == layout.pairs == len(set(pairs)) and set(pairs) == expected
        rows = {(source, token) for source, token, _ in expected}
        assert layout.rows == len(rows) <= sum(len(one) for one in index)
        assert layout.expert.tolist() == sorted(layout.expert.tolist())
        assert layout.groups.ends[-1:].tolist() in ([layout.pairs], [])


@pytest.mark.parametrize("choice", ["none", "full", "selective"])
def test_what_travels(choice) -> None:
    """Rows and their weights once more with "full"; nothing that "selective" repeats."""
    experts, size = experts_of("gpt_oss"), 2
    given = [tokens_of("even", rank, size, 4, choices=2, seed=1) for rank in range(size)]

    def work(member: Member) -> tuple[Tensor, ...]:
        own = local(experts, size, member.rank)
        hidden, index, weights, gradient = given[member.rank]
        hidden, weights = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
        call = Call(own, spread(index, 4, member), member, Overlap())

        def forward(hidden: Tensor, weights: Tensor) -> Tensor:
            return run(call, hidden.tanh(), weights)

        if choice != "none":
            forward = checkpointed(forward, choice, Switch(), torch.device("cpu"))
        output = forward(hidden, weights)
        output.backward(gradient)
        return output.detach(), hidden.grad, weights.grad, own.gate_up_proj.grad, own.down_proj_bias.grad

    results, members = in_group(size, work)
    there, back = ["rows", "weights"], ["sums"]
    again = there if choice == "full" else []
    expected = ["choices", *there, *back, *again, "gradients", "gradients of weights", *back]
    assert members.log == [expected] * size
    if choice != "none":
        plain = ours(experts, [(one[0].tanh(), *one[1:]) for one in given], Overlap(), split=False)
        for place, name in enumerate(("output", "weights")):
            for rank in range(size):
                assert torch.equal(results[rank][2 * place], plain[name][rank])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_bytes_that_are_kept_and_that_travel(family, size) -> None:
    """b (R h + P F) + b P are kept from F to B, b (2 R h + P (F + f)) + b P from I to W, both beside integers. Rows
    travel twice in F and twice in I, never in W; beside those of F an int32 and a weight of each choice, and in I the
    gradient of each weight."""
    experts, choices = experts_of(family), 2
    given = [tokens_of("even", rank, size, 4, choices=choices, seed=5) for rank in range(size)]

    def work(member: Member) -> list[Any]:
        own, found = local(experts, size, member.rank), []
        hidden, index, weights, gradient = given[member.rank]
        hidden, weights = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
        queue = WeightGradients()
        queue.begin((0, 0))
        with Tracker() as tracker:
            tracker.add(hidden, index, weights, gradient, *own.parameters(False))

            def after(what: str) -> None:
                member.members.met(member.rank, None)  # nobody holds what others have sent
                found.append((what, tracker.live, member.members.bytes[member.rank]))

            after("before")
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
            for one in own.parameters(False):
                one.grad = None
            after("W")
        return [layout, *found]

    results, _ = in_group(size, work)
    b, f = 8, 96
    for layout, *found in results:
        live = {what: bytes_ for what, bytes_, _ in found}
        sent = [bytes_ for _, _, bytes_ in found]
        rows, pairs = layout.rows * WIDTH, layout.pairs
        kept = b * (rows + pairs * 2 * f) + b * pairs
        queued = b * (2 * rows + pairs * 3 * f) + b * pairs
        assert (live["F"] - live["layout"], live["I"] - live["layout"]) == (kept, queued)
        assert live["W"] == live["layout"]
        goes, comes = sum(layout.sent), sum(layout.received)
        sides = layout.own + goes
        integers = 8 * (4 * pairs + layout.rows) + 8 * (2 * sides + layout.tokens) + choices * sides
        assert live["layout"] - live["before"] == integers + 4 * len(layout.groups.ends)
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

    experts = experts_of("mixtral")
    hidden, index, weights, _ = tokens_of("even", 0, 1, 4, choices=2, seed=0)
    queue = WeightGradients() if split else None
    call = Call(experts, alone(index, 4), None, Overlap(), queue, name="model.layers.3.mlp.experts")
    monkeypatch.setattr(function, broken, exhausted)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        if queue is not None:
            queue.begin((0, 0))
        run(call, hidden.requires_grad_(), weights).sum().backward()
        if queue is not None:
            queue.compute((0, 0))
    tokens = len(hidden)
    expected = (
        f"in model.layers.3.mlp.experts: {tokens} rows, {2 * tokens} pairs of a row and an expert, for {tokens} tokens"
        " of its own"
    )
    assert raised.value.__notes__ == [expected]
    assert cause_of(raised.value, 2).text == f"process 2 failed: OutOfMemoryError: out of memory; {expected}"
