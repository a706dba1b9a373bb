"""What the package index and pip read: links, and no dependency that only tests or development need."""

from __future__ import annotations

import re
import subprocess
import sys
from email import message_from_string
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parent.parent
DEVELOPMENT = re.compile(r"pytest|jsonschema|hypothesis|ruff|mypy|pre-commit|nbclient|ipykernel|mkdocs", re.IGNORECASE)


def test_what_an_index_shows_and_pip_installs(tmp_path: Path) -> None:
    """Of a wheel that is built from this tree."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = message_from_string(archive.read(name).decode("utf-8"))
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert any(line.startswith("torch") for line in needed)
    assert [line for line in needed if DEVELOPMENT.match(line)] == []
    links = dict(line.split(", ") for line in metadata.get_all("Project-URL", []))
    assert set(links) == {"Repository", "Documentation", "Changelog", "Issues"}
    assert "make test" in metadata.get_payload()
