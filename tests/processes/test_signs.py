"""What other processes say is read as data; who may be killed is what the kernel says, whatever stands in a store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from evenpipe.processes.peers import Peers
from evenpipe.processes.signs import LAUNCHER, TEXT_LENGTH, Beat, Cause, Waiting, siblings, start_time
from evenpipe.processes.store import FolderStore

BEAT = Beat(3, "a machine", 77, "123", Waiting("1RECV_F0", "1F0", "F:0>1", (0,)))
CAUSE = Cause("dead", 1, "process 1 (pid 7) has died")

NOT_BEATS = {
    "nothing": "",
    "no JSON": "{",
    "a list": "[]",
    "too deep": "[" * 100_000,
    "a field more": json.dumps(asdict(BEAT) | {"command": "rm"}),
    "a field less": json.dumps({"count": 1}),
    "a count that is none": json.dumps(asdict(BEAT) | {"count": "3"}),
    "true is no count": json.dumps(asdict(BEAT) | {"count": True}),
    "a pid that would be a group": json.dumps(asdict(BEAT) | {"pid": -1}),
    "a pid of 5 000 digits": json.dumps(asdict(BEAT)).replace("77", "7" * 5000),
    "a machine with escapes": json.dumps(asdict(BEAT) | {"machine": "\x1b[2J"}),
    "a machine as long as a book": json.dumps(asdict(BEAT) | {"machine": "m" * 100_000}),
    "peers that do not exist": json.dumps(asdict(BEAT) | {"waiting": asdict(BEAT.waiting) | {"peers": [4]}}),
    "more peers than processes": json.dumps(asdict(BEAT) | {"waiting": asdict(BEAT.waiting) | {"peers": [0] * 5}}),
    "a wait that is text": json.dumps(asdict(BEAT) | {"waiting": "0"}),
    "done is a number": json.dumps(asdict(BEAT) | {"done": 0}),
}


def test_a_beat_comes_back() -> None:
    for beat in (BEAT, replace(BEAT, waiting=None, done=True)):
        assert Beat.load(beat.dump(), 4) == beat


def test_what_no_process_has_written_is_no_beat() -> None:
    assert [what for what, text in NOT_BEATS.items() if Beat.load(text, 4) is not None] == []


def test_a_cause_comes_back_as_the_words_of_its_writer() -> None:
    assert Cause.load(CAUSE.dump(2), 4) == Cause("dead", 1, CAUSE.text, witness=2)
    half = "x" * (TEXT_LENGTH // 2 - 3)
    for text, shown in (
        ("process 1 (pid 7) has died", "process 1 (pid 7) has died"),
        ("pay at evil.example", "process 2 said: pay at evil.example"),
        ("\x1b]0;title\x07line\x9b", "process 2 said: \\x1b]0;title\\x07line\\x9b"),
        ("x" * 5000, f"process 2 said: {half} ... {half}"),
    ):
        assert str(Cause.load(Cause("input", 2, text).dump(2), 4)) == shown


def test_a_cause_that_no_process_has_written_says_so() -> None:
    unknown = Cause("dead", LAUNCHER, "the store of the run has a cause that no process of the run has written")
    for changed in {"origin": 4}, {"origin": -2}, {"kind": "fun"}, {"text": None}, {"witness": None}, {"more": 1}:
        assert Cause.load(json.dumps(asdict(CAUSE) | {"witness": 2} | changed), 4) == unknown, changed


def test_siblings_are_children_of_the_same_agent_and_of_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the agent; the one that asks is forked from it."""
    sleep = [sys.executable, "-S", "-c", "input()"]
    nested = [sys.executable, "-S", "-c", f"import subprocess, sys; subprocess.run({sleep!r})"]
    run = {"TORCHELASTIC_RUN_ID": "a run"}
    programs = {
        "worker": (sleep, run | {"RANK": "1"}),
        "of another run": (sleep, {"TORCHELASTIC_RUN_ID": "another", "RANK": "2"}),
        "no worker": (sleep, {}),
        "no rank": (sleep, run | {"RANK": "../3"}),
        "a child of a child": (nested, {"RANK": "4"} | run),
    }
    processes = {
        name: subprocess.Popen(command, env=environment, stdin=subprocess.PIPE)
        for name, (command, environment) in programs.items()
    }
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a run")
    read, write = os.pipe()
    try:
        asking = os.fork()
        if asking == 0:
            os.write(write, json.dumps(siblings()).encode())
            os._exit(0)
        os.waitpid(asking, 0)
        found = json.loads(os.read(read, 4096))
    finally:
        for process in processes.values():
            process.communicate(b"\n")
        os.close(read)
        os.close(write)
    assert found == {"1": processes["worker"].pid, "4": processes["a child of a child"].pid}


def test_who_met_the_others_and_died_before_its_first_beat_is_known(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "store")
    dead = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    beat = Beat(0, "here", dead.pid, start_time(dead.pid) or "")
    Peers(store, beat, 0, 2, key="here")
    store.write("here/0", beat.dump())
    mine = Peers(store, Beat(0, "here", 1, ""), 1, 2)
    assert mine.local_ranks() == [0]
    assert mine.first_death(mine.local_ranks()) is None
    dead.communicate(b"\n")
    cause = mine.first_death(mine.local_ranks())
    assert cause is not None
    assert cause.text == f"process 0 (pid {dead.pid}) has died: killed, out of memory or crashed"
