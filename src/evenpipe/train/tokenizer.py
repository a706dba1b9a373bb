"""The tokenizer: an existing one of transformers, or a byte-level BPE trained on the data.

No function here adds special tokens to a document; packing puts the end-of-text token between documents.
"""

from __future__ import annotations

import atexit
import contextlib
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
from evenpipe.given import find_file, hub_options, nearest_path, reason_of
from evenpipe.words import refused, show

_REMEDY = "give tokenizer.source, a folder or hub name with the tokenizer of the model"

TRAINING_CHARACTERS = 500_000_000  # more characters do not change the merges, but take memory

VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "sentencepiece.model",
    "spm.model",
    "tekken.json",
    "tiktoken.model",
    "merges.txt",
    "bpe.codes",
    "byte_maps.json",
)
"""Files of which a tokenizer has at least one, unless it comes with Python code."""
TOKENIZER_FILES = (
    *VOCABULARY_FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "emoji.json",
    "normalizer.json",
    "chat_template.jinja",
    "chat_template.json",
)
TEMPLATES = "additional_chat_templates"
"""Folder of additional chat templates."""

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
    tokenizer = open_tokenizer(source, trust_remote_code)
    if end_of_text is not None:
        if end_of_text not in tokenizer.get_vocab():
            raise refused("tokenizer.end_of_text", end_of_text, f"a token of the tokenizer {show(source)}")
        tokenizer.eos_token = end_of_text
    if tokenizer.eos_token_id is None:
        raise InputError(
            f"tokenizer.end_of_text is none; it must name a token: the tokenizer {show(source)} has none of its own"
        )
    return tokenizer


def open_tokenizer(source: str, trust_remote_code: bool = False, remedy: str = _REMEDY) -> Any:
    """Return the transformers tokenizer of a hub name or local folder.

    Raises `InputError` if it cannot be loaded, or if its files are missing: then `remedy` ends the sentence.
    """
    from transformers import AutoTokenizer

    options = {} if Path(source).exists() else hub_options()
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code, **options)
    except Exception as error:  # transformers and tokenizers raise many types on a damaged file
        is_model = Path(source).is_dir() or find_file(source, "config.json") is not None
        if is_model and "trust_remote_code" not in str(error):
            _check_files(source, VOCABULARY_FILES, remedy)
        raise InputError(
            f"the tokenizer {show(source)} cannot be loaded: {reason_of(error)}{nearest_path(source)}"
        ) from error
    if tokenizer.vocab_files_names and not Path(source).is_file():
        _check_files(source, (*tokenizer.vocab_files_names.values(), "tokenizer.json"), remedy)
    return tokenizer


def _check_files(source: str, names: Iterable[str], remedy: str) -> None:
    """Refuse a folder without the files of its tokenizer: transformers may build one that knows only special tokens.

    names: files of which it needs at least one; transformers itself also looks for other names.
    """
    existing = {name for name in (*names, *VOCABULARY_FILES) if find_file(source, name) is not None}
    if not existing:
        first = list(dict.fromkeys(names))[:3]
        raise InputError(f"{show(source)} has no tokenizer: it has no {' or '.join(first)}; {remedy}")
    halves = {"vocab.json", "merges.txt"}
    if halves <= set(names) and "tokenizer.json" not in existing and len(halves & existing) == 1:
        raise InputError(f"{show(source)} has half of a tokenizer: it has no {(halves - existing).pop()}; {remedy}")


def tokenizer_size(tokenizer: Any) -> int:
    """Return the number of rows that an embedding needs: one more than the highest token id."""
    highest: int = max(tokenizer.get_vocab().values())
    return highest + 1


