"""Lets tests in this folder import the small run of tests/checkpoints and the traced steps of tests/schedule, in any
import mode."""

import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
for folder in (Path(__file__).parent, TESTS / "checkpoints", TESTS / "schedule"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
