"""Write docs/configuration.md: every field of a configuration, from the docstrings of its classes.

python tools/configuration_page.py
"""

from __future__ import annotations

from pathlib import Path

from evenpipe.declaration import describe_fields, summary
from evenpipe.train.config_file import sections

FILE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
HEAD = """# Configuration reference

Generated from the docstrings; `evenpipe train --help` prints the same.
"""


def draw() -> str:
    """Return the text of the page."""
    lines = [HEAD]
    for name, section in sections().items():
        lines += [f"## {name}", "", summary(section), ""]
        for field in describe_fields(section):
            kind = field.type.replace("|", "or")
            lines += [f"`{field.name} = {field.default}` ({kind})", f":   {_escape(field.text)}", ""]
    return "\n".join(lines).rstrip() + "\n"


def _escape(text: str) -> str:
    """Escape the asterisks and brackets of a text for Markdown, outside code."""
    parts = text.split("`")
    parts[::2] = [part.replace("*", r"\*").replace("[", r"\[").replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts)


if __name__ == "__main__":
    FILE.write_text(draw(), encoding="utf-8")
