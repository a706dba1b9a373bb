"""Runs steps: distributes data, runs the passes of this device's program, sums gradients, and shares results."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch

from evenpipe.communication.clock import Conversion, read_clocks
from evenpipe.experts.load import Load
from evenpipe.host.offload import Activations
from evenpipe.layers.random_state import Draws
from evenpipe.parallel.grid import Grid
from evenpipe.parallel.groups import Groups
from evenpipe.runtime.batch import cut, distribute
from evenpipe.runtime.device import HeldModel
from evenpipe.runtime.gradient_hooks import call_hooks, set_aside
from evenpipe.runtime.inputs import Divisor, Inputs
from evenpipe.runtime.pieces import Cutter
from evenpipe.runtime.replicas import Replicas
from evenpipe.runtime.result import StepResult
from evenpipe.runtime.results import Results
from evenpipe.runtime.router_loss import RouterLosses
from evenpipe.runtime.step_plan import StepPlan
from evenpipe.runtime.trained import Trained
from evenpipe.runtime.transport import Transport
from evenpipe.runtime.walker import Walker
from evenpipe.schedule import Program


@dataclass(slots=True, kw_only=True)
class Executor:
    """Runs the steps of a model that is spread over processes."""

    plan: StepPlan
    """Its layout may change between steps."""
    held: HeldModel
    groups: Groups
    grid: Grid
    torch_device: torch.device
    trained: Trained
    results: Results
    walker: Walker
    router_losses: RouterLosses | None
    cutter: Cutter | None
    draws: Draws | None
    """None: layers draw no random numbers."""
    failed: Callable[[BaseException], None]
    """Called with the error when a step fails while other processes may be in it."""
    _evaluations: dict[int, Program] = field(default_factory=dict)
    """By number of sequences."""

    def run(self, inputs: Inputs, *, training: bool, record_passes: bool) -> StepResult:
        """Run a step, or an evaluation."""
        started, plan, groups = time.perf_counter(), self.plan, self.groups
        drawn = self.draws if training else None
        self.trained.read()
        inputs, totals = distribute(
            inputs,
            called="step" if training else "evaluate",
            microbatches=plan.recipe.microbatches if training else 1,
            model=plan.description,
            tokens=Divisor.of(plan.recipe.parallelism, plan.layout.program.slices),
            groups=groups,
            grid=self.grid,
            trained=self.trained,
            drawn=drawn.draw() if drawn is not None and self.grid.feeds else 0,
            torch_device=self.torch_device,
        )
        self.trained.follow()
        assert inputs.input_ids is not None
        # Members of an expert group run the same passes.
        sequences = len(inputs.input_ids) if groups.experts is None else totals.fewest_sequences
        program = plan.layout.program if training else self._evaluation(sequences)
        microbatches = program.microbatches
        batch = cut(inputs, totals, microbatches=microbatches, dtype=self.results.dtype, torch_device=self.torch_device)
        if self.cutter is not None:
            batch = self.cutter.pieces(batch)
        hooked = self.trained.hooked if training else {}
        drawing: AbstractContextManager[None] = nullcontext()
        if drawn is not None:
            drawing = drawn.step(totals.drawn, self.grid.coordinate("dp") * program.microbatches * program.slices)
        with self._ending_with_all():
            self.held.refresh()
            if self.router_losses is not None:
                self.router_losses.accumulate = totals.accumulate
            self.walker.record_passes = record_passes
            clocks = partial(read_clocks, groups.everyone, self.grid.group("pp", "tp"), self.torch_device)
            start_clocks = clocks() if record_passes else None
            with set_aside(hooked) as of_hooked, drawing:
                record = self.walker.walk(program, batch)
            if start_clocks is not None:
                record.clock = Conversion(start_clocks, clocks())
            result = self.results.of(batch, record, started, totals.loss_factor, training=training)
        call_hooks(hooked, of_hooked)  # no other process waits for this one any more
        return result

    @contextmanager
    def _ending_with_all(self) -> Iterator[None]:
        """End the run on all processes if one fails inside: the others are in other passes, and would wait for messages
        that a loop which catches the error never sends."""
        try:
            yield
        except BaseException as error:
            self.failed(error)
            raise

    def _evaluation(self, sequences: int) -> Program:
        """Return the cached program that evaluates `sequences` sequences: the walker identifies programs by id."""
        evaluation = self.plan.layout.evaluation
        microbatches = min(sequences, evaluation.microbatches)
        if microbatches not in self._evaluations:
            self._evaluations[microbatches] = (
                evaluation if microbatches == evaluation.microbatches else evaluation.of_the_first(microbatches)
            )
        return self._evaluations[microbatches]

    def forget_evaluations(self) -> None:
        """Discard cached programs after the plan's layout has changed."""
        self._evaluations.clear()


def make_executor(
    plan: StepPlan,
    held: HeldModel,
    groups: Groups,
    grid: Grid,
    *,
    torch_device: torch.device,
    compute_dtype: torch.dtype,
    entropy: bool,
    cutter: Cutter | None,
    load: Load | None,
    draws: Draws | None,
    activations: Activations | None,
    on_first_rank: Collection[str],
    failed: Callable[[BaseException], None],
) -> Executor:
    """Return the executor of this process's part of a model.

    Args:
        entropy: whether the output layer computes it.
        load: counts the experts that tokens choose; None for a model without experts.
        on_first_rank: names of parameters that only the first tensor rank holds.
    """
    description, layout = plan.description, plan.layout
    router_losses = None
    if description.router_loss is not None:
        router_losses = RouterLosses(
            description.router_loss,
            replicas=grid.size("dp"),
            torch_device=torch_device,
            tensor_ranks=grid.size("tp"),
            context=groups.context,
        )
    replicas = Replicas(held, layout.program, groups)
    return Executor(
        plan=plan,
        held=held,
        groups=groups,
        grid=grid,
        torch_device=torch_device,
        trained=Trained(
            {name: shard.tensor for name, shard in held.shards.items()},
            names=[name for name, _ in description.skeleton.named_parameters(remove_duplicate=False)],
            vocabulary=description.vocabulary_names,
            tensor_ranks=grid.size("tp"),
            context_ranks=grid.size("cp"),
            on_first_rank=on_first_rank,
            follow=[*(parameters.follow_flags for parameters in held.unsharded), replicas.follow_flags],
        ),
        results=Results(
            held.output,
            router_losses,
            groups,
            layout,
            pipelines=plan.recipe.parallelism.replicas,
            compute_dtype=compute_dtype,
            entropy=entropy,
            load=load,
        ),
        walker=Walker(
            grid.coordinate("pp"),
            held.stages,
            held.embedding,
            held.output,
            transport=Transport(
                groups.communicators,
                grid.group("pp"),
                description.hidden_size,
                compute_dtype,
                torch_device,
                grid.size("tp"),
            ),
            vocabulary_passes=layout.sharded,
            weight_gradients=held.weight_gradients,
            checkpointing=held.checkpointing,
            replicas=replicas,
            router_losses=router_losses,
            activations=activations,
            running=groups.running,
            draws=draws,
        ),
        router_losses=router_losses,
        cutter=cutter,
        draws=draws,
        failed=failed,
    )
