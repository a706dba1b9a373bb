"""The command line: one file per command, with its arguments and exit codes; other folders do the work."""
