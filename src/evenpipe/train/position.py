"""The position of a run in its training data: the number of rows read, which checkpoints save.

In every epoch, all replicas together read all training rows in an order specific to that epoch (`Batches`). The
position counts them from the beginning of the run, so it does not depend on the number of rows per step, and a run
that continues with other sizes or another layout reads on at the next row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evenpipe.train.data import PreparedData
from evenpipe.train.packing import Batches, split_rows


def saved_position(rows: int, batches: Batches) -> dict[str, int]:
    """Return the values that a checkpoint saves after `rows` rows."""
    return {"rows": rows, "rows_per_epoch": len(batches.training_rows)}


def resumed_position(
    state: Mapping[str, Any], step: int, data: PreparedData, batches: Batches
) -> tuple[int, list[str]]:
    """Return the number of rows read before a checkpoint, and messages about it.

    If the data now has other rows (another sequence length or share of validation rows), the run continues at the same
    fraction of the epoch. Checkpoints of older versions lack the position: it is derived from the rows per step that
    they were saved with, and is uncertain if the run had other sizes before.

    Args:
        state: `extra` of the checkpoint.
        step: steps before the checkpoint.
    """
    lines = []
    if "position" in state:
        rows, rows_per_epoch = state["position"]["rows"], state["position"]["rows_per_epoch"]
    else:
        rows, rows_per_epoch, is_certain = _derived(state, step, data)
        if not is_certain:
            lines.append(
                f"the checkpoint of step {step} is of an older version and does not know which rows were read: steps"
                f" had different sizes before it. Training continues after {rows:,} rows, and some rows of this epoch"
                " may be read twice or not at all"
            )
    rows_now = len(batches.training_rows)
    return rows if rows_now == rows_per_epoch else rows * rows_now // rows_per_epoch, lines


def _derived(state: Mapping[str, Any], step: int, data: PreparedData) -> tuple[int, int, bool]:
    """Return (rows read, rows per epoch, whether the number of rows is certain) for a checkpoint without them."""
    identity = state["data"]
    length = identity["data.sequence_length"]
    rows = step * identity["sequences per step"]  # as the version that saved it would have continued
    training, _ = split_rows(data.tokens // length, identity["data.validation_fraction"])
    return rows, len(training), rows * length == state["tokens"]
