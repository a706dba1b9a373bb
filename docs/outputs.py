"""Runs what pages of docs/ show, and writes what it prints into them.

    python docs/outputs.py

Blocks of a page are taken in turn, in one folder: `csv NAME` and `toml NAME` are files (the latter one of the
repository's), `sh` are commands, `python` programs, and `text` is what the commands and programs since the last `text`
have printed. A test runs everything again and compares.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = tuple(ROOT / "docs" / name for name in ("schedules.md", "memory.md", "offload.md", "output_layer.md"))
BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def render(page: str, folder: Path) -> str:
    """The page with what its commands print when they are run in `folder`, which should be empty."""
    (folder / "examples").symlink_to(ROOT / "examples")
    printed: list[str] = []

    def run(arguments: list[str]) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "110", "NO_COLOR": "1"}
        done = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(arguments)}\n{done.stdout}\n{done.stderr}")
        printed.append(done.stdout)

    def block(match: re.Match[str]) -> str:
        language, name, body = match.groups()
        if language == "csv":
            (folder / name).write_text(body, encoding="utf-8")
        elif language == "toml":
            body = (ROOT / name).read_text(encoding="utf-8")
        elif language == "python":
            run([sys.executable, "-c", body])
        elif language == "sh":
            for line in body.splitlines():
                command = re.sub(r"^evenpipe ", "python -m evenpipe.cli.main ", line)
                run(["sh", "-c", re.sub(r"^python ", f"{sys.executable} ", command)])
        elif language == "text":
            body = "".join(printed)
            printed.clear()
        return f"```{language}{f' {name}' if name else ''}\n{body}```"

    return BLOCK.sub(block, page)


if __name__ == "__main__":
    for file in FILES:
        with tempfile.TemporaryDirectory() as temporary:
            file.write_text(render(file.read_text(encoding="utf-8"), Path(temporary)), encoding="utf-8")
