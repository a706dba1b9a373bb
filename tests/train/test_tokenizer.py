"""What a tokenizer learns from: long runs are cut, ordinary text is not; and its training can be ended."""

from __future__ import annotations

import subprocess
import sys

import pytest

from evenpipe.train.tokenizer import LONGEST_RUN, _interruptible, _pieces, train_tokenizer

LONG = LONGEST_RUN + 1

ONE_PIECE = [
    # texts that are learned from as they stand
    "def f(x):\n    return x  # ünïcode, 123\n" * 1000,
    "a" * LONGEST_RUN,
    " ".join(["a" * LONGEST_RUN] * 3),
    "0123456789abcdef+/" * 1000,  # in which nothing is longer than 16
    "日本語、" * 1000,
    "_" * LONGEST_RUN + "a" + "\n" * LONGEST_RUN,
]


CUT = [
    # text, lengths of its pieces
    ("", []),
    ("a" * LONG, [LONGEST_RUN, 1]),
    (" " * LONG, [LONGEST_RUN, 1]),
    ("!" * LONG, [LONGEST_RUN, 1]),
    ("語" * (2 * LONGEST_RUN), [LONGEST_RUN, LONGEST_RUN]),
    ("short " + "a" * LONG + " short", [6 + LONGEST_RUN, 7]),
]


def test_long_runs_are_cut_and_ordinary_text_is_not():
    for text in ONE_PIECE:
        assert list(_pieces(text)) == [text]
    for text, lengths in CUT:
        pieces = list(_pieces(text))
        assert "".join(pieces) == text and [len(piece) for piece in pieces] == lengths


def test_millions_of_one_letter_are_a_tokenizer():
    tokenizer = train_tokenizer(["a" * 3_000_000], 300, "<|end|>")
    assert tokenizer.decode(tokenizer("aaa aaaa")["input_ids"]) == "aaa aaaa"


def test_a_signal_ends_the_wait_for_work_outside_python_and_the_process():
    """Foreign code must not come back to an interpreter that is shutting down: what was registered before shows that
    this one did not begin to."""
    program = """
import atexit, os, signal, threading
from evenpipe.train.tokenizer import _interruptible
atexit.register(print, "shutting down")
def ended(number, frame): raise SystemExit(128 + number)
signal.signal(signal.SIGTERM, ended)
def work():
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait()
print("said", end=" ")
_interruptible(work)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (143, "said ", "")


def test_what_fails_there_is_raised_here():
    def work():
        raise ValueError("no text")

    with pytest.raises(ValueError, match="no text"):
        _interruptible(work)
