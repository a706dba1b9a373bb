"""Lets tests in this folder import `harness`, the tiny models of tests/model and the configurations of tests/families,
here and in the processes that are started, in any import mode."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent / "model", HERE.parent / "families"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
