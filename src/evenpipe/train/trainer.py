"""The training loop of a process.

    read the newest sound checkpoint -> step, step, ..., evaluate -> save -> report

The learning rate and the seeds of a step depend only on the configuration and the step number; its batch depends on the
number of rows read before it, which checkpoints save. So a run that was killed and restarted is bitwise identical to an
uninterrupted one (on a GPU: if it is deterministic), and a run that continues with other sizes reads on at the next
row.
"""

from __future__ import annotations

import gc
import hashlib
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from evenpipe.checkpoints import Checkpoint, abandon_later, mark_unhealthy, prepare_folder
from evenpipe.checkpoints.agreement import Team
from evenpipe.checkpoints.lock import Claim, join
from evenpipe.communication.flight_recorder import write_flight_recorder
from evenpipe.errors import InputError, RunError
from evenpipe.processes.stopping import StopRequest
from evenpipe.processes.worker import initialise_worker
from evenpipe.runtime.result import StepResult
from evenpipe.schedule.trace_file import write_trace
from evenpipe.train.arrangement import Arrangement, changes_of_order
from evenpipe.train.build import build_pipeline
from evenpipe.train.callbacks import Callback, TrainingState, call, find_callbacks, make_callbacks
from evenpipe.train.changed_values import changed_values
from evenpipe.train.config import Config
from evenpipe.train.data import PreparedData, changes_of_data, data_identity, open_batches, open_data, planned_steps
from evenpipe.train.files import disk_errors
from evenpipe.train.health import Health, are_finite
from evenpipe.train.learning_rates import learning_rate
from evenpipe.train.metrics import ExpertMetrics, Metrics, RunningMean, StepMetrics
from evenpipe.train.optimization import make_optimizer, rate_shares
from evenpipe.train.packing import Batches, Sequences
from evenpipe.train.position import resumed_position, saved_position
from evenpipe.train.recovery import (
    RESUMED_FROM,
    abandoned_message,
    diverged,
    find_start,
    first_ruined,
    refuse_unhealthy,
)
from evenpipe.train.report import TrainingReport, gather_report, measures_busy, report_text, write_loads, write_report
from evenpipe.train.stopping import say_stop
from evenpipe.train.throughput import PeakMemory, Throughput
from evenpipe.train.trackers import Tracker, forget_runs

WARM_UP_STEPS, TIMED_STEPS = 2, 8
"""In a run with a time box: warm-up steps, and the steps whose speed decides the number of steps."""


@dataclass(slots=True)
class _Progress:
    """Progress of a run, which checkpoints save with the tensors."""

    step: int = 0
    """Number of steps done."""
    steps: int = 0
    """Total number of steps."""
    rows: int = 0
    """Position in the data: training rows read, as `Batches` counts them."""
    tokens: int = 0
    mean: RunningMean = field(default_factory=RunningMean)
    health: Health = field(default_factory=Health)
    resumed_from: int | None = None
    """The last `checkpoint.resume_from` that the run went back to."""


def train(config: Config, claims: Sequence[Claim] = (), callbacks: Sequence[Callback] = ()) -> int:
    """Train from the newest checkpoint, or from the beginning, to the end. Collective over all processes of the run.

    After Ctrl-C or SIGTERM it finishes the step, saves, and returns the number of the signal; else it returns 0.

    claims: locks of the run's folders, from the process that started this one.
    callbacks: callbacks in addition to those of the configuration.

    Raises InputError and RunError as `run_training` does.
    """
    if config.training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch requires it for matrix products on a GPU
        torch.use_deterministic_algorithms(True)
    worker = initialise_worker(timeout_seconds=config.pipeline.timeout_seconds)
    join(claims)
    worker.watch.on_failure(partial(write_flight_recorder, config.flight_recorder_folder, worker.rank))
    run = _Run(config, worker.torch_device, make_callbacks([*find_callbacks(config.training.callbacks), *callbacks]))
    run.resume()
    gc.collect()
    gc.freeze()  # a full collection in the middle of a step would look like a straggler
    run.listen(StopRequest(worker, lambda number, ends: say_stop(config, number, ends) if worker.rank == 0 else None))
    try:
        return run.to_the_end()
    finally:
        run.stop.close()
        if run.metrics is not None:
            run.metrics.close()


