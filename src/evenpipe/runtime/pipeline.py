"""`Pipeline`: a causal language model on all processes of a pipeline, trained step by step.

It composes

    Description     what the model is                           model/description.py
    StepPlan        its recipe and layout                       runtime/step_plan.py
    Groups          communicators of its processes              parallel/groups.py
    ModelState      this process's part of it                   runtime/model_state.py, built by runtime/device.py
    Executor        the steps                                   runtime/executor.py

and delegates its methods to them.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from evenpipe.checkpoints import Checkpoint
from evenpipe.errors import InputError
from evenpipe.experts.bias import is_router_bias, move_biases
from evenpipe.host.memory import keep_freed_memory, return_freed_memory
from evenpipe.host.offload import activations_engine
from evenpipe.layers.random_state import Draws
from evenpipe.model import (
    Description,
    EdgeTensor,
    Origin,
    Spec,
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
from evenpipe.model.placement import Held
from evenpipe.model.small_copy import SmallCopies
from evenpipe.model.transform import LayerTransform, transformed
from evenpipe.optimizers.held import HeldParameter
from evenpipe.parallel import process_grid
from evenpipe.parallel.groups import Groups
from evenpipe.processes.worker import Worker, borrow_worker, device_of_pipeline, return_worker
from evenpipe.recipe.layout import Layout
from evenpipe.recipe.loss import loss_of_model
from evenpipe.recipe.recipe import Recipe, refuse_unknown
from evenpipe.runtime.accounting import ByteCounter
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
    refuse_use_of_a_part,
    sizes_given,
)
from evenpipe.runtime.batch import count_weight
from evenpipe.runtime.device import Builder, LayerOptions, SharedLayers, Weights
from evenpipe.runtime.executor import make_executor
from evenpipe.runtime.expert_group import count_choices, spread_experts
from evenpipe.runtime.gradient_hooks import lost_hooks
from evenpipe.runtime.hops import check_edges
from evenpipe.runtime.inputs import Inputs
from evenpipe.runtime.model_state import ModelState
from evenpipe.runtime.pieces import make_cutter
from evenpipe.runtime.result import StepResult, html_table
from evenpipe.runtime.step_plan import plan_step
from evenpipe.runtime.tensor_cut import cut_layers, names_on_first_rank, places_of
from evenpipe.runtime.trace import gather_trace
from evenpipe.schedule import Costs, Order, Program, Timeline
from evenpipe.schedule.trace import Trace
from evenpipe.vocabulary import LossOptions
from evenpipe.words import count, nearest, refused

logger = logging.getLogger(__name__)


class Pipeline:
    """A causal language model spread over the processes of a pipeline, one per device.

    Create it on every process, inside torchrun or `evenpipe.launch`, or in your own processes with a process group. A
    single process without one makes a pipeline of one device. In processes that evenpipe did not start, a pipeline
    leaves signals, hooks and the allocator as they are and ends no process, unless `initialise_worker` was called.

    A `Recipe` describes how the model is spread and in which order the devices compute. It documents each of its
    options: pass them individually, or pass a recipe.

        pipeline = Pipeline("Qwen/Qwen3-8B", schedule="zbv", microbatches=32)
        pipeline = Pipeline("Qwen/Qwen3-8B", recipe=Recipe.of(pp=8, schedule="zbv", microbatches=32))

    Args:
        model: hub name or local folder (its weights are loaded), a transformers config (fresh weights, the same for
            every layout), or a live transformers model (its weights are copied, with what its modules have set; hooks
            and replaced modules are refused).
        recipe: a recipe, instead of its individual options; its `dp` and `pp` must be those of the processes.
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
        self_check: before anything else, compare cut and uncut small copies of the model on the first process, and a
            short forward of a live model with that of a model built from its config.
        spec: a `ModelSpec`, or a function of the config that returns one: facts about the model's family, if `describe`
            cannot determine how to cut it.
        trust_remote_code: run Python code that comes with a hub model.
        transforms: changes to its layers, such as adapters, applied in this order (`evenpipe.LayerTransform`).
        timeout_seconds: maximum seconds of each wait.
        schedule: order of the passes: a name such as "zbv", an order, a program, a CSV file, a function, or a schedule
            of torch; default: "1f1b".
        schedule_options: options of a named schedule: `stages_per_device`, `group_size`, `max_in_flight`.
        vocabulary: "balanced" (= "vocab-2"; the default), "vocab-1", "interlaced", "redistribute" or "first-last".
        microbatches: number of equal parts of every batch; default: 4 per device, or the number in the given order.
        dp, pp, cp, tp, ep: sizes of the axes; default: those of the mesh, else 1 for each but `pp`, which gets the
            remaining processes. `dp`: pipelines side by side, each with the whole model and its own data; `pp`:
            devices of a pipeline; `cp`: processes that share every sequence; `tp`: processes of a device, which share
            every layer and the rows of both vocabulary layers; `ep`: neighbouring replicas that share the experts of
            every layer.
        data_parallel, reshard, prefetch: "replicate" (the default) or "shard" (FSDP2), as in `Parallelism`.
        layers_per_stage: layers of each stage, first to last; default: an even split.
        activation_checkpointing: "none" (the default), "full" or "selective" for all layers, or one of them per layer.
        compile_layers: run every layer through torch.compile.
        costs: measured pass times for arranging the schedule.
        arrange, sequence_length: how to arrange it without `costs`, as in `Recipe`, and for which sequence length.
        communicators: "per-kind", "per-pair" or "one", as in `Recipe`; default: "per-kind".
        nccl: `NcclOptions`: priority and channels of communication on GPUs.
        offload: `OffloadOptions` for activations on the host; default: those that the order moves.
        context_exchange, tensor_overlap, slices, documents: as in `Parallelism` and `BatchShape`.

    Raises:
        InputError: a value is not accepted; the message names it.
        TypeError: an argument is unknown; the message names the nearest one.
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
        spec: Spec | None = None,
        trust_remote_code: bool = False,
        transforms: Sequence[LayerTransform] = (),
        timeout_seconds: float = 600.0,
        **recipe_options: Unpack[PipelineOptions],
    ) -> None:
        refuse_unknown(recipe_options, (*(Pipeline.__init__.__kwdefaults__ or ()), *PipelineOptions.__annotations__))
        check_kinds(mesh=mesh, loss=loss, seed=seed, self_check=self_check, recipe=recipe, transforms=transforms)
        check_positive("timeout_seconds", timeout_seconds)
        requested = None if torch_device is None else device_of_torch(torch_device)
        worker = borrow_worker(torch_device=requested)  # the first call decides
        self._watch, self._owned = worker.watch, worker.owned
        self._closed, self._closing = False, ExitStack()
        self._closing.callback(return_worker, worker)
        try:
            self._grid = grid = process_grid(mesh, **sizes_given(recipe, recipe_options))
            self._closing.callback(self._watch.show_positions(places_of(grid)))
            self.device, self.devices = grid.coordinate("pp"), grid.size("pp")
            self.tensor_rank, self.tensor_ranks = grid.coordinate("tp"), grid.size("tp")
            self.context_rank, self.context_ranks = grid.coordinate("cp"), grid.size("cp")
            self.replica, self.replicas = grid.coordinate("dp"), grid.size("dp")
            self.expert_rank, self.expert_ranks = grid.coordinate("ep"), grid.size("ep")
            self.torch_device = device_of_pipeline(worker, requested)
            self._compute_dtype = dtype_of_compute(parameter_dtype, compute_dtype, self.torch_device)
            self.description = self._describe(model, spec, transforms, trust_remote_code=trust_remote_code)
            options = loss_of_model(loss or LossOptions(), self.description)
            copies = SmallCopies.of(self.description)  # the checks below share them
            self._plan = plan_step(
                self.description,
                recipe_of(recipe, recipe_options, grid),
                worker,
                torch_device=self.torch_device,
                compute_dtype=self._compute_dtype,
                loss=options,
                logs=grid.is_first,
            )
            sharded = self.recipe.parallelism.data_parallel == "shard" and self.recipe.parallelism.replicas > 1
            if sharded:
                check_shardable(self.description)
            worker.wait_for_all("a description of the model", timeout_seconds)
            self._groups = Groups(
                grid,
                self.layout.communicators,
                tied=self._tied_twice,
                vocabulary=self.layout.sharded,
                sharded=sharded,
                timeout_seconds=timeout_seconds,
                torch_device=self.torch_device,
                watch=self._watch,
                nccl=self.recipe.nccl,
            )
            self._closing.callback(self._groups.close)
            if self_check and self.description.config is not None:
                self._check_architecture()
            program = self.layout.program
            self._tensor, self.tensor_overlap = cut_layers(
                self.description, self._groups, self.recipe, self_check, stages=program.placement.stages
            )
            self._cutter, self.context_exchange = make_cutter(
                self.description,
                self._plan.costs,
                program.slices,
                self.recipe,
                self._groups,
                on_gpu=self.torch_device.type == "cuda",
            )
            del copies
            self._load = count_choices(self.description, self._groups, self.tensor_rank)
            self._experts = spread_experts(self.description, self._groups, self.recipe)
            self._build(worker, options, parameter_dtype, seed, sharded=sharded)
            self._release_live_model()
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
        edge_tensors: Sequence[EdgeTensor] = (),
        **options: Any,
    ) -> Pipeline:
        """Make a pipeline of plain modules; their weights are copied.

        Layers may pass on further tensors besides the hidden states, each with its own shape and dtype:

            edge_tensors = [EdgeTensor("memory", ("sequences", "tokens", 16), torch.float64)]

        Then each layer returns the tuple (hidden, memory), and the next one is called with both. The first layer is
        called with the hidden states only, and only the hidden states that the last one returns are used.

        Args:
            embedding: weight [vocabulary, hidden_size].
            layers: each takes and returns hidden states [batch, sequence, hidden_size].
            norm: applied between the last layer and the head, or None.
            head: hidden_size -> vocabulary; tied if its weight is the embedding's.
            edge_tensors: the tensors that layers return after the hidden states, in order.
            options: as for `Pipeline`.
        """
        return cls(describe_modules(embedding, layers, norm, head, edge_tensors), **options)

    # --- building --------------------------------------------------------------------------------------------

    def _describe(
        self, model: Any, spec: Spec | None, transforms: Sequence[LayerTransform], *, trust_remote_code: bool
    ) -> Description:
        if not isinstance(model, Description):
            model = describe(model, spec=spec, trust_remote_code=trust_remote_code)
        elif spec is not None:
            raise refused("spec", spec, "left out for plain modules, and where the model is a description")
        is_first = self._grid.is_first
        description = transformed(as_stored(model, say=logger.warning if is_first else None), transforms)
        if (live := description.model) is not None:
            check_values(live)
            for sentence in filter(None, (lost_hooks(live), *left_out(live)) if is_first else ()):
                logger.warning(sentence)
        if self.devices > 1:
            check_compute_dtype(description, self._compute_dtype)
        return description

    def _build(
        self, worker: Worker, options: LossOptions, parameter_dtype: torch.dtype, seed: int, *, sharded: bool
    ) -> None:
        plan, groups, replicas = self._plan, self._groups, self._groups.replicas
        activations = None
        if plan.moves_activations[self.device]:
            activations = activations_engine(self.recipe.offload, self.torch_device)
            self._closing.callback(activations.copies.close)
        if self.torch_device.type == "cpu" and worker.owned:
            if activations is None:
                keep_freed_memory()
            else:
                return_freed_memory()
        draws = None
        if may_draw(self.description):
            draws = Draws(self.torch_device, self.context_rank * self.tensor_ranks + self.tensor_rank)
        kept_layers = self.recipe.offload.kept_layers(self.description.layers)
        broadcasts_weights = replicas is not None and self.description.model is not None
        held = Builder(
            description=self.description,
            layout=self.layout,
            grid=self._grid,
            loss=options,
            layers=LayerOptions(plan.checkpointing, draws, self.recipe.compile_layers, activations, kept_layers),
            weights=Weights(parameter_dtype, seed, self._broadcast if broadcasts_weights else None),
            compute_dtype=self._compute_dtype,
            torch_device=self.torch_device,
            shards=replicas if sharded else None,
            expert_shards=groups.expert_replicas if sharded else None,
            ranks=SharedLayers(self._tensor, self._experts, self._load, self._cutter is not None),
        ).build()
        check_edges(held.stages, self.layout.program.placement.edges, groups)
        files = read_files(self.description) if self._grid.is_first else {}
        self._state = ModelState(
            description=self.description,
            held=held,
            groups=groups,
            grid=self._grid,
            torch_device=self.torch_device,
            parameter_dtype=parameter_dtype,
            is_first=self._grid.is_first,
            sharded=sharded,
            origin=Origin(files, stored_dtypes(self.description, held.shards | held.buffers)),
            drawn_by=None if draws is None else self._drawn_by,
        )
        self._executor = make_executor(
            plan,
            held,
            groups,
            self._grid,
            torch_device=self.torch_device,
            compute_dtype=self._compute_dtype,
            entropy=options.entropy,
            cutter=self._cutter,
            load=self._load,
            draws=draws,
            activations=activations,
            on_first_rank=names_on_first_rank(self.description, self._tensor),
            failed=self._step_failed,
        )

    def _broadcast(self, tensor: Tensor) -> None:
        """Broadcast the weights of the first replica's live model: each replica may have drawn its own."""
        assert self._groups.replicas is not None
        self._groups.replicas.broadcast(tensor, self._grid.at(dp=0, cp=0), "weights of the first replica").wait(
            "the first step"
        )

    def _check_architecture(self) -> None:
        """Check the architecture on the first process; raise its error on all processes."""
        fault = None
        if self._grid.is_first:
            fault = fault_of_architecture(self.description, self.layout.program.order, self.recipe)
        fault = self._groups.from_the_first(fault, "the self-check")
        if fault is not None:
            raise InputError(fault)

    def _release_live_model(self) -> None:
        """Release a live model, which has been copied; keep only its generation config."""
        model, skeleton = self.description.model, self.description.skeleton
        if isinstance(skeleton, PreTrainedModel) and model is not None:
            skeleton.generation_config = copy.deepcopy(model.generation_config)
            self.description = replace(self.description, model=None)
            self._plan.description = self._state.description = self.description

    @property
    def _tied_twice(self) -> tuple[int, int] | None:
        """The two devices that each hold a copy of the tied matrix; None if it is held once."""
        placement = self.layout.program.placement
        ends = placement.first_device, placement.last_device
        return ends if self.description.tied and not self.layout.sharded and len({*ends}) > 1 else None

    # --- the layout ------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"Pipeline has no attribute '{name}'{nearest(name, dir(self))}")

    def __repr__(self) -> str:
        numbers = sum(math.prod(shape) for shape in self.description.shapes.values())
        parts = [
            f"{self.description.architecture} of {count(self.description.layers, 'layer')} and {numbers:,} parameters",
            f"device {self.device} of {self.devices}",
            *([f"tensor rank {self.tensor_rank} of {self.tensor_ranks}"] if self.tensor_ranks > 1 else []),
            *([f"context rank {self.context_rank} of {self.context_ranks}"] if self.context_ranks > 1 else []),
            *([f"replica {self.replica} of {self.replicas}"] if self.replicas > 1 else []),
            *([f"expert rank {self.expert_rank} of {self.expert_ranks}"] if self.expert_ranks > 1 else []),
            count(self.layout.program.placement.stages, "stage"),
            count(self.microbatches, "microbatch"),
            f"vocabulary {self.layout.mode}",
        ]
        return f"<Pipeline: {', '.join(parts)}>"

    def _repr_html_(self) -> str:
        """Return a table for notebooks: layers and vocabulary rows of each device, as ranges with exclusive ends."""
        layout, rows = self.layout, []
        for device in range(self.devices):
            stages = layout.program.placement.stages_of(device)
            layers = ", ".join(f"{first}:{last}" for first, last in (layout.layers[stage] for stage in stages))
            device_shards = slice(device * self.tensor_ranks, (device + 1) * self.tensor_ranks)
            shards = [shards[device_shards] for shards in (layout.embedding_shards, layout.head_shards)]
            rows.append([str(device), layers, *(f"{held[0].start}:{held[-1].stop}" for held in shards)])
        return html_table(repr(self), ["device", "layers", "rows of the embedding", "rows of the output layer"], rows)

    @property
    def recipe(self) -> Recipe:
        """The recipe, including everything that was chosen by default or from costs."""
        return self._plan.recipe

    @property
    def layout(self) -> Layout:
        """Where layers and vocabulary rows are, and the program of a step.

        Another layout with the same placement, mode and communicators may be set on all processes; it is used from the
        next step on.
        """
        return self._plan.layout

    @layout.setter
    def layout(self, layout: Layout) -> None:
        self._plan.layout = layout
        self._executor.forget_evaluations()

    @property
    def chosen_slices(self) -> str | None:
        """Why sequences are cut into this number of slices; None if the number was given."""
        return self._plan.chosen_slices

    @property
    def microbatches(self) -> int:
        """Number of equal parts of each batch."""
        return self.recipe.microbatches

    @property
    def order(self) -> Order:
        """The passes of every device in a step, in order, including vocabulary passes."""
        return self.layout.program.order

    @property
    def program(self) -> Program:
        """The passes and transfers that each device executes in a step."""
        return self.layout.program

    @property
    def order_matters(self) -> bool:
        """Whether another order of the same passes changes gradients: it changes their last bits where one device
        accumulates the gradients of both vocabulary layers in one matrix.

        In all other models each parameter gets its gradients from one microbatch after the other, in any order. Random
        numbers of layers do not depend on it (`layers/random_state.py`).
        """
        return self.description.tied

    @property
    def feeds(self) -> bool:
        """Whether this is the first process of its replica, which passes the data of every step."""
        return self._grid.feeds

    @property
    def _separate(self) -> bool:
        """Whether documents of a sequence are kept from attending to each other."""
        return self.recipe.batch.separate

    @property
    def expert_layers(self) -> tuple[str, ...]:
        """Names of the expert modules of the whole model, one for each layer that has experts."""
        return () if self._load is None else self._load.layers

    @property
    def keeps_documents_apart(self) -> str | None:
        """What keeps the documents of a sequence apart: "the model's attention" or "evenpipe's attention"; None if they
        attend to each other."""
        if not self._separate:
            return None
        return "the model's attention" if self._cutter is None else "evenpipe's attention"

    def slice_lengths(self, tokens: int) -> tuple[int, ...]:
        """Return the number of tokens of each slice of a sequence of `tokens` tokens, a multiple of what `step` needs.

        Slices are cut so that layers take equal time on each, according to the recipe's costs if these were measured on
        slices, else by FLOPs.
        """
        ends = (tokens,) if self._cutter is None else self._cutter.ends_of(tokens)
        return tuple(end - start for start, end in pairwise((0, *ends)))

    def trace(self, result: StepResult, **about: Any) -> Trace | None:
        """Return the trace of a step with `record_passes` on the first process of the pipeline, and None on the others.

        Each context rank has its own trace.

        about: further facts for the reader of the trace. Collective.
        """
        if result.record.clock is None:
            raise InputError("trace: the step was not recorded; expected the result of step(..., record_passes=True)")
        self._groups.check_same_call("trace")
        layout = self.layout
        ranks = {"tp": self.tensor_ranks} if self.tensor_ranks > 1 else {}
        return gather_trace(
            result.record,
            layout.program,
            self._groups.everyone,
            self._grid.group("pp", "tp"),
            self.torch_device,
            costs=layout.costs,
            about={"vocabulary": layout.mode, **ranks, **about},
        )

    def layout_by(self, costs: Costs) -> Layout:
        """Return the layout of this pipeline with its named schedule arranged by pass times, one F and B per stage.

        Raises InputError if the pipeline runs a given order, or if the new order needs other communicators.
        """
        return self._plan.layout_by(costs)

    def arrange(self, costs: Costs) -> None:
        """From the next step on, run the order arranged by these pass times. Collective.

        Raises InputError as `layout_by`, and if processes give different pass times.
        """
        layout = self.layout_by(costs)
        text = "\n".join(" ".join(map(str, row)) for row in layout.program.rows)
        fingerprint = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
        orders = self._groups.begin("arrange", [fingerprint], "the call of arrange", "")
        if any(order != [fingerprint] for order in orders):
            raise InputError("arrange: processes were given other pass times; expected the same on all of them")
        self.layout = layout

    def from_the_first(self, text: str | None, label: str) -> str | None:
        """Return the text of the very first process on all processes. Collective.

        label: describes the text in the error of a process that waits for it in vain.
        """
        return self._groups.from_the_first(text, label)

    def predict(self, vocabulary: str | None = None) -> Timeline:
        """Simulate a step of this pipeline, optionally in another vocabulary mode. Times are in FLOPs per token.

        Another mode keeps the layers of each stage, unless either mode is "redistribute".
        """
        return self._plan.predict(vocabulary)

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
        """Run forward and backward of a batch, and add its gradients to those of the parameters.

        Only the first process of a pipeline passes data; arguments of the others are ignored. Each replica has its own
        batch; batches may differ in size, length and number of labels. The loss is the mean over the labels of all
        replicas, and the gradients are those of this mean. Parameters can be frozen between steps by their
        `requires_grad`, with the same value for a name on all processes that have the parameter. Collective.

        Gradient hooks on `parameters()` are called as by a single backward of the whole batch: once for each parameter
        with a gradient, at the end of the step, with this step's complete gradient of what this process holds.

        An optimizer's update can use the accumulated gradients of several steps. With `total_tokens` they are those of
        the mean over all labels of the update, as one step with all batches would give:

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
            InputError: a batch is not accepted, `requires_grad` or hooks differ between processes, or autocast is on;
                no gradient has changed then. Or a hook returned something that cannot be a gradient; then only the
                parameters whose hooks were called earlier have this step's gradient.
            RunError: a step has failed on another process, or earlier on this one. With several processes, any
                exception in the middle of a step ends the run on all of them.
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
        """Run the forward of a batch without gradients; return the loss and the log-probability of every label.

        Arguments and errors are those of `step`, but the batch may have any size: it need not be a multiple of
        `microbatches`, and may be smaller. The loss is the mean over all labels except -100. Collective.
        """
        inputs = Inputs.of(input_ids, labels, position_ids, attention_mask, token_weights, separate=self._separate)
        modes = {stage: module.training for stage, module in self._state.held.stages.items()}
        for module in self._state.held.stages.values():
            module.eval()
        try:
            return self._run(inputs, training=False, record_passes=False)
        finally:
            for stage, module in self._state.held.stages.items():
                module.train(modes[stage])

    def _run(self, inputs: Inputs, *, training: bool, record_passes: bool) -> StepResult:
        self._watch.raise_cause()
        if self._closed:
            raise InputError("the pipeline is closed and cannot step; expected one that is open: make a new one")
        check_no_autocast(self.torch_device)
        if training and self.recipe.compile_layers and self._executor.draws is not None:
            check_memory_budget()
        return self._executor.run(inputs, training=training, record_passes=record_passes)

    def _step_failed(self, error: BaseException) -> None:
        self._watch.report_exception(error)
        if not self._owned and self._groups.everyone is not None:  # else this process ends soon
            self.close()  # which ends waits of others that only the connection can end

    def count_bytes(self) -> ByteCounter:
        """Return a context manager that counts the bytes of this process's tensors in every pass of the steps inside.

        Tensors of the pipeline count from the start: "parameters", their "copies" in another dtype, "gradients" and
        "buffers". Optimizer state counts only if it is created inside.
        """

        def follow(counter: ByteCounter | None) -> None:
            self._executor.walker.counter = counter

        return ByteCounter(self._state.held.tensors(), follow)

    # --- parameters ------------------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over (Hugging Face name, parameter) of this process, which holds only rows of vocabulary matrices."""
        if self.devices > 1 or self.tensor_ranks > 1 or self._state.sharded:
            refuse_use_of_a_part(self._state.name_of_a_part)
        for name, shard in self._state.held.shards.items():
            yield name, shard.tensor

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over the parameters of this process, for an optimizer.

        Other processes have the rest of the model, so a norm or mean over these parameters differs between processes.
        Clip with `clip_grad_norm_`, which uses the norm of all gradients. The call
        `torch.nn.utils.clip_grad_norm_(pipeline.parameters(), ...)` raises InputError. If this process has only rows of
        a matrix, so do `torch.optim.Adafactor` and `torch.optim.Muon`. A list of parameters made earlier is not
        detected.
        """
        return (parameter for _, parameter in self.named_parameters())

    def parameter_shards(self) -> dict[str, Held[nn.Parameter]]:
        """Return this process's part of each parameter by Hugging Face name.

        Saved buffers (such as the bias that corrects a router's scores) are included as frozen parameters.
        """
        return self._state.shards

    def held_parameters(self) -> Iterator[HeldParameter]:
        """Iterate over this process's part of each parameter, with the communicator to the holders of the other rows,
        for optimizers that need whole matrices. The order is the same on all of these processes."""
        return self._state.held_parameters()

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        for parameter in self.parameters():
            parameter.grad = None

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale all gradients so that their norm over all devices is at most `max_norm`; return the norm before.

        With an infinite `max_norm` gradients are not scaled. Collective; every process gets the same number.
        """
        check_positive("max_norm", max_norm)
        return self._state.clip_grad_norm_(max_norm)

    def move_router_biases(self, load: Tensor, rate: float) -> None:
        """Balance experts without a loss, after the optimizer's step: move the biases by which routers choose experts
        (arXiv 2408.15664; DeepSeek-V3 and others have them) by `rate` towards experts with few tokens. Collective.

        Args:
            load: the sum of `StepResult.expert_load` over the steps of an update; the same on all processes.

        Raises:
            InputError: no router of the model has such a bias.
        """
        check_positive("rate", rate)
        if not self.has_router_biases:
            raise InputError(
                f"move_router_biases: no router of {self.description.architecture} has a bias to choose by"
            )
        self._groups.check_same_call("move_router_biases")
        move_biases(self.parameter_shards(), load, self.expert_layers, rate)

    @property
    def has_router_biases(self) -> bool:
        """Whether a router of the model has a bias that only affects which experts it chooses."""
        return any(map(is_router_bias, self.description.shapes))

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group of all processes of all replicas; None for a single process."""
        return None if self._groups.everyone is None else self._groups.everyone.group

    def gather_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of every process, replica by replica and in each by device, on every process. All
        processes must give equally many numbers. Collective."""
        return self._groups.numbers(numbers)

    # --- whole tensors ---------------------------------------------------------------------------------------

    def stream_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over (name, whole gradient on the CPU) on the first process, and over nothing on the others. Every
        process must exhaust the iterator; one that has not raises InputError in its next collective method."""
        return self._groups.stream("stream_gradients", self._state.whole_gradients())

    def stream_state(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over (name, whole parameter or saved buffer on the CPU), as `stream_gradients` does."""
        return self._groups.stream("stream_state", self._state.whole_tensors())

    def full_gradients(self) -> dict[str, Tensor]:
        """Return all whole gradients by Hugging Face name on the first process; empty on the others. Collective."""
        return dict(self._groups.stream("full_gradients", self._state.whole_gradients()))

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return all whole parameters and saved buffers by Hugging Face name on the first process; empty on the others.

        Collective.
        """
        return dict(self._groups.stream("full_state_dict", self._state.whole_tensors()))

    def save_checkpoint(
        self,
        folder: str | Path,
        step: int,
        optimizer: torch.optim.Optimizer | None,
        scheduler: Any = None,
        extra: Mapping[str, Any] | None = None,
        *,
        keep: int | None = 2,
        unhealthy: str | None = None,
    ) -> Path:
        """Save everything that a loop needs to continue as if it had not stopped; return the checkpoint's folder,
        `folder/step-NNNNNNNN`. Any number of processes, any schedule and any vocabulary mode can load it.

        `evenpipe.newest_checkpoint` never finds an incomplete checkpoint, even after a failure of a process or disk.
        The first save locks the folder until the first process ends; saves of other runs are refused. The states of
        torch's random generators are saved: of the CPU, and of the GPU that a process computes on; those of Python and
        numpy are not. Collective.

        Args:
            folder: folder of all checkpoints of the run, visible to all processes.
            step: number of optimizer steps taken. An existing checkpoint of this step is replaced.
            optimizer: an optimizer of parameters of this pipeline; its state and the options of its groups, such as
                learning rates, are saved. None for a process without a trainable parameter.
            scheduler: a scheduler of this optimizer, as in `torch.optim.lr_scheduler`; the optimizer must then have
                equally many groups on every process.
            extra: JSON values that the loop needs in addition, such as its position in the data. Only the first
                process's are saved.
            keep: number of checkpoints to keep, this one and the newest before it; None: all. The newest healthy one is
                kept in any case.
            unhealthy: why the state may be ruined, such as "the loss has doubled"; None: it is healthy. The checkpoint
                keeps it (`Checkpoint.unhealthy`).

        Raises:
            InputError: another run has locked the folder, or a value cannot be saved; the sentence names it.
            RunError: a disk or a process failed; earlier checkpoints have not changed.
        """
        check_kinds(step=step, optimizer=optimizer, extra=extra, unhealthy=unhealthy)
        return self._state.save(folder, step, optimizer, scheduler, extra, keep=keep, unhealthy=unhealthy)

    def load_checkpoint(
        self,
        checkpoint: Checkpoint | str | Path,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
    ) -> dict[str, Any]:
        """Load parameters, optimizer and scheduler from a checkpoint; return its `extra`.

        If anything fails, none of them has changed. The options of optimizer groups, such as learning rates, become the
        saved ones; to use others, set them afterwards. Parameters that are trained now, but were not when the
        checkpoint was saved, begin with new optimizer state; a warning names them. With an optimizer, torch's random
        generators continue too: those of all processes if as many have saved theirs, else that of the first process,
        which dropout follows. Collective.

        Args:
            checkpoint: from `evenpipe.newest_checkpoint`, or the folder of a checkpoint.
            optimizer: an optimizer of the saved kind; None does not read its state.
            scheduler: a scheduler of the saved kind.

        Raises:
            InputError: the checkpoint is damaged, or does not fit the model, the optimizer or the scheduler.
            RunError: a disk or a process failed.
        """
        check_kinds(optimizer=optimizer)
        order = self.order
        splits = self.recipe.compile_layers and any(map(order.splits_backward, range(self.devices)))
        uncompiled = (
            "compiled layers with a split backward run their first microbatch uncompiled: with dropout it draws other"
            " random numbers than in an uninterrupted run"
        )
        return self._state.load(checkpoint, optimizer, scheduler, drawn_otherwise=uncompiled if splits else None)

    def _drawn_by(self) -> dict[str, Any]:
        """What the random numbers of layers depend on besides each step's number, by the names used in messages."""
        return {
            "microbatches of all replicas": self.replicas * self.microbatches,
            "slices": self.layout.program.slices,
            "context ranks": self.context_ranks,
            "tensor ranks": self.tensor_ranks,
            "compiled layers": self.recipe.compile_layers,
            "device": self.torch_device.type,
        }

    def save_pretrained(self, path: str | Path, *, dtype: torch.dtype | None = None) -> None:
        """Write a Hugging Face folder that `from_pretrained` loads: safetensors, config and generation config.

        A loaded model is written as it was, except for its weights: config.json and generation_config.json are the same
        files, and every tensor has the dtype in which it was stored. A live model is written as its own
        `save_pretrained` would write it. The tokenizer is not written: it has its own `save_pretrained`.

        The first process writes one whole tensor at a time. Collective.

        Args:
            dtype: dtype of the weights; default: that of the model from which the pipeline was made, so that masters of
                16-bit weights are rounded; fresh weights have `parameter_dtype`. Parameters that transformers keeps in
                fp32 in 16-bit models stay in fp32.

        Raises:
            InputError: models are not stored in this dtype.
            RunError: the folder cannot be written, or the model consists of plain modules; raised on every process.
        """
        self._state.save_pretrained(path, dtype)

    def close(self) -> None:
        """Destroy the communicators. No step may be running, and the pipeline cannot step afterwards. Collective."""
        self._closed = True
        self._closing.close()
