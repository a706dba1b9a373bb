"""What becomes of memory that this process frees on the host.

glibc gives it back to the system as soon as enough lies free at the end of its heap, and the next tensor finds it gone:
every page has to be zeroed and mapped again. Training frees and takes the same sizes in every pass. In the model of
`benchmarks/measured.py` that cost a quarter of the time of weight gradients (traced: 23.5 ms of a W, 17 without), and
in some passes only, so that nobody could say how long they take.
"""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Names of glibc's options, from malloc.h."""
_NEVER = -1
_LARGEST_IN_HEAP = 32 * 2**20
"""Bytes: glibc takes no more. What is larger is mapped by itself, and given back at once."""
_SMALLEST_MAPPED = 64 * 2**10
"""Bytes: small enough for activations, large enough that a mapping of its own is worth it."""


def return_freed_memory() -> bool:
    """Lets glibc give back at once what this process frees, if it is more than a few pages: where activations go to a
    file, resident memory falls with them. Their next pages have to be mapped anew, which takes time.

    Returns as `keep_freed_memory`.
    """
    return _set_options(_SMALLEST_MAPPED, _SMALLEST_MAPPED)


def keep_freed_memory() -> bool:
    """Lets glibc keep what this process frees, for the next tensors: resident memory stays at its peak.

    Returns False, and changes nothing, where the environment has settings for glibc's allocator of its own, and where
    the process has another C library.
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
