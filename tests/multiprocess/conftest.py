"""Lets tests in this folder import `harness` and the tiny models of tests/model, here and in the processes that are
started, in any import mode."""

import sys
from pathlib import Path

for folder in (Path(__file__).parent, Path(__file__).parent.parent / "model"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
