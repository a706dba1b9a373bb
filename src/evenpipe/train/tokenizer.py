"""The tokenizer: an existing one of transformers, or a byte-level BPE trained on the data.

No function here adds special tokens to a document; packing puts the end-of-text token between documents.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from evenpipe.errors import InputError
from evenpipe.given import beside, hub_options
from evenpipe.train.section import show

TRAINING_CHARACTERS = 500_000_000  # more characters do not change the merges, but take memory
UNLIMITED = 10**9  # tokenizers without a limit have 1e30

LONGEST_RUN = 1000
"""Maximum length of a run of letters and digits, of spaces or of other characters that is learned as one word. The time
of a merge grows with the square of a word's length: three million letters in a row would take hours."""
_SHORT_RUNS = re.compile(
    "(?:" + "|".join(f"{run}{{1,{LONGEST_RUN}}}+(?!{run})" for run in (r"\s", r"[^\W_]", r"(?:[^\w\s]|_)")) + ")*+"
)


def train_tokenizer(texts: Iterable[str], entries: int, end_of_text: str) -> Any:
    """Train a byte-level BPE tokenizer of at most `entries` tokens; return a transformers fast tokenizer.

    The same texts give the same tokenizer. Training reads at most the first 500 million characters, and learns no token
    across a cut in runs of more than `LONGEST_RUN` characters.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=entries,
        special_tokens=[end_of_text],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pieces = (piece for text in _first(texts, TRAINING_CHARACTERS) for piece in _pieces(text))
    _interruptible(lambda: tokenizer.train_from_iterator(pieces, trainer))
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=tokenizer, eos_token=end_of_text, clean_up_tokenization_spaces=False)


def load_tokenizer(source: str, end_of_text: str | None, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a hub name or local folder; `end_of_text`, if given, becomes its `eos_token`.

    Raises `InputError` if it cannot be loaded or does not have the token.
    """
    from transformers import AutoTokenizer

    options = {} if Path(source).exists() else hub_options()
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"the tokenizer {show(source)} cannot be loaded: {reason}{beside(source)}") from error
    if end_of_text is not None:
        if end_of_text not in tokenizer.get_vocab():
            raise InputError(
                f"tokenizer.end_of_text is {show(end_of_text)}, but must be a token of the tokenizer {show(source)}"
            )
        tokenizer.eos_token = end_of_text
    if tokenizer.eos_token_id is None:
        raise InputError(
            f"tokenizer.end_of_text is none, but must name a token: the tokenizer {show(source)} has none of its own"
        )
    return tokenizer


def tokenizer_size(tokenizer: Any) -> int:
    """Return the number of rows that an embedding needs: one more than the highest token id."""
    highest: int = max(tokenizer.get_vocab().values())
    return highest + 1


def folder_digest(folder: Path) -> str:
    """Return the hex sha256 of names and contents of a saved tokenizer's files."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


def copy_tokenizer(folder: Path, target: Path, maximum_length: int) -> None:
    """Copy a saved tokenizer; one without a sensible `model_max_length` gets `maximum_length` tokens."""
    fresh = target.with_name(target.name + ".tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(folder, fresh)
    path = fresh / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    if settings.get("model_max_length") is None or settings["model_max_length"] > UNLIMITED:
        settings["model_max_length"] = maximum_length
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    shutil.rmtree(target, ignore_errors=True)
    fresh.rename(target)


def _first(texts: Iterable[str], characters: int) -> Iterator[str]:
    for text in texts:
        if characters <= 0:
            return
        yield text[:characters]
        characters -= len(text)


def _pieces(text: str) -> Iterator[str]:
    """Cut a text within runs that are longer than `LONGEST_RUN`."""
    start = 0
    while start < len(text):
        short = _SHORT_RUNS.match(text, start)
        assert short is not None, "the pattern also matches an empty text"
        yield text[start : short.end() + LONGEST_RUN]
        start = short.end() + LONGEST_RUN


def _interruptible(work: Callable[[], object]) -> None:
    """Do `work`, which stays outside Python for a long time, in another thread, so that this one can handle signals.
    The process can end without waiting for that thread."""
    failed: list[BaseException] = []
    done = threading.Event()

    def do() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)
        finally:
            done.set()

    try:
        threading.Thread(target=do, name="evenpipe-tokenizer", daemon=True).start()
        done.wait()
    except BaseException as error:
        atexit.register(_end_beside, done, error.code if isinstance(error, SystemExit) else 128 + signal.SIGINT)
        raise
    if failed:
        raise failed[0]


def _end_beside(done: threading.Event, exit_code: Any) -> None:
    """At the end of the process, if the thread still works: end now. An interpreter that is shutting down unwinds a
    thread that comes back to it, which the foreign code of this one answers with SIGABRT."""
    if not done.is_set():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code if isinstance(exit_code, int) else 1)
