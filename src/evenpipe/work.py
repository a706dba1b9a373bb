"""Work under way, such as a transfer between processes: started in one place, waited for where its result is needed."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol


class Work(Protocol):
    """Work that has been started. `communication.Handle` is that of communicators."""

    def wait(self) -> Any:
        """Return its result, when it is there. What it reads and writes must stay as it is until then."""
        ...


class Done(NamedTuple):
    """Work that is over."""

    result: Any = None
    held: list[Any] | None = None
    """Tensors that live until the wait, as those of a communicator do."""

    def wait(self, needed_by: str = "") -> Any:
        """Return the result. needed_by: as of `communication.Handle`."""
        if self.held is not None:
            self.held.clear()
        return self.result


NOTHING: Work = Done()
"""Nothing to wait for."""
