"""Damages places of `src/evenpipe`, one at a time, and says which damage the tests do not find.

    python tests/mutation/run_mutations.py --runs 100 --seed 1 --json FILE    of the tests that `make test` runs
    python tests/mutation/run_mutations.py --only 17 --seed 1                 only this mutation

Each area of the code gets the same number of mutations. Tests of the damaged folder run first, then all others; the
first failure ends a run, and so does `LIMIT_SECONDS` without an end, which counts as a failure. FILE is read first, and
mutations that it has are not run again, so an interrupted run can be continued.

With `--reach REACH`, only those test files run which execute the damaged block of statements. REACH says which blocks
each test file executes; where it does not exist, it is recorded first: every test file runs alone on a copy of the
source that notes each block once. It holds for one state of the source, on which test files that could not be recorded
must pass.

A mutation that no test finds is not always a gap: some change nothing that can be seen (a limit of a cache, a tie that
is broken otherwise). A person looks at each and says so in FILE, in "remark".
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "benchmarks")]

from provenance import write  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "evenpipe"
AREAS: dict[str, tuple[str, ...]] = {
    "schedule rules": ("schedule",),
    "vocabulary passes": ("vocabulary",),
    "runtime": ("runtime", "communication", "host", "layers"),
    "replicas": ("parallel", "optimizers"),
    "tensor cuts": ("tensor", "model"),
    "attention": ("attention",),
    "experts": ("experts",),
    "checkpoints": ("checkpoints", "train"),
    "estimates": ("memory", "costs", "simulate", "plan"),
    "messages": (),  # of all folders: what an InputError or a RunError says, and when it is raised
}
ERRORS = ("InputError", "RunError")
SWAPS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
}
"""Operators: their text, and what they become."""
LIMIT_SECONDS = 1800.0


@dataclass(frozen=True)
class Edit:
    """Replaces some bytes of a file."""

    start: int
    end: int
    text: str


@dataclass
class Mutation:
    number: int
    area: str
    file: str
    """Below `src/evenpipe`."""
    line: int
    before: str
    after: str
    """The changed line, or lines."""
    found_by: str | None = None
    """The first test that fails; empty where none does."""
    seconds: int = 0
    remark: str = ""


# --- places that can be damaged ---------------------------------------------------------------------------------------


def places(source: str, only_errors: bool) -> list[Edit]:
    """Every edit of a file. Some leave no valid Python."""
    content = source.encode()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))

    def span(node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, ast.expr | ast.stmt) and node.end_lineno is not None
        assert node.end_col_offset is not None
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def between(left: ast.expr, right: ast.expr, operator: type) -> Iterator[Edit]:
        text, other = SWAPS[operator]
        begin, end = span(left)[1], span(right)[0]
        gap = re.sub(rb"#[^\n]*", lambda comment: b" " * len(comment[0]), content[begin:end])
        if (place := re.search(rb"(?<![\w<>=!*/])" + re.escape(text.encode()) + rb"(?![\w<>=!*/])", gap)) is not None:
            yield Edit(begin + place.start(), begin + place.end(), other)

    def of_expression(node: ast.AST) -> Iterator[Edit]:
        match node:
            case ast.Compare(left=left, ops=[operator], comparators=[right]) if type(operator) in SWAPS:
                yield from between(left, right, type(operator))
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in SWAPS:
                if not any(isinstance(side, ast.JoinedStr) or is_text(side) for side in (left, right)):
                    yield from between(left, right, type(operator))
            case ast.BoolOp(op=operator, values=[left, right, *_]):
                yield from between(left, right, type(operator))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield Edit(span(node)[0], span(operand)[0], "")
            case ast.Constant(value=int() as value) if not isinstance(value, bool):
                yield Edit(*span(node), str(value + 1))
            case ast.IfExp(test=test) | ast.If(test=test) | ast.While(test=test) if not isinstance(test, ast.UnaryOp):
                begin, end = span(test)
                yield Edit(begin, end, f"not ({content[begin:end].decode()})")
            case ast.Expr(value=ast.Call()) | ast.AugAssign():
                yield Edit(*span(node), "pass")

    def of_error(node: ast.AST) -> Iterator[Edit]:
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            name = node.exc.func.id if isinstance(node.exc.func, ast.Name) else ""
            if name in ERRORS:
                yield Edit(*span(node), "pass")
                for part in ast.walk(node.exc):
                    if isinstance(part, ast.FormattedValue):
                        yield Edit(*span(part.value), "0")

    found = []
    for node in _walked(ast.parse(source)):
        found += of_error(node) if only_errors else of_expression(node)
    return found


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _walked(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but annotations, which nothing evaluates, and what only messages are made of."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                yield from _walked(child)


def _is_python(content: bytes) -> bool:
    try:
        ast.parse(content)
    except SyntaxError:
        return False
    return True


def changed(content: bytes, edit: Edit) -> bytes:
    return content[: edit.start] + edit.text.encode() + content[edit.end :]


def draw(seed: int, number: int) -> tuple[Mutation, bytes, str]:
    """A mutation, the damaged file, and the block of statements in which it is."""
    area = list(AREAS)[number % len(AREAS)]
    dice = random.Random(f"{seed} {number}")
    folders = [PACKAGE / room for room in AREAS[area]] or [PACKAGE]
    files = sorted(path for folder in folders for path in folder.rglob("*.py"))
    while True:
        path = dice.choices(files, [file.stat().st_size for file in files])[0]
        source = path.read_text(encoding="utf-8")
        if edits := places(source, area == "messages"):
            edit, content = dice.choice(edits), source.encode()
            if _is_python(damaged := changed(content, edit)):
                break
    first = content.rfind(b"\n", 0, edit.start) + 1

    def lines(whole: bytes, end: int) -> str:
        last = whole.find(b"\n", end)
        return whole[first : last if last >= 0 else len(whole)].decode().strip()

    return (
        Mutation(
            number=number,
            area=area,
            file=path.relative_to(PACKAGE).as_posix(),
            line=content[: edit.start].count(b"\n") + 1,
            before=lines(content, edit.end),
            after=lines(damaged, edit.start + len(edit.text.encode())),
        ),
        damaged,
        block_at(path, source, content[: edit.start]),
    )


# --- which test files execute which blocks ----------------------------------------------------------------------------

RECORDER = """
import os

