"""Lets the tests of this folder import the small families of the tests with several processes."""

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "multiprocess"
if str(FOLDER) not in sys.path:
    sys.path.insert(0, str(FOLDER))
