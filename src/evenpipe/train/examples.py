"""The examples that come with evenpipe. Neither torch nor transformers is imported."""

from __future__ import annotations

import shutil
from pathlib import Path

import evenpipe
from evenpipe.given import check_new
from evenpipe.words import unknown

ALL = "all"
"""Name for the whole folder of examples."""


def examples() -> Path:
    """Return the folder of the examples that come with evenpipe."""
    package = Path(evenpipe.__file__).parent
    folder = package / "examples"
    return folder if folder.is_dir() else package.parent.parent / "examples"  # a source checkout


def example_configurations() -> dict[str, Path]:
    """Return the examples that `evenpipe train` runs, by name."""
    files = sorted(examples().glob("*.toml"))
    return {path.stem: path for path in files if "\n[model]" in path.read_text("utf-8")}


def write_example(name: str, path: Path) -> None:
    """Copy the configuration `name`. Raises InputError if the name is unknown or the file exists."""
    known = example_configurations()
    if name not in known:
        raise unknown("--example", name, (ALL, *known))
    check_new(path)
    text = known[name].read_text("utf-8").replace(f"examples/{name}.toml", str(path))
    path.write_text(text, encoding="utf-8")


def write_examples(folder: Path) -> None:
    """Copy all examples. Raises InputError if `folder` exists."""
    check_new(folder)
    shutil.copytree(examples(), folder, ignore=shutil.ignore_patterns("__pycache__", ".*"))
