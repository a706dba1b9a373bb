"""Wakes the watch's thread when the process has done its work, and on signals, even while the main thread is blocked.

Python runs signal handlers only on the main thread, which is blocked during a wait in gloo. But Python's C code
receives the signal, and can write the signal's number into a pipe at once (`signal.set_wakeup_fd`).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

STOPS = (signal.SIGTERM, signal.SIGINT)
"""The signals that ask a program to stop."""


@contextlib.contextmanager
def signals_handled(
    handler: Callable[[int, FrameType | None], None] | signal.Handlers, signals: Sequence[int]
) -> Iterator[None]:
    """Install a handler within the context. No effect outside the main thread, where Python has no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handlers = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, previous in previous_handlers.items():
            signal.signal(number, previous if previous is not None else signal.SIG_DFL)


class Bell:
    """A pipe to wait on."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._signals: set[int] = set()

    def ring(self, number: int = 0) -> None:
        """Wake the waiting thread. number: of a signal, or 0."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full: it rings already
            os.write(self._write, bytes([number]))

    def wait(self, seconds: float) -> bytes:
        """Return all numbers rung since the last call, after at most `seconds`."""
        if not select.select([self._read], [], [], seconds)[0]:
            return b""
        with contextlib.suppress(BlockingIOError):
            return os.read(self._read, 4096)
        return b""

    def ring_on(self, *signals: int) -> None:
        """Make these signals ring instead of ending the process, unless the program handles them itself.

        In processes forked from this one, the signals keep their default effect.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        new = [number for number in signals if signal.getsignal(number) is signal.SIG_DFL]
        if not new:
            return
        if not self._signals:
            previous = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            if previous != -1:
                signal.set_wakeup_fd(previous)  # of another library's event loop; then only the handler rings
            # A signal must not reach the child before it has released the pipe, which would ring here.
            os.register_at_fork(
                before=lambda: self._mask(signal.SIG_BLOCK),
                after_in_parent=lambda: self._mask(signal.SIG_UNBLOCK),
                after_in_child=self._in_child,
            )
        for number in new:
            signal.signal(number, lambda number, _: self.ring(number))
        self._signals.update(new)

    def _mask(self, how: int) -> None:
        if self._signals:
            signal.pthread_sigmask(how, self._signals)

    def _in_child(self) -> None:
        if signals := set(self._signals):
            self.restore_signals()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)

    def restore_signals(self) -> None:
        """Restore the default effect of the signals."""
        if not self._signals or threading.current_thread() is not threading.main_thread():
            return
        if (descriptor := signal.set_wakeup_fd(-1)) != self._write:
            signal.set_wakeup_fd(descriptor)
        for number in self._signals:
            signal.signal(number, signal.SIG_DFL)
        self._signals.clear()

    def close(self) -> None:
        """Close the pipe, once no thread waits on it."""
        self.restore_signals()
        os.close(self._read)
        os.close(self._write)
