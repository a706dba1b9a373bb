"""Messages between processes of a run outside of process groups: short texts by name, in a store that all can reach.

Two stores with different access:

- `FolderStore`, for processes that a launcher started on its own machine: files in a folder that only this user may
  enter. Nothing listens on a port, and nothing can hang.
- `NetworkStore`, for processes that torchrun started: torch's TCPStore, which accepts requests from everyone who
  reaches its port (docs/security.md). A request that its machine cannot answer would block while TCP retries, about
  sixteen minutes; here it has a limit.

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
"""Most bytes that are read of a text."""

SLICE_SECONDS = 0.25
"""Interval of polls. Twice as long a gap means that this process was stopped, and the excess does not count."""


class StoreError(RuntimeError):
    """The store is lost: its connection broke, or its folder was removed."""


class StoreSilentError(StoreError):
    """The store has not answered within the limit of a request."""

    def __init__(self, address: str, seconds: float) -> None:
        """seconds: how long this process waited for the answer, without time during which it was stopped."""
        super().__init__(f"{address} does not answer")
        self.address = address
        self.seconds = seconds


class FolderStore:
    """A file for each name, in a folder of this machine. A file appears with its whole text or not at all.

    Every method returns at once (in `NetworkStore` within a limit), and raises StoreError if the store is lost.
    """

    def __init__(self, folder: Path) -> None:
        """Create the folder, for this user alone, if it does not exist."""
        self._folder = folder
        folder.mkdir(mode=0o700, exist_ok=True)

    def write(self, name: str, text: str) -> None:
        """Replace the text of `name` by `text`."""
        with self._errors():
            self._temporary_file(text).rename(self._file(name))

    def read(self, name: str) -> str | None:
        """Return the text of `name`; None if it has none."""
        with self._errors():
            try:
                with self._file(name).open("rb") as file:
                    return file.read(TEXT_BYTES).decode(errors="replace")
            except FileNotFoundError:
                self._folder.stat()  # raises if the folder itself is missing
                return None

    def has(self, names: Iterable[str]) -> bool:
        """Return whether each of these names has a text."""
        return all(self._file(name).exists() for name in names)

    def append(self, name: str, text: str) -> None:
        """Append `text` to the text of `name`."""
        with self._errors():
            descriptor = os.open(self._file(name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                os.write(descriptor, text.encode())
            finally:
                os.close(descriptor)

    def write_once(self, name: str, text: str) -> str:
        """Write `text` unless `name` has a text; return the text that it has now. The first text stays."""
        with self._errors():
            temporary = self._temporary_file(text)
            with contextlib.suppress(FileExistsError):
                self._file(name).hardlink_to(temporary)
            temporary.unlink()
        return self.read(name) or text

    def secret(self) -> bytes | None:
        """Return a secret that only processes of this run know; None if others can read the store."""
        return self.write_once("secret", secrets.token_hex(32)).encode()

    def clone(self) -> FolderStore:
        """Return a client of the same store for another thread: a client handles one request at a time."""
        return self

    def close(self) -> None:
        """End the client's thread, until the next request."""

    def longer_limit(self, limit_seconds: float) -> contextlib.AbstractContextManager[None]:
        """Let requests within the context take this long, for when all processes access the store at once."""
        return contextlib.nullcontext()

    def _file(self, name: str) -> Path:
        return self._folder / quote(name, safe="")

    def _temporary_file(self, text: str) -> Path:
        """Write a new file with this text, under a name that no process reads."""
        path = self._folder / f".{uuid.uuid4().hex}"
        path.write_text(text, encoding="utf-8", errors="replace")
        return path

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(f"the folder {str(self._folder)!r}: {error.strerror}") from error


class NetworkStore:
    """A store of torch with the methods of `FolderStore`. Requests run on a separate thread, and are abandoned after a
    limit.

    An answer after the limit is dropped; the next request waits for it first.
    """

    def __init__(self, store: Any, limit_seconds: float = ANSWER_SECONDS) -> None:
        """
        Args:
            store: of torch; a new client of it is made, which takes seconds if a name server does not answer.
            limit_seconds: how long a request may take.
        """
        self.limit_seconds = limit_seconds
        self._store = store.clone()
        self._requests: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._answered = threading.Event()
        self._answered.set()
        self._request_lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def write(self, name: str, text: str) -> None:
        self._request(lambda store: store.set(name, text))

    def read(self, name: str) -> str | None:
        # `get` would wait for a missing text.
        content = self._request(lambda store: store.get(name)[:TEXT_BYTES] if store.check([name]) else None)
        return None if content is None else content.decode(errors="replace")

    def has(self, names: Iterable[str]) -> bool:
        keys = list(names)
        return self._request(lambda store: store.check(keys))

    def append(self, name: str, text: str) -> None:
        self._request(lambda store: store.append(name, text))

    def write_once(self, name: str, text: str) -> str:
        return self._request(lambda store: store.compare_set(name, "", text))[:TEXT_BYTES].decode(errors="replace")

    def secret(self) -> bytes | None:
        return None

    def clone(self) -> NetworkStore:
        return NetworkStore(self._store, self.limit_seconds)

    def close(self) -> None:
        with self._request_lock:
            if self._thread is not None:
                self._requests.put(None)
                if self._answered.is_set():
                    self._thread.join()
                self._thread = None

    @contextlib.contextmanager
    def longer_limit(self, limit_seconds: float) -> Iterator[None]:
        previous, self.limit_seconds = self.limit_seconds, max(limit_seconds, self.limit_seconds)
        try:
            yield
        finally:
            self.limit_seconds = previous

    def _request(self, call: Callable[[Any], T]) -> T:
        results: list[T] = []
        errors: list[Exception] = []
        answered = threading.Event()

        def run() -> None:
            try:
                results.append(call(self._store))
            except Exception as error:
                errors.append(error)
            answered.set()

        with self._request_lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="evenpipe-store", daemon=True)
                self._thread.start()
            self._wait(self._answered)
            self._answered = answered
            self._requests.put(run)
            self._wait(answered)
        if errors:
            if isinstance(errors[0], RuntimeError):
                raise StoreError(str(errors[0])) from errors[0]
            raise errors[0]
        return results[0]

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            request()

    def _wait(self, answered: threading.Event) -> None:
        waited, last = 0.0, time.monotonic()
        while not answered.wait(SLICE_SECONDS):
            now = time.monotonic()
            waited, last = waited + min(now - last, 2 * SLICE_SECONDS), now
            if waited >= self.limit_seconds:
                raise StoreSilentError(_address(self._store), waited)


Store = FolderStore | NetworkStore


def _address(store: Any) -> str:
    """Return the address of a store, in words."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return f"the store at {store.host}:{store.port}" if isinstance(store, TCPStore) else "the store"
