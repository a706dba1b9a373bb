"""What tokens choose is counted once in a step, whatever became of the step before."""

from __future__ import annotations

import torch

from evenpipe.experts.load import Load
from evenpipe.parallel.running import Running


def test_a_failed_step_leaves_nothing_to_the_next_one() -> None:
    running = Running(step=1, place=(0, 0))
    load = Load(["layers.0"], 3, running, torch.device("cpu"))
    load.add("layers.0", torch.tensor([[0, 1]]))
    load.add("layers.0", torch.tensor([[2, 2]]))  # repeated
    running.step = 2  # the first one has failed
    load.add("layers.0", torch.tensor([[1, 2], [1, 3]]))  # 3: no expert
    assert load.take().tolist() == [[0, 2, 1]]
    assert load.take().tolist() == [[0, 0, 0]]
