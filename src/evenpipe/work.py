"""Pending work, such as a transfer between processes: started early, and waited for where its result is needed."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol


class Work(Protocol):
    """Work that has been started, such as `communication.Handle`."""

    def wait(self) -> Any:
        """Wait for the work and return its result. The tensors that it reads and writes must not change until then."""
        ...


class Done(NamedTuple):
    """Completed work."""

    result: Any = None
    held: list[Any] | None = None
    """Tensors that are kept until the wait, as in `communication.Handle`."""

    def wait(self, needed_by: str = "") -> Any:
        """Return the result. needed_by: as in `communication.Handle`."""
        if self.held is not None:
            self.held.clear()
        return self.result


NOTHING: Work = Done()
"""Nothing to wait for."""
