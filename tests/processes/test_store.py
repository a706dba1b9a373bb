"""Texts by name, in a folder and in torch's store: the same rules; and a store that does not answer."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from evenpipe.processes.store import FolderStore, NetworkStore, Store, StoreError, StoreSilentError

HOLDS_A_STORE = """
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
input()
"""


@pytest.fixture(params=["folder", "network"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return FolderStore(tmp_path / "store") if request.param == "folder" else NetworkStore(dist.HashStore())


def test_texts_by_name(store: Store) -> None:
    assert store.read("beat/0") is None
    assert not store.has(["beat/0"])
    store.write("beat/0", "one")
    store.write("beat/0", "")
    store.write("on a machine/../x", "two\n")
    assert (store.read("beat/0"), store.read("on a machine/../x")) == ("", "two\n")
    assert store.has(["beat/0", "on a machine/../x"])
    assert not store.has(["beat/0", "beat/1"])
    for number in range(3):
        store.append("here", f" {number}")
    assert store.read("here") == " 0 1 2"
    assert store.clone().read("here") == " 0 1 2"


def test_the_first_one_settles(store: Store) -> None:
    held: list[str] = []
    threads = [
        threading.Thread(target=lambda n=n: held.append(store.clone().write_once("cause", str(n)))) for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(held)) == 1
    assert store.read("cause") == held[0]


def test_a_closed_store_has_no_thread_until_the_next_request(store: Store) -> None:
    before = set(threading.enumerate())
    store.write("a name", "a text")
    store.close()
    assert set(threading.enumerate()) == before
    assert store.read("a name") == "a text"
    store.close()
    assert set(threading.enumerate()) == before


def test_a_folder_is_for_this_user_alone_and_keeps_no_parts(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "store")
    for _ in range(2):
        store.write("beat/0", "x")
        store.write_once("cause", "x")
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["beat%2F0", "cause"]


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "store")
    (tmp_path / "store").rmdir()
    for ask in (lambda: store.write("x", ""), lambda: store.read("x"), lambda: store.write_once("x", "")):
        with pytest.raises(StoreError, match=r"^the folder '.*store': No such file or directory$"):
            ask()


@pytest.fixture
def holder() -> Iterator[tuple[subprocess.Popen[str], int]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS_A_STORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    yield process, int(process.stdout.readline())
    process.kill()
    process.communicate()


def test_a_store_that_does_not_answer_and_one_that_is_gone(holder: tuple[subprocess.Popen[str], int]) -> None:
    """As where its machine is cut off: no connection is reset, and torch's own client would wait for ever."""
    process, port = holder
    store = NetworkStore(dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False), limit_seconds=0.5)
    store.write("x", "1")
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)  # until then its threads may still answer
    for ask in (lambda: store.read("x"), lambda: store.write("x", "2"), lambda: store.write_once("x", "")):
        with pytest.raises(StoreSilentError, match=rf"^the store at 127.0.0.1:{port} does not answer$") as caught:
            ask()
        assert 0.5 <= caught.value.seconds < 1.5
    os.kill(process.pid, signal.SIGCONT)
    with store.longer_limit(30.0):
        assert store.read("x") == "1"  # and no answer of before is taken for that of this question
    store.write("x", "3")
    process.kill()
    process.wait()
    with pytest.raises(StoreError):
        store.read("x")
