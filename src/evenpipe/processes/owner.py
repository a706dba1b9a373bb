"""What the watch does in a process that evenpipe runs: under `launch`, in the commands, and after `initialise_worker`.
It handles signals, and ends the process and stopped processes of the run. In a process that evenpipe does not run it
does none of this: there a cause is only raised where the main thread waits.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import warnings
from collections.abc import Callable

from evenpipe.given import plain_lines
from evenpipe.processes.signs import Cause, is_stopped, siblings

EXIT_CODE = 3


class Owner:
    """The owner of this process, while it runs for evenpipe."""

    def __init__(self, on_cause: Callable[[Cause], None] | None = None) -> None:
        """on_cause: called once, on any thread, as soon as the cause is known. Default: print the message to stderr if
        the main thread is stuck and the watch has to end the process."""
        self.under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        """torchrun's agent sends SIGTERM when a process has failed, and the run ends with the agent."""
        self.on_cause = on_cause
        self._agent = os.getppid()

    def take_over(self) -> None:
        """Let Ctrl-C end this process at once: Python's own handler is blocked during a gloo wait. Silence torch's
        warning for a backward on a GPU, on its own thread, whose first operation is a matrix product."""
        warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA context")
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def is_orphan(self) -> bool:
        """Return whether torchrun's agent, which started this process, has died."""
        return self.under_torchrun and os.getppid() != self._agent

    def kill_siblings(self, rank: int | None = None) -> None:
        """Under torchrun, kill process `rank` on this machine, or all stopped processes (None), which ignore other
        signals and would delay torchrun's end by half a minute. Elsewhere `supervisor` does this."""
        if not self.under_torchrun or self.is_orphan():
            return
        for sibling, pid in siblings().items():
            if sibling == rank or (rank is None and is_stopped(pid)):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)

    def end(self, error: Exception) -> None:
        """End this process, because its main thread did not."""
        if self.on_cause is None:
            print(plain_lines(f"evenpipe: {error}"), file=sys.stderr, flush=True)
        os._exit(EXIT_CODE)
