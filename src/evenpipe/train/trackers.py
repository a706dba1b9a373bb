"""The figures of metrics.jsonl sent to Weights & Biases, or kept by trackio, as far as these are installed.

The first process of a run owns them. A run that is started again goes on in the same run of the tracker, whose id is
kept in RUN/trackers.json. A tracker that fails while the run trains is left out from then on: training is worth more.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from evenpipe.errors import InputError
from evenpipe.train.config import Config
from evenpipe.train.config_file import config_to_dict
from evenpipe.train.files import write_json

FILE = "trackers.json"
FINISH_SECONDS = 60.0


def check_trackers(names: Sequence[str]) -> None:
    """Raises InputError for one that is not installed. Imports nothing."""
    for name in names:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # a folder of that name, such as wandb makes, is no package
            raise InputError(f'output.trackers names "{name}", but must not until it is installed: pip install {name}')


def scalars(record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The figures of a line of metrics.jsonl, without its step; of a list, one per device."""
    for name, value in record.items():
        if isinstance(value, (list, tuple)):
            for device, item in enumerate(value):
                yield f"{name}/device {device}", item
        elif name != "step":
            yield name, value


def open_trackers(config: Config, say: Callable[[str], None]) -> list[Tracker]:
    """Those of the configuration; arguments and errors as of `Tracker`."""
    output = config.output
    about = config_to_dict(config)
    return [Tracker(name, config.run_folder, output.project, about, say) for name in output.trackers]


class Tracker:
    """A run of one tracker."""

    def __init__(
        self, name: str, folder: Path, project: str, config: Mapping[str, Any], say: Callable[[str], None]
    ) -> None:
        """
        Args:
            name: "wandb" or "trackio".
            folder: of the run, whose name the tracker shows.
            say: shows a line where it fails later.

        Raises:
            InputError: it cannot be opened, at the first start of the run: nothing is lost yet.
        """
        self._name = name
        self._say = say
        self._run: Any = None
        kept, is_new = _identity(name, folder, project)
        options = {"project": project, "config": dict(config), "resume": "allow"}
        if name == "wandb":
            options |= {"name": folder.name, "id": kept, "dir": str(folder)}
        else:  # which knows a run by its name
            options |= {"name": f"{folder.name}-{kept}"}
        try:
            self._run = importlib.import_module(name).init(**options)
        except Exception as error:
            if is_new:
                raise InputError(f'output.trackers names "{name}", but it cannot be opened: {_words(error)}') from error
            self._give_up(error)
            return
        if is_new:
            write_json(folder / FILE, _kept(folder) | {name: {"project": project, "id": kept}})

    def write(self, record: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl."""
        self._try(lambda run: run.log(dict(scalars(record)), step=record["step"]))

    def close(self) -> None:
        """Send what is left, if that can be done in `FINISH_SECONDS`: without a network it may take for ever."""
        thread = threading.Thread(target=self._try, args=(lambda run: run.finish(),), daemon=True)
        thread.start()
        thread.join(FINISH_SECONDS)
        if thread.is_alive():
            self._say(f"{self._name} has not sent all of its figures within {FINISH_SECONDS:g} s; they are left behind")

    def _try(self, do: Callable[[Any], Any]) -> None:
        if self._run is None:
            return
        try:
            do(self._run)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._run = None
        self._say(f"{self._name} has failed and gets no more figures until the next start: {_words(error)}")


def _identity(name: str, folder: Path, project: str) -> tuple[str, bool]:
    """(id of the tracker's run, whether it is a new one)."""
    kept = _kept(folder).get(name)
    if kept is not None and kept["project"] == project:
        return kept["id"], False
    return secrets.token_hex(4), True


def _kept(folder: Path) -> dict[str, Any]:
    path = folder / FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _words(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
