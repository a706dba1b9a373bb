"""Messages between processes of a run outside of groups: small texts under names, in a store that all can reach.

Two kinds, with different access:

- `FolderStore`, of processes that a launcher started on its own machine: files in a folder that only this user may
  enter. Nothing listens on a port, and nothing can hang.
- `NetworkStore`, of processes that torchrun started: torch's TCPStore, which accepts requests from everyone who reaches
  its port (docs/security.md). A request that its machine cannot answer would block as long as TCP retries, some sixteen
  minutes; here it has a limit.

Texts come from other processes, or from strangers: `signs` treats them as data, with limits.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar
from urllib.parse import quote

from torch.distributed import PrefixStore, TCPStore

T = TypeVar("T")

ANSWER_SECONDS = 2.0
"""Default limit of a request: a thousand times as long as a busy store takes."""

TEXT_BYTES = 1 << 20
"""Longest text that is read."""

SLICE_SECONDS = 0.25
"""A longer gap is time in which this process was stopped, and does not count."""


class StoreError(RuntimeError):
    """The store is gone: its connection broke, or its folder does not exist any more."""


class StoreSilentError(StoreError):
    """The store has not answered within the limit of a request."""

    def __init__(self, address: str, seconds: float) -> None:
        """seconds: how long this request was waited for, while this process ran."""
        super().__init__(f"{address} does not answer")
        self.address = address
        self.seconds = seconds


class FolderStore:
    """A file for each name, in a folder of this machine. A file appears with its whole text or not at all.

    Every method returns at once, those of `NetworkStore` within a limit, and raises StoreError if the store is gone.
    """

    def __init__(self, folder: Path) -> None:
        """Make the folder, for this user alone, if it does not exist."""
        self._folder = folder
        folder.mkdir(mode=0o700, exist_ok=True)

    def write(self, name: str, text: str) -> None:
        """Replace the text under `name` by `text`."""
        with self._errors():
            self._part(text).rename(self._file(name))

    def read(self, name: str) -> str | None:
        """Return the text under `name`; None if there never was one."""
        with self._errors():
            try:
                with self._file(name).open("rb") as file:
                    return file.read(TEXT_BYTES).decode(errors="replace")
            except FileNotFoundError:
                self._folder.stat()  # otherwise the store is gone, not the text
                return None

    def has(self, names: Iterable[str]) -> bool:
        """Return whether there is a text under each of these names."""
        return all(self._file(name).exists() for name in names)

    def append(self, name: str, text: str) -> None:
        """Append `text` to the text under `name`."""
        with self._errors():
            descriptor = os.open(self._file(name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                os.write(descriptor, text.encode())
            finally:
                os.close(descriptor)

    def settle(self, name: str, text: str) -> str:
        """Write `text` unless there is a text under `name`; return the text there now. The first one stays."""
        with self._errors():
            part = self._part(text)
            with contextlib.suppress(FileExistsError):
                self._file(name).hardlink_to(part)
            part.unlink()
        return self.read(name) or text

    def secret(self) -> bytes | None:
        """Return a secret that only processes of this run know; None if the store is open to others."""
        return self.settle("secret", secrets.token_hex(32)).encode()

    def another(self) -> FolderStore:
        """Return a client of the same store for another thread: each handles one request at a time."""
        return self

    def close(self) -> None:
        """End the client's thread, until the next request."""

    def patient(self, limit_seconds: float) -> contextlib.AbstractContextManager[None]:
        """Requests within may take this long: for moments in which every process asks the store."""
        return contextlib.nullcontext()

    def _file(self, name: str) -> Path:
        return self._folder / quote(name, safe="")

    def _part(self, text: str) -> Path:
        """Write a new file with this text, under a name that nobody reads."""
        part = self._folder / f".{uuid.uuid4().hex}"
        part.write_text(text, encoding="utf-8", errors="replace")
        return part

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(f"the folder {str(self._folder)!r}: {error.strerror}") from error


class NetworkStore:
    """A store of torch's, with the methods of `FolderStore`. Each request runs on a separate thread, and is abandoned
    after a limit.

    An answer after the limit is dropped; the next request waits for it first.
    """

    def __init__(self, store: Any, limit_seconds: float = ANSWER_SECONDS) -> None:
        """
        Args:
            store: a store of torch's, for which a new client is made. That takes seconds if a name server does not
                answer.
            limit_seconds: how long a request may take.
        """
        self.limit_seconds = limit_seconds
        self._store = store.clone()
        self._questions: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._answered = threading.Event()
        self._answered.set()
        self._asking = threading.Lock()
        self._thread: threading.Thread | None = None

    def write(self, name: str, text: str) -> None:
        self._ask(lambda store: store.set(name, text))

    def read(self, name: str) -> str | None:
        # Getting a missing text would wait for it.
        content = self._ask(lambda store: store.get(name)[:TEXT_BYTES] if store.check([name]) else None)
        return None if content is None else content.decode(errors="replace")

    def has(self, names: Iterable[str]) -> bool:
        wanted = list(names)
        return self._ask(lambda store: store.check(wanted))

    def append(self, name: str, text: str) -> None:
        self._ask(lambda store: store.append(name, text))

    def settle(self, name: str, text: str) -> str:
        return self._ask(lambda store: store.compare_set(name, "", text))[:TEXT_BYTES].decode(errors="replace")

    def secret(self) -> bytes | None:
        return None

    def another(self) -> NetworkStore:
        return NetworkStore(self._store, self.limit_seconds)

    def close(self) -> None:
        with self._asking:
            if self._thread is not None:
                self._questions.put(None)
                if self._answered.is_set():
                    self._thread.join()
                self._thread = None

    @contextlib.contextmanager
    def patient(self, limit_seconds: float) -> Iterator[None]:
        before, self.limit_seconds = self.limit_seconds, max(limit_seconds, self.limit_seconds)
        try:
            yield
        finally:
            self.limit_seconds = before

    def _ask(self, question: Callable[[Any], T]) -> T:
        found: list[T] = []
        failed: list[Exception] = []
        answered = threading.Event()

        def ask() -> None:
            try:
                found.append(question(self._store))
            except Exception as error:
                failed.append(error)
            answered.set()

        with self._asking:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="evenpipe-store", daemon=True)
                self._thread.start()
            self._wait(self._answered)
            self._answered = answered
            self._questions.put(ask)
            self._wait(answered)
        if failed:
            if isinstance(failed[0], RuntimeError):
                raise StoreError(str(failed[0])) from failed[0]
            raise failed[0]
        return found[0]

    def _run(self) -> None:
        while (question := self._questions.get()) is not None:
            question()

    def _wait(self, answered: threading.Event) -> None:
        waited, last = 0.0, time.monotonic()
        while not answered.wait(SLICE_SECONDS):
            now = time.monotonic()
            waited, last = waited + min(now - last, 2 * SLICE_SECONDS), now
            if waited >= self.limit_seconds:
                raise StoreSilentError(_address(self._store), waited)


Store = FolderStore | NetworkStore


def _address(store: Any) -> str:
    """Return the address of the machine that holds a store."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return f"the store at {store.host}:{store.port}" if isinstance(store, TCPStore) else "the store"
