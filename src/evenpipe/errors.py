"""The two errors for users. The command line prints their sentence without a traceback."""

from __future__ import annotations


class InputError(ValueError):
    """The input is wrong: a setting, a file or a model. The sentence names the field, its value and the accepted
    values."""

    exit_code = 2


class RunError(RuntimeError):
    """The run failed with valid input: a process died, the disk is full, or a peer does not answer."""

    exit_code = 3
