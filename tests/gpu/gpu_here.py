"""Whether there is a GPU to run on. Imports nothing but torch, to say no quickly."""

from __future__ import annotations

import torch


def no_gpu() -> str | None:
    """Why there is nothing to run on, in one sentence; None where there is a GPU."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA, so it sees no NVIDIA GPU"
    return f"torch {torch.__version__} sees no NVIDIA GPU on this machine"
