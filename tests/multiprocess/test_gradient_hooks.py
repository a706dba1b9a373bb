"""Hooks on parameters of a pipeline: what they do beside changing gradients, which tests/fuzz compares in every layout.
Hooks on some of the processes are refused (test_trained_parameters.py).

optimizers in hooks        one per parameter, which steps as soon as the gradient is there and drops it
graph hooks                `register_multi_grad_hook`, `queue_callback`
hooks that fail            the user's own error, or one that names the parameter; no process waits, the next step works
"""

from __future__ import annotations

import contextlib
import copy
import traceback
from collections.abc import Iterator
from dataclasses import replace

import pytest
import reference
import torch
import torch.distributed as dist
from harness import check_cases, run_processes
from small_runs import Case, described, opened
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from evenpipe import Pipeline
from evenpipe.errors import InputError
from evenpipe.model.fp64 import InFp64

TOKENS, STEPS = 16, 2
EMBEDDING, NORM = "model.embed_tokens.weight", "model.layers.3.input_layernorm.weight"

TWO = Case("llama", devices=2)
LAYOUTS = (
    replace(TWO, schedule="zbv", tied=True, checkpointing="full"),
    Case("llama", tensor_ranks=2, tied=True),
    Case("llama", context_ranks=2, mode="first-last", tied=True),
    replace(TWO, replicas=2, data_parallel="shard", mode="first-last", tied=True),
    replace(TWO, family="mixtral", replicas=2, members=2, data_parallel="shard", schedule="zbv"),
)


def data_of(case: Case, replica: int | None = None) -> list[tuple[Tensor, Tensor]]:
    data = reference.batches(61, case.replicas * case.microbatches, TOKENS, STEPS)
    return data if replica is None else [(case.part(replica, ids), case.part(replica, labels)) for ids, labels in data]


def one_process(case: Case) -> nn.Module:
    return copy.deepcopy(described(case.family, case.tied).model).train()


# --- optimizers in hooks ---------------------------------------------------------------------------------


