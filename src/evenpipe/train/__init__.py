"""The trainer: configuration, data, optimizer, checkpoints and export, metrics.

`evenpipe.train.start.start` runs a configuration for the command line; `evenpipe.train.trainer.train` runs it on each
process.
"""
