"""Lets these tests use the traced steps of tests/schedule."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "schedule"))