def optimizers_in(case: Case) -> Iterator[str]:
    """Weights after steps of an optimizer per parameter, in a hook, as in one process with one optimizer."""
    model = one_process(case)
    wanted = reference.train(model, data_of(case)).weights
    with contextlib.closing(opened(case)) as pipeline:
        for parameter in pipeline.parameters():
            optimizer = reference.adamw([parameter])

            def update(parameter: Tensor, optimizer=optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(update)
        for ids, labels in data_of(case, pipeline.replica):
            pipeline.step(ids, labels)
            if any(parameter.grad is not None for parameter in pipeline.parameters()):
                yield "a gradient that its hook has dropped"
        found = pipeline.full_state_dict()
    if dist.get_rank() == 0:
        error, name = reference.worst({name: found[name] for name in wanted}, wanted)
        if not error <= 1e-8:
            yield f"weight of {name}: {error:.1e}"


def run_cases(cases: list[Case]) -> list[str]:
    with InFp64():
        return [f"{case}: {fault}" for case in cases for fault in optimizers_in(case)]


def test_optimizers_in_hooks(sample) -> None:
    check_cases(run_cases, sample(LAYOUTS, 2))


# --- in bf16 ---------------------------------------------------------------------------------------------


def doubles_in_bf16(cases: list[Case]) -> None:
    """Masters get what hooks return, in their dtype: twice the gradient that they have without hooks, bit for bit."""
    for case in cases:
        exact = one_process(case).float()
        errors = reference.Bf16Errors(exact)
        options = {"parameter_dtype": torch.float32, "compute_dtype": torch.bfloat16}
        plain, hooked = (opened(case, **options) for _ in range(2))
        calls = []
        for parameter in hooked.parameters():
            parameter.register_hook(lambda gradient: calls.append(gradient.dtype) or 2 * gradient)
        for number, (ids, _) in enumerate(reference.batches(61, case.replicas * case.microbatches, TOKENS, 4, seed=2)):
            own = ids.chunk(case.replicas)[hooked.replica]
            for pipeline in (plain, hooked):
                pipeline.zero_grad()
                loss = pipeline.step(own).loss
            expected, found = plain.full_gradients(), hooked.full_gradients()
            assert all(torch.equal(2 * gradient, found[name]) for name, gradient in expected.items()), case
            assert calls == (number + 1) * len(list(hooked.parameters())) * [torch.float32]
            if dist.get_rank() == 0:
                errors.add({name: gradient / 2 for name, gradient in found.items()}, loss, ids)
        if dist.get_rank() == 0:
            errors.check(str(case))
        plain.close()
        hooked.close()


@pytest.mark.slow
def test_in_bf16() -> None:
    run_processes(doubles_in_bf16, 1, [Case("llama", mode="first-last", schedule="zb-h1")])
    sharded = Case("llama", replicas=2, data_parallel="shard", mode="first-last")
    tied = replace(TWO, mode="first-last", tied=True)
    run_processes(doubles_in_bf16, 2, [replace(TWO, schedule="zbv"), tied, sharded, Case("llama", tensor_ranks=2)])


# --- what autograd offers hooks --------------------------------------------------------------------------


def hooks_of_a_backward(case: Case) -> None:
    """Hooks of several gradients, callbacks at the end of a backward, hooks that remove themselves or add others."""
    data = data_of(case)[0]
    model = one_process(case)
    reference.loss_of(model, *data).backward()
    with contextlib.closing(opened(case)) as pipeline:
        held, shards = dict(pipeline.named_parameters()), pipeline.parameter_shards()
        wanted = {name: shards[name].placement.of(model.get_parameter(name).grad) for name in held}
        said: list[str] = []
        gradients: list[dict[str, Tensor]] = []

        def every(found: list[Tensor]) -> None:
            gradients.append({name: gradient.clone() for name, gradient in zip(held, found, strict=True)})
            torch.autograd.Variable._execution_engine.queue_callback(lambda: said.append("end"))

        def once(_: Tensor) -> None:
            said.append("once")
            handle.remove()
            first.register_hook(lambda _: said.append("added"))

        first = next(iter(held.values()))
        handle = first.register_hook(once)
        of_all = register_multi_grad_hook(list(held.values()), every)
        of_any = register_multi_grad_hook(list(held.values()), lambda _: said.append("any"), mode="any")
        for expected in (["any", "end", "once"], ["added", "any", "end"]):
            said.clear()
            pipeline.zero_grad()
            pipeline.step(*data)
            assert sorted(said) == expected
            assert reference.worst(gradients.pop(), wanted)[0] <= 1e-10 and not gradients
            assert reference.worst({name: one.grad for name, one in held.items()}, wanted)[0] <= 1e-10
        of_all.remove()
        of_any.remove()
        pipeline.step(*data)
        assert not gradients and sorted(said) == ["added", *expected]


@pytest.mark.parametrize("case", [Case("llama", schedule="zb-h1", mode="first-last"), TWO], ids=["one", "two"])
def test_hooks_of_a_backward(case: Case) -> None:
    run_processes(hooks_of_a_backward, case.processes, case)


# --- hooks that fail -------------------------------------------------------------------------------------


def raises(_: Tensor) -> None:
    raise ArithmeticError("what a user wrote")


FAULTS = {
    "raises": (raises, ArithmeticError, "^what a user wrote"),
    "shorter": (
        lambda gradient: gradient[:1],
        InputError,
        r"returned \[1\] torch.float64 on cpu; expected None or .*\[16\]",
    ),
    "narrow": (lambda gradient: gradient.bfloat16(), InputError, r"returned \[16\] torch.bfloat16 on cpu"),
    "number": (lambda gradient: 0.0, InputError, "returned float instead of a tensor; expected None or a gradient"),
    "sparse": (lambda gradient: gradient.to_sparse(), InputError, "torch.sparse_coo; expected None"),
}


def fails(case: Case) -> None:
    """The process with the hook raises at the end of its step; the others have finished theirs."""
    model = one_process(case)
    data = data_of(case)
    with contextlib.closing(opened(case)) as pipeline:
        held = dict(pipeline.named_parameters())
        for hook, kind, said in FAULTS.values():
            handle = held[NORM].register_hook(hook) if NORM in held else None
            if handle is None:
                pipeline.step(*data[0])
                continue
            with pytest.raises(kind, match=said) as caught:
                pipeline.step(*data[0])
            assert caught.value.__notes__ == [f"in a gradient hook of {NORM}"]
            if kind is InputError:
                assert str(caught.value).startswith(f"{NORM}: ")
            else:
                assert "raises" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
            assert list(held[NORM]._backward_hooks.values()) == [hook]
            handle.remove()
        pipeline.zero_grad()
        pipeline.step(*data[1])
        found = pipeline.full_gradients()
    reference.loss_of(model, *data[1]).backward()
    if dist.get_rank() == 0:
        assert reference.worst(found, {name: one.grad for name, one in model.named_parameters()})[0] <= 1e-10


def test_hooks_that_fail() -> None:
    run_processes(fails, 2, TWO)


class Breaks(nn.Linear):
    """A layer that fails on demand."""

    broken = False

    def forward(self, hidden: Tensor) -> Tensor:
        if self.broken:
            raise ArithmeticError("broken")
        return hidden + super().forward(hidden)


def plain_modules() -> tuple[nn.Embedding, list[nn.Module], nn.Linear]:
    torch.manual_seed(0)
    return nn.Embedding(61, 8), [Breaks(8, 8) for _ in range(2)], nn.Linear(8, 61)


def a_step_fails() -> None:
    """Hooks and the gradients of earlier steps are put back."""
    embedding, layers, head = plain_modules()
    with contextlib.closing(Pipeline.from_modules(embedding, layers, None, head, microbatches=2)) as pipeline:
        called = []
        for name, parameter in pipeline.named_parameters():
            parameter.register_hook(lambda _, name=name: called.append(name))
        ids = torch.arange(32).view(4, 8)
        pipeline.step(ids)
        gradients = {name: parameter.grad.clone() for name, parameter in pipeline.named_parameters()}
        assert sorted(called) == sorted(gradients)
        Breaks.broken = True
        with pytest.raises(ArithmeticError, match="broken"):
            pipeline.step(ids)
        Breaks.broken = False
        assert all(torch.equal(gradients[name], one.grad) for name, one in pipeline.named_parameters())
        pipeline.step(ids)
        assert sorted(called) == sorted([*gradients, *gradients])
        assert all(torch.equal(2 * gradients[name], one.grad) for name, one in pipeline.named_parameters())


def test_a_step_that_fails_puts_hooks_back() -> None:
    run_processes(a_step_fails, 1)
