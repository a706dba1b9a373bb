"""Lets tests in this folder import the tiny configs of `tests/model/families.py`; none may reach the hub."""

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
for folder in (Path(__file__).parent, Path(__file__).parents[1] / "model"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
