"""`Pipeline`: a causal language model on all processes of a pipeline, trained step by step."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from evenpipe.checkpoints import Checkpoint, load, open_checkpoint, save
from evenpipe.checkpoints.resumed_model import check_same_model
from evenpipe.communication.clock import Conversion, read_clocks
from evenpipe.communication.shared import Shared
from evenpipe.errors import InputError, RunError
from evenpipe.host.engine import activations_engine
from evenpipe.host.memory import keep_freed_memory, return_freed_memory
from evenpipe.layers.checkpointing import check_choices
from evenpipe.layers.experts import split_once
from evenpipe.model import (
    Description,
    as_stored,
    check_compute_dtype,
    describe,
    describe_modules,
    disk_tensors,
    save_tensors,
    self_check,
    write_folder_metadata,
)
from evenpipe.model.structure import first_line
from evenpipe.optimizers.held import HeldParameter
from evenpipe.parallel import check_built, clip_gradients, process_grid, total_norm
from evenpipe.parallel.gathering import stream_whole
from evenpipe.parallel.groups import Groups
from evenpipe.parallel.tensor_placement import Held
from evenpipe.processes.worker import borrow_worker, device_of_pipeline, give_back
from evenpipe.recipe.layout import Layout, ModelCosts, flop_costs, without_vocabulary
from evenpipe.recipe.recipe import Recipe, refuse_unknown
from evenpipe.runtime.accounting import ByteCounter
from evenpipe.runtime.arguments import (
    PipelineOptions,
    check_kinds,
    check_no_autocast,
    check_positive,
    check_shardable,
    device_of_torch,
    dtype_of_compute,
    loss_of_model,
    recipe_of,
    refuse_use_of_a_part,
)
from evenpipe.runtime.batch import Batch, Inputs, cut, distribute
from evenpipe.runtime.device import Builder, LayerOptions
from evenpipe.runtime.replicas import Replicas
from evenpipe.runtime.result import StepResult, html_table
from evenpipe.runtime.router_loss import RouterLosses
from evenpipe.runtime.row import refuse_unfit
from evenpipe.runtime.trace import gather_trace
from evenpipe.runtime.trained import Trained
from evenpipe.runtime.transport import Transport
from evenpipe.runtime.walker import Walker
from evenpipe.schedule import Kind, Order, Program, Timeline, parts_of, time_order, vocabulary_mode
from evenpipe.schedule.trace import Trace
from evenpipe.schedule.words import count
from evenpipe.vocabulary import LossOptions

logger = logging.getLogger(__name__)


class Pipeline:
    """A causal language model spread over the processes of a pipeline, one per device.

    Make it on every process, inside torchrun or `evenpipe.launch`, or in processes of your own with a process group. A
    single process without one makes a pipeline of one device. In processes that evenpipe did not start, a pipeline
    leaves signals, hooks and the allocator as they are and ends no process, unless `initialise_worker` was called.

    Besides these arguments, `Pipeline` takes those of a `Recipe`, which says how the model is spread and in which order
    the devices compute:

        pipeline = Pipeline("Qwen/Qwen3-8B", schedule="zbv", microbatches=32)
        pipeline = Pipeline("Qwen/Qwen3-8B", recipe=Recipe.of(pp=8, schedule="zbv", microbatches=32))

    Args:
        model: hub name or local folder (its weights are loaded), a transformers config (fresh weights, the same for
            every layout), or a live transformers model (its weights are copied).
        recipe: a whole recipe, in place of its single options; its `dp` and `pp` must be those of the processes.
        mesh: a DeviceMesh with an axis "pp", and an axis "dp" for several pipelines side by side; default: all
            processes, with neighbours in one pipeline.
        loss: label smoothing, z-loss and other options of the loss. Logit scale and soft-cap come from the model,
            except for plain modules.
        parameter_dtype: dtype of parameters, gradients and therefore optimizer state: fp32 or fp64.
        compute_dtype: dtype of activations and products; default: bf16 on a GPU, else `parameter_dtype`.
        seed: seed of fresh weights.
        torch_device: device on which this process computes. The first open pipeline of a process, or
            `initialise_worker` before it, decides the default for later ones: its own GPU if there is one, else the
            CPU. Later pipelines must not use another GPU.
        self_check: before anything else, compare a cut and a whole shrunken copy of the model on the first process.
        trust_remote_code: run Python code that comes with a hub model.
        timeout_seconds: maximum seconds of every single wait.
        schedule: a name such as "1f1b" or "zbv"; an `Order`; a `Program`, which is executed without changes if its
            barriers fit the vocabulary mode, and else only gives its passes; the path of a CSV file with an order or
            program, in the format of evenpipe or torch; a function of devices and microbatches that returns an `Order`;
            or a schedule of `torch.distributed.pipelining`, an instance or a class, whose order is used.
            Default: "1f1b".
        schedule_options: options of a named schedule, if it has them: `stages_per_device`, `group_size`,
            `memory_limit`; for a class of torch, `stages_per_device`.
        vocabulary: "balanced" (= "vocab-2", one barrier; the default), "vocab-1", "interlaced", "redistribute" or
            "first-last".
        microbatches: number of equal parts of every batch; default: 4 per device, or the number in the given order.
        slices: parts of every sequence; only 1 can run.
        replicas: number of pipelines side by side, each with the whole model and its own data; default: the "dp" size
            of the mesh, else one.
        cp, tp, ep: sizes of the axes for parts of sequences, of matrices, and of experts; only 1 can run.
        data_parallel: "replicate" (the default): every replica keeps all parameters of its devices. "shard": replicas
            share the rows of parameters, gradients and optimizer state, and gather parameters during a step (FSDP2).
        layers_per_stage: layers of each stage, first to last; default: an even split, or by cost for "redistribute".
        checkpointing: the tensors that a layer keeps for its backward: "none" (the default) keeps all; "full" keeps
            only the input and repeats the forward; "selective" also keeps the results of products and of attention; or
            one choice per layer. If the order has R for a microbatch, R repeats the forward before the backward.
        compile_layers: run every layer through torch.compile, with any schedule. Embedding, output layer, loss and
            other code outside the layers are not compiled; the first step takes longer.
        costs: measured pass times for arranging the schedule; default: FLOPs.
        sequence_length: tokens per sequence for these FLOPs, because attention's share depends on it; steps may have
            other lengths. Default: 2048, or the maximum of the model.
        communicators: "per-pair" (the default): one for each ordered pair of devices that send to each other and one
            for each kind of collective. "per-kind": one for all forward hops, one for all backward hops, one for each
            kind of collective. "one": a single one. Each takes memory (with NCCL about 0.5 GB), and transfers on the
            same communicator wait for each other.
        nccl: priority and channels of communication on GPUs; default: high priority, and NCCL chooses the number of
            channels. No effect on gloo.
        offload: which activations go to the host, and the memory that they use there; default: those that the order
            moves.

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
        self._watch = worker.watch
        self._closed, self._closing = False, ExitStack()
        self._closing.callback(give_back, worker)
        try:
            self._grid = grid = process_grid(mesh, how.get("replicas") if recipe is None else recipe.parallelism.dp)
            check_built(grid)
            self.device, self.devices = grid.coordinate("pp"), grid.size("pp")
            self.replica, self.replicas = grid.coordinate("dp"), grid.size("dp")
            self.torch_device = device_of_pipeline(worker, wanted)
            self.recipe = recipe_of(recipe, how, dp=self.replicas, pp=self.devices)
            self.microbatches = self.recipe.microbatches
            self._sharded = self.recipe.parallelism.data_parallel == "shard" and self.replicas > 1
            self._compute_dtype = dtype_of_compute(parameter_dtype, compute_dtype, self.torch_device)
            description = (
                model if isinstance(model, Description) else describe(model, trust_remote_code=trust_remote_code)
            )
            self.description = as_stored(description, say=logger.warning if self._is_very_first else None)
            if self.devices > 1:
                check_compute_dtype(self.description, self._compute_dtype)
            options = loss_of_model(loss or LossOptions(), self.description)
            self._entropy = options.entropy
            layers, offload = self.description.layers, self.recipe.offload
            self._checkpointing = self.recipe.checkpointing_of(layers)
            check_choices(self._checkpointing)
            self._model_costs = ModelCosts.of(self.description, self.recipe.batch.sequence_length)
            self.layout = Layout.of(self.recipe, self._model_costs, self.description.vocabulary_size)
            refuse_unfit(self.layout.program)
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
            if self._sharded:
                check_shardable(self.description)
            self._groups = Groups(
                self._grid,
                self.layout.communicators,
                tied=self._tied_twice,
                timeout_seconds=timeout_seconds,
                torch_device=self.torch_device,
                watch=self._watch,
                nccl=self.recipe.nccl,
            )
            self._closing.callback(self._groups.close)
            if self_check and self.description.config is not None:
                self._check_architecture()
            self._build(options, parameter_dtype, seed)
            self._let_go_of_the_model()
        except InputError:  # the same on every process
            self.close()
            raise

    @classmethod
    def from_modules(
        cls,
        embedding: nn.Embedding,
        layers: Sequence[nn.Module],
        norm: nn.Module | None,
        head: nn.Linear,
        **options: Any,
    ) -> Pipeline:
        """Make a pipeline of plain modules; their weights are copied.

        Args:
            embedding: weight [vocabulary, hidden_size].
            layers: each takes and returns hidden states [batch, sequence, hidden_size].
            norm: applied between the last layer and the head, or None.
            head: hidden_size -> vocabulary; tied if its weight is the embedding's.
            options: as for `Pipeline`.
        """
        return cls(describe_modules(embedding, layers, norm, head), **options)

    # --- building --------------------------------------------------------------------------------------------

    def _build(self, options: LossOptions, parameter_dtype: torch.dtype, seed: int) -> None:
        groups, replicas = self._groups, self._groups.replicas
        self._held = Builder(
            description=self.description,
            layout=self.layout,
            grid=self._grid,
            loss=options,
            layers=LayerOptions(self._checkpointing, self.recipe.compile_layers, self._activations, self._kept_layers),
            parameter_dtype=parameter_dtype,
            compute_dtype=self._compute_dtype,
            torch_device=self.torch_device,
            seed=seed,
            shards=replicas if self._sharded else None,
            broadcast=None if replicas is None or self.description.model is None else self._broadcast,
        ).build()
        router_loss = self.description.router_loss
        self._router_losses = (
            None
            if router_loss is None
            else RouterLosses(router_loss, replicas=self.replicas, torch_device=self.torch_device)
        )
        over_replicas = None
        if replicas is not None:
            over_replicas = Replicas(self._held, self.layout, self.device, replicas, is_first=self.replica == 0)
        follow = [parameters.follow_flags for parameters in self._held.parameters.values()]
        if over_replicas is not None:
            follow.append(over_replicas.follow_flags)
        self._trained = Trained(
            dict(self.named_parameters()),
            names=[name for name, _ in self.description.skeleton.named_parameters(remove_duplicate=False)],
            vocabulary=self.description.vocabulary_names,
            follow=follow,
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
            ),
            vocabulary_passes=self.layout.sharded,
            weight_gradients=self._held.weight_gradients,
            checkpointing=self._held.checkpointing,
            replicas=over_replicas,
            router_losses=self._router_losses,
            activations=self._activations,
        )

    def _broadcast(self, tensor: Tensor) -> None:
        """Give all replicas the first one's weights of a live model: each may have drawn its own."""
        assert self._groups.replicas is not None
        self._groups.replicas.broadcast(tensor, self._grid.at(dp=0), "weights of the first replica").wait(
            "the first step"
        )

    def _let_go_of_the_model(self) -> None:
        """Release a live model, which has been copied; keep only its generation config."""
        model, skeleton = self.description.model, self.description.skeleton
        if isinstance(skeleton, PreTrainedModel) and model is not None:
            skeleton.generation_config = copy.deepcopy(model.generation_config)
            self.description = replace(self.description, model=None)

    @property
    def _tied_twice(self) -> tuple[int, int] | None:
        """The two devices that each have a copy of the one matrix of tied weights, if two have."""
        placement = self.layout.program.placement
        ends = placement.first_device, placement.last_device
        return ends if self.description.tied and not self.layout.sharded and len({*ends}) > 1 else None

    def _check_architecture(self) -> None:
        """Check the architecture on the first process; raise its error on all."""
        fault: str | None = None
        if self._is_very_first:
            passes = (part for row in self.layout.program.order.rows for item in row if item for part in parts_of(item))
            splits = any(part.kind is Kind.I for part in passes)
            try:
                self_check(self.description, split_once if splits else None, say=logger.warning)
            except InputError as error:
                fault = str(error)
            except Exception as error:  # whatever a family's own forward raises: the others wait for a sentence
                fault = (
                    f"{self.description.architecture} cannot be checked on a small copy ({type(error).__name__}:"
                    f" {first_line(error)}): pass self_check=False to train it unchecked."
                )
        fault = self._groups.from_the_first(fault, "the self-check")
        if fault is not None:
            raise InputError(fault)

    @property
    def _spread_over(self) -> tuple[str, ...]:
        """The axes over which the parameters of a whole model are spread."""
        return ("pp", "dp") if self._sharded else ("pp",)

    @property
    def _is_very_first(self) -> bool:
        """Whether this is the first process of the first pipeline."""
        return self.device == 0 and self.replica == 0

    def __repr__(self) -> str:
        numbers = sum(math.prod(shape) for shape in self.description.shapes.values())
        parts = [
            f"{self.description.architecture} of {self.description.layers} layers and {numbers:,} parameters",
            f"device {self.device} of {self.devices}",
            *([f"replica {self.replica} of {self.replicas}"] if self.replicas > 1 else []),
            count(self.layout.program.placement.stages, "stage"),
            count(self.microbatches, "microbatch"),
            f"vocabulary {self.layout.mode}",
        ]
        return f"<Pipeline: {', '.join(parts)}>"

    def _repr_html_(self) -> str:
        """Return a table for notebooks: layers and vocabulary rows of each device, from 0, the last one excluded."""
        layout, rows = self.layout, []
        for device in range(self.devices):
            stages = layout.program.placement.stages_of(device)
            layers = ", ".join(f"{first}:{last}" for first, last in (layout.layers[stage] for stage in stages))
            shards = [shards[device] for shards in (layout.embedding_shards, layout.head_shards)]
            rows.append([str(device), layers, *(f"{shard.start}:{shard.stop}" for shard in shards)])
        return html_table(repr(self), ["device", "layers", "rows of the embedding", "rows of the output layer"], rows)

    # --- the schedule ----------------------------------------------------------------------------------------

    @property
    def order(self) -> Order:
        """The passes of every device in a step, in order, including vocabulary passes."""
        return self.layout.program.order

    @property
    def program(self) -> Program:
        """The passes and transfers that every device executes in a step."""
        return self.layout.program

    # --- training --------------------------------------------------------------------------------------------

    def step(
        self,
        input_ids: Tensor | None,
        labels: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_weights: Tensor | None = None,
        accumulate: int = 1,
        record_passes: bool = False,
    ) -> StepResult:
        """Run forward and backward of one batch, and add its gradients to those of the parameters.

        Only the first process of a pipeline passes data; arguments of the others are ignored. Each replica has its own
        batch; batches may differ in size, length and number of labels. The loss is the mean over the labels of all
        replicas, and the gradients are those of this mean. Parameters can be frozen between steps by their
        `requires_grad`, with the same value for a name on all processes that have the parameter. Collective.

        Args:
            input_ids: [batch, sequence] int64; batch must be a multiple of `microbatches`.
            labels: same shape, aligned with `input_ids` and shifted inside; -100 is ignored. Default: `input_ids`.
            position_ids: same shape; default: 0, 1, 2, ...
            attention_mask: same shape, 1 for tokens and 0 for padding, which must be on the right.
            token_weights: same shape, weight of each label in the mean; default: 1.
            accumulate: number of steps per optimizer update. Each step divides its gradients by this number, so the
                update uses their mean; it equals that of one step with all batches if each has as many labels. The
                loss in the result is not divided. With the default, 1, gradients of several steps add up.
            record_passes: keep the times of every pass, wait and transfer in the result, for `trace`; on a GPU also the
                actions of the memory allocator.

        Raises:
            InputError: a batch that is not accepted, `requires_grad` that differs between processes, or autocast. No
                gradient has changed then.
        """
        inputs = Inputs(input_ids, labels, position_ids, attention_mask, token_weights, accumulate)
        return self._run(inputs, training=True, record_passes=record_passes)

    def evaluate(
        self,
        input_ids: Tensor | None,
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
        inputs = Inputs(input_ids, labels, position_ids, attention_mask, token_weights)
        modes = {stage: module.training for stage, module in self._held.stages.items()}
        for module in self._held.stages.values():
            module.eval()
        try:
            return self._run(inputs, training=False, record_passes=False)
        finally:
            for stage, module in self._held.stages.items():
                module.train(modes[stage])

    def _run(self, inputs: Inputs, *, training: bool, record_passes: bool) -> StepResult:
        if self._closed:
            raise InputError("the pipeline is closed and cannot step, expected one that is open: make a new one")
        check_no_autocast(self.torch_device)
        started = time.perf_counter()
        groups = self._groups
        self._trained.read()
        inputs, totals = distribute(
            inputs,
            microbatches=self.microbatches if training else 1,
            model=self.description,
            communicator=groups.pipeline,
            replicas=groups.replicas,
            trained=self._trained,
            torch_device=self.torch_device,
        )
        self._trained.follow()
        weights_dtype = torch.float64 if self._compute_dtype == torch.float64 else torch.float32
        assert inputs.input_ids is not None
        program = self.layout.program if training else self._evaluation(len(inputs.input_ids))
        parts = program.microbatches
        batch = cut(inputs, totals, microbatches=parts, dtype=weights_dtype, torch_device=self.torch_device)
        self._held.refresh()
        if self._router_losses is not None:
            self._router_losses.accumulate = totals.accumulate
        self._walker.record_passes = record_passes
        before = read_clocks(groups.pipeline, self.torch_device) if record_passes else None
        with self._tied_gradients() if training else nullcontext():
            record = self._walker.walk(program, batch)
        if before is not None:
            record.clock = Conversion(before, read_clocks(groups.pipeline, self.torch_device))
        output = self._held.output
        loss = self._shared_mean(None if output is None else output.loss, weights_dtype)
        entropy = None
        if self._entropy:
            entropy = self._shared_mean(None if output is None else output.entropy, weights_dtype)
        router_loss = self._shared_router_loss()
        log_probabilities = [] if training else self._log_probabilities(batch, weights_dtype)
        if output is not None:
            output.clear()
        if self._router_losses is not None:
            self._router_losses.clear()
        return StepResult(
            batch.valid_tokens,
            time.perf_counter() - started,
            record,
            loss,
            log_probabilities,
            (batch.sequences, batch.sequence_length),
            router_loss,
            entropy,
            totals.accumulate,
        )

    def _evaluation(self, sequences: int) -> Program:
        """Return the cached program that evaluates `sequences`: the walker knows programs by identity."""
        whole = self.layout.evaluation
        parts = min(sequences, whole.microbatches)
        if parts not in self._evaluations:
            self._evaluations[parts] = whole if parts == whole.microbatches else whole.of_the_first(parts)
        return self._evaluations[parts]

    def _log_probabilities(self, batch: Batch, dtype: torch.dtype) -> list[Shared]:
        own = None if self._held.output is None else self._held.output.log_probabilities
        return [
            self._share(None if own is None else own[index], dtype, (microbatch.tokens,))
            for index, microbatch in enumerate(batch.microbatches)
        ]

    def _share(self, own: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]) -> Shared:
        """Share a result of the output layer. If it is sharded, all devices know it; else the last stage sends it."""
        if self.layout.sharded:
            assert own is not None
            return Shared(own, None)
        return self._groups.share(own, self.layout.program.placement.last_device, dtype, shape)

    def _shared_mean(self, own: Tensor | None, dtype: torch.dtype) -> Shared:
        """Share a mean. Token weights add up to 1 over all replicas, so the sum of their losses (entropies) is the
        mean."""
        if self.replicas == 1:
            return self._share(own, dtype, ())
        return self._groups.share_sum(own, self.layout.program.placement.last_device, dtype)

    def _shared_router_loss(self) -> Shared | None:
        """Share the router loss, which the device of the last stage knows in every vocabulary mode."""
        if self._router_losses is None:
            return None
        own, source = self._router_losses.value, self.layout.program.placement.last_device
        if self.replicas == 1:
            return self._groups.share(own, source, torch.float64, ())
        return self._groups.share_sum(own, source, torch.float64)

    @contextmanager
    def _tied_gradients(self) -> Iterator[None]:
        """Sum the gradients of tied weights of which two devices have a copy.

        A step gives the first device the embedding's part of the gradient, and the last device the output layer's. Both
        then get the sum, added to their gradient from before. It is reduced over these two processes on their own
        communicator, and broadcast to both.
        """
        matrix = self._held.tied_copy
        if matrix is None or not matrix.trainable:
            yield
            return
        parameter, before = matrix.parameter, matrix.parameter.grad
        parameter.grad = None
        try:
            yield
        except BaseException:
            parameter.grad = before
            raise
        communicator = self._groups.tied
        assert communicator is not None
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
        communicator.reduce(gradient, communicator.members[0], "the sum of tied gradients").wait("the optimizer")
        communicator.broadcast(gradient, communicator.members[0], "tied gradients").wait("the optimizer")
        parameter.grad = gradient if before is None else before.add_(gradient)

    # --- parameters ------------------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over (Hugging Face name, parameter) of this process; of vocabulary matrices, it has only rows."""
        if self.devices > 1 or self._sharded:
            refuse_use_of_a_part(lambda: next((one.name for one in self.held_parameters() if one.communicator), None))
        for name, shard in self._held.shards.items():
            yield name, shard.tensor

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over the parameters of this process, for an optimizer.

        Other processes have the rest of the model, so a norm or mean over these parameters differs between processes.
        Clip with `clip_gradients`, which uses the norm of all gradients. The call
        `torch.nn.utils.clip_grad_norm_(pipeline.parameters(), ...)` raises InputError. If this process has only rows of
        a matrix, so do `torch.optim.Adafactor` and `torch.optim.Muon`. A list of parameters that was made before is not
        detected.
        """
        return (parameter for _, parameter in self.named_parameters())

    def parameter_shards(self) -> dict[str, Held[nn.Parameter]]:
        """Return this process's part of each parameter by Hugging Face name.

        Saved buffers (such as the bias that corrects a router's scores) are included as frozen parameters.
        """
        return self._held.shards | self._held.buffers

    def held_parameters(self) -> Iterator[HeldParameter]:
        """Iterate, for optimizers that need whole matrices, over this process's part of each parameter, with its
        communicator to the processes with the other rows. The order is the same on all of them."""
        for name, shard in self._held.shards.items():
            axes = [axis for cut in shard.placement.cuts for axis in cut.axes]
            yield HeldParameter(name, shard.tensor, shard.placement, self._groups.over(*axes))

    def count_bytes(self) -> ByteCounter:
        """Return a context that counts the bytes of all tensors of this process, for every pass of the steps inside.

        Tensors of the pipeline count from the start: "parameters", their "copies" in another dtype, "gradients" and
        "buffers". Optimizer state counts only if it is created inside.
        """

        def follow(counter: ByteCounter | None) -> None:
            self._walker.counter = counter

        return ByteCounter(self._held.tensors(), follow)

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        for parameter in self.parameters():
            parameter.grad = None

    def clip_gradients(self, max_norm: float) -> float:
        """Scale all gradients so that their norm over all devices is at most `max_norm`; return the norm before.

        With an infinite `max_norm` it only measures. Collective; every process gets the same number.
        """
        check_positive("max_norm", max_norm)
        held = [
            (shard.tensor.grad, shard.placement)
            for shard in self._held.shards.values()
            if shard.tensor.grad is not None
        ]
        counted = [gradient for gradient, placement in held if placement.is_first_copy(*self._spread_over)]
        norm = total_norm(counted, self.torch_device, lambda square: self._groups.sum(square, *self._spread_over))
        if max_norm != float("inf"):
            clip_gradients([gradient for gradient, _ in held], norm, max_norm)
        return float(norm)

    # --- over all devices ------------------------------------------------------------------------------------

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group of all processes of all replicas; None for a single process."""
        return None if self._groups.everyone is None else self._groups.everyone.group

    def gather_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of every process, replica by replica and in each by device, on every process. All
        processes must give equally many numbers. Collective."""
        return self._groups.numbers(numbers)

    def trace(self, result: StepResult, **about: Any) -> Trace | None:
        """Return the trace of a step with `record_passes` on the first process of the pipeline, None on the others.

        about: further facts for the reader of the trace. Collective.
        """
        if result.record.clock is None:
            raise InputError("trace: the step was not recorded, expected the result of step(..., record_passes=True)")
        layout = self.layout
        return gather_trace(
            result.record,
            layout.program,
            self._groups.pipeline,
            self.torch_device,
            costs=layout.costs,
            about={"vocabulary": layout.mode, **about},
        )

    def predict(self, vocabulary: str | None = None) -> Timeline:
        """Simulate a step of this pipeline, or of it in another vocabulary mode. Times are in FLOPs per token.

        The other mode keeps the layers of each stage, unless one of both is "redistribute".
        """
        layout = self.layout
        if vocabulary is not None and vocabulary_mode(vocabulary) != layout.mode:
            cut_anew = "redistribute" in (layout.mode, vocabulary) and len(layout.layers) <= self.description.layers
            other = Recipe(
                parallelism=self.recipe.parallelism,
                batch=self.recipe.batch,
                schedule=without_vocabulary(layout.program.order),
                vocabulary=vocabulary,
                layers_per_stage=None if cut_anew else layout.layers_per_stage,
            )
            layout = Layout.of(other, self._model_costs, self.description.vocabulary_size)
        return time_order(layout.program.order, flop_costs(self._model_costs, layout))

    def close(self) -> None:
        """Destroy the communicators. No step may be running; the pipeline cannot step afterwards. Collective."""
        self._closed = True
        self._closing.close()

    # --- whole tensors ---------------------------------------------------------------------------------------

    def stream_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over (name, whole gradient on the CPU) on the first process; every process must exhaust it."""
        return self._stream({name: shard.tensor.grad for name, shard in self._held.shards.items()})

    def stream_state(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over (name, whole parameter or saved buffer on the CPU) on the first process; every process must
        exhaust it."""
        return self._stream({name: shard.tensor for name, shard in self.parameter_shards().items()})

    def _stream(self, tensors: Mapping[str, Tensor | None]) -> Iterator[tuple[str, Tensor]]:
        """Stream whole tensors: sharded rows from all replicas, everything else only from the first replica."""
        if self.replica > 0 and not self._sharded:
            return iter(())
        placements = {name: shard.placement for name, shard in self.parameter_shards().items()}
        held = {
            name: Held(tensor, placements[name])
            for name, tensor in tensors.items()
            if tensor is not None and placements[name].is_first_copy()
        }
        return stream_whole(held, self._groups.over(*self._spread_over), self.torch_device)

    def full_gradients(self) -> dict[str, Tensor]:
        """Return all whole gradients by Hugging Face name on the first process; empty on the others. Collective."""
        return dict(self.stream_gradients())

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return all whole parameters and saved buffers by Hugging Face name on the first process; empty on the others.

        Collective.
        """
        return dict(self.stream_state())

    def save_checkpoint(
        self,
        folder: str | Path,
        step: int,
        optimizer: torch.optim.Optimizer | None,
        scheduler: Any = None,
        extra: Mapping[str, Any] | None = None,
        *,
        keep: int | None = 2,
    ) -> Path:
        """Save everything that a loop needs to continue as if it had not stopped; return the checkpoint's folder,
        `folder/step-NNNNNNNN`. Any number of processes, any schedule and any vocabulary mode can load it.

        `evenpipe.newest_checkpoint` never finds an incomplete checkpoint, even after a failure of a process or disk.
        The first save locks the folder until the first process ends; saves of other runs are refused. Random generators
        are not saved: if they matter, seed them by the step, such as `torch.manual_seed(step)` for dropout. Collective.

        Args:
            folder: folder of all checkpoints of the run, visible to all processes.
            step: number of optimizer steps taken. An existing checkpoint of this step is replaced.
            optimizer: an optimizer of parameters of this pipeline; its state and the options of its groups, such as
                learning rates, are saved. None for a process without a trainable parameter.
            scheduler: a scheduler of this optimizer, as in `torch.optim.lr_scheduler`; the optimizer must then have
                equally many groups on every process.
            extra: JSON values that the loop needs in addition, such as its position in the data. Only the first
                process's are saved.
            keep: number of checkpoints to keep, this one and the newest before it; None: all.

        Raises:
            InputError: another run has locked the folder, or a value cannot be saved; the sentence names it.
            RunError: a disk or a process failed; earlier checkpoints have not changed.
        """
        check_kinds(step=step, optimizer=optimizer, extra=extra)
        config = self.description.config
        metadata = {
            **({} if config is None else {"model_config": config.to_dict()}),
            "tied": self.description.tied,
            "extra": dict(extra or {}),
        }
        shards = self.parameter_shards()
        return save(folder, step, shards, optimizer, metadata, self.process_group, scheduler=scheduler, keep=keep)

    def load_checkpoint(
        self,
        checkpoint: Checkpoint | str | Path,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
    ) -> dict[str, Any]:
        """Load parameters, optimizer and scheduler from a checkpoint; return its `extra`.

        If anything fails, none of them has changed. The options of optimizer groups, such as learning rates, become the
        saved ones; to use others, set them afterwards. Collective.

        Args:
            checkpoint: from `evenpipe.newest_checkpoint`, or the folder of a checkpoint.
            optimizer: an optimizer of the saved kind; None does not read its state.
            scheduler: a scheduler of the saved kind.

        Raises:
            InputError: the checkpoint is damaged, or does not fit the model, the optimizer or the scheduler.
            RunError: a disk or a process failed.
        """
        check_kinds(optimizer=optimizer)
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = open_checkpoint(checkpoint, self.process_group)
        for change in check_same_model(checkpoint, self.description):
            if self._is_very_first:
                logger.warning(change)
        load(checkpoint, self.parameter_shards(), optimizer, self.process_group, scheduler=scheduler)
        return checkpoint.extra

    def save_pretrained(self, path: str | Path) -> None:
        """Write a Hugging Face folder that `from_pretrained` loads: safetensors, config and generation config.

        The first process writes one whole tensor at a time. Collective.

        Raises:
            InputError: the model consists of plain modules.
            RunError: the folder cannot be written; raised on every process.
        """
        fault: str | None = None
        tensors = self.stream_state()
        try:
            if self._is_very_first:
                write_folder_metadata(self.description, path, next(self.parameters()).dtype)
                save_tensors(path, disk_tensors(self.description, tensors))
        except Exception as error:  # of disk, safetensors or transformers: all processes must raise it
            fault = f"the model was not written to {str(path)!r}: {getattr(error, 'strerror', None) or error}"
        for _ in tensors:  # the other processes send; after a failure the first one must still receive
            pass
        fault = self._groups.from_the_first(fault, "the saved model")
        if fault is not None:
            raise RunError(fault)
