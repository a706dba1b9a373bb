"""Messages when a signal stops a run."""

from __future__ import annotations

import signal
import sys

from evenpipe.checkpoints.folder import newest_step
from evenpipe.train.config import Config


def say_stop(config: Config, number: int, ends: bool) -> None:
    """Print the effect of a signal: the first lets the step finish, the second `ends` the run."""
    name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    if ends:
        text = f"{name}: ended at once; {_lost(config)}"
    else:
        text = f"{name}: finishing the step and saving; a second signal ends the run at once, without saving"
    print(f"\nevenpipe: {text}", file=sys.stderr, flush=True)


def _lost(config: Config) -> str:
    saved = newest_step(config.checkpoint_folder)
    if saved is None:
        return "no step was saved, so all steps are lost; the same command starts again"
    return f"steps after {saved}, the last one saved, are lost; the same command continues from there"
