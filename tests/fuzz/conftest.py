"""Lets the tests of this folder import its programs, the tiny models and the random orders, in any import mode."""

import sys
from pathlib import Path

for folder in ("fuzz", "model", "multiprocess"):
    if (path := str(Path(__file__).parent.parent / folder)) not in sys.path:
        sys.path.insert(0, path)
