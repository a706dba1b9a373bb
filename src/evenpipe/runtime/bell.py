"""What wakes the thread of the watch: the end of the process's work, and SIGTERM, even while the main thread is deaf.

Python runs signal handlers on the main thread alone, which hears nothing during a wait in gloo. But what receives the
signal is C code of Python's, and that can write the signal's number into a pipe at once (`signal.set_wakeup_fd`).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading


class Bell:
    """A pipe to wait on."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._hears_sigterm = False

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

    def hear_sigterm(self) -> None:
        """From now on SIGTERM rings instead of ending the process, unless the program handles that signal itself.

        Not in processes forked from this one: there it ends them, as always.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)  # somebody else's loop; then the handler alone rings
        signal.signal(signal.SIGTERM, lambda number, _: self.ring(number))
        self._hears_sigterm = True
        # A signal to the child must not come before the child has let go of the pipe, which rings here.
        os.register_at_fork(
            before=lambda: self._hold(signal.SIG_BLOCK),
            after_in_parent=lambda: self._hold(signal.SIG_UNBLOCK),
            after_in_child=self._in_child,
        )

    def _hold(self, how: int) -> None:
        if self._hears_sigterm:
            signal.pthread_sigmask(how, [signal.SIGTERM])

    def _in_child(self) -> None:
        if self._hears_sigterm:
            self.fall_silent()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])

    def fall_silent(self) -> None:
        """SIGTERM ends the process again."""
        if not self._hears_sigterm or threading.current_thread() is not threading.main_thread():
            return
        self._hears_sigterm = False
        if (descriptor := signal.set_wakeup_fd(-1)) != self._write:
            signal.set_wakeup_fd(descriptor)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def close(self) -> None:
        """For when nobody waits any more."""
        self.fall_silent()
        os.close(self._read)
        os.close(self._write)
