"""Sends the metrics of metrics.jsonl to Weights & Biases or trackio.

Only the first process of a run has trackers. A run that starts again continues the same run of the tracker; its id is
in RUN/trackers.json. If a tracker fails while the run trains, the run continues without it.
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
    """Raise InputError for a tracker that is not installed, without importing it."""
    for name in names:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # a folder of that name, such as wandb makes, is not a package
            raise InputError(f'output.trackers names "{name}", but must not until it is installed: pip install {name}')


def scalars(record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Iterate over the numbers in a line of metrics.jsonl, except its step; a list has one per device."""
    for name, value in record.items():
        if isinstance(value, (list, tuple)):
            for device, item in enumerate(value):
                yield f"{name}/device {device}", item
        elif name != "step":
            yield name, value


def open_trackers(config: Config, say: Callable[[str], None]) -> list[Tracker]:
    """Open the trackers of the configuration; arguments and errors are those of `Tracker`."""
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
            folder: folder of the run; the tracker shows its name.
            say: prints a line if the tracker fails later.

        Raises:
            InputError: the tracker cannot be opened at the first start of the run; later failures are only printed.
        """
        self._name = name
        self._say = say
        self._run: Any = None
        kept, is_new = _identity(name, folder, project)
        options = {"project": project, "config": dict(config), "resume": "allow"}
        if name == "wandb":
            options |= {"name": folder.name, "id": kept, "dir": str(folder)}
        else:  # trackio identifies a run by its name
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
        """Send a line of metrics.jsonl."""
        self._try(lambda run: run.log(dict(scalars(record)), step=record["step"]))

    def close(self) -> None:
        """Send the rest within `FINISH_SECONDS`: without a network it could take forever."""
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


def _identity(name: str, folder: Path, project: str) -> tuple[str, bool]:
    """Return (id of the tracker's run, whether it is new)."""
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
