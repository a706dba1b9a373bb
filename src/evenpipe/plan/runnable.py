"""Which plans `evenpipe train` can run; the others are estimates."""

from __future__ import annotations

from functools import partial

from evenpipe.attention.check import check_pieces
from evenpipe.errors import InputError
from evenpipe.recipe.parallelism import Parallelism
from evenpipe.tensor.check import cut_of_model

from .problem import Problem


def refusal(problem: Problem, parallelism: Parallelism) -> str:
    """Return why `evenpipe train` cannot run it, in a sentence; empty if it can.

    The layers of a small copy of the model are cut over tensor ranks as the runtime does it, and compared with the
    whole ones: about a second per number of ranks, once. Likewise whole sequences with pieces of them.
    """
    try:
        parallelism.check_runnable()
    except InputError as error:
        return str(error)
    return refusal_of_cut(problem, parallelism.tp) or refusal_of_pieces(problem, parallelism.cp)


def refusal_of_cut(problem: Problem, ranks: int) -> str:
    """Return why the layers cannot be cut over so many tensor ranks."""
    return "" if ranks == 1 else problem.once((cut_of_model, ranks), partial(_refusal_of_cut, problem, ranks))


def _refusal_of_cut(problem: Problem, ranks: int) -> str:
    try:
        cut_of_model(problem.description, ranks)
    except InputError as error:
        return str(error)
    return ""


def refusal_of_pieces(problem: Problem, ranks: int) -> str:
    """Return why no sequence can be shared by so many context ranks."""
    return "" if ranks == 1 else problem.once(check_pieces, partial(_refusal_of_pieces, problem))


def _refusal_of_pieces(problem: Problem) -> str:
    try:
        check_pieces(problem.description, "context_parallel", slices=False)
    except InputError as error:
        return str(error)
    return ""
