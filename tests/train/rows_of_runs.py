"""A run that is started several times with other sizes, and the rows that it reads."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from evenpipe.train.data import PreparedData
from evenpipe.train.packing import Batches, positions_of, split_rows
from evenpipe.train.position import resumed_position, saved_position

LENGTH = 4
"""Tokens of a row."""


class Start(NamedTuple):
    """One start of a run."""

    steps: int
    replicas: int
    rows: int
    """Of each replica in a step."""


def batches(rows: int, batch_size: int, *, fraction: float = 0.0, ends: np.ndarray | None = None) -> Batches:
    tokens = np.arange(rows * LENGTH, dtype=np.int32).reshape(rows, LENGTH)
    return Batches(tokens, batch_size=batch_size, seed=5, validation_fraction=fraction, ends=ends)


def prepared(tokens: int) -> PreparedData:
    return PreparedData(
        folder="data", fingerprint="f", documents=1, tokens=tokens, tokenizer_size=300, end_of_text_id=0
    )


def faults_of_run(rows: int, starts: Sequence[Start], *, fraction: float, packed: bool) -> list[str]:
    """Return what is wrong with the rows that a run reads: each one should be read once per epoch, whatever changes
    between starts. The last start reads to the end of an epoch, whatever its number of steps.

    Args:
        rows: of the data, validation rows included.
        fraction: share of the validation rows.
        packed: rows hold several documents, and come with the positions of their tokens.
    """
    ends = np.arange(3, rows * LENGTH, 3) if packed else None
    position, step, faults = 0, 0, []
    read: list[int] = []
    state = None
    for number, start in enumerate(starts):
        opened = batches(rows, start.replicas * start.rows, fraction=fraction, ends=ends)
        if state is not None:
            position, remarks = resumed_position(json.loads(json.dumps(state)), step, prepared(rows * LENGTH), opened)
            faults += [f"start {number} says {remark}" for remark in remarks]
        is_last = number + 1 == len(starts)
        steps = opened.steps_of(int(opened.epoch(position)) + 1, position) if is_last else start.steps
        for _ in range(steps):
            for replica in range(start.replicas):
                sequences = opened.batch(position, replica, start.replicas)
                numbers = (sequences.input_ids[:, 0] // LENGTH).tolist()
                read += numbers
                if ends is not None:
                    expected = torch.from_numpy(positions_of(ends, numbers, LENGTH))
                    if not torch.equal(sequences.position_ids, expected):
                        faults.append(f"rows {numbers} have the positions {sequences.position_ids.tolist()}")
            position, step = position + opened.batch_size, step + 1
        state = {"position": saved_position(position, opened)}
    training, _ = split_rows(rows, fraction)
    epochs, rest = divmod(len(read), len(training))
    if not epochs:
        faults.append(f"{len(read)} of {len(training)} rows are read; expected at least one epoch")
    for epoch in range(epochs):
        counts = Counter(read[epoch * len(training) : (epoch + 1) * len(training)])
        if counts != Counter(training.tolist()):
            faults.append(f"epoch {epoch} reads rows so often: {dict(sorted(counts.items()))}")
    if rest and len(set(read[-rest:])) < rest:
        faults.append(f"rows are read twice in the last epoch: {read[-rest:]}")
    if opened.epoch(position) != len(read) / len(training):
        faults.append(f"the run says epoch {opened.epoch(position)}, but has read {len(read)} rows of {len(training)}")
    return faults
