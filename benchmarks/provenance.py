"""Files of figures with all that readers need to repeat them: commit, date, processor and versions."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

from evenpipe.runtime.trace import machine

RESULTS = Path(__file__).resolve().parent / "results"


@cache
def commit() -> str:
    """Return the commit of this checkout, with "-dirty" if sources have changed since; "unknown" without git."""
    try:
        head = _git("rev-parse", "--short=8", "HEAD")
        changed = _git("status", "--porcelain", "--", "src", "benchmarks", ":!benchmarks/results")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}-dirty" if changed else head


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(RESULTS.parents[1]), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def provenance(torch_device: torch.device | None = None) -> dict[str, Any]:
    """Return commit, date (UTC), processor or GPU, and versions."""
    return {
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        **machine(torch_device or torch.device("cpu")),
        "transformers": transformers.__version__,
    }


def write(path: Path, figures: Mapping[str, Any], torch_device: torch.device | None = None) -> None:
    """Write a file of figures, with their provenance first."""
    content = {**provenance(torch_device), **figures}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
