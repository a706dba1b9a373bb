"""From a configuration to a finished run: check, prepare the data once, start the processes, show a text at the end."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evenpipe.errors import InputError
from evenpipe.given import plain, plain_lines
from evenpipe.runtime.checkpoints.folder_lock import Claim, claim, release
from evenpipe.train.callbacks import Callback, find_callbacks
from evenpipe.train.config import Config
from evenpipe.train.config_file import config_from_dict, config_to_dict, load_config
from evenpipe.train.data import prepare
from evenpipe.train.files import check_folders, disk_errors, write_json
from evenpipe.train.model_source import check_schedule, check_shape, model_config, pipeline_model
from evenpipe.train.stopping import say_stop
from evenpipe.train.trackers import check_trackers

SET_UP = "set up"  # the mark of the first process: it has done its part


def run_training(
    config: Mapping[str, Any] | str | Path, *, callbacks: Sequence[Callback] = (), force: bool = False
) -> None:
    """What `evenpipe train` does: from a configuration to a trained and exported model.

    It starts the processes itself, so a script calls it under `if __name__ == "__main__":`; under torchrun it runs in
    place. Called again it goes on from the newest checkpoint.

    Args:
        config: a TOML file, or the same as nested dictionaries, section by section.
        callbacks: called beside those of `training.callbacks`; each process has a copy of its own, made by pickle.
        force: also in folders that another run writes to; its next checkpoint then fails.

    Raises:
        InputError: something in the configuration, or a callback, is wrong; one sentence says what.
        RunError: the run failed: a callback, a process, a disk, a connection, or the loss is no longer finite.
        SystemExit, KeyboardInterrupt: a signal ended it, after it has saved.
    """
    start(
        config_from_dict(config) if isinstance(config, Mapping) else load_config(config),
        callbacks=callbacks,
        force=force,
    )


def start(config: Config, *, callbacks: Sequence[Callback] = (), force: bool = False) -> None:
    """Run `config` to its end: in local processes that are started here, or in place when torchrun started this one.

    `callbacks` and `force` as for `run_training`.

    Raises `InputError` for wrong input, before any process starts where that is possible, `RunError` when the run
    fails, and `SystemExit` or `KeyboardInterrupt` when a signal ended it.
    """
    if "RANK" in os.environ:
        _run_in_place(config, callbacks, force)
        return
    from evenpipe.runtime.launcher import launch, prepare_launch

    prepare_launch("evenpipe.train.trainer", "evenpipe.runtime.pipeline")  # imports in the background, once for all
    claims = set_up(config, force)

    from evenpipe.train.trainer import train

    asked = 0

    def on_stop(number: int) -> None:
        nonlocal asked
        asked = number
        say_stop(config, number, ends=False)

    try:
        try:
            signals = launch(
                train,
                config,
                claims,
                callbacks,
                processes=config.pipeline.processes,
                timeout_seconds=config.pipeline.timeout_seconds,
                on_stop=on_stop,
            )
        except (KeyboardInterrupt, SystemExit):
            if asked:  # and once more
                say_stop(config, asked, ends=True)
            raise
        if signals[0]:
            raise SystemExit(128 + signals[0])
        show_result(config)
    finally:
        release(claims)


def set_up(config: Config, force: bool) -> list[Claim]:
    """Everything that one process does before the others begin. What is quickly refused comes before the data.

    Gives the locks of the folders that the run writes to, which this process holds from now on.
    """
    from evenpipe.train.optimization import check_optimizer

    model = model_config(config.model)
    check_shape(config, model)
    check_schedule(config, model)
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
    write_json(config.run_folder / "config.json", config_to_dict(config))
    return claims


def show_result(config: Config) -> None:
    """Export the newest checkpoint as a Hugging Face folder, and print what that model writes after each prompt."""
    if not config.output.export:
        return
    from evenpipe.train.export import export_checkpoint

    folder = export_checkpoint(config.checkpoint_folder, config.export_folder)
    print(f"the model is in {plain(folder)}", file=sys.stderr, flush=True)
    if not config.sample.prompts:
        return
    from evenpipe.train.generation import Generator

    generate = Generator(config.export_folder)
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
    """This process is one of those that torchrun started. However long the first one prepares data, the others wait."""
    from evenpipe.runtime.worker import finish_worker, initialise_worker
    from evenpipe.train.trainer import train

    worker = initialise_worker(timeout_seconds=config.pipeline.timeout_seconds)
    try:
        if worker.world_size != config.pipeline.processes:
            raise InputError(
                f"pipeline.processes is {config.pipeline.processes}, but must be {worker.world_size}, the number of "
                "processes that torchrun starts"
            )
        if worker.rank == 0:
            set_up(config, force)
            worker.mark(SET_UP)
        worker.wait_for_mark(SET_UP, "the data", "training")
        stopped_by = train(config, callbacks=callbacks)
    except BaseException as error:
        worker.watch.report_exception(error)  # the others end too, with its words
        raise
    finish_worker()  # what follows the first process does alone
    if stopped_by:
        raise SystemExit(128 + stopped_by)
    if worker.rank == 0:
        show_result(config)
