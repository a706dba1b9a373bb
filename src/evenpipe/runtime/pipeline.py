"""`Pipeline`: a causal language model on all processes of a pipeline, trained step by step."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from evenpipe.communication.clock import Conversion, read_clocks
from evenpipe.errors import InputError
from evenpipe.host.memory import keep_freed_memory, return_freed_memory
from evenpipe.host.offload import activations_engine
from evenpipe.layers.checkpointing import check_choices
from evenpipe.layers.random_state import Draws
from evenpipe.model import (
    Description,
    EdgeTensor,
    Origin,
    as_stored,
    check_compute_dtype,
    check_values,
    describe,
    describe_modules,
    left_out,
    read_files,
    stored_dtypes,
)
from evenpipe.model.draws import may_draw
from evenpipe.parallel import process_grid
from evenpipe.parallel.groups import Groups
from evenpipe.parallel.tensor_ranks import SharedGradients
from evenpipe.processes.worker import Worker, borrow_worker, device_of_pipeline, give_back
from evenpipe.recipe.layout import Layout
from evenpipe.recipe.loss import loss_of_model
from evenpipe.recipe.recipe import Recipe, refuse_unknown
from evenpipe.recipe.unused_options import unused_options
from evenpipe.runtime.arguments import (
    PipelineOptions,
    check_kinds,
    check_memory_budget,
    check_no_autocast,
    check_positive,
    check_shardable,
    device_of_torch,
    dtype_of_compute,
    fault_of_architecture,
    recipe_of,
    sizes_given,
)
from evenpipe.runtime.arranging import model_costs
from evenpipe.runtime.batch import count_weight, cut, distribute
from evenpipe.runtime.device import Builder, LayerOptions, SharedLayers, Weights
from evenpipe.runtime.expert_group import count_choices, spread_experts
from evenpipe.runtime.gradient_hooks import call_hooks, lost_hooks, set_aside
from evenpipe.runtime.hops import check_edges
from evenpipe.runtime.inputs import Divisor, Inputs
from evenpipe.runtime.pieces import make_cutter
from evenpipe.runtime.replicas import Replicas
from evenpipe.runtime.result import StepResult
from evenpipe.runtime.results import Results
from evenpipe.runtime.router_loss import RouterLosses
from evenpipe.runtime.row import validate_program
from evenpipe.runtime.slices import cut_sequences
from evenpipe.runtime.spread_model import SpreadModel
from evenpipe.runtime.tensor_cut import alone, cut_layers, places_of
from evenpipe.runtime.tied import tied_gradients
from evenpipe.runtime.trained import Trained
from evenpipe.runtime.transport import Transport
from evenpipe.runtime.walker import Walker
from evenpipe.schedule import Kind, Program
from evenpipe.vocabulary import LossOptions

logger = logging.getLogger(__name__)


class Pipeline(SpreadModel):
    """A causal language model spread over the processes of a pipeline, one per device.

    Make it on every process, inside torchrun or `evenpipe.launch`, or in processes of your own with a process group. A
    single process without one makes a pipeline of one device. In processes that evenpipe did not start, a pipeline
    leaves signals, hooks and the allocator as they are and ends no process, unless `initialise_worker` was called.

    How the model is spread, and in which order the devices compute, is a `Recipe`, which explains each of its options:
    pass them one by one, or the whole recipe.

        pipeline = Pipeline("Qwen/Qwen3-8B", schedule="zbv", microbatches=32)
        pipeline = Pipeline("Qwen/Qwen3-8B", recipe=Recipe.of(pp=8, schedule="zbv", microbatches=32))

    Args:
        model: hub name or local folder (its weights are loaded), a transformers config (fresh weights, the same for
            every layout), or a live transformers model (its weights are copied, with what its modules have set; hooks
            and replaced modules are refused).
        recipe: a whole recipe, in place of its single options; its `dp` and `pp` must be those of the processes.
        mesh: a DeviceMesh with an axis "pp", an axis "dp" for several pipelines side by side, and an axis "tp" for
            several processes per device; default: all processes, with neighbours in one device.
        loss: label smoothing, z-loss and other options of the loss. Logit scale and soft-cap come from the model,
            except for plain modules.
        parameter_dtype: dtype of parameters, gradients and therefore optimizer state: fp32 or fp64.
        compute_dtype: dtype of activations and products; default: bf16 on a GPU, else `parameter_dtype`.
        seed: seed of fresh weights.
        torch_device: device on which this process computes. The first open pipeline of a process, or
            `initialise_worker` before it, decides the default for later ones: its own GPU if there is one, else the
            CPU. Later pipelines must not use another GPU.
        self_check: before anything else, compare a cut and a whole shrunken copy of the model on the first process, and
            a short forward of a live model with that of a model built from its config.
        trust_remote_code: run Python code that comes with a hub model.
        timeout_seconds: maximum seconds of every single wait.
        schedule: order of the passes: a name such as "zbv", an order, a program, a CSV file, a function, or a schedule
            of torch; default: "1f1b".
        schedule_options: options of a named schedule: `stages_per_device`, `group_size`, `memory_limit`.
        vocabulary: "balanced" (= "vocab-2"; the default), "vocab-1", "interlaced", "redistribute" or "first-last".
        microbatches: number of equal parts of every batch; default: 4 per device, or the number in the given order.
        replicas: number of pipelines side by side, each with the whole model and its own data: the size of `dp`;
            default: that of the mesh, else one.
        data_parallel, reshard, prefetch: "replicate" (the default) or "shard" (FSDP2), as in `Parallelism`.
        layers_per_stage: layers of each stage, first to last; default: an even split.
        checkpointing: "none" (the default), "full" or "selective" for all layers, or one of them per layer.
        compile_layers: run every layer through torch.compile.
        costs: measured pass times for arranging the schedule.
        arrange, sequence_length: what arranges it without `costs`, as in `Recipe`, for sequences of so many tokens.
        communicators: "per-pair" (the default), "per-kind" or "one".
        nccl: `NcclOptions`: priority and channels of communication on GPUs.
        offload: `OffloadOptions`: activations on the host; default: those that the order moves.
        tensor_parallel: processes of a device, which share every layer and the rows of both vocabulary layers: the
            size of `tp`; default: that of the mesh, else one.
        context_parallel: processes that share every sequence: the size of `cp`, likewise.
        expert_parallel: neighbouring replicas that share the experts of every layer: the size of `ep`, likewise.
        context_exchange, tensor_overlap, slices, documents: as in `Parallelism` and `BatchShape`.

    Raises:
        InputError: a value that is not accepted; the sentence names it.
        TypeError: an unknown argument; the sentence names the nearest one.
    """

    def __init__(
        self,
        model: str | Path | Any,
        *,
        recipe: Recipe | None = None,
        mesh: DeviceMesh | None = None,
        loss: LossOptions | None = None,
        parameter_dtype: torch.dtype = torch.float32,
        compute_dtype: torch.dtype | None = None,
        seed: int = 0,
        torch_device: torch.device | str | None = None,
        self_check: bool = True,
        trust_remote_code: bool = False,
        timeout_seconds: float = 600.0,
        **how: Unpack[PipelineOptions],
    ) -> None:
        refuse_unknown(how, (*(Pipeline.__init__.__kwdefaults__ or ()), *PipelineOptions.__annotations__))
        check_kinds(mesh=mesh, loss=loss, seed=seed, self_check=self_check, recipe=recipe)
        check_positive("timeout_seconds", timeout_seconds)
        wanted = None if torch_device is None else device_of_torch(torch_device)
        worker = borrow_worker(torch_device=wanted)  # the first call decides
        self._watch, self._owned = worker.watch, worker.owned
        self._closed, self._closing = False, ExitStack()
        self._closing.callback(give_back, worker)
        try:
            self._grid = grid = process_grid(mesh, **sizes_given(recipe, how))
            self._take_place(grid)
            self._closing.callback(self._watch.call_by_place(places_of(grid)))
            self.torch_device = device_of_pipeline(worker, wanted)
            self.recipe = recipe_of(recipe, how, grid)
            self.microbatches = self.recipe.microbatches
            self._sharded = self.recipe.parallelism.data_parallel == "shard" and self.recipe.parallelism.replicas > 1
            self._compute_dtype = dtype_of_compute(parameter_dtype, compute_dtype, self.torch_device)
            if not isinstance(model, Description):
                model = describe(model, trust_remote_code=trust_remote_code)
            self.description = as_stored(model, say=logger.warning if self._is_very_first else None)
            if (live := self.description.model) is not None:
                check_values(live)
                remarks = (lost_hooks(live), *left_out(live)) if self._is_very_first else ()
                for sentence in filter(None, remarks):
                    logger.warning(sentence)
            if self.devices > 1:
                check_compute_dtype(self.description, self._compute_dtype)
            options = loss_of_model(loss or LossOptions(), self.description)
            self._plan_step(worker, options)
            if self._sharded:
                check_shardable(self.description)
            worker.wait_for_all("a description of the model", timeout_seconds)
            self._groups = Groups(
                self._grid,
                self.layout.communicators,
                tied=self._tied_twice,
                sharded=self._sharded,
                timeout_seconds=timeout_seconds,
                torch_device=self.torch_device,
                watch=self._watch,
                nccl=self.recipe.nccl,
            )
            self._closing.callback(self._groups.close)
            if self_check and self.description.config is not None:
                self._check_architecture()
            slices, stages = self.layout.program.slices, self.layout.program.placement.stages
            cut = cut_layers(self.description, self._groups, self.recipe, self_check, stages=stages)
            self._tensor, self.tensor_overlap = cut
            cutter = make_cutter(self.description, self._model_costs, slices, self.recipe, self._groups)
            self._pieces, self.context_exchange = cutter
            self._load = count_choices(self.description, self._groups, self.tensor_rank)
            self._experts = spread_experts(self.description, self._groups, self.recipe)
            self._build(options, parameter_dtype, seed)
            files = read_files(self.description) if self._is_very_first else {}
            self._origin = Origin(files, stored_dtypes(self.description, self.parameter_shards()))
            self._let_go_of_the_model()
        except InputError:  # the same on every process
            self.close()
            raise
        except BaseException as error:
            if not worker.owned:  # otherwise the process ends with it
                if worker.borrowers == 1:  # this must not end other pipelines
                    worker.watch.report_exception(error)
                self.close()
            raise

    @classmethod
    def from_modules(
        cls,
        embedding: nn.Embedding,
        layers: Sequence[nn.Module],
        norm: nn.Module | None,
        head: nn.Linear,
        *,
        beside: Sequence[EdgeTensor] = (),
        **options: Any,
    ) -> Pipeline:
        """Make a pipeline of plain modules; their weights are copied.

        Layers may hand on further tensors besides the hidden states, each with a shape and dtype of its own:

            beside = [EdgeTensor("memory", ("sequences", "tokens", 16), torch.float64)]

        Then each layer returns the tuple (hidden, memory), and the next one is called with both. The first layer is
        called with the hidden states only, and of what the last one returns only they are used.

        Args:
            embedding: weight [vocabulary, hidden_size].
            layers: each takes and returns hidden states [batch, sequence, hidden_size].
            norm: applied between the last layer and the head, or None.
            head: hidden_size -> vocabulary; tied if its weight is the embedding's.
            beside: the tensors that layers return behind the hidden states, in order.
            options: as for `Pipeline`.
        """
        return cls(describe_modules(embedding, layers, norm, head, beside), **options)

    # --- building --------------------------------------------------------------------------------------------

    def _plan_step(self, worker: Worker, loss: LossOptions) -> None:
        """Decide what every device computes and keeps, before anything is built."""
        layers, offload = self.description.layers, self.recipe.offload
        self._checkpointing = self.recipe.checkpointing_of(layers)
        check_choices(self._checkpointing)
        self._model_costs = model_costs(self.description, self.recipe, worker, self._compute_dtype, loss)
        self.recipe, self.chosen_slices = cut_sequences(
            self.description, self._model_costs, self.recipe, self.torch_device.type, says=self._is_very_first
        )
        self.layout = Layout.of(
            self.recipe, self._model_costs, self.description.vocabulary_size, tied=self.description.tied
        )
        validate_program(self.layout.program)
        if self._is_very_first:
            rows = self.layout.program.rows
            moves = any(item is not None and item.kind is Kind.O for row in rows for item in row)
            for sentence in unused_options(self.recipe, moves=moves):
                logger.warning(sentence)
        self._evaluations: dict[int, Program] = {}
        self._kept_layers = offload.kept_layers(layers)
        self._activations = None
        if any(item is not None and item.kind is Kind.O for item in self.layout.program.rows[self.device]):
            self._activations = activations_engine(offload, self.torch_device)
            self._closing.callback(self._activations.copies.close)
        if self.torch_device.type == "cpu" and worker.owned:
            if self._activations is None:
                keep_freed_memory()
            else:
                return_freed_memory()

    def _build(self, options: LossOptions, parameter_dtype: torch.dtype, seed: int) -> None:
        groups, replicas = self._groups, self._groups.replicas
        self._draws = None
        if may_draw(self.description):
            self._draws = Draws(self.torch_device, self.context_rank * self.tensor_ranks + self.tensor_rank)
        gives_all = replicas is not None and self.description.model is not None
        self._held = Builder(
            description=self.description,
            layout=self.layout,
            grid=self._grid,
            loss=options,
            layers=LayerOptions(
                self._checkpointing, self._draws, self.recipe.compile_layers, self._activations, self._kept_layers
            ),
            weights=Weights(parameter_dtype, seed, self._broadcast if gives_all else None),
            compute_dtype=self._compute_dtype,
            torch_device=self.torch_device,
            shards=replicas if self._sharded else None,
            expert_shards=groups.expert_replicas if self._sharded else None,
            ranks=SharedLayers(self._tensor, self._experts, self._load, self._pieces is not None),
        ).build()
        check_edges(self._held.stages, self.layout.program.placement.edges, groups)
        router_loss = self.description.router_loss
        self._router_losses = None
        if router_loss is not None:
            self._router_losses = RouterLosses(
                router_loss,
                replicas=self.replicas,
                torch_device=self.torch_device,
                tensor_ranks=self.tensor_ranks,
                context=groups.context,
            )
        self._shared_gradients = None
        if groups.shared is not None:
            self._shared_gradients = SharedGradients(self._held.shared, groups.shared)
        follow = [parameters.follow_flags for parameters in self._held.unsharded]
        over_replicas = None
        if replicas is not None:
            over_replicas = Replicas(self._held, self.layout.program, self._grid, groups)
            follow.append(over_replicas.follow_flags)
        self._trained = Trained(
            dict(self.named_parameters()),
            names=[name for name, _ in self.description.skeleton.named_parameters(remove_duplicate=False)],
            vocabulary=self.description.vocabulary_names,
            tensor_ranks=self.tensor_ranks,
            context_ranks=self.context_ranks,
            alone=alone(self.description, self._tensor),
            follow=follow,
        )
        self._results = Results(
            self._held.output,
            self._router_losses,
            groups,
            self.layout,
            pipelines=self.recipe.parallelism.replicas,
            compute_dtype=self._compute_dtype,
            entropy=options.entropy,
            load=self._load,
        )
        self._walker = Walker(
            self.device,
            self._held.stages,
            self._held.embedding,
            self._held.output,
            transport=Transport(
                groups.communicators,
                self._grid.line("pp"),
                self.description.hidden_size,
                self._compute_dtype,
                self.torch_device,
                self.tensor_ranks,
            ),
            vocabulary_passes=self.layout.sharded,
            weight_gradients=self._held.weight_gradients,
            checkpointing=self._held.checkpointing,
            replicas=over_replicas,
            router_losses=self._router_losses,
            activations=self._activations,
            running=groups.running,
            draws=self._draws,
        )

    def _broadcast(self, tensor: Tensor) -> None:
        """Give all replicas the first one's weights of a live model: each may have drawn its own."""
        assert self._groups.replicas is not None
        self._groups.replicas.broadcast(tensor, self._grid.at(dp=0, cp=0), "weights of the first replica").wait(
            "the first step"
        )

    def _check_architecture(self) -> None:
        """Check the architecture on the first process; raise its error on all."""
        fault = None
        if self._is_very_first:
            fault = fault_of_architecture(self.description, self.layout.program.order, self.recipe)
        fault = self._groups.from_the_first(fault, "the self-check")
        if fault is not None:
            raise InputError(fault)

    # --- training --------------------------------------------------------------------------------------------

    def step(
        self,
        input_ids: Tensor | Mapping[str, Tensor] | None,
        labels: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_weights: Tensor | None = None,
        accumulate: int | None = None,
        total_tokens: float | None = None,
        record_passes: bool = False,
    ) -> StepResult:
        """Run forward and backward of one batch, and add its gradients to those of the parameters.

        Only the first process of a pipeline passes data; arguments of the others are ignored. Each replica has its own
        batch; batches may differ in size, length and number of labels. The loss is the mean over the labels of all
        replicas, and the gradients are those of this mean. Parameters can be frozen between steps by their
        `requires_grad`, with the same value for a name on all processes that have the parameter. Collective.

        Hooks of gradients on `parameters()` are called as by one backward of the whole batch: once for every parameter
        with a gradient, at the end of the step, with the gradient of this step, complete for what this process holds.

        An optimizer's update can use the gradients of several steps, which add up. With `total_tokens` they are those
        of the mean over all labels of the update, as one step with all batches would give:

            batches = [next(data) for _ in range(4)]
            total = sum(pipeline.count_labels(*batch) for batch in batches)
            loss = sum(pipeline.step(*batch, total_tokens=total).loss for batch in batches)

        Args:
            input_ids: [batch, sequence] int64; batch must be a multiple of `microbatches`. Or a mapping of tensors by
                the names of these arguments, from `input_ids` to `token_weights`, as loaders and collators of
                transformers make them; other names are refused.
            labels: same shape, aligned with `input_ids` and shifted inside; -100 is ignored. Default: `input_ids`.
            position_ids: same shape; default: 0, 1, 2, ...
            attention_mask: same shape, 1 for tokens and 0 for padding, which must be on the right.
            token_weights: same shape, weight of each label in the mean; default: 1.
            accumulate: number of steps per optimizer update; default: 1. Without `total_tokens`, each step divides its
                gradients by this number, so the update uses a mean of means: it equals that of one step with all
                batches only if each has as many labels. The loss in the result is not divided.
            total_tokens: number of labels that all steps of the update count, over all replicas, from `count_labels`;
                with token weights, their sum. It takes the place of the step's own number (or sum) in every mean, so
                the losses of the steps add up to that of the update. The router loss of a mixture of experts has no
                labels: it needs `accumulate` too, and the update uses the mean over its steps.
            record_passes: keep the times of every pass, wait and transfer in the result, for `trace`; on a GPU also the
                actions of the memory allocator.

        Raises:
            InputError: a batch that is not accepted, `requires_grad` or hooks that differ between processes, or
                autocast: no gradient has changed then. Or a hook returned something that cannot be the gradient: only
                parameters whose hooks were called before have this step's.
            RunError: a step has failed on another process, or on this one before. With several processes, any exception
                in the middle of a step ends the run on all of them.
        """
        tensors = (input_ids, labels, position_ids, attention_mask, token_weights)
        inputs = Inputs.of(*tensors, accumulate, self._separate, total_tokens)
        return self._run(inputs, training=True, record_passes=record_passes)

    def count_labels(
        self,
        input_ids: Tensor | Mapping[str, Tensor] | None,
        labels: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_weights: Tensor | None = None,
    ) -> float:
        """Return how many labels `step` would count in a batch, over all replicas; with token weights, their sum.

        Labels of -100, of padding, and of the first token of a sequence (or separate document) do not count. Arguments
        and errors are those of `step`. The result is the same on every process. Collective.
        """
        tensors = (input_ids, labels, position_ids, attention_mask, token_weights)
        inputs = Inputs.of(*tensors, separate=self._separate)
        numbers_of_all = partial(self._groups.numbers, called="count_labels")
        return count_weight(inputs, model=self.description, numbers_of_all=numbers_of_all, feeds=self.feeds)

    def evaluate(
        self,
        input_ids: Tensor | Mapping[str, Tensor] | None,
        labels: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_weights: Tensor | None = None,
    ) -> StepResult:
        """Run the forward of one batch without gradients; return the loss and the log-probability of every label.

        Arguments and errors are those of `step`, but the batch may have any size: it need not be a multiple of
        `microbatches`, and may be smaller. The loss is the mean over all labels except -100. Collective.
        """
        inputs = Inputs.of(input_ids, labels, position_ids, attention_mask, token_weights, separate=self._separate)
        modes = {stage: module.training for stage, module in self._held.stages.items()}
        for module in self._held.stages.values():
            module.eval()
        try:
            return self._run(inputs, training=False, record_passes=False)
        finally:
            for stage, module in self._held.stages.items():
                module.train(modes[stage])

    def _run(self, inputs: Inputs, *, training: bool, record_passes: bool) -> StepResult:
        self._watch.raise_cause()
        if self._closed:
            raise InputError("the pipeline is closed and cannot step, expected one that is open: make a new one")
        check_no_autocast(self.torch_device)
        if training and self.recipe.compile_layers and self._draws is not None:
            check_memory_budget()
        started = time.perf_counter()
        groups = self._groups
        self._trained.read()
        inputs, totals = distribute(
            inputs,
            microbatches=self.microbatches if training else 1,
            model=self.description,
            tokens=Divisor.of(self.recipe.parallelism, self.layout.program.slices),
            communicator=groups.pipeline,
            replicas=groups.data,
            begin=partial(groups.begin, "step" if training else "evaluate"),
            trained=self._trained,
            drawn=self._draws.draw() if training and self._draws is not None and self.feeds else 0,
            torch_device=self.torch_device,
        )
        self._trained.follow()
        assert inputs.input_ids is not None
        # Members of an expert group run the same passes.
        sequences = len(inputs.input_ids) if self._groups.experts is None else totals.fewest_sequences
        program = self.layout.program if training else self._evaluation(sequences)
        parts = program.microbatches
        batch = cut(inputs, totals, microbatches=parts, dtype=self._results.dtype, torch_device=self.torch_device)
        if self._pieces is not None:
            batch = self._pieces.pieces(batch)
        hooked = self._trained.hooked if training else {}
        drawing: AbstractContextManager[None] = nullcontext()
        if training and self._draws is not None:
            drawing = self._draws.step(totals.drawn, self.replica * program.microbatches * program.slices)
        with self._ending_with_all():
            self._held.refresh()
            if self._router_losses is not None:
                self._router_losses.accumulate = totals.accumulate
            self._walker.record_passes = record_passes
            before = read_clocks(groups.over("pp", "tp"), self.torch_device) if record_passes else None
            shared = self._shared_gradients if training else None
            tied = tied_gradients(self._held.tied_copy, self._groups.tied) if training else nullcontext()
            with set_aside(hooked) as of_hooked, drawing, tied:
                if shared is not None:
                    shared.begin()
                record = self._walker.walk(program, batch)
                if shared is not None:
                    shared.finish()
            if before is not None:
                record.clock = Conversion(before, read_clocks(groups.over("pp", "tp"), self.torch_device))
            result = self._results.of(batch, record, started, totals.loss_factor, training=training)
        call_hooks(hooked, of_hooked)  # no other process waits for this one any more
        return result

    @contextmanager
    def _ending_with_all(self) -> Iterator[None]:
        """End the run on all processes if one fails in here: the others are in other passes, and would wait for what a
        loop that catches the error never sends."""
        try:
            yield
        except BaseException as error:
            self._watch.report_exception(error)
            if not self._owned and self._groups.everyone is not None:  # else this process ends soon
                self.close()  # which ends waits of others that only the connection can end
            raise

    def _evaluation(self, sequences: int) -> Program:
        """Return the cached program that evaluates `sequences`: the walker knows programs by identity."""
        whole = self.layout.evaluation
        parts = min(sequences, whole.microbatches)
        if parts not in self._evaluations:
            self._evaluations[parts] = whole if parts == whole.microbatches else whole.of_the_first(parts)
        return self._evaluations[parts]

    def close(self) -> None:
        """Destroy the communicators. No step may be running; the pipeline cannot step afterwards. Collective."""
        self._closed = True
        self._closing.close()
