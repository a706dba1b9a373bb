"""Lets tests in this folder import the small run of tests/checkpoints, in any import mode."""

import sys
from pathlib import Path

for folder in (Path(__file__).parent, Path(__file__).parent.parent / "checkpoints"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
