"""What the fork server imports once per pytest run, so that a forked process starts in about 0.05 s.

What is left out here every process of every test imports for itself: a pipeline, pytest and the trainer take 0.3 s.

Imports only: nothing here may start a thread or touch CUDA, since neither survives a fork.
"""

import atexit
import contextlib
import gc
import importlib

import torch
import torch.distributed
import transformers

torch.set_num_threads(1)

FAMILIES = (
    *("cohere2", "gemma2", "gemma3", "gpt_neox", "granite", "llama", "mistral"),
    *("olmo2", "phi3", "qwen2", "qwen3", "smollm3", "starcoder2"),
)
OURS = (
    *("errors", "schedule", "vocabulary", "model", "communication.communicators", "processes.launcher"),
    *("runtime.pipeline", "train.config_file", "train.trainer", "train.export", "plan.configuration_search"),
)

importlib.import_module("pytest")
importlib.import_module("transformers.modeling_utils")
importlib.import_module("torch.distributed.pipelining")
for family in FAMILIES:
    importlib.import_module(f"transformers.models.{family}.modeling_{family}")
for room in OURS:
    # A room that does not import fails in the test that uses it, with a traceback; here it would take all tests along.
    with contextlib.suppress(Exception):
        importlib.import_module(f"evenpipe.{room}")

gc.collect()
gc.freeze()  # forked processes need not look through all that was imported whenever they collect
atexit.register(gc.unfreeze)  # or Triton calls all of it leaked when the server ends

__all__ = ["torch", "transformers"]
