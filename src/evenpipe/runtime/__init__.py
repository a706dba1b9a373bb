"""Executes a program on this device: compute, communication, and what failed when a process dies.

`Pipeline` is what users hold; the walker, the communicators and the watch stand behind it.
"""

from evenpipe.runtime.launch import launch
from evenpipe.runtime.pipeline import Pipeline, StepResult
from evenpipe.runtime.worker import initialise_worker

__all__ = ["Pipeline", "StepResult", "initialise_worker", "launch"]
