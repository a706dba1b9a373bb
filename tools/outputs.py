"""Run the commands and programs in README and docs/, and write their output into the pages.

    python tools/outputs.py [PAGE.md ...]

The blocks of a page run in turn, in one folder with `examples` and some text in `my_texts`:

    csv NAME, toml NAME    a file; a file of the repository is copied into the page
    sh                     commands, one per line
    python [NAME]          a program in a separate file, so that it may start processes, or one of the repository
    text                   the output of the commands and programs since the last `text`

A comment on the line before a block changes that:

    <!-- run small -->        `evenpipe train` and `evenpipe profile` run a tiny model for three steps
    <!-- not run: REASON -->  the block is only shown

A test renders every page and compares.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md")
BLOCK = re.compile(
    r"^(?:<!-- (run small|not run: \S[^\n]*) -->\n)?```(\w*)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
LANGUAGES = ("csv", "toml", "sh", "python", "text")
PROGRAMS = {"evenpipe": "-m evenpipe.cli.main", "torchrun": "-m torch.distributed.run", "python": ""}
SMALL = (
    *("training.steps=3", "training.minutes=none", "checkpoint.every_steps=2", "data.sequence_length=32"),
    *("data.validation_fraction=0.05", "tokenizer.vocabulary_size=300", "sample.new_tokens=4"),
    *("model.config.hidden_size=16", "model.config.num_hidden_layers=4", "model.config.head_dim=8"),
    *("model.config.num_attention_heads=2", "model.config.num_key_value_heads=1", "model.self_check=false"),
)
SMALL_CORPUS = ("data.corpus=python-standard-library:json",)


def render(page: str, folder: Path) -> str:
    """Return the page with the output of its commands, run in `folder`, which should be empty."""
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "my_texts").mkdir()
    for file in (ROOT / "docs" / "schedules.md", ROOT / "docs" / "memory.md"):
        (folder / "my_texts" / f"{file.stem}.txt").write_bytes(file.read_bytes())
    printed: list[str] = []

    def run(arguments: list[str]) -> None:
        path = os.pathsep.join((str(ROOT / "src"), str(folder)))
        environment = os.environ | {"PYTHONPATH": path, "COLUMNS": "110", "NO_COLOR": "1"}
        done = subprocess.run(
            arguments, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=1200
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(arguments)}\n{done.stdout}\n{done.stderr}")
        printed.append(done.stdout)

    def block(match: re.Match[str]) -> str:
        mark, language, name, body = match.groups()
        if mark and mark.startswith("not run"):
            return match[0]
        if language not in LANGUAGES:
            raise ValueError(f"a block of {language!r} is not run; expected one of {LANGUAGES} or a reason above it")
        if language in {"csv", "toml"}:
            if not name:
                raise ValueError(f"a block of {language} has no name; expected one or a reason above it")
            if (ROOT / name).is_file():
                body = (ROOT / name).read_text(encoding="utf-8")
            else:
                (folder / name).write_text(body, encoding="utf-8")
        elif language == "python":
            program = folder / (name or "program.py")
            if name:
                body = program.read_text(encoding="utf-8")
            else:
                program.write_text(body, encoding="utf-8")
            run([sys.executable, str(program)])
        elif language == "sh":
            for line in body.replace("\\\n", " ").splitlines():
                if not line.startswith(("make ", "#")):
                    run(["sh", "-c", _small(_command(line), folder) if mark else _command(line)])
        elif language == "text":
            body = "".join(printed)
            printed.clear()
        above = f"<!-- {mark} -->\n" if mark else ""
        return f"{above}```{language}{f' {name}' if name else ''}\n{body}```"

    return BLOCK.sub(block, page)


def _command(line: str) -> str:
    """Return the command with this Python instead of the programs that an installation puts on the path."""
    program, space, rest = re.sub(r"\s+# .*", "", line).partition(" ")
    return f"{sys.executable} {PROGRAMS[program]}{space}{rest}" if program in PROGRAMS else line


def _small(command: str, folder: Path) -> str:
    """Return the command, with a small configuration if it trains."""
    found = re.search(r"evenpipe\.cli\.main (?:train|profile) (\S+\.toml)", command)
    if not found:
        return command
    configuration = (folder / found[1]).read_text(encoding="utf-8")
    small = (*SMALL, *(SMALL_CORPUS if "corpus =" in configuration else ()))
    return f"{command[: found.end()]} {' '.join(small)}{command[found.end() :]} " + (
        "training.steps=3" if "training.steps" in command else ""
    )


if __name__ == "__main__":
    for file in map(Path, sys.argv[1:]) if sys.argv[1:] else PAGES:
        with tempfile.TemporaryDirectory() as temporary:
            file.write_text(render(file.read_text(encoding="utf-8"), Path(temporary)), encoding="utf-8")
