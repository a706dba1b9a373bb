"""The command line: one file per command, arguments and exit codes only; the work is done by the other rooms."""
