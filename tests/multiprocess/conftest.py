"""Lets tests in this folder import `harness`, here and in the processes that it starts, in any import mode."""

import sys
from pathlib import Path

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)
