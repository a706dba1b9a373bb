"""Whether freed host memory of this process goes back to the system.

glibc returns memory to the system as soon as enough is free at the end of its heap, and for the next tensor every page
must be zeroed and mapped again. Training frees and allocates the same sizes in every pass. In the model of
`benchmarks/measured.py` that cost a quarter of the time of weight gradients (traced: 23.5 ms for a W, 17 without), and
only in some passes, so pass times were unpredictable.
"""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Names of glibc's options, from malloc.h."""
_NEVER = -1
_LARGEST_IN_HEAP = 32 * 2**20
"""Bytes: glibc accepts no more. Larger blocks are mapped separately, and returned at once."""
_SMALLEST_MAPPED = 64 * 2**10
"""Bytes: small enough for activations, large enough that a separate mapping is worth it."""


def return_freed_memory() -> bool:
    """Let glibc return freed memory at once, if it is more than a few pages: if activations go to a file, resident
    memory falls with them. Their next pages must be mapped anew, which takes time.

    Returns the same as `keep_freed_memory`.
    """
    return _set_options(_SMALLEST_MAPPED, _SMALLEST_MAPPED)


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory for the next tensors: resident memory stays at its peak.

    Returns False, and changes nothing, if the environment sets options of glibc's allocator, or if the process uses
    another C library.
    """
    return _set_options(_LARGEST_IN_HEAP, _NEVER)


def _set_options(mmap_threshold: int, trim_threshold: int) -> bool:
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc" in tunables or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(set_option(_MMAP_THRESHOLD, mmap_threshold) and set_option(_TRIM_THRESHOLD, trim_threshold))
