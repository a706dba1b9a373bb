"""Lets tests in this folder import `families` and the configurations of tests/families, in any import mode, and keeps
them from using the hub."""

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
HERE = Path(__file__).parent
for folder in (HERE, HERE.parent / "families"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
