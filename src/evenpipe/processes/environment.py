"""Environment variables: those of torchrun, and temporary ones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from evenpipe.errors import InputError
from evenpipe.given import shown
from evenpipe.words import refused

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables with which a process finds the others."""
LOCAL_VARIABLES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")


def is_single_process() -> bool:
    """Return whether this process runs without others, according to RANK: the address may be set for a later torchrun.

    Raises:
        InputError: WORLD_SIZE says that there are others, but RANK is missing. Each process would train separately.
    """
    if "RANK" in os.environ:
        return False
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise _incomplete()
    return True


def rank_and_size(*, meets_by_address: bool = True) -> tuple[int, int]:
    """Return the rank of this process and the world size.

    meets_by_address: whether the variables must also say where the processes meet.

    Raises:
        InputError: a variable is missing or not a valid number; names the variable and its value.
    """
    names = TORCHRUN_VARIABLES if meets_by_address else TORCHRUN_VARIABLES[:2]
    if not all(os.environ.get(name) for name in names):
        raise _incomplete()
    size = whole_number("WORLD_SIZE", 1)
    if meets_by_address:
        whole_number("MASTER_PORT", 1, 65535)
    for name in LOCAL_VARIABLES:
        if name in os.environ:
            whole_number(name, 0)
    return whole_number("RANK", 0, size - 1), size


def whole_number(name: str, minimum: int, maximum: int | None = None) -> int:
    """Return the whole number in a variable that is set. Raises InputError for anything else."""
    text = os.environ[name]
    if text.isdecimal() and len(text) < 10 and minimum <= int(text) and (maximum is None or int(text) <= maximum):
        return int(text)
    accepted = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
    why = f" (WORLD_SIZE is {maximum + 1})" if name == "RANK" and maximum is not None else ""
    raise refused(f"environment variable {name}", text, f"a whole number {accepted}{why}")


def _incomplete() -> InputError:
    """Return the error for a process that is one of several but cannot find the others."""
    values = [
        f"{name} is {shown(os.environ[name]) if os.environ.get(name) else 'missing'}" for name in TORCHRUN_VARIABLES
    ]
    return InputError(
        f"environment variables: {', '.join(values)}; expected all four, as torchrun sets them for each process, or"
        " neither RANK nor WORLD_SIZE for a process that is alone"
    )


def allocator_variables() -> dict[str, str]:
    """Return the variables that let torch's GPU allocator grow segments in place; empty if the user configures it.

    Messages of expert ranks and embedding rows change size with each microbatch, and would otherwise leave unused gaps.
    A process reads the variables when it imports torch.
    """
    if os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
        return {}
    return {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@contextmanager
def default_variables(**variables: str) -> Iterator[None]:
    """Within the context, set these environment variables, unless they are set already."""
    missing = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            del os.environ[name]
