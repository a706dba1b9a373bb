"""Lets tests in this folder import the tiny models of tests/model, in any import mode."""

import sys
from pathlib import Path

for folder in (Path(__file__).parent, Path(__file__).parent.parent / "model"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
