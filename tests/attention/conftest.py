"""Families are those of the model's tests."""

import sys
from pathlib import Path

for room in ("model", "families"):
    sys.path.append(str(Path(__file__).resolve().parent.parent / room))
