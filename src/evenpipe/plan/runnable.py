"""Which plans `evenpipe train` can run; the others are estimates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from evenpipe.attention.check import check_pieces
from evenpipe.errors import InputError
from evenpipe.experts.refusals import check_experts
from evenpipe.memory.states import MIXED, SINGLE
from evenpipe.recipe.recipe import Recipe
from evenpipe.tensor.check import cut_of_model

from .device_memory import check_estimate
from .problem import Problem


def refusal(problem: Problem, recipe: Recipe) -> str:
    """Return why `evenpipe train` cannot run a recipe, in a sentence; empty if it can.

    The layers of a small copy of the model are sharded over tensor ranks as in the runtime and compared with the whole
    layers, which takes about a second per number of ranks, once. Pieces of sequences are compared with whole sequences
    likewise.
    """
    sizes, dtypes = recipe.parallelism, problem.dtypes
    if dtypes not in {MIXED, SINGLE}:
        return f"gradients in {dtypes.gradients}, masters in {dtypes.masters} and moments in {dtypes.moments}"
    try:
        sizes.check_runnable()
    except InputError as error:
        return str(error)
    experts = refusal_of_experts(problem, sizes.ep)
    if experts:
        return experts
    pieces = refusal_of_pieces(problem, sizes.cp)
    return refusal_of_cut(problem, sizes.tp) or pieces or (refusal_of_slices(problem) if recipe.slices > 1 else "")


def refusal_of_cut(problem: Problem, ranks: int) -> str:
    """Return why the layers cannot be sharded over this many tensor ranks."""
    if ranks == 1:
        return ""
    return _once(problem, cut_of_model, partial(cut_of_model, problem.bytes.description, ranks), ranks)


def refusal_of_experts(problem: Problem, members: int) -> str:
    """Return why this many replicas cannot share the experts of every layer."""
    check = partial(check_experts, problem.description, members)
    return _once(problem, check_experts, check, members)


def refusal_of_pieces(problem: Problem, ranks: int) -> str:
    """Return why sequences cannot be sharded over this many context ranks."""
    return "" if ranks == 1 else _refusal(problem, "cp", slices=False)


def refusal_of_slices(problem: Problem) -> str:
    """Return why sequences cannot be cut into slices."""
    return _refusal(problem, "slices", slices=True)


def refusal_of_estimate(problem: Problem, layout: Recipe) -> str:
    """Return why the memory of a layout cannot be estimated."""
    sizes = layout.parallelism
    return _once(problem, check_estimate, partial(check_estimate, problem, layout), (sizes.tp, sizes.cp))


def _refusal(problem: Problem, option: str, *, slices: bool) -> str:
    # `problem.bytes` keeps the small copies.
    check = partial(check_pieces, problem.bytes.description, option, slices=slices)
    return _once(problem, check_pieces, check, option)


def _once(problem: Problem, kind: object, check: Callable[[], object], key: object) -> str:
    """Return the error of a check that runs once per problem; empty if it passes."""

    def sentence() -> str:
        try:
            check()
        except InputError as error:
            return str(error)
        return ""

    return problem.once((kind, key), sentence)
