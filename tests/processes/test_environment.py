"""The variables by which a process finds the others: complete and numbers, or one sentence that names them."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

import evenpipe
from evenpipe.processes import worker
from evenpipe.processes.environment import is_alone, rank_and_size

COMPLETE = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
WRONG = "environment variable {}, expected a whole number {}"

REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"WORLD_SIZE": None},
        "RANK is '1', WORLD_SIZE is missing, MASTER_ADDR is '127.0.0.1', MASTER_PORT is '29500'; ",
    ),
    ({"WORLD_SIZE": ""}, "RANK is '1', WORLD_SIZE is missing, MASTER_ADDR is '127.0.0.1', MASTER_PORT is '29500';"),
    ({"RANK": None}, "RANK is missing, WORLD_SIZE is '4'"),
    ({"MASTER_ADDR": None}, "MASTER_ADDR is missing, MASTER_PORT is '29500'; expected all four"),
    ({"MASTER_PORT": None, "MASTER_ADDR": None}, "MASTER_ADDR is missing, MASTER_PORT is missing"),
    ({"RANK": "one"}, WRONG.format("RANK: 'one'", "from 0 to 3 (WORLD_SIZE is 4)")),
    ({"RANK": "4"}, WRONG.format("RANK: '4'", "from 0 to 3 (WORLD_SIZE is 4)")),
    ({"RANK": "-1"}, WRONG.format("RANK: '-1'", "from 0 to 3")),
    ({"WORLD_SIZE": "0"}, WRONG.format("WORLD_SIZE: '0'", "at least 1")),
    ({"WORLD_SIZE": "4.0"}, WRONG.format("WORLD_SIZE: '4.0'", "at least 1")),
    ({"MASTER_PORT": "http"}, WRONG.format("MASTER_PORT: 'http'", "from 1 to 65535")),
    ({"MASTER_PORT": "70000"}, WRONG.format("MASTER_PORT: '70000'", "from 1 to 65535")),
    ({"LOCAL_RANK": "x"}, WRONG.format("LOCAL_RANK: 'x'", "at least 0")),
    ({"LOCAL_WORLD_SIZE": "all"}, WRONG.format("LOCAL_WORLD_SIZE: 'all'", "at least 0")),
]


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the complete variables, with changes; None removes one."""
    monkeypatch.setattr(worker, "_this", None)

    def put(changes: dict[str, str | None]) -> None:
        for name in (*COMPLETE, "LOCAL_RANK", "LOCAL_WORLD_SIZE", worker.STORE_FOLDER):
            monkeypatch.delenv(name, raising=False)
        for name, value in {**COMPLETE, **changes}.items():
            if value is not None:
                monkeypatch.setenv(name, value)

    return put


def test_incomplete_variables_are_refused_before_anything_starts(variables: Any) -> None:
    for changes, says in REFUSED:
        variables(changes)
        with pytest.raises(evenpipe.InputError) as caught:
            evenpipe.initialise_worker()
        assert says in str(caught.value), changes
        assert not dist.is_initialized() and worker._this is None


def test_complete_variables_are_accepted(variables: Any) -> None:
    for changes, alone in (
        ({}, False),
        ({"RANK": None, "WORLD_SIZE": None}, True),  # an address for a torchrun to come
        ({"RANK": None, "WORLD_SIZE": "1"}, True),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, False),
    ):
        variables(changes)
        assert is_alone() == alone, changes
        assert alone or rank_and_size() == (1, 4)
    variables({"MASTER_ADDR": None, "MASTER_PORT": None})  # processes of a launch need no address
    assert rank_and_size(meets_by_address=False) == (1, 4)
