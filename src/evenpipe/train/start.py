"""From a configuration to a finished run: check, prepare the data once, start the processes, generate sample text."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evenpipe.checkpoints.lock import Claim, claim, release
from evenpipe.given import plain, plain_lines
from evenpipe.train.callbacks import Callback, find_callbacks
from evenpipe.train.config import Config
from evenpipe.train.config_file import config_from_dict, load_config
from evenpipe.train.data import prepare
from evenpipe.train.files import check_folders, disk_errors, write_json
from evenpipe.train.model_source import check_pipeline, pipeline_model
from evenpipe.train.stopping import say_stop
from evenpipe.train.trackers import check_trackers
from evenpipe.words import refused

SET_UP = "set up"  # mark that the first process sets when it has prepared the run


def run_training(
    config: Mapping[str, Any] | str | Path | Config, *, callbacks: Sequence[Callback] = (), force: bool = False
) -> None:
    """Train and export a model, like `evenpipe train`. A second call continues from the newest checkpoint.

    It starts the processes itself, so call it under `if __name__ == "__main__":`; under torchrun it runs in place. If
    possible, InputError is raised before any process starts.

    Args:
        config: path of a TOML file, or nested dictionaries of its sections, or a `Config`.
        callbacks: callbacks in addition to `training.callbacks`; each process gets a copy, made by pickle.
        force: take folders from another run that writes to them; its next checkpoint then fails.

    Raises:
        InputError: a value of the configuration, or a callback, is not accepted; the sentence names it.
        RunError: a callback, process, disk or connection failed, or the loss is not finite.
        SystemExit, KeyboardInterrupt: a signal ended the run after it saved.
    """
    if isinstance(config, Config):
        run = config
    else:
        run = config_from_dict(config) if isinstance(config, Mapping) else load_config(config)
    if "RANK" in os.environ:
        _run_in_place(run, callbacks, force)
        return
    from evenpipe.processes.launcher import launch, prepare_launch

    prepare_launch("evenpipe.train.trainer", "evenpipe.runtime.pipeline")  # imports in the background, once for all
    claims = set_up(run, force)

    from evenpipe.train.trainer import train

    stop_signal = 0

    def on_stop(number: int) -> None:
        nonlocal stop_signal
        stop_signal = number
        say_stop(run, number, ends=False)

    try:
        try:
            signals = launch(
                train,
                run,
                claims,
                callbacks,
                processes=run.pipeline.processes,
                timeout_seconds=run.pipeline.timeout_seconds,
                on_stop=on_stop,
            )
        except (KeyboardInterrupt, SystemExit):
            if stop_signal:  # this is the second signal
                say_stop(run, stop_signal, ends=True)
            raise
        if signals[0]:
            raise SystemExit(128 + signals[0])
        show_result(run)
    finally:
        release(claims)


def set_up(config: Config, force: bool) -> list[Claim]:
    """Do all work that one process does before the others start: quick checks first, then the data.

    Returns the locks of the run's folders, which this process holds from now on.
    """
    from evenpipe.train.optimization import check_optimizer

    check_pipeline(config)
    check_optimizer(config.optimizer)
    check_trackers(config.output.trackers)
    find_callbacks(config.training.callbacks)
    check_folders(config.folders)  # before a lock is left in one of them
    claims = []
    for field, folder in (("output.folder", config.run_folder), ("checkpoint.folder", config.checkpoint_folder)):
        with disk_errors(folder, "taking its lock"):
            claims.append(claim(folder, force=force, field=field, by_force="--force"))
        if claims[-1].taken_from is not None:
            text = f"{field} {folder} is taken from {claims[-1].taken_from}, whose next checkpoint will fail"
            print(text, file=sys.stderr, flush=True)
    data = prepare(config)
    pipeline_model(config, data.tokenizer_size, data.end_of_text_id)
    write_json(config.run_folder / "config.json", asdict(config))
    return claims


def show_result(config: Config) -> None:
    """Export the newest checkpoint as a Hugging Face folder, and print the model's continuation of each prompt."""
    if not config.output.export:
        return
    from evenpipe.train.export import export_checkpoint

    trust_remote_code = config.model.trust_remote_code
    folder = export_checkpoint(
        config.checkpoint_folder,
        config.export_folder,
        dtype=config.output.dtype,
        trust_remote_code=trust_remote_code,
    )
    print(f"the model is in {plain(folder)}", file=sys.stderr, flush=True)
    if not config.sample.prompts:
        return
    from evenpipe.train.generation import Generator

    generate = Generator(config.export_folder, trust_remote_code)
    for number, prompt in enumerate(config.sample.prompts):
        text = generate(
            prompt,
            max_new_tokens=config.sample.new_tokens,
            temperature=config.sample.temperature,
            top_k=config.sample.top_k,
            seed=config.training.seed + number,
        )
        print(plain_lines(f"\n--- {prompt!r}\n{text}"), flush=True)


def _run_in_place(config: Config, callbacks: Sequence[Callback], force: bool) -> None:
    """Run in a process that torchrun started. The others wait without a timeout while the first one prepares data."""
    from evenpipe.processes.worker import finish_worker, initialise_worker
    from evenpipe.train.trainer import train

    worker = initialise_worker(timeout_seconds=config.pipeline.timeout_seconds)
    try:
        if worker.world_size != config.pipeline.processes:
            raise refused(
                "pipeline.processes",
                config.pipeline.processes,
                f"{worker.world_size}, the number of processes that torchrun starts",
            )
        if worker.rank == 0:
            set_up(config, force)
            worker.mark(SET_UP)
        worker.wait_for_mark(SET_UP, "the data", "training")
        stopped_by = train(config, callbacks=callbacks)
    except BaseException as error:
        worker.watch.report_exception(error)  # the others end, too, with this message
        raise
    finish_worker()  # only the first process does the remaining work
    if stopped_by:
        raise SystemExit(128 + stopped_by)
    if worker.rank == 0:
        show_result(config)