_seen = set()
_file = os.open(os.environ["EVENPIPE_REACH"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def reached(block):
    if block not in _seen:
        _seen.add(block)
        os.write(_file, block.encode() + b"\\n")
"""
FOLDERS = ("src", "tests", "examples", "docs", "benchmarks", "tools", ".ci")
FILES = ("pyproject.toml", "constraints.txt", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "mkdocs.yml")
"""What tests read."""
UNTOUCHED = ("vocabulary/kernels/rows.py",)
"""Triton reads the source of these; whoever executes another block of the folder is taken to execute them."""


def blocks(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    """Lists of statements that are executed from the first on: of the module, of functions and of branches."""
    yield tree.body
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef):
            for name in ("body", "orelse", "finalbody"):
                statements = getattr(node, name, None)
                if isinstance(statements, list) and statements:
                    yield statements


def block_name(path: Path, statements: list[ast.stmt]) -> str:
    return f"{path.relative_to(PACKAGE).as_posix()}:{statements[0].lineno}"


def _begin(statements: list[ast.stmt]) -> tuple[int, int]:
    return statements[0].lineno, statements[0].col_offset


def block_at(path: Path, source: str, before: bytes) -> str:
    """The innermost block of a file that has the place after the bytes `before`."""
    place = before.count(b"\n") + 1, len(before) - (before.rfind(b"\n") + 1)

    def has(statement: ast.stmt) -> bool:
        assert statement.end_lineno is not None and statement.end_col_offset is not None
        begin = statement.lineno, statement.col_offset
        return begin <= place < (statement.end_lineno, statement.end_col_offset)

    tree = ast.parse(source)
    around = [statements for statements in blocks(tree) if any(map(has, statements))]
    return block_name(path, max(around, key=_begin, default=tree.body))


def recording(path: Path) -> str:
    """The source of a file that calls `reached` at the beginning of each block."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for statements in list(blocks(tree)):
        call = ast.parse(f"_reached({block_name(path, statements)!r})").body
        if statements is tree.body:
            call = ast.parse("from evenpipe._reach import reached as _reached").body + call
        first = 0
        while first < len(statements) and _must_stay_first(statements[first]):
            first += 1
        statements[first:first] = call
    return ast.unparse(ast.fix_missing_locations(tree))


def _must_stay_first(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.ImportFrom):
        return statement.module == "__future__"
    return isinstance(statement, ast.Expr) and is_text(statement.value)


def source_digest() -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(PACKAGE.rglob("*.py")))).hexdigest()


