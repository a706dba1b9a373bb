"""What a tokenizer learns from: long runs are cut, ordinary text is not; and its training can be ended."""

from __future__ import annotations

import subprocess
import sys

import pytest

from evenpipe.train.tokenizer import LONGEST_RUN, _pieces, train_tokenizer

PIECES = [
    # text, lengths of the pieces that are learned from
    ("", []),
    ("def f(x):\n    return x  # ünïcode, 123\n" * 1000, [39_000]),
    (" ".join(["a" * LONGEST_RUN] * 3), [3 * LONGEST_RUN + 2]),
    ("_" * LONGEST_RUN + "a" + "\n" * LONGEST_RUN, [2 * LONGEST_RUN + 1]),
    (" " * (LONGEST_RUN + 1), [LONGEST_RUN, 1]),
    ("語" * (2 * LONGEST_RUN), [LONGEST_RUN, LONGEST_RUN]),
    ("short " + "a" * (LONGEST_RUN + 1) + " short", [6 + LONGEST_RUN, 7]),
]


def test_long_runs_are_cut_and_ordinary_text_is_not():
    for text, lengths in PIECES:
        pieces = list(_pieces(text))
        assert "".join(pieces) == text and [len(piece) for piece in pieces] == lengths
    tokenizer = train_tokenizer(["a" * 3_000_000], 300, "<|end|>")
    assert tokenizer.decode(tokenizer("aaa aaaa")["input_ids"]) == "aaa aaaa"


def test_a_signal_ends_the_training_and_the_process():
    """Foreign code must not come back to an interpreter that is shutting down: what was registered before shows that
    this one did not begin to."""
    program = """
import atexit, os, signal, threading
from evenpipe.train.tokenizer import train_tokenizer
atexit.register(print, "shutting down")
def ended(number, frame): raise SystemExit(128 + number)
signal.signal(signal.SIGTERM, ended)
def texts():
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait()
    yield "never"
print("said", end=" ")
train_tokenizer(texts(), 300, "<|end|>")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (143, "said ", "")


def test_what_fails_there_is_raised_here():
    with pytest.raises(ZeroDivisionError):
        train_tokenizer((str(1 // number) for number in (1, 0)), 300, "<|end|>")
