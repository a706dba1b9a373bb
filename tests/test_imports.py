"""Who may import whom: the rule of the house, read from the imports themselves."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "evenpipe"

# room -> rooms of ours that it may import; `OPEN` are open to all: two exception classes, files and texts of others,
# numbers in messages, sizes of memory, work under way, what users write. `interop` turns what others write into orders
# and programs, and knows nothing but `schedule`; so `recipe` takes torch's schedules from it. `memory` traces the very
# layers that `runtime` will run.
OPEN = {"errors", "given", "words", "sizes", "work", "declaration", "__version__"}
MAY_IMPORT: dict[str, set[str]] = {
    "__main__": {"cli"},
    "errors": set(),
    "given": set(),
    "words": set(),
    "work": set(),
    "declaration": set(),
    "sizes": set(),
    "schedule": set(),
    "simulate": {"schedule"},
    "draw": {"schedule"},
    "interop": {"schedule"},
    "vocabulary": set(),
    "model": set(),
    "layers": {"model", "vocabulary"},
    "experts": {"model", "layers"},
    "tensor": {"model", "layers"},
    "attention": {"model", "vocabulary"},
    "processes": set(),
    "communication": {"processes"},
    "costs": {"schedule", "vocabulary", "model", "experts", "recipe"},
    "recipe": {"schedule", "interop", "vocabulary", "model", "communication", "experts"},
    "optimizers": {"communication", "model", "parallel"},
    "parallel": {"communication", "processes", "model", "attention"},
    "host": {"schedule", "communication", "recipe", "optimizers"},
    "checkpoints": {"processes", "communication", "model", "optimizers", "parallel", "host"},
    "runtime": {
        *{"schedule", "vocabulary", "model", "layers", "processes", "communication", "recipe", "optimizers"},
        *{"parallel", "host", "checkpoints", "tensor", "attention", "experts", "costs"},
    },
    "memory": {
        *{"schedule", "simulate", "vocabulary", "model", "layers", "costs", "recipe", "optimizers", "parallel"},
        *{"tensor", "attention", "experts"},
    },
    "plan": {
        *{"memory", "simulate", "costs", "schedule", "vocabulary", "model", "recipe", "tensor", "attention", "experts"},
    },
    "compare": {"schedule", "simulate", "costs", "recipe"},
    "search": {"schedule", "simulate", "compare"},
    "train": {
        *{"schedule", "simulate", "draw", "vocabulary", "model", "processes", "communication", "costs", "recipe"},
        *{"optimizers", "parallel", "host", "checkpoints", "runtime", "memory", "plan", "experts"},
    },
}
ANYTHING = set(MAY_IMPORT) | {"cli"}
MAY_IMPORT["cli"] = ANYTHING - {"__main__", "cli"}


FILES = sorted(SOURCE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_modules(path: Path) -> set[str]:
    """Modules that a file imports, at module level or inside functions, by their absolute names."""
    modules: set[str] = set()
    package = ("evenpipe", *path.relative_to(SOURCE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            modules |= {module} if module != "evenpipe" else {f"evenpipe.{alias.name}" for alias in node.names}
    return modules


def test_a_room_imports_only_what_it_may() -> None:
    """And the schedule room needs no torch."""
    rooms = {room_of(path) for path in FILES} - {"__init__"}
    assert rooms <= ANYTHING, f"rooms without a rule: {sorted(rooms - ANYTHING)}"
    for path in FILES:
        room, names = room_of(path), [name.split(".") for name in imported_modules(path)]
        if room != "__init__":
            allowed = MAY_IMPORT[room] | {room} | OPEN
            assert {name[1] for name in names if name[0] == "evenpipe" and len(name) > 1} <= allowed, path
        if room == "schedule":
            assert not {"torch", "transformers"} & {name[0] for name in names}, path


def test_the_rule_has_no_circles() -> None:
    done: set[str] = set()
    while len(done) < len(MAY_IMPORT):
        ready = {room for room, needs in MAY_IMPORT.items() if room not in done and needs <= done}
        assert ready, f"a circle among {sorted(set(MAY_IMPORT) - done)}"
        done |= ready
