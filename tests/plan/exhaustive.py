"""The search of the planner beside an evaluation of everything in a small space."""

from __future__ import annotations

import math

from evenpipe.plan.bounds import layout_bound, order_bound, work_bound
from evenpipe.plan.configuration_search import head_layers, search_configurations
from evenpipe.plan.evaluation import evaluate
from evenpipe.plan.problem import Problem
from evenpipe.plan.space import Space, configurations, layouts


def check_against_all(given: Problem, space: Space) -> None:
    """Check that bounds hold, and that the best plan that is found is the best one within 2 %."""
    best = math.inf
    for layout in layouts(given, space):
        for one in configurations(given, space, layout, head_layers(given, layout)):
            evaluation = evaluate(given, one)
            if evaluation.fits:
                best = min(best, evaluation.seconds)
                # Bounds that hold: else the search might pass the best plan over.
                assert layout_bound(given, layout).seconds <= evaluation.seconds * (1 + 1e-9)
                bound = work_bound(given, one)
                assert max(bound.seconds, order_bound(given, one, bound.again)) <= evaluation.seconds * (1 + 1e-9), (
                    one.name
                )
                assert not bound.lacking and not layout_bound(given, layout).lacking, one.name
    found = search_configurations(given, space, wanted=3, workers=1)
    assert found.best is not None and found.best.seconds <= 1.02 * best
    assert found.best.seconds >= best
