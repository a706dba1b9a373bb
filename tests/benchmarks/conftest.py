"""Lets the tests of this folder import the benchmarks of one GPU."""

import sys
from pathlib import Path

GPU = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"
if str(GPU) not in sys.path:
    sys.path.append(str(GPU))