@dataclass
class Reach:
    """Blocks that test files execute."""

    source: str
    """`source_digest` of what was recorded."""
    files: dict[str, list[str]]
    """By test file, as `tests/schedule/test_check.py`."""
    always: list[str]
    """Test files that could not be recorded, or that read the source instead of executing it."""

    def of(self, block: str) -> list[str]:
        package = block.rpartition("/")[0]
        return [
            file
            for file, executed in self.files.items()
            if file in self.always
            or block in executed
            or (block.startswith(UNTOUCHED) and any(other.startswith(package) for other in executed))
        ]


def record(options: list[str]) -> Reach:
    """Run each test file alone on a copy of the source that notes what is executed."""
    with tempfile.TemporaryDirectory(prefix="evenpipe-reach-") as name:
        copy = Path(name)
        files = _copied(copy)
        package = copy / "src" / "evenpipe"
        for path in sorted(PACKAGE.rglob("*.py")):
            relative = path.relative_to(PACKAGE)
            if relative.as_posix() not in UNTOUCHED:
                (package / relative).write_text(recording(path))
        (package / "_reach.py").write_text(RECORDER)

        def executed(file: str) -> tuple[str, list[str], bool]:
            notes = copy / f"{file.replace('/', '.')}.reach"
            environment = _environment(copy) | {"EVENPIPE_REACH": str(notes)}
            command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, file]
            process = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
            print(f"{file} {process.stdout.strip().rpartition(chr(10))[2]}", flush=True)
            blocks = sorted(set(notes.read_text().split())) if notes.exists() else []
            return file, blocks, process.returncode in (0, 5)

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            recorded = list(pool.map(executed, files))
    return Reach(
        source_digest(),
        {file: blocks for file, blocks, _ in recorded},
        [file for file, blocks, passed in recorded if not blocks or not passed],
    )


# --- running tests ----------------------------------------------------------------------------------------------------


def _copied(copy: Path) -> list[str]:
    """Copy the source and the tests; return the test files below `copy`."""
    for part in FOLDERS:
        shutil.copytree(ROOT / part, copy / part)  # with compiled files, which stay valid
    for part in FILES:
        shutil.copy(ROOT / part, copy / part)
    return [path.relative_to(copy).as_posix() for path in sorted((copy / "tests").rglob("test_*.py"))]


