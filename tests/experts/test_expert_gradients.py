"""Experts of one process and over the members of a group, each a thread, against transformers in one process.

`tests/multiprocess` compares the messages of processes, and the bytes that live.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import EXPERTS, tiny_config, whole_model
from torch import Tensor

from evenpipe.experts.adopt import OwnExperts
from evenpipe.experts.function import Call, Overlap, first_of, run
from evenpipe.experts.layout import alone, spread
from evenpipe.experts.load import Load
from evenpipe.layers.checkpointing import Switch, checkpoint_layer
from evenpipe.layers.weight_gradients import WeightGradients
from evenpipe.model import gradient_errors
from evenpipe.model.products import PLAIN, Groups, Products, fill_grouped
from evenpipe.parallel.running import Running
from evenpipe.processes.signs import cause_of
from evenpipe.tensor.threads import in_threads

WIDTH = 64


def experts_of(family: str, dtype: torch.dtype = torch.float64, implementation: str = "eager", **changes: Any) -> Any:
    """The experts of the last layer of a tiny model; "eager" is transformers' loop over them."""
    config = tiny_config(family, **changes)
    config._experts_implementation = implementation
    model = whole_model(config, dtype)
    return next(module for module in model.base_model.layers[-1].modules() if hasattr(module, "_apply_gate"))


# --- over members ----------------------------------------------------------------------------------------------------


class Member:
    """The `Exchange` of a thread; those of a group meet at a barrier, and each sees what all brought."""

    def __init__(self, rank: int, barrier: threading.Barrier, table: list[Any]) -> None:
        self.rank, self.size, self.barrier, self.table = rank, len(table), barrier, table

    def meet(self, brought: Any) -> list[Any]:
        self.table[self.rank] = brought
        self.barrier.wait(60)
        table = list(self.table)
        self.barrier.wait(60)
        return table

    def counts(self, own: Tensor) -> tuple[list[list[int]], list[list[int]]]:
        return own.tolist(), [table[self.rank].tolist() for table in self.meet(own.clone())]

    def start(self, output: Tensor, rows: Tensor, received: Sequence[int], sent: Sequence[int], label: str) -> Any:
        assert sum(received) == len(output) and sum(sent) == len(rows) and not sent[self.rank]
        assert output.dtype == rows.dtype and output.shape[1:] == rows.shape[1:]
        messages = self.meet((label, rows.split(list(sent))))
        assert {name for name, _ in messages} == {label}, "members exchange different things"
        parts = [parts[self.rank] for _, parts in messages]
        assert [len(part) for part in parts] == list(received)
        output.copy_(torch.cat(parts))
        return SimpleNamespace(wait=lambda: None)

    def leave(self) -> None:
        self.barrier.abort()


def in_group(size: int, work: Callable[[Member], Any]) -> list[Any]:
    """What `work` returns on each member."""
    barrier, table = threading.Barrier(size), [None] * size
    members = [Member(rank, barrier, table) for rank in range(size)]
    return in_threads(members, lambda rank: work(members[rank]))


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

    results = in_group(size, work)
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


# --- of one process --------------------------------------------------------------------------------------------------

TOKENS = 24
NARROW = {"moe_intermediate_size": 6, "intermediate_size": 6}
WAYS: list[tuple[str, torch.dtype, str, dict[str, int], float]] = [
    # how transformers computes products: one after the other, or at once; dtype; its way that is the reference; changes
    # of the config; tolerance: in fp32 weights come before the second product, not after it
    ("eager", torch.float64, "eager", {}, 1e-14),
    ("grouped_mm", torch.float32, "grouped_mm", {}, 1e-6),
    # what torch cannot multiply at once: fp64, and rows that are not whole 16 bytes
    ("grouped_mm", torch.float64, "eager", {}, 1e-14),
    ("grouped_mm", torch.float32, "eager", NARROW, 1e-6),
]


def routed(experts: Any, choices: int = 2, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """(hidden, chosen experts, their weights, gradient of the output). Nobody chooses the last expert."""
    generator = torch.Generator().manual_seed(3)
    count = next(experts.parameters()).shape[0] - 1
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype)
    scores = torch.rand(TOKENS, count, generator=generator).to(dtype)
    weights, chosen = scores.topk(choices, dim=-1)
    return hidden, chosen, weights, torch.randn(TOKENS, WIDTH, generator=generator).to(dtype)


def gradients(experts: Any, inputs: tuple[Tensor, ...], queue: WeightGradients | None = None) -> dict[str, Any]:
    """Of all parameters, the input and the weights; through I and W where there is a queue."""
    experts.zero_grad()
    hidden, chosen, weights, gradient = inputs
    hidden, weights = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
    if queue is not None:
        queue.under_way = (0, 0)
    output = experts(hidden, chosen, weights)
    if queue is not None:
        queue.begin((0, 0))
    output.backward(gradient)
    if queue is not None:
        queue.under_way = None
        assert all(parameter.grad is None for parameter in experts.parameters()), "nothing before W"
        queue.compute((0, 0))
    results = {name: parameter.grad for name, parameter in experts.named_parameters()}
    return results | {"output": output.detach(), "hidden": hidden.grad, "weights": weights.grad}


