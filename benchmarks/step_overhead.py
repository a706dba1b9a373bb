"""Time of a training step against that of another version of evenpipe, both on the quickstart's model.

    git worktree add ../before COMMIT
    python benchmarks/step_overhead.py --against ../before [--turns 30 --steps 5] [--json FILE]

Both versions start their processes once and take turns, a few steps each, so that a change in the machine's speed
meets both; the one that waits does not compute. Printed are the median step of each, and the median and the quartiles
of the ratio turn by turn. A third pipeline, of this version with a hook on each of its parameters, shows what hooks
cost, and a second pipeline of the other version how far two of the same are apart.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROCESSES, MICROBATCHES, SEQUENCE, VOCABULARY = 4, 4, 256, 8192
WARM_UP_STEPS = 5


class Version:
    """A pipeline of one version in processes of its own, which runs as many steps as it is told."""

    def __init__(self, root: Path, hooks: bool, folder: Path) -> None:
        self._orders, self._answers = folder / "orders", folder / "answers"
        for pipe in (self._orders, self._answers):
            os.mkfifo(pipe)
        environment = {**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--serve", str(folder), *(["--hooks"] if hooks else [])]
        self._process = subprocess.Popen(command, env=environment)
        self._writer, self._reader = self._orders.open("w"), self._answers.open()

    def steps(self, count: int) -> float:
        """Run so many steps; return the seconds of one."""
        self._writer.write(f"{count}\n")
        self._writer.flush()
        return float(self._reader.readline()) / count

    def close(self) -> None:
        self._writer.write("0\n")
        self._writer.close()
        self._process.wait()


def serve(folder: str, hooks: bool) -> None:
    """On every process: run steps as the first one is told."""
    import torch
    from transformers import LlamaConfig

    import evenpipe

    settings = tomllib.loads((ROOT / "examples" / "quickstart.toml").read_text())["model"]["config"]
    pipeline = evenpipe.Pipeline(
        LlamaConfig(vocab_size=VOCABULARY, **settings),
        schedule="1f1b",
        vocabulary="balanced",
        microbatches=MICROBATCHES,
    )
    for parameter in pipeline.parameters() if hooks else ():
        parameter.register_hook(lambda gradient: None)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-4)
    is_first = pipeline.device == 0
    torch.manual_seed(0)
    batch = torch.randint(0, VOCABULARY, (MICROBATCHES, SEQUENCE)) if is_first else None
    orders, answers = (
        (Path(folder) / name).open(mode) if is_first else None for name, mode in (("orders", "r"), ("answers", "w"))
    )
    while True:
        text = pipeline.from_the_first(orders.readline() if orders is not None else None, "the number of steps")
        assert text is not None
        if not int(text):
            return
        started = time.perf_counter()
        for _ in range(int(text)):
            pipeline.step(batch)
            pipeline.clip_grad_norm_(1.0)
            optimizer.step()
            pipeline.zero_grad()
        if answers is not None:
            answers.write(f"{time.perf_counter() - started}\n")
            answers.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="a checkout of the other version")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--steps", type=int, default=5, help="steps of a turn (default 5)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--hooks", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        import evenpipe

        evenpipe.launch(serve, options.serve, options.hooks, processes=PROCESSES, torch_device="cpu")
        return
    if options.against is None:
        parser.error("--against: expected the folder of another version")
    with tempfile.TemporaryDirectory() as folder:
        versions = {}
        for name, root, hooks in (
            ("before", options.against, False),
            ("now", ROOT, False),
            ("hooks", ROOT, True),
            ("before again", options.against, False),
        ):
            (Path(folder) / name).mkdir()
            versions[name] = Version(root.resolve(), hooks, Path(folder) / name)
        for version in versions.values():
            version.steps(WARM_UP_STEPS)
        seconds: dict[str, list[float]] = {name: [] for name in versions}
        for turn in range(options.turns):
            for name in list(versions) if turn % 2 == 0 else reversed(list(versions)):
                seconds[name].append(versions[name].steps(options.steps))
        for version in versions.values():
            version.close()
    report(seconds, options)


def report(seconds: dict[str, list[float]], options: argparse.Namespace) -> None:
    results: dict[str, Any] = {"turns": options.turns, "steps": options.steps, "milliseconds": {}, "ratio": {}}
    for name, times in seconds.items():
        results["milliseconds"][name] = round(1e3 * statistics.median(times), 1)
    for name in list(seconds)[1:]:
        ratios = [new / old for new, old in zip(seconds[name], seconds["before"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        results["ratio"][name] = {"quartiles": [round(low, 4), round(high, 4)], "median": round(middle, 4)}
        print(
            f"{name}: {results['milliseconds'][name]} ms, {middle:.4f} times before (quartiles {low:.4f}, {high:.4f})"
        )
    print(f"before: {results['milliseconds']['before']} ms")
    if options.json is not None:
        from provenance import write

        write(options.json, results)


if __name__ == "__main__":
    main()
