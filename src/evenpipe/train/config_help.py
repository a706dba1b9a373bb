"""The configuration in words, and as a JSON schema with which editors complete and check TOML."""

from __future__ import annotations

import textwrap
from typing import Any

from evenpipe.declaration import JSON_SCHEMA, describe_fields, json_schema, summary
from evenpipe.train.config_file import sections

WIDTH = 110


def configuration_help() -> str:
    """The text of `evenpipe train --help`: each section, and each field with type, default and meaning."""
    lines = []
    for name, section in sections().items():
        lines += ["", f"[{name}]  {summary(section)}"]
        for field in describe_fields(section):
            lines.append(f"  {field.name} = {field.default}   ({field.type})")
            lines += textwrap.wrap(field.text, WIDTH, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines).strip("\n")


def configuration_schema() -> dict[str, Any]:
    """The JSON schema of a configuration."""
    return {
        "$schema": JSON_SCHEMA,
        "title": "evenpipe configuration",
        "type": "object",
        "properties": {name: json_schema(section) for name, section in sections().items()},
        "required": ["model", "data"],
        "additionalProperties": False,
    }
