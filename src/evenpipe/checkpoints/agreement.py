"""All processes of a group learn how a piece of work ended on each process, so they continue or fail together.

If only one process raised, the others would wait in their next collective until it timed out. This is for rare, slow
work on files; the values must be JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from evenpipe.checkpoints.manifest import DamagedError
from evenpipe.communication.messages import gather_values
from evenpipe.errors import InputError, RunError
from evenpipe.processes.names import process
from evenpipe.processes.worker import current_watch

_ERRORS = {kind.__name__: kind for kind in (InputError, DamagedError, RunError)}


class Team:
    """The processes of a group (None: all), or only this one: with `local_only`, or without torch.distributed.

    The group's timeout limits how long one process may work while the others wait for it.
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, called: str = "", *, local_only: bool = False
    ) -> None:
        """called: the public function that uses this team, which all processes must have called (`calls`)."""
        self._called = called
        self.distributed = not local_only and dist.is_available() and dist.is_initialized()
        self.group = (process_group or dist.group.WORLD) if self.distributed else None
        self.rank = dist.get_rank(self.group) if self.distributed else 0
        self.size = dist.get_world_size(self.group) if self.distributed else 1

    def gather(self, value: Any) -> list[Any]:
        """Return the value of every process, by rank, as read from JSON: tuples become lists.

        Raises:
            RunError: a process died or does not answer.
            InputError: on every process, if they were called for different functions.
        """
        if not self.distributed:
            return [json.loads(json.dumps(value))]
        watch = current_watch()
        if watch is not None:
            ranks = dist.get_process_group_ranks(self.group)
            peers = tuple(rank for rank in ranks if rank != watch.rank)
            watch.begin_wait("the work of all processes on files", "", "files", peers)
        try:
            values = gather_values(value, self.group, self._called)
        except InputError:
            if watch is not None:
                watch.end_wait()
            raise
        except RuntimeError as error:
            if watch is not None:
                raise watch.explain(error) from error
            reason = str(error).splitlines()[0].split(". ")[0] if str(error) else type(error).__name__
            raise RunError(f"another process died or does not answer ({reason})") from error
        if watch is not None:
            watch.end_wait()
        return values

    def everywhere(self, work: Callable[[], Any]) -> list[Any]:
        """Do the work on every process; return all results by rank, like `gather`.

        Raises:
            InputError, DamagedError, RunError: on every process, if the work raised on one of them; OSError becomes
                RunError. Any other exception, which is a bug, is raised unchanged on its process and as RunError on
                the others.
        """
        value: Any = None
        failure: tuple[str, str] | None = None
        unexpected: Exception | None = None
        try:
            value = work()
        except (InputError, RunError) as error:
            failure = (type(error).__name__, str(error))
        except OSError as error:
            failure = ("RunError", f"{process(self.rank)}: {describe_os_error(error)}")
        except Exception as error:
            failure, unexpected = ("RunError", f"{process(self.rank)}: {type(error).__name__}: {error}"), error
        outcomes = self.gather((failure, value))
        if unexpected is not None:
            raise unexpected
        for failed, _ in outcomes:
            if failed is not None:
                kind, text = failed
                raise _ERRORS.get(kind, InputError)(text)
        return [result for _, result in outcomes]

    def first(self, work: Callable[[], Any]) -> Any:
        """Do the work on the first process only; return its result on all. Raises like `everywhere`."""
        return self.everywhere(work if self.rank == 0 else lambda: None)[0]


def describe_os_error(error: OSError) -> str:
    """Return, for example, "No space left on device: 'checkpoints/step-00000010.tmp/__0_0.distcp'"."""
    text = error.strerror or str(error)
    return text if error.filename is None else f"{text}: {str(error.filename)!r}"
