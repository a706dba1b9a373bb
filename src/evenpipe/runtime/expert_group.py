"""The experts of a run that the members of a group share."""

from __future__ import annotations

import logging

from evenpipe.experts.adopt import Spread, names_of_experts
from evenpipe.experts.load import Load
from evenpipe.experts.overlap import Layer, choose
from evenpipe.experts.refusals import check_experts
from evenpipe.experts.routing import Routing
from evenpipe.model import Description
from evenpipe.model.flops import usual_length
from evenpipe.parallel.expert_ranks import ExpertRanks
from evenpipe.parallel.groups import Groups
from evenpipe.recipe.recipe import Recipe

logger = logging.getLogger(__name__)


def spread_experts(description: Description, groups: Groups, recipe: Recipe) -> Spread | None:
    """Return how this process shares experts with the other members of its group; None if it is the only one.

    Raises:
        InputError: on every process, if the model or the recipe has no experts that can be shared.
    """
    if groups.experts is None:
        return None
    check_experts(description, len(groups.experts.members))
    ranks = ExpertRanks(groups.experts, groups.running)
    chosen = choose(recipe.parallelism.experts, _layer(description, ranks.size, recipe))
    if groups.everyone is not None and groups.everyone.position == 0:
        logger.info("exchange of experts: %s", chosen.reason)
    return Spread(ranks, Routing(groups.running), chosen.overlap)


def _layer(description: Description, members: int, recipe: Recipe) -> Layer:
    """Return the first layer with experts."""
    first = next(iter(names_of_experts(description)))
    experts = description.skeleton.get_submodule(first)
    count, *sizes = experts.get_parameter("down_proj").shape
    return Layer(
        tokens=recipe.batch.microbatch_size * (recipe.batch.sequence_length or usual_length(description)),
        hidden_size=description.hidden_size,
        width=sizes[0 if experts.is_transposed else 1],
        experts=count,
        choices=getattr(description.config, "num_experts_per_tok", 1),
        members=members,
    )


def count_choices(description: Description, groups: Groups, tensor_rank: int) -> Load | None:
    """Return the counter of tokens' choices; None for a model without experts that transformers can replace."""
    names = {} if description.config is None else names_of_experts(description)
    if not names:
        return None
    return Load(
        list(names),
        max(names.values()),
        groups.running,
        groups.torch_device,
        counts=not tensor_rank,  # tensor ranks route the same tokens
    )