class _Run:
    """One start of a run, on one process."""

    def __init__(self, config: Config, torch_device: torch.device, callbacks: Sequence[Callback]) -> None:
        self.config = config
        self.callbacks = callbacks
        self.data: PreparedData = open_data(config)
        self.pipeline = build_pipeline(config, self.data.tokenizer_size, self.data.end_of_text_id, torch_device)
        rate = config.experts.router_bias_rate
        if rate and not self.pipeline.has_router_biases:
            raise InputError(
                f"experts.router_bias_rate is {rate:g}, but no router of {self.pipeline.description.architecture} has a"
                " bias to choose by; leave it out"
            )
        self.feeds = self.pipeline.feeds
        """Whether this process feeds its pipeline's share of every batch."""
        self.is_first = self.feeds and self.pipeline.replica == 0
        """Whether this is the first process of the run."""
        self._arrangement = Arrangement(self.pipeline, config)
        self.batches: Batches = open_batches(config, self.data, reads=self.feeds)
        self.optimizer = make_optimizer(self.pipeline, config.optimizer, config.offload.directory)
        self._rate_shares = rate_shares(self.optimizer, config.optimizer)
        self._planned = planned_steps(config, self.batches)
        self.progress = _Progress(steps=self._planned)
        self.started_step = 0
        self.metrics: Metrics | None = None
        self.stop: StopRequest
        self.box_open = config.training.minutes is not None
        self._since = time.perf_counter()
        self._memory = PeakMemory(torch_device)
        self._throughput = Throughput(self.pipeline, config)
        self._pending: list[tuple[StepResult, float, float]] = []
        self._step_seconds: list[float] = []
        self._busy_seconds = self._busy_in_all = self._training_seconds = 0.0
        self._expert_load: torch.Tensor | None = None
        self._loss = math.nan
        """Of the last logged step."""
        self._last: tuple[StepResult | None, float, float] = (None, math.nan, math.nan)
        """Result, gradient norm and learning rate of the last step."""
        self._wants_to_stop = False
        """Whether a callback of this process has returned "stop"."""
        self._validation: float | None = None

    # --- resuming and saving ---------------------------------------------------------------------------------

    def resume(self) -> None:
        """Load the checkpoint to continue from, if there is one."""
        config, group = self.config, self.pipeline.process_group
        prepare_folder(config.checkpoint_folder, group)
        start = find_start(config, group)
        checkpoint = start.checkpoint
        abandoned: list[int] = []
        changed: dict[str, str] = {}
        if checkpoint is not None:
            state = checkpoint.extra
            if state["data"]["data"] != self.data.fingerprint:  # token ids mean something else; shapes may differ, too
                raise InputError(
                    f"output.folder is {config.output.folder!r}, where {checkpoint.path.name} was trained on other text"
                    " or with another tokenizer; expected the same data, or another folder"
                )
            self.progress.step = checkpoint.step
            self.progress.tokens = state["tokens"]
            self.progress.mean = RunningMean(**state["running_mean"])
            self.progress.rows, position_messages = resumed_position(state, checkpoint.step, self.data, self.batches)
            self.progress.steps = planned_steps(config, self.batches, checkpoint.step, self.progress.rows)
            decided = state["decided_steps"]
            if decided is not None and decided["for"].items() <= self._decided_for.items():
                self.progress.steps, self.box_open = decided["steps"], False
            if self.progress.step < self.progress.steps:
                refuse_unhealthy(checkpoint, config)
            self._load(checkpoint)
            self.progress.resumed_from = config.checkpoint.resume_from or state.get(RESUMED_FROM)
            changed = changed_values(state["config"], config) if "config" in state else {}
            comparable = not any(name.startswith(("data.", "loss.")) for name in changed)
            if checkpoint.unhealthy is None and comparable and "health" in state:
                self.progress.health = Health(**state["health"])
            if start.goes_back:
                abandoned = Team(group).first(lambda: abandon_later(config.checkpoint_folder, checkpoint.step))
        self.started_step = self.progress.step
        self._arrangement.begin(self.started_step, None if checkpoint is None else checkpoint.extra.get("arrangement"))
        if not self.is_first:
            return
        self.metrics = Metrics(
            config.run_folder,
            steps=self.progress.steps,
            resume_step=self.progress.step,
            goes_back=start.goes_back,
            tensorboard=config.output.tensorboard,
        )
        if start.goes_back:
            forget_runs(config.run_folder)
        self.metrics.follow(Tracker(name, config, self.metrics.say) for name in config.output.trackers)
        mechanism = self.pipeline.keeps_documents_apart
        treatment = "joined, one stream of text" if mechanism is None else f"separate, kept apart by {mechanism}"
        self.metrics.say(f"documents that share a row are {treatment}")
        if self.pipeline.context_exchange is not None:
            self.metrics.say(f"context ranks exchange {self.pipeline.context_exchange}")
        if self.pipeline.tensor_overlap is not None:
            self.metrics.say(f"transfers of tensor parallelism beside products: {self.pipeline.tensor_overlap}")
        if self.pipeline.chosen_slices is not None:
            self.metrics.say(f"slices: {self.pipeline.chosen_slices}")
        for rejected in start.search_result.rejected:
            self.metrics.say(f"skipped checkpoint {rejected.path.name}: {rejected.reason}")
        if checkpoint is not None:
            self.metrics.say(f"continuing from {checkpoint.path}")
            if changed:
                values = ", ".join(f"{name}: {change}" for name, change in changed.items())
                self.metrics.say(f"changed since then: {values}")
            if checkpoint.unhealthy is not None:
                self.metrics.say(f"this checkpoint is marked as unhealthy: {checkpoint.unhealthy}")
            if abandoned:
                self.metrics.say(abandoned_message(abandoned))
            changes = changes_of_data(state["data"], data_identity(config, self.data))
            order = changes_of_order(self.pipeline, state.get("arranged_by", "flops"))
            for line in [*order, *changes, *position_messages]:
                self.metrics.say(line)

    def _load(self, checkpoint: Checkpoint) -> None:
        """Load a checkpoint, but keep the options of the configuration (such as weight decay) in optimizer groups. A
        user's own optimizer gets the saved options: they may contain state."""
        groups = [] if self.optimizer is None or self.config.optimizer.is_own else self.optimizer.param_groups
        configured = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        self.pipeline.load_checkpoint(checkpoint, self.optimizer)
        for group, options in zip(groups, configured, strict=True):
            group.update(options)

    @property
    def _decided_for(self) -> dict[str, Any]:
        """The values that decided the number of steps; a resumed run with the same values keeps the decision."""
        decisive = {"steps": self._planned, "minutes": self.config.training.minutes}
        if self.config.training.epochs is not None:  # the remaining rows are divided by the rows per step
            decisive["rows_per_step"] = self.batches.batch_size
        return decisive

    def save(self) -> None:
        """Save a checkpoint. Collective."""
        if self.metrics is not None:
            self.metrics.sync()
        progress = self.progress
        extra: dict[str, Any] = {
            "decided_steps": None if self.box_open else {"for": self._decided_for, "steps": progress.steps},
            "tokens": progress.tokens,
            "position": saved_position(progress.rows, self.batches),
            "arranged_by": self.pipeline.layout.arranged_by,
            "running_mean": asdict(progress.mean),
            "health": asdict(progress.health),
            RESUMED_FROM: progress.resumed_from,
            "data": data_identity(self.config, self.data),
            "arrangement": self._arrangement.state(),
            "config": asdict(self.config),
            "tokenizer": os.path.relpath(
                self.config.run_folder / "tokenizer", self.config.checkpoint_folder / "step-00000000"
            ),
        }
        fault = self._fault()
        path = self.pipeline.save_checkpoint(
            self.config.checkpoint_folder,
            progress.step,
            self.optimizer,
            extra=extra,
            keep=self.config.checkpoint.keep,
            unhealthy=fault,
        )
        if self.metrics is not None and fault is not None:
            self.metrics.say(f"the checkpoint of step {progress.step} is marked as unhealthy: {fault}")
        self._call("on_save", path)

    def _fault(self) -> str | None:
        """Return in words why the state may be ruined, or None; mark earlier checkpoints that were already ruined.
        Collective."""
        health, folder = self.progress.health, self.config.checkpoint_folder
        trained = (held.parameter for held in self.pipeline.held_parameters() if held.parameter.requires_grad)
        finite = min(row[0] for row in self.pipeline.gather_numbers([are_finite(trained)]))
        fault = health.fault() if finite else "a parameter is not finite"
        fault = self.pipeline.from_the_first(fault, "the mark of health")
        if fault is not None:
            ruined = first_ruined(health, self.progress.step + 1)
            Team(self.pipeline.process_group).first(lambda: mark_unhealthy(folder, ruined, fault))
        return fault

    # --- the loop --------------------------------------------------------------------------------------------

    def listen(self, stop: StopRequest) -> None:
        """From now on, let a signal end the run after the current step. Collective: the launcher learns when all
        processes listen."""
        self.stop = stop
        self._asked_to_stop()
        if self.is_first:
            stop.announce()

    def _asked_to_stop(self) -> int:
        """Return the number of a signal that any process has received, or 0. If a callback on any process has returned
        "stop", the current step becomes the last one. Collective."""
        table = self.pipeline.gather_numbers([self.stop.signal_number, self._wants_to_stop])
        if any(wants for _, wants in table):
            self._wants_to_stop = self.box_open = False
            self._set_steps(self.progress.step)
        return int(max(number for number, _ in table))

    @property
    def epoch(self) -> float:
        """Passes over the training rows so far."""
        return self.batches.epoch(self.progress.rows)

    def _call(self, method: str, *arguments: Any) -> None:
        """Call a method of all callbacks."""
        if not self.callbacks:
            return
        result, norm, rate = self._last
        state = TrainingState(
            step=self.progress.step,
            steps=self.progress.steps,
            epoch=self.epoch,
            learning_rate=rate,
            gradient_norm=norm,
            result=result,
            validation_loss=self._validation,
            is_first=self.is_first,
            pipeline=self.pipeline,
            optimizer=self.optimizer,
        )
        self._wants_to_stop |= call(self.callbacks, method, state, *arguments)

    def to_the_end(self) -> int:
        """Train until the last step or a signal; return the number of the signal, or 0."""
        config, progress = self.config, self.progress
        self._restart_clock()
        stop_signal = 0
        while progress.step < progress.steps and not stop_signal:
            self._step()
            stop_signal = self._asked_to_stop()
            number = progress.step
            if self.box_open and self.steps_taken == WARM_UP_STEPS + TIMED_STEPS:
                self._decide_steps(sum(self._step_seconds[WARM_UP_STEPS:]) / TIMED_STEPS)
            if number % config.output.log_every_steps == 0 or number == progress.steps:
                self._log()
            every = config.training.evaluate_every_steps
            if number == progress.steps or (every is not None and number % every == 0 and not stop_signal):
                self._evaluate()
                if number < progress.steps:
                    stop_signal = self._asked_to_stop()
            every = config.checkpoint.every_steps
            if number == progress.steps or stop_signal or (every is not None and number % every == 0):
                self._log()
                self.save()
                self._restart_clock()
        if progress.step == progress.steps and self.steps_taken:
            self._report()
        self._call("on_end")
        if self.metrics is not None and stop_signal:
            self.metrics.say(f"stopped at step {progress.step}; continue with the same command")
        elif self.metrics is not None and not self.steps_taken:
            self.metrics.say(
                "the only step was done before"
                if progress.steps == 1
                else f"all {progress.steps} steps were done before"
            )
        return stop_signal

    @property
    def steps_taken(self) -> int:
        """Steps since the run was started or continued."""
        return self.progress.step - self.started_step

    def _step(self) -> None:
        config, pipeline, progress = self.config, self.pipeline, self.progress
        started = time.perf_counter()
        process = (pipeline.replica * pipeline.devices + pipeline.device) * pipeline.context_ranks
        process = (process + pipeline.context_rank) * pipeline.tensor_ranks + pipeline.tensor_rank
        torch.manual_seed(_seed(config.training.seed, progress.step, process))  # for dropout
        rate = learning_rate(progress.step, progress.steps, config.optimizer)
        if self.optimizer is not None:
            for group, share in zip(self.optimizer.param_groups, self._rate_shares, strict=True):
                group["lr"] = rate * share
        traced, measured = progress.step + 1 in config.output.trace_steps, self._arrangement.records(progress.step + 1)
        ids, labels, positions = self._local_batch(self.batches.batch, progress.rows)
        result = pipeline.step(ids, labels, position_ids=positions, record_passes=traced or measured)
        norm = pipeline.clip_grad_norm_(config.optimizer.clip_norm or float("inf"))
        if self.optimizer is not None:
            self.optimizer.step()
        if config.experts.router_bias_rate:
            pipeline.move_router_biases(result.expert_load, config.experts.router_bias_rate)
        pipeline.zero_grad()
        progress.step += 1
        progress.rows += self.batches.batch_size
        progress.tokens += self.batches.tokens_per_batch
        if traced:
            self._write_trace(result)
        if measured:
            message = self._arrangement.observe(progress.step, result)
            if message is not None and self.metrics is not None:
                self.metrics.say(message)
        self._busy_seconds += result.record.busy
        self._last = (result, norm, rate)
        self._pending.append(self._last)
        self._call("on_step_end")
        self._step_seconds.append(time.perf_counter() - started)

    def _local_batch(
        self, batch: Callable[[int, int, int], Sequences], number: int
    ) -> Sequences | tuple[None, None, None]:
        """Return the rows of a batch that this process feeds to its pipeline, if any."""
        if not self.feeds:
            return None, None, None
        return batch(number, self.pipeline.replica, self.pipeline.replicas)

    def _write_trace(self, result: StepResult) -> None:
        """Write the trace of the last step. Collective."""
        step = self.progress.step
        trace = self.pipeline.trace(result, schedule=self.config.pipeline.schedule, step=step)
        if trace is None or self.metrics is None:
            return
        folder = self.config.trace_folder
        with disk_errors(folder, "writing a trace"):
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"step-{step:08d}.json"
            write_trace(trace, path)
        self.metrics.say(f"the trace of step {step} is in {path}; evenpipe draw {path} shows it")

    def _log(self) -> None:
        """Read the losses since the last line and write a line. Collective, because it gathers the busy shares."""
        if not self._pending:
            return
        progress, steps, loss = self.progress, len(self._pending), math.nan
        for step, (result, norm, _) in enumerate(self._pending, progress.step - steps + 1):
            loss = result.loss
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise RunError(diverged(self.config, progress.health, step, loss, norm, marks=self.is_first))
            progress.mean.add(loss)
            progress.health.add(loss)
        result, norm, rate = self._pending[-1]
        now = time.perf_counter()
        seconds = now - self._since
        table = self.pipeline.gather_numbers([self._busy_seconds, self._memory.take()])
        tokens_per_second = steps * self.batches.tokens_per_batch / seconds
        self._training_seconds += seconds
        self._busy_in_all += self._busy_seconds
        if self.metrics is not None:
            if self.pipeline.expert_layers:
                self._expert_load = result.expert_load
            self.metrics.log(
                StepMetrics(
                    step=progress.step,
                    epoch=self.epoch,
                    loss=loss,
                    running_mean_loss=progress.mean.mean,
                    tokens=progress.tokens,
                    tokens_per_second=tokens_per_second,
                    learning_rate=rate,
                    gradient_norm=norm,
                    busy=tuple(busy / seconds for busy, _ in table) if measures_busy(self.pipeline) else None,
                    seconds=seconds,
                    teraflops_per_second=self._throughput.teraflops_per_second(tokens_per_second),
                    peak_memory_bytes=tuple(int(peak) for _, peak in table),
                    model_flops_utilization=self._throughput.utilization(tokens_per_second),
                    entropy=result.entropy if self.config.loss.entropy else None,
                    experts=None if self._expert_load is None else ExpertMetrics.of(self._expert_load),
                )
            )
        self._pending, self._busy_seconds, self._since, self._loss = [], 0.0, now, loss

    def _restart_clock(self) -> None:
        """Restart the time and memory measurement for the next line, after work that is not part of a step."""
        self._since = time.perf_counter()
        self._memory.restart()

    def _evaluate(self) -> None:
        """Compute the mean loss over the validation rows, which are always the same. Collective."""
        count = min(self.batches.validation_batches, self.config.training.evaluation_batches or sys.maxsize)
        if not count:
            return
        self._log()
        total, tokens = 0.0, 0
        for index in range(count):
            ids, labels, positions = self._local_batch(self.batches.validation_batch, index)
            result = self.pipeline.evaluate(ids, labels, position_ids=positions)
            total += result.loss * result.tokens
            tokens += result.tokens
        self._validation = total / tokens if tokens else math.nan
        if self.metrics is not None:
            self.metrics.log_evaluation(self.progress.step, self._validation, tokens)
        self._call("on_evaluate")
        self._restart_clock()

    def _decide_steps(self, step_seconds: float) -> None:
        """Decide how many steps, without evaluations and saves, fit into the time box at the slowest process's speed.

        Collective; all processes get the same number.
        """
        minutes = self.config.training.minutes
        assert minutes is not None
        slowest = max(values[0] for values in self.pipeline.gather_numbers([step_seconds]))
        fit = int(minutes * 60 / slowest)
        self._set_steps(min(self.progress.steps, max(fit, self.progress.step)))
        self.box_open = False

    def _set_steps(self, steps: int) -> None:
        """Change the total number of steps."""
        self.progress.steps = steps
        if self.metrics is not None:
            self.metrics.set_steps(steps)

    def _report(self) -> None:
        """Write and print the report. Collective."""
        training = TrainingReport(
            steps=self.steps_taken,
            epoch=self.epoch,
            tokens=self.steps_taken * self.batches.tokens_per_batch,
            seconds=self._training_seconds,
            loss=self._loss,
            running_mean_loss=self.progress.mean.mean,
            validation_loss=self._validation,
        )
        report = gather_report(
            self.pipeline,
            training=training,
            schedule=self.config.pipeline.schedule,
            busy_seconds=self._busy_in_all,
            peak_memory_bytes=self._memory.of_run,
        )
        if report is not None and self.metrics is not None:
            write_report(report, self.config.run_folder / "report.json")
            self.metrics.say(report_text(report))
            if self._expert_load is not None:
                write_loads(self._expert_load, self.pipeline.expert_layers, self.config.run_folder / "expert_load.svg")


def _seed(seed: int, step: int, process: int) -> int:
    """Return the seed of a step: the same in a resumed run, different on every process."""
    digest = hashlib.sha256(f"{seed} {step} {process}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
