"""Draw docs/measured.svg: a measured step of examples/zbv.toml above the step predicted from its own costs.

    python tools/measured_picture.py

Takes a minute. Run it on an idle machine: other processes distort the picture.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "measured.svg"
STEP = 12
OPTIONS = (
    *(f"training.steps={STEP}", f"output.trace_steps=[{STEP}]", "output.folder=run", "output.export=false"),
    *("checkpoint.every_steps=none", "output.tensorboard=false", "data.validation_fraction=0"),
)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for arguments in (
            ["train", str(ROOT / "examples" / "zbv.toml"), *OPTIONS],
            ["draw", f"run/traces/step-{STEP:08d}.json", "-o", str(FILE)],
        ):
            subprocess.run([sys.executable, "-m", "evenpipe.cli.main", *arguments], cwd=folder, check=True)


if __name__ == "__main__":
    main()
