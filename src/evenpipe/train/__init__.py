"""The trainer: configuration, data, optimizer, checkpoints and export, metrics.

`evenpipe.train.start.start` runs a configuration from the command line's point of view, `evenpipe.train.trainer.train`
on each process.
"""
