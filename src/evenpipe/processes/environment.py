"""Variables of the environment: those that torchrun sets, and one for a while."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from evenpipe.errors import InputError
from evenpipe.given import shown
from evenpipe.words import refused

OF_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables by which a process finds the others."""
ON_ITS_MACHINE = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")


def is_alone() -> bool:
    """Return whether no variable says that this process is one of several. Its number, RANK, decides: the address may
    be set for a torchrun to come.

    Raises:
        InputError: WORLD_SIZE says that there are others, and RANK is missing. Each of them would train on its own.
    """
    if "RANK" in os.environ:
        return False
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise _incomplete()
    return True


def rank_and_size(*, meets_by_address: bool = True) -> tuple[int, int]:
    """Return the number of this process and that of all processes.

    meets_by_address: whether the variables must also say where the processes meet.

    Raises:
        InputError: a variable is missing, or is not the number that it should be; names it, and its value.
    """
    names = OF_TORCHRUN if meets_by_address else OF_TORCHRUN[:2]
    if not all(os.environ.get(name) for name in names):
        raise _incomplete()
    size = whole_number("WORLD_SIZE", 1)
    if meets_by_address:
        whole_number("MASTER_PORT", 1, 65535)
    for name in ON_ITS_MACHINE:
        if name in os.environ:
            whole_number(name, 0)
    return whole_number("RANK", 0, size - 1), size


def whole_number(name: str, least: int, most: int | None = None) -> int:
    """Return the whole number in a variable that is set. Raises InputError for anything else."""
    text = os.environ[name]
    if text.isdecimal() and len(text) < 10 and least <= int(text) and (most is None or int(text) <= most):
        return int(text)
    accepted = f"at least {least}" if most is None else f"from {least} to {most}"
    why = f" (WORLD_SIZE is {most + 1})" if name == "RANK" and most is not None else ""
    raise refused(f"environment variable {name}", text, f"a whole number {accepted}{why}")


def _incomplete() -> InputError:
    """Return the error of a process that is one of several, but cannot find the others."""
    values = [f"{name} is {shown(os.environ[name]) if os.environ.get(name) else 'missing'}" for name in OF_TORCHRUN]
    return InputError(
        f"environment variables: {', '.join(values)}; expected all four, as torchrun sets them for each process, or"
        " neither RANK nor WORLD_SIZE for a process that is alone"
    )


def allocator_variables() -> dict[str, str]:
    """Return what lets torch's allocator on GPUs grow segments in place; nothing if the user configures it.

    Messages of expert ranks and embedding rows have another size in each microbatch, and leave unused gaps otherwise.
    A process reads them when it imports torch.
    """
    if os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
        return {}
    return {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@contextmanager
def default_variables(**variables: str) -> Iterator[None]:
    """Within, these variables of the environment have these values, unless they have others."""
    missing = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            del os.environ[name]
