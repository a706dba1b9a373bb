"""Executes a program on this device: compute, communication, and the cause when a process fails.

`Pipeline` is the class for users; the walker, the communicators and the watch work behind it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evenpipe.runtime.checkpoints import newest_checkpoint
    from evenpipe.runtime.host_optimizer import HostAdamW
    from evenpipe.runtime.launcher import launch
    from evenpipe.runtime.nccl import NcclOptions
    from evenpipe.runtime.offload_options import OffloadOptions
    from evenpipe.runtime.optimizers.adafactor import Adafactor
    from evenpipe.runtime.optimizers.muon import Muon
    from evenpipe.runtime.pipeline import Pipeline
    from evenpipe.runtime.result import StepResult
    from evenpipe.runtime.worker import initialise_worker

_PUBLIC = {
    "Adafactor": "evenpipe.runtime.optimizers.adafactor",
    "HostAdamW": "evenpipe.runtime.host_optimizer",
    "Muon": "evenpipe.runtime.optimizers.muon",
    "NcclOptions": "evenpipe.runtime.nccl",
    "OffloadOptions": "evenpipe.runtime.offload_options",
    "Pipeline": "evenpipe.runtime.pipeline",
    "StepResult": "evenpipe.runtime.result",
    "initialise_worker": "evenpipe.runtime.worker",
    "launch": "evenpipe.runtime.launcher",
    "newest_checkpoint": "evenpipe.runtime.checkpoints",
}

__all__ = [
    "Adafactor",
    "HostAdamW",
    "Muon",
    "NcclOptions",
    "OffloadOptions",
    "Pipeline",
    "StepResult",
    "initialise_worker",
    "launch",
    "newest_checkpoint",
]


def __getattr__(name: str) -> Any:
    """Import lazily: a process that only launches others does not need the models that `Pipeline` imports."""
    if name in _PUBLIC:
        from importlib import import_module

        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'evenpipe.runtime' has no attribute '{name}'")
