"""For all tests: where there is no GPU, Triton interprets its kernels. It looks when a kernel is defined."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