def test_gradients_are_those_of_transformers(sample) -> None:
    """Of each way; and a backward that is not split has the same bits. Choices of no expert add nothing, and an expert
    without tokens gets zeros."""
    absent = torch.arange(TOKENS) % 3 == 0
    for family, way, choices in sample(itertools.product(EXPERTS, range(len(WAYS)), (1, 2, 3))):
        implementation, dtype, of_reference, changes, tolerance = WAYS[way]
        experts, same = (experts_of(family, dtype, name, **changes) for name in (implementation, of_reference))
        hidden, chosen, weights, gradient = routed(experts, choices, dtype)
        expected = gradients(same, (hidden, chosen, torch.where(absent[:, None], 0, weights), gradient))
        expected["weights"][absent] = 0
        count = next(experts.parameters()).shape[0]
        inputs = hidden, torch.where(absent[:, None], count, chosen), weights, gradient
        queue = WeightGradients()
        OwnExperts(queue).apply(experts, {})
        whole, split = gradients(experts, inputs), gradients(experts, inputs, queue)
        assert max(gradient_errors(split, expected).values()) < tolerance, (family, way, choices)
        assert all(torch.equal(whole[name], split[name]) for name in whole), (family, way, choices)
        assert not any(split[name][count - 1].any() for name, _ in experts.named_parameters())


def test_experts_train_where_nothing_before_them_does() -> None:
    experts = experts_of("mixtral")
    hidden, chosen, weights, gradient = routed(experts)
    OwnExperts(WeightGradients()).apply(experts, {})
    experts(hidden, chosen, weights).backward(gradient)
    assert all(parameter.grad is not None for parameter in experts.parameters())


def test_checkpointed_experts_repeat_only_their_first_products() -> None:
    """Three experts have tokens; each has 2 products in F and 4 in the backward."""
    experts = experts_of("mixtral")
    OwnExperts(WeightGradients()).apply(experts, {})
    results, counts = [], []
    for choice in ("none", "full"):
        checkpoint_layer(experts, choice, Switch(), torch.device("cpu"))
        with torch.autograd.profiler.profile() as profile:
            results.append(gradients(experts, routed(experts)))
        counts.append(sum(event.name == "aten::mm" for event in profile.function_events))
    assert counts == [3 * (2 + 4), 3 * (2 + 1 + 4)]
    assert all(torch.equal(results[1][name], value) for name, value in results[0].items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_products_by_group(dtype) -> None:
    """Against a loop over the groups; in fp64 that loop is the implementation. Rows of a part are written to their
    places, and others stay as they are."""
    torch.manual_seed(0)
    rows, matrices, right = (torch.randn(*shape).to(dtype) for shape in ((12, 16), (4, 16, 8), (12, 8)))
    for ends in ([5, 5, 9, 12], [0, 12, 12, 12], [0, 0, 0, 12]):
        stops = Groups(torch.tensor(ends, dtype=torch.int32))
        products, outer = PLAIN.grouped_output(rows, matrices, stops), PLAIN.grouped_weight_gradient(rows, right, stops)
        for expert, (start, end) in enumerate(itertools.pairwise([0, *ends])):
            torch.testing.assert_close(products[start:end], rows[start:end] @ matrices[expert])
            torch.testing.assert_close(outer[expert], rows[start:end].t() @ right[start:end])
    whole = PLAIN.grouped_output(rows, matrices, Groups(torch.tensor([5, 5, 9, 12], dtype=torch.int32)))
    places = torch.tensor([0, 1, 2, 7, 8, 9])  # of the experts 0, 2, 2, 3
    part = torch.full_like(whole, 7.0)
    fill_grouped(part, places, rows[places], matrices, Groups(torch.tensor([3, 3, 5, 6], dtype=torch.int32)))
    others = torch.ones(12, dtype=torch.bool)
    others[places] = False
    torch.testing.assert_close(part[places], whole[places])
    assert (part[others] == 7.0).all()


# --- errors and load ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("broken", "split"),
    [("grouped_output", False), ("grouped_weight_gradient", False), ("grouped_weight_gradient", True)],
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
    monkeypatch.setattr(Products, broken, exhausted)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        run(call, hidden.requires_grad_(), weights).sum().backward()
        queue.compute((0, 0))
    tokens = len(hidden)
    note = f"in layers.3.experts: {tokens} rows, {2 * tokens} pairs of a row and an expert, for {tokens} tokens"
    assert raised.value.__notes__ == [f"{note} of its own"]
    assert cause_of(raised.value, 2).text == f"process 2 failed: OutOfMemoryError: out of memory; {note} of its own"


def test_choices_of_a_failed_step_are_not_counted_in_the_next_one() -> None:
    running = Running(step=1, stage_unit=(0, 0))
    load = Load(["layers.0"], 3, running, torch.device("cpu"))
    load.add("layers.0", torch.tensor([[0, 1]]))
    load.add("layers.0", torch.tensor([[2, 2]]))  # repeated
    running.step = 2  # the first one has failed
    load.add("layers.0", torch.tensor([[1, 2], [1, 3]]))  # 3: no expert
    assert load.take().tolist() == [[0, 2, 1]]
    assert load.take().tolist() == [[0, 0, 0]]
