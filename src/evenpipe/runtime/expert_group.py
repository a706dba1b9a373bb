"""The experts of a run that the members of a group share."""

from __future__ import annotations

from evenpipe.errors import InputError
from evenpipe.experts.adopt import Spread, names_of_experts
from evenpipe.experts.function import Overlap
from evenpipe.experts.load import Load
from evenpipe.experts.routing import Routing
from evenpipe.model import Description
from evenpipe.parallel.expert_ranks import ExpertRanks
from evenpipe.parallel.groups import Groups
from evenpipe.recipe.recipe import Recipe


def spread_experts(description: Description, groups: Groups, recipe: Recipe) -> Spread | None:
    """Return how this process shares experts with the other members of its group; None for one.

    Raises:
        InputError: on every process: such a model, or such a recipe, has none that can be shared.
    """
    if groups.experts is None:
        return None
    if recipe.compile_layers:
        raise InputError(
            "compile_layers: True, expected False with expert_parallel: the exchange of rows between experts stays"
            " outside of graphs"
        )
    ranks = ExpertRanks(groups.experts, groups.running)
    return Spread(ranks, Routing(groups.running), Overlap(columns=4, arrivals=True))


def count_choices(description: Description, groups: Groups) -> Load | None:
    """Return what counts the choices of tokens; None for a model without experts that transformers can replace."""
    names = {} if description.config is None else names_of_experts(description)
    return Load(list(names), max(names.values()), groups.running, groups.torch_device) if names else None
