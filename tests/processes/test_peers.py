"""What a process finds out about others of its machine, in one process with a store of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from evenpipe.processes.peers import Peers
from evenpipe.processes.signs import Beat, started
from evenpipe.processes.store import FolderStore


def test_who_met_the_others_and_died_before_its_first_beat_is_known(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "store")
    dead = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    beat = Beat(0, "here", dead.pid, started(dead.pid) or "")
    Peers(store, beat, 0, 2, key="here")
    store.write("here/0", beat.dump())
    mine = Peers(store, Beat(0, "here", 1, ""), 1, 2)
    assert mine.here() == [0]
    assert mine.first_death(mine.here()) is None
    dead.communicate(b"\n")
    cause = mine.first_death(mine.here())
    assert cause is not None
    assert cause.text == f"process 0 (pid {dead.pid}) has died: killed, out of memory or crashed"