def folder_digest(folder: Path) -> str:
    """Return the hex sha256 of the names and contents of a saved tokenizer's files."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


def kept_files(folder: Path) -> dict[str, Path]:
    """Return the tokenizer files in a folder, which may contain other files, by their names in a model folder."""
    names = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    for pattern in ("*.tiktoken", "tokenization*.py", f"{TEMPLATES}/*.jinja"):
        names += [path.relative_to(folder).as_posix() for path in sorted(folder.glob(pattern)) if path.is_file()]
    return {name: folder / name for name in names}


def keep_tokenizer(
    tokenizer: Any, source: str, target: Path, *, end_of_text: str | None, model_type: str | None = None
) -> None:
    """Copy the files of a loaded tokenizer unchanged from its hub name or folder.

    Next to the config of another model, the files may load as a different tokenizer; the copy then consists of the
    files that transformers writes.

    end_of_text: becomes the `eos_token` of the copy.
    model_type: type of the model that the tokenizer will be exported with; None: the tokenizer's original model.
    """
    paths = [find_file(source, name) for name in TOKENIZER_FILES]
    folder = next((path.parent for path in paths if path is not None), None)
    with _replaced(target) as fresh:
        if folder is not None:
            for name, path in kept_files(folder).items():
                (fresh / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(path, fresh / name)
            if end_of_text is not None:
                _change(fresh / _SETTINGS, lambda settings: _ending(settings, end_of_text))
                _change(fresh / _SPECIAL, lambda tokens: _ending(tokens, end_of_text) if tokens else tokens)
            if model_type is None:
                return
            own_class = type(tokenizer).__name__
            _change(fresh / _SETTINGS, lambda settings: {"tokenizer_class": own_class, **settings})
            if _is_same(tokenizer, fresh, model_type):
                return
            shutil.rmtree(fresh)
        tokenizer.save_pretrained(fresh)
        _change(fresh / _SETTINGS, lambda settings: {key: settings[key] for key in settings if key not in _LEAKS})


def _is_same(tokenizer: Any, folder: Path, model_type: str) -> bool:
    """Return whether the files in a folder load as the same tokenizer next to the config of a model."""
    from transformers import AutoTokenizer

    config = folder / "config.json"
    config.write_text(json.dumps({"model_type": model_type}))
    try:
        reloaded = AutoTokenizer.from_pretrained(folder)
    except Exception:  # transformers raises many types
        return False
    finally:
        config.unlink()
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])[:: max(1, len(vocabulary) // 500)]
    text = _SAMPLE + tokenizer.convert_tokens_to_string(tokens)
    same = vocabulary == reloaded.get_vocab() and tokenizer.eos_token_id == reloaded.eos_token_id
    return same and tokenizer(text)["input_ids"] == reloaded(text)["input_ids"]


_SAMPLE = "The quick  brown fox\n\tdef f(x): return -1.5e10, 'ünï' # 日本語 \U0001f44d <s>\r\n"


def copy_tokenizer(folder: Path, target: Path) -> None:
    """Copy a tokenizer that the run has trained."""
    with _replaced(target) as fresh:
        shutil.copytree(folder, fresh, dirs_exist_ok=True)


_SETTINGS, _SPECIAL = "tokenizer_config.json", "special_tokens_map.json"
_LEAKS = ("is_local", "local_files_only")
"""Settings in which transformers records how it found a tokenizer."""


@contextlib.contextmanager
def _replaced(target: Path) -> Iterator[Path]:
    """Yield a new folder, which replaces `target` once it is complete."""
    fresh = target.with_name(target.name + ".tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    yield fresh
    shutil.rmtree(target, ignore_errors=True)
    fresh.rename(target)


def _change(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change the values in a JSON file; write it only if they differ."""
    settings = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    changed = change(settings)
    if changed != settings:
        path.write_text(json.dumps(changed, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _ending(settings: dict[str, Any], end_of_text: str) -> dict[str, Any]:
    current = settings.get("eos_token")
    same = end_of_text == (current.get("content") if isinstance(current, dict) else current)
    return settings if same else {**settings, "eos_token": end_of_text}


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
    """Run `work`, which spends a long time in native code, in another thread so that this one can handle signals.
    The process can end without waiting for that thread."""
    failed: list[BaseException] = []
    finished = threading.Event()

    def do() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)
        finally:
            finished.set()

    try:
        threading.Thread(target=do, name="evenpipe-tokenizer", daemon=True).start()
        while not finished.wait(0.2):  # the signal may go to the other thread, which does not wake this one
            pass
    except BaseException as error:
        atexit.register(
            _exit_if_unfinished, finished, error.code if isinstance(error, SystemExit) else 128 + signal.SIGINT
        )
        raise
    if failed:
        raise failed[0]


def _exit_if_unfinished(finished: threading.Event, exit_code: Any) -> None:
    """At process exit, end at once if the thread is still working. An interpreter that is shutting down unwinds a
    thread that returns to it, to which the native code in this thread reacts with SIGABRT."""
    if not finished.is_set():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code if isinstance(exit_code, int) else 1)
