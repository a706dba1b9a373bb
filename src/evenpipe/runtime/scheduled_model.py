"""A model whose devices run a program: its passes, their trace, and another order between two steps."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import torch

from evenpipe.errors import InputError
from evenpipe.model import Description
from evenpipe.parallel.groups import Groups
from evenpipe.recipe.layout import Layout, ModelCosts, flop_costs, layout_of, without_vocabulary
from evenpipe.recipe.recipe import Recipe
from evenpipe.runtime.result import StepResult
from evenpipe.runtime.trace import gather_trace
from evenpipe.schedule import Costs, Order, Program, Timeline, VocabularyMode, time_order
from evenpipe.schedule.trace import Trace


class ScheduledModel:
    """A model whose devices run the program of a layout."""

    description: Description
    recipe: Recipe
    layout: Layout
    torch_device: torch.device
    """Device on which this process computes."""
    tensor_ranks: int
    """Processes of a device, which share each of its layers."""
    _model_costs: ModelCosts
    _groups: Groups
    _evaluations: dict[int, Program]
    """By number of sequences."""

    @property
    def order(self) -> Order:
        """The passes of every device in a step, in order, including vocabulary passes."""
        return self.layout.program.order

    @property
    def program(self) -> Program:
        """The passes and transfers that every device executes in a step."""
        return self.layout.program

    @property
    def order_matters(self) -> bool:
        """Whether another order of the same passes changes gradients: in their last bits, where one device adds those
        of both vocabulary layers up in one matrix.

        In all other models each parameter gets its gradients from one microbatch after the other, in any order. Random
        numbers of layers do not depend on it (`layers/random_state.py`).
        """
        return self.description.tied

    def trace(self, result: StepResult, **about: Any) -> Trace | None:
        """Return the trace of a step with `record_passes` on the first process of the pipeline, None on the others.

        With context ranks, each of them has a trace of its own.

        about: further facts for the reader of the trace. Collective.
        """
        if result.record.clock is None:
            raise InputError("trace: the step was not recorded, expected the result of step(..., record_passes=True)")
        self._groups.agree("trace")
        layout = self.layout
        ranks = {"tensor_parallel": self.tensor_ranks} if self.tensor_ranks > 1 else {}
        return gather_trace(
            result.record,
            layout.program,
            self._groups.over("pp", "tp"),
            self.torch_device,
            costs=layout.costs,
            about={"vocabulary": layout.mode, **ranks, **about},
        )

    def layout_by(self, costs: Costs) -> Layout:
        """Return the layout of this pipeline with its named schedule arranged by pass times, one F and B per stage.

        Raises InputError if the pipeline runs a given order, or if the other one needs other communicators.
        """
        if not isinstance(self.recipe.schedule, str):
            raise InputError("arrange: this pipeline runs a given order, expected one with a named schedule")
        recipe = replace(self.recipe, costs=costs, layers_per_stage=self.layout.layers_per_stage)
        layout = layout_of(recipe, self._model_costs, self.description)
        missing = sorted(layout.communicators.keys() - self.layout.communicators.keys())
        if missing:
            raise InputError(f"arrange: the order needs communicators that this pipeline lacks: {', '.join(missing)}")
        return layout

    def arrange(self, costs: Costs) -> None:
        """From the next step on, run the order that these pass times arrange. Collective.

        Raises InputError as `layout_by`, and if processes give different pass times.
        """
        layout = self.layout_by(costs)
        text = "\n".join(" ".join(map(str, row)) for row in layout.program.rows)
        own = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
        orders = self._groups.begin("arrange", self._groups.everyone, [own], "the call of arrange", "")
        if any(order != [own] for order in orders):
            raise InputError("arrange: processes were given other pass times, expected the same on all of them")
        self.layout = layout
        self._evaluations.clear()

    def from_the_first(self, text: str | None, what: str) -> str | None:
        """Return the text of the very first process on all of them; what: for the error of a process that waits for it
        in vain. Collective."""
        return self._groups.from_the_first(text, what)

    def predict(self, vocabulary: str | None = None) -> Timeline:
        """Simulate a step of this pipeline, or of it in another vocabulary mode. Times are in FLOPs per token.

        The other mode keeps the layers of each stage, unless one of both is "redistribute".
        """
        layout = self.layout
        if vocabulary is not None and VocabularyMode.of(vocabulary) != layout.mode:
            cut_anew = "redistribute" in (layout.mode, vocabulary) and len(layout.layers) <= self.description.layers
            other = Recipe(
                parallelism=self.recipe.parallelism,
                batch=self.recipe.batch,
                schedule=without_vocabulary(layout.program.order),
                vocabulary=vocabulary,
                layers_per_stage=None if cut_anew else layout.layers_per_stage,
            )
            layout = layout_of(other, self._model_costs, self.description)
        return time_order(layout.program.order, flop_costs(self._model_costs, layout))
