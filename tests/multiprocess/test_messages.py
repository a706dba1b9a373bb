"""What processes of a group tell each other is data: JSON comes back, a pickle is not even looked at."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import run_processes

from evenpipe.communication import messages
from evenpipe.communication.messages import broadcast_value, gather_values
from evenpipe.errors import RunError
from evenpipe.processes.proof import find_strangers

SOURCE = Path(__file__).resolve().parents[2] / "src" / "evenpipe"

MAY_PICKLE = {
    "processes/launcher.py": "the function, its arguments and its results, between a launcher and its own children",
    "checkpoints/storage.py": "torch's index of a checkpoint, by an unpickler that knows ten names",
}


def values() -> None:
    rank = dist.get_rank()
    own = {"rank": rank, "text": "\u00e4" * rank, "list": [1.5, None, True, (2, 3)]}
    found = gather_values(own, None)
    assert found == [{"rank": r, "text": "\u00e4" * r, "list": [1.5, None, True, [2, 3]]} for r in range(3)]
    pair = dist.new_group([1, 2])
    if rank:
        assert gather_values(rank, pair) == [1, 2]
        assert broadcast_value({"from": rank}, 2, pair) == {"from": 2}
    assert broadcast_value(None if rank else "the first", 0, None) == "the first"


def test_values_come_back() -> None:
    run_processes(values, 3)


def somebody_sends_something_else(what: str) -> None:
    if dist.get_rank() == 1:
        content = {"a pickle": b"\x80\x04\x95\x00", "too much": b"x" * 100, "deep": b"[" * 90_000}[what]
        messages._encode = lambda _: torch.frombuffer(bytearray(content), dtype=torch.uint8)
    messages.LIMIT_BYTES = 99 if what == "too much" else 100_000
    message = {"too much": "announced a message of 100 bytes; expected 1 to 99"}.get(what, "sent invalid JSON")
    with pytest.raises(RunError, match=message):
        gather_values(0, None)


@pytest.mark.parametrize("what", ["a pickle", "too much", "deep"])
def test_what_is_not_a_message_is_refused(what: str) -> None:
    run_processes(somebody_sends_something_else, 2, what)


def strangers_to(secrets: list[bytes]) -> list[int]:
    rank = dist.get_rank()
    return find_strangers(dist.group.WORLD, rank, range(len(secrets)), secrets[rank])


def test_members_prove_that_they_belong_to_the_run() -> None:
    """Whoever took the place of one cannot, and is a stranger to all others."""
    assert run_processes(strangers_to, 3, [b"secret"] * 3) == [[], [], []]
    assert run_processes(strangers_to, 3, [b"secret", b"", b"secret"]) == [[1], [0, 2], [1]]


def opens_the_door(path: Path) -> list[str]:
    """Where a file could run what it reads."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            if {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"} & {m.split(".")[0] for m in modules}:
                found.append(f"line {node.lineno}: imports a pickle")
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if name.endswith("_object_list") or name in ("all_gather_object", "gather_object", "scatter_object"):
            found.append(f"line {node.lineno}: {name}")
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            weights_only = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}.get("weights_only")
            if weights_only != "True":
                found.append(f"line {node.lineno}: torch.load without weights_only=True")
    return found


def test_nothing_that_arrives_is_unpickled() -> None:
    found = {str(path.relative_to(SOURCE)): opens_the_door(path) for path in sorted(SOURCE.rglob("*.py"))}
    assert {name: places for name, places in found.items() if places and name not in MAY_PICKLE} == {}
    assert all(found[name] for name in MAY_PICKLE), "an exception that is not needed any more"
