"""Files, functions and dataclasses stay small; ruff counts the parameters of functions (PLR0913)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "evenpipe"
KERNELS = {"vocabulary/kernels/rows.py"}
KEY_TABLES = {"Costs", "DataConfig", "Hardware", "PipelineConfig", "OptimizerConfig", "Recipe", "Space"}
"""Users write their keys, one field each."""


def trees() -> Iterator[tuple[str, str, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text()
        yield path.relative_to(SOURCE).as_posix(), text, ast.parse(text)


def test_files_have_at_most_450_lines() -> None:
    assert not {name: lines for name, text, _ in trees() if (lines := len(text.splitlines())) > 450}


def test_functions_have_at_most_80_lines() -> None:
    lines = {
        f"{name} {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for name, _, tree in trees()
        if name not in KERNELS
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert not {name: count for name, count in lines.items() if count > 80}


def test_dataclasses_have_at_most_12_fields() -> None:
    fields = {
        f"{name} {node.name}": _fields(node)
        for name, _, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and _is_dataclass(node) and node.name not in KEY_TABLES
    }
    assert not {name: count for name, count in fields.items() if count > 12}


def _is_dataclass(node: ast.ClassDef) -> bool:
    written = [ast.unparse(one) for one in (*node.decorator_list, *node.bases)]
    return any("dataclass" in one or one in ("NamedTuple", "Section") for one in written)


def _fields(node: ast.ClassDef) -> int:
    own = [one.annotation for one in node.body if isinstance(one, ast.AnnAssign)]
    return sum("ClassVar" not in ast.unparse(annotation) for annotation in own)
