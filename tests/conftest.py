"""For all tests: where there is no GPU, Triton interprets its kernels (it looks when a kernel is defined); and an
example of hypothesis may take its time, since a busy machine is no fault of the code.
"""

from __future__ import annotations

import os

import torch
from hypothesis import settings

pytest_plugins = ["sampling"]

settings.register_profile("evenpipe", deadline=None)
settings.load_profile("evenpipe")

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