def _environment(copy: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def run(mutation: Mutation, damaged: bytes, options: list[str], reaching: list[str] | None) -> str:
    """Run tests on a damaged copy of the source; return the first that fails, or an empty text.

    `reaching` are the test files to run (default: all).
    """
    with tempfile.TemporaryDirectory(prefix="evenpipe-mutation-") as name:
        copy = Path(name)
        files = _copied(copy)
        (copy / "src" / "evenpipe" / mutation.file).write_bytes(damaged)
        if reaching is not None:
            files = [file for file in files if file in reaching]
        own = [file for file in files if file.startswith(f"tests/{mutation.file.split('/')[0]}/")]
        ends = time.monotonic() + LIMIT_SECONDS
        for chosen in (own, [file for file in files if file not in own]):
            if chosen and (failure := _first_failure(copy, chosen, options, ends - time.monotonic())):
                return failure
    return ""


def _first_failure(copy: Path, files: list[str], options: list[str], seconds: float) -> str:
    pytest = [sys.executable, "-m", "pytest", "-n", "auto", "--dist", "loadfile", "--no-header"]
    process = subprocess.Popen(
        [*pytest, "-x", *options, *files],
        cwd=copy,
        env=_environment(copy),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return f"no end in {LIMIT_SECONDS:.0f} s"
    if process.returncode in (0, 5):  # 5: no test is left
        return ""
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return failed[0] if failed else f"pytest ended with {process.returncode}: {output[-300:]}"


# --- the figures ------------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100, help="how many mutations (default 100)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="NUMBER", help="this mutation alone")
    parser.add_argument("--options", default="--quick --seed 0", help='of pytest (default "--quick --seed 0")')
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--reach", type=Path, metavar="REACH", help="run only test files that execute the damage")
    parser.add_argument("--list", action="store_true", help="show the mutations and run nothing")
    options = parser.parse_args(arguments)
    known = _read(options.json, options.seed)
    pytest_options = options.options.split()
    reach = _read_reach(options.reach, pytest_options) if options.reach is not None else None
    for number in range(options.runs) if options.only is None else [options.only]:
        drawn, damaged, block = draw(options.seed, number)
        mutation = known.setdefault(number, drawn)
        if options.list:
            print(f"{number} {mutation.area}: {mutation.file}:{mutation.line}\n- {mutation.before}\n+ {mutation.after}")
            continue
        if mutation.found_by is not None:
            continue
        started = time.monotonic()
        reaching = reach.of(block) if reach is not None else None
        mutation.found_by = run(mutation, damaged, pytest_options, reaching)
        mutation.seconds = round(time.monotonic() - started)
        what = mutation.found_by or "MISSED"
        print(f"{number} {mutation.file}:{mutation.line} {mutation.seconds} s: {what}", flush=True)
        if not mutation.found_by:
            print(f"- {mutation.before}\n+ {mutation.after}", flush=True)
        if options.json is not None:
            _write(options.json, options.seed, known)
    return 0


def _read(path: Path | None, seed: int) -> dict[int, Mutation]:
    if path is None or not path.exists():
        return {}
    content = json.loads(path.read_text())
    if content["seed"] != seed:
        raise SystemExit(f"{path} has the mutations of --seed {content['seed']}")
    return {one["number"]: Mutation(**one) for one in content["mutations"]}


def _read_reach(path: Path, options: list[str]) -> Reach:
    is_new = not path.exists()
    if is_new:
        path.write_text(json.dumps(asdict(record(options))))
    reach = Reach(**json.loads(path.read_text()))
    if reach.source != source_digest():
        raise SystemExit(f"{path} was recorded with another state of src/; remove it to record it again")
    if is_new:  # a test that fails in any case would find every damage
        with tempfile.TemporaryDirectory(prefix="evenpipe-sound-") as name:
            _copied(Path(name))
            if failure := _first_failure(Path(name), reach.always, options, LIMIT_SECONDS):
                raise SystemExit(f"{failure} fails without any damage")
    return reach


def _write(path: Path, seed: int, known: dict[int, Mutation]) -> None:
    ended = [mutation.found_by for mutation in known.values() if mutation.found_by is not None]
    figures = {
        "seed": seed,
        "found": sum(map(bool, ended)),
        "missed": ended.count(""),
        "mutations": [asdict(known[number]) for number in sorted(known)],
    }
    write(path, figures)


if __name__ == "__main__":
    raise SystemExit(main())
