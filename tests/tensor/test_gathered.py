"""What a block's gathered input keeps; tests/multiprocess compares gradients."""

from types import SimpleNamespace
from weakref import ref

import torch

from evenpipe.tensor.gathered import Gathered


def test_all_rows_are_gathered_once_and_freed_after_their_last_use() -> None:
    def start_gather(rows: torch.Tensor) -> SimpleNamespace:
        gathers.append(rows)
        return SimpleNamespace(wait=lambda: torch.cat([rows, rows]))

    gathers: list[torch.Tensor] = []
    rows = torch.rand(2, 3)
    gathered = Gathered(rows, SimpleNamespace(size=2, overlap=None, start_gather=start_gather), keeps=False)
    saved = [gathered.save(layer) for layer in ("q", "k")]
    gathered.close()
    whole = gathered.whole(saved[0])
    assert whole.shape == (4, 3) and whole is gathered.whole(saved[1]) and len(gathers) == 1
    watched = ref(whole)
    del whole
    assert watched() is None
