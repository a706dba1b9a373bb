"""Sends the metrics of metrics.jsonl to Weights & Biases or trackio.

Only the first process of a run has trackers. A run that starts again continues the same run of the tracker, unless it
goes back to an older checkpoint (`checkpoint.resume_from`); its id is in RUN/trackers.json. If a tracker fails while
the run trains, the run continues without it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evenpipe.errors import InputError
from evenpipe.train.config import Config
from evenpipe.train.files import write_json

FILE = "trackers.json"
FINISH_SECONDS = 60.0


def check_trackers(names: Sequence[str]) -> None:
    """Raise InputError for a tracker that is not installed, without importing it."""
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a folder of that name, as wandb creates, is no package
            raise InputError(f'output.trackers names "{name}", which is not installed: pip install {name}')


def scalars(record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Iterate over the numbers in a line of metrics.jsonl, except its step; a list has one per device, or per layer
    with experts."""
    for name, value in record.items():
        if isinstance(value, (list, tuple)):
            of = "layer" if name.startswith("expert_load") else "device"
            for number, item in enumerate(value):
                yield f"{name}/{of} {number}", item
        elif name != "step":
            yield name, value


def forget_runs(folder: Path) -> None:
    """Let the next trackers of a run begin new runs, because it has gone back to an earlier step: trackers cannot
    replace the metrics of later steps that they already have."""
    (folder / FILE).unlink(missing_ok=True)


class Tracker:
    """A run in a tracker, "wandb" or "trackio"."""

    def __init__(self, name: str, config: Config, say: Callable[[str], None]) -> None:
        """Raises InputError if the tracker cannot be opened at the first start of the run. Later failures are only
        printed, by `say`."""
        self._name, self._say = name, say
        self._run: Any = None
        folder, project = config.run_folder, config.output.project
        file = folder / FILE
        saved = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        is_new = name not in saved or saved[name]["project"] != project
        identity = secrets.token_hex(4) if is_new else saved[name]["id"]
        options = {"project": project, "config": asdict(config), "resume": "allow"}
        if name == "wandb":
            options |= {"name": folder.name, "id": identity, "dir": str(folder)}
        else:  # trackio identifies a run by its name
            options |= {"name": f"{folder.name}-{identity}"}
        try:
            self._run = importlib.import_module(name).init(**options)
        except Exception as error:
            if is_new:
                raise InputError(f'output.trackers names "{name}", but it cannot be opened: {_words(error)}') from error
            self._give_up(error)
            return
        if is_new:
            write_json(file, saved | {name: {"project": project, "id": identity}})

    def write(self, record: Mapping[str, Any]) -> None:
        """Send a line of metrics.jsonl."""
        self._try(lambda run: run.log(dict(scalars(record)), step=record["step"]))

    def close(self) -> None:
        """Send the remaining metrics within `FINISH_SECONDS`: without a network this could take forever."""
        thread = threading.Thread(target=self._try, args=(lambda run: run.finish(),), daemon=True)
        thread.start()
        thread.join(FINISH_SECONDS)
        if thread.is_alive():
            self._say(f"{self._name} did not send all metrics within {FINISH_SECONDS:g} s; the rest is lost")

    def _try(self, do: Callable[[Any], Any]) -> None:
        if self._run is None:
            return
        try:
            do(self._run)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._run = None
        self._say(f"{self._name} has failed and gets no more metrics until the next start: {_words(error)}")


def _words(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
