"""What wakes the thread of the watch: the end of the process's work, and signals, even while the main thread is deaf.

Python runs signal handlers on the main thread alone, which hears nothing during a wait in gloo. But what receives the
signal is C code of Python's, and that can write the signal's number into a pipe at once (`signal.set_wakeup_fd`).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading

STOPS = (signal.SIGTERM, signal.SIGINT)
"""The signals by which a program is asked to stop."""


class Bell:
    """A pipe to wait on."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._heard: set[int] = set()

    def ring(self, number: int = 0) -> None:
        """Wakes who waits; the number is that of a signal or 0."""
        with contextlib.suppress(BlockingIOError):  # full: it rings already
            os.write(self._write, bytes([number]))

    def wait(self, seconds: float) -> bytes:
        """The numbers rung, after at most so many seconds; several at once where several were."""
        if not select.select([self._read], [], [], seconds)[0]:
            return b""
        with contextlib.suppress(BlockingIOError):
            return os.read(self._read, 4096)
        return b""

    def hear(self, *signals: int) -> None:
        """From now on these signals ring instead of ending the process, unless the program handles them itself.

        Not in processes forked from this one: there they end them, as always.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        new = [number for number in signals if signal.getsignal(number) is signal.SIG_DFL]
        if not new:
            return
        if not self._heard:
            before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            if before != -1:
                signal.set_wakeup_fd(before)  # somebody else's loop; then the handler alone rings
            # A signal to the child must not come before the child has let go of the pipe, which rings here.
            os.register_at_fork(
                before=lambda: self._hold(signal.SIG_BLOCK),
                after_in_parent=lambda: self._hold(signal.SIG_UNBLOCK),
                after_in_child=self._in_child,
            )
        for number in new:
            signal.signal(number, lambda number, _: self.ring(number))
        self._heard.update(new)

    def _hold(self, how: int) -> None:
        if self._heard:
            signal.pthread_sigmask(how, self._heard)

    def _in_child(self) -> None:
        if heard := set(self._heard):
            self.fall_silent()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, heard)

    def fall_silent(self) -> None:
        """The signals end the process again."""
        if not self._heard or threading.current_thread() is not threading.main_thread():
            return
        if (descriptor := signal.set_wakeup_fd(-1)) != self._write:
            signal.set_wakeup_fd(descriptor)
        for number in self._heard:
            signal.signal(number, signal.SIG_DFL)
        self._heard.clear()

    def close(self) -> None:
        """For when nobody waits any more."""
        self.fall_silent()
        os.close(self._read)
        os.close(self._write)
