"""`evenpipe export RUN_OR_CHECKPOINT -o FOLDER [--dtype DTYPE]`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from evenpipe.cli.printing import say


def run(
    checkpoint: Path, *, output: Path, dtype: Literal["source", "float32", "bfloat16", "float16"] = "source"
) -> int:
    """Write the folder.

    RUN_OR_CHECKPOINT    a checkpoint, or the folder of a run, for its newest checkpoint
    -o, --output FOLDER  the Hugging Face folder to write
    --dtype              dtype of the weights; source: that of the model that training began with
    """
    from evenpipe.train.export import export_checkpoint

    export_checkpoint(checkpoint, output, dtype=dtype)
    say(f"wrote {output}")
    return 0
