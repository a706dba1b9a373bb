"""What the package index and pip read: links, and no dependency that only tests or development need."""

from __future__ import annotations

import re
import subprocess
import sys
from email import message_from_string
from email.message import Message
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parent.parent
DEVELOPMENT = re.compile(r"pytest|hypothesis|ruff|mypy|pre-commit|nbclient|ipykernel|mkdocs", re.IGNORECASE)


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> Message:
    """Of a wheel that is built from this tree."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], cwd=ROOT, check=True)
    (wheel,) = folder.glob("*.whl")
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        return message_from_string(archive.read(name).decode("utf-8"))


def test_an_installation_has_no_dependency_of_tests_or_development(metadata: Message) -> None:
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert any(line.startswith("torch") for line in needed)
    assert [line for line in needed if DEVELOPMENT.match(line)] == []


def test_the_index_has_links_and_the_readme(metadata: Message) -> None:
    links = dict(line.split(", ") for line in metadata.get_all("Project-URL", []))
    assert set(links) == {"Repository", "Documentation", "Changelog", "Issues"}
    assert "make test" in metadata.get_payload()
