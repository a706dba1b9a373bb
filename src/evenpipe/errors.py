"""The two errors that a user meets. The command line shows their one sentence and no traceback."""

from __future__ import annotations


class InputError(ValueError):
    """The input is wrong: a setting, a file, a model. One sentence names the field, its value and what is accepted."""

    exit_code = 2


class RunError(RuntimeError):
    """The run failed though its input was right: a process died, the disk is full, a peer does not answer."""

    exit_code = 3
