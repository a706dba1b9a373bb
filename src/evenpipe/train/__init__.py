"""The trainer: configuration, data, optimizer, checkpoints and export, metrics.

`evenpipe.train.start.run_training` runs a configuration; `evenpipe.train.trainer.train` runs it on each process.
"""
