"""Wrong input of every kind, over all commands: exit code 2, one sentence that says what is wrong, nothing written."""

from __future__ import annotations

import json
import shlex
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from small_run import TOML

from evenpipe.cli.main import MOST, main
from evenpipe.costs.hardware import KNOWN, hardware_to_toml
from evenpipe.schedule import plan_order

MODEL = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4}
MODEL |= {"num_attention_heads": 2, "vocab_size": 300}
TRACE = """{
"format": "evenpipe trace", "version": 2, "about": {"schedule": "1f1b"}, "placement": [0], "microbatches": 1,
"vocabulary": "first-last", "forward_only": false, "costs": null,
"devices": [{
  "row": "0F0,0B0", "start": 0, "end": 2, "clock": {"offset": 0, "drift": 0, "uncertainty": 0},
  "passes": [["0F0", 0, 1, 0], ["0B0", 1, 2, 0]], "waits": [], "transfers": []
}]}"""
TOO_LATE = TRACE.replace('"end": 2', '"end": 1.7e308')
ESCAPE = "\x1b[31m"
HARDWARE = hardware_to_toml(KNOWN["H100-80G"])


FILES: dict[str, str] = {
    "text.txt": "def f(x):\n    return x\n" * 100,
    "config.toml": TOML,
    "model.json": json.dumps(MODEL),
    "model/config.json": json.dumps(MODEL),
    "costs.toml": "F = 1\nB = 2\n",
    "order.csv": "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n",
    "vocabulary.csv": plan_order("1f1b", 2, 2, "vocab-2").to_csv(),
    "transfers.csv": "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n",
    "trace.json": TRACE,
    "kept.toml": "# of another day\n",
    "kept.svg": "<svg/>",
    "empty/.hidden": "",
    "folder.svg/.hidden": "",
}

SIMULATE = "simulate --schedule 1f1b --devices 2 --microbatches 2"
CONTENTS: dict[str, list[tuple[str | bytes, ...]]] = {
    # command, which reads the file that it names last: contents of that file, words of the sentence
    "check bad.csv": [
        ("", "bad.csv", "the file is empty"),
        (bytes(range(256)), "bad.csv", "not UTF-8 at byte 128"),
        ("0F0\x1b]0;title\x07,0B0\n", "row 1, column 1", "'0F0\\x1b]0;title\\x07' is not a pass"),
    ],
    f"check {ESCAPE}.csv": [("0X0\n", "\\x1b[31m.csv: row 1")],
    "simulate --schedule bad.csv": [("0F0,0B0,0B0\n1F0,1B0,1B0\n", "bad.csv: the schedule has", "faults")],
    "train config.toml pipeline.schedule=bad.csv": [("0F0,0F1,0O0,0L0,0B0,0B1\n1F0,1B0,1F1,1B1\n", "1 fault")],
    f"{SIMULATE} --costs bad.toml": [
        ("", "bad.toml", "F is missing"),
        ("F = = 1\n", "bad.toml is not TOML", "line 1"),
        ("F = 1\nB = -2\n", "bad.toml", "costs.B is -2; it must be a number of at least 0"),
        ('F = 1\nB = 2\n[links]\n"F:0-1" = {latency = 1}\n', 'costs.links has no field "F:0-1"; known: p2p'),
    ],
    f"{SIMULATE} --costs bad.json": [
        ("", "bad.json is not JSON"),
        ('{"F": 1, "B": "\\ud800"}', "bad.json", "an invalid character", "\\ud800"),
    ],
    "draw bad.json": [
        ("", "bad.json is not JSON"),
        (TOO_LATE, "devices[0].end is 1.7e+308; it must be a number of seconds"),
        (TRACE.replace("[0]", '["0"]'), 'placement[0] is "0"; it must be an integer'),
    ],
    "profile --from bad.json": [(TOO_LATE, "bad.json: devices[0].end is 1.7e+308")],
    "profile -o kept.toml --from bad.json": [("", "bad.json is not JSON")],
    "explain model.json --gpus 4 --hardware bad.toml": [
        (HARDWARE.replace('name = "H100-80G"', "name = [1]"), "hardware.name is [1]; it must be text"),
        (
            HARDWARE.replace('torch_device = "cuda"', 'torch_device = "tpu"'),
            'hardware.torch_device is "tpu"; it must be one of cuda, cpu',
        ),
        (HARDWARE.replace("units = 1\n", "units = 1e300\n"), "hardware.units is 1e+300; it must be a finite number"),
        (
            HARDWARE.replace("[peak_flops]", "[peaks]"),
            'hardware has no field "peaks"; known: name',
            'did you mean "peak_flops"?',
        ),
    ],
    "estimate --model bad.json": [
        ("", "bad.json"),
        (json.dumps({"model_type": "lama"}), "'bad.json'", "model type `lama`"),
    ],
    "init --data bad.txt": [("", '--data is "bad.txt"', "empty; expected text")],
    "train bad.toml": [
        ("", "model needs either source or architecture"),
        (TOML + '"a\\u001b[31m\\nb" = 1\n', "output.a\\x1b[31m\\nb is no field"),
    ],
    "train config.toml pipeline.costs=bad.toml": [("", "bad.toml", "F is missing")],
}

ARGUMENTS: dict[str, list[tuple[str, ...]]] = {
    # beginning of the command: its other arguments, words of the sentence
    "": [
        ("--unknown", "evenpipe has no argument --unknown; evenpipe --help lists all options"),
        ("--", "the command is missing; evenpipe --help"),
        ("schedule chek", "there is no command 'chek', did you mean check? evenpipe schedule --help"),
        ("tarin config.toml", "there is no command 'tarin', did you mean train?"),
        ("xyz", "there is no command 'xyz', known: explain, init, train,"),
        ("check", "FILE.csv is missing", "evenpipe check --help"),
        ("schedule check", "FILE.csv is missing", "evenpipe schedule check --help"),
        ("train", "CONFIG.toml is missing; evenpipe train --help"),
        ("explain model.json", "--gpus is missing; evenpipe explain --help"),
        ("search", "--devices is missing"),
        ("draw", "--schedule is missing; it must be a name or FILE.csv"),
    ],
    "check": [
        (".", ". cannot be read", "Is a directory"),
        ("''", "the name of a file is empty"),
        ("'a\nb.csv'", "a\\nb.csv cannot be read", "No such file"),
        ("\udcff.csv", "'\\udcff.csv' is not UTF-8"),
        ("a\0b.csv", "'a\\x00b.csv'", "contains NUL"),
        (f"order.csv --{ESCAPE}", "check has no argument --\\x1b[31m; evenpipe check --help lists all options"),
        (f"order.csv {ESCAPE}", "check has no argument \\x1b[31m; evenpipe check --help"),
        ("order.csv --bytes-limit=-1", "--bytes-limit is -1; it must be a finite number above 0"),
        ("order.csv --bytes-limit 1", "--costs is missing; --bytes-limit needs its sizes"),
        ("order.csv --max-in-flight 1,2,3", "--max-in-flight has 3 numbers; it must have one, or 2, one per device"),
    ],
    "simulate": [
        ("--schedule zvb", 'schedule is "zvb"; it must be one of gpipe, 1f1b', 'did you mean "zbv"?'),
        ("--schedule costs.json", '--schedule is "costs.json"; it must be the name of a schedule, or', "ends in .csv"),
        ("--schedule order.csv --devices 3", "'order.csv' is for 2 devices", "not 3"),
        ("--schedule transfers.csv --vocabulary vocab-1", "transfers.csv", "has transfers"),
        ("--schedule 1f1b", "--devices is missing; it must be a whole number of at least 1"),
        ("--schedule 1f1b --devices 1000000000 --microbatches 2", "2000000000", "too many to simulate"),
    ],
    "simulate --devices 2 --microbatches 2": [
        ("", "--schedule"),
        ("--compare 1f1b,zbv --sort x", '--sort is "x"; it must be one of lost, step, span, bubble,'),
        ("--schedule 1f1b,zbv", "it must be one schedule; --compare 1f1b,zbv takes several"),
        ("--schedule dualpipe-v --slices 2", "must be passes of their own"),
    ],
    SIMULATE: [
        ("--microbatches 0", "--microbatches is 0; it must be at least 1"),
        ("--max-in-flight many", '--max-in-flight is "many"; it must be a number, or one per device'),
        ("--vocabulary vocab-3", 'vocabulary is "vocab-3"; it must be one of balanced', 'did you mean "vocab-2"?'),
        ("--vocabulary ,", '--vocabulary is ","; it must be one or several of first-last'),
        ("--sort step", "--sort is given, but there is only one schedule", "--compare"),
        ("--edges 0-1", "'0-1' is not an edge"),
    ],
    "draw": [
        ("nowhere.json", "nowhere.json cannot be read"),
        ("trace.json --unit-seconds 1e308", "--unit-seconds is 1e+308", "1e+100"),
        ("trace.json --devices 2", "--devices is given", "leave one of them out"),
        ("trace.json --reshard", "--reshard is given", "leave one of them out"),
    ],
    "draw --schedule 1f1b --devices 2 --microbatches 2": [
        ("-o /proc/x.svg", "/proc/x.svg cannot be written"),
        ("-o folder.svg", "folder.svg cannot be written", "Is a directory"),
        (f"-o {ESCAPE}/x.svg", "there is no folder '\\x1b[31m'"),
        ("-o x.pdf", "'x.pdf' cannot be drawn", ".html", ".svg", ".png", ".json"),
        ("-o kept.svg --costs nowhere.toml", "nowhere.toml cannot be read"),
    ],
    "search --devices 2 --microbatches 2": [
        ("-o 'a\nb.txt'", '"a\\nb.txt"; it must end in .csv'),
        ("--placement y", 'placement is "y"; it must be linear, looped, v'),
        ("--placement v --stages-per-device 3", "placement 'v' has 2 stages per device, not 3"),
        ("--seconds 0", "--seconds is 0; it must be a finite number above 0"),
        ("--seed", "--seed has no value; evenpipe search --help lists all options"),
        ("--split-backward=1", "--split-backward takes no value; "),
        ("--vocabulary interlaced", "search knows the vocabulary modes"),
        ("--devices 8 --microbatches 200 --split-backward --max-in-flight 8", "small cases", "12800 passes"),
    ],
    "estimate --model": [
        ("nowhere.json", "the model is 'nowhere.json', but there is no such file"),
        ("nowhere/x", "model = 'nowhere/x' is neither a folder", "nor a model that the hub"),
        ("empty", "model = 'empty' is neither a folder with a config.json"),
    ],
    "estimate --model model.json": [
        ("--gpu-memory 1000000000000000000000000000000B", "--gpu-memory", "less than 8 EiB"),
        ("--gpu-memory 80", "--gpu-memory is '80', which has no unit; it must be a number and a unit", "as in 80GiB"),
        ("--sequence 0", "--sequence is 0; it must be at least 1"),
        ("--pp 33", "33 with 33 stages, but the model has 4 layers"),
        ("--zero 4", "--zero is 4; it must be one of 0, 1, 2, 3"),
        ("--layers-per-stage a", '--layers-per-stage is "a"; it must be one or several whole numbers such as 1,2,4'),
        ("-o x.pdf", '--output is "x.pdf"; it must end in .svg'),
        ("--checkpointing full/0", '--checkpointing is "full/0"; it must be none, selective or full, or one of them'),
        ("--gpus 8", "estimate has no argument --gpus, did you mean --"),
    ],
    "estimate --model config.toml": [("--pp 4", "--pp is for models given by name", "config.toml has its own")],
    "explain": [
        ("model.json --gpus 0", "--gpus is 0; it must be at least 1, at most 100000"),
        ("model.json --gpus 1000000000", "--gpus is 1000000000; it must be at least 1, at most 100000"),
    ],
    "explain model.json --gpus 4": [
        ("--hardware H100", 'hardware is "H100"; it must be one of A100-40G', 'did you mean "H100-80G"?'),
        ("--tp 3", "tp"),
        ("-o picture.pdf", "picture.pdf"),
    ],
    "plan": [
        ("--model empty --gpus 4", "neither a folder with a config.json nor a model that the hub gives out"),
        ("--model model --gpus four", '--gpus is "four"; it must be a whole number of at least 1'),
    ],
    "plan --model model --gpus 4 --no-cache --workers 1": [
        ("--vocabulary x", 'vocabulary is "x"; it must be one of balanced, first-last'),
        ("--best 0", "--best is 0; it must be at least 1"),
        ("--batch -3", "--batch is -3; it must be at least 1"),
        ("--minutes 0", "--minutes is 0; it must be above 0"),
        ("-o kept.toml --batch 0", "--batch is 0; it must be at least 1"),
    ],
    "profile": [
        ("", "either CONFIG.toml or --from TRACE.json, but neither is given"),
        ("config.toml --steps 0", "--steps is 0; it must be at least 1"),
        ("config.toml --from trace.json", "either CONFIG.toml or --from TRACE.json, but both are"),
        ("--hardware --processes 0", "--processes is 0; it must be at least 1"),
        ("--from trace.json -o /proc/x.toml", "/proc/x.toml cannot be written"),
    ],
    "init": [
        ("--data modl.json", '--data is "modl.json", but there is no such file or folder; did you mean "model.json"?'),
        ("--data folder.svg --example zbv", "--example is a complete configuration"),
        ("--processes 0", "--processes is 0; it must be at least 1"),
        ("--example zvb", '--example is "zvb"', "must be one of all, experts, quickstart", 'did you mean "zbv"?'),
        ("-o kept.toml", '"kept.toml" exists already', "-o names another one"),
    ],
    "export": [
        ("run", "--output is missing; evenpipe export --help"),
        ("empty -o out", "'empty' has no checkpoint", "expected a checkpoint's folder"),
    ],
    "generate": [
        ("", "FOLDER is missing; evenpipe generate --help"),
        ("empty", '"empty" is not a model folder', "config.json"),
        ("empty --seed x", '--seed is "x"; it must be a whole number'),
    ],
    "train": [
        (f"{ESCAPE}.toml", '"\\x1b[31m.toml" cannot be read'),
    ],
    "train config.toml": [
        ("output.folder=\udcff", "\\udcff", "not UTF-8"),
        (f"training.steps={'9' * 5000}", "training.steps is", "must be an integer"),
        ("optimizer.learning_rate=1e309", "optimizer.learning_rate is inf", "finite number"),
        ("optimizer.learning_rate=1e200", "optimizer.learning_rate is 1e+200", "below 1e+100"),
        ("pipeline.timeout_seconds=1e50", "pipeline.timeout_seconds is 1e+50", "at most 1e+09"),
        ("tokenizer.vocabulary_size=4000000000", "tokenizer.vocabulary_size is 4000000000", "from 257 to 10000000"),
        ("pipeline.microbatches=1000000000", "order of 2000000000 forwards"),
        ("'pipeline.schedule={a = 1}'", "pipeline.schedule"),
        ("training.callbacks=nowhere:Mine", "training.callbacks[0]", "there is no module nowhere"),
        ("steps=3", 'the override is "steps=3"; it must be written section.key=value; did you mean training.steps'),
        ("offload.host_memory=1000000000000000000000000000000B", "offload.host_memory", "less than 8 EiB"),
        ("offload.directory=/proc/x", 'offload.directory is "/proc/x"', "an existing directory"),
        ("output.folder=/proc/x", 'output.folder is "/proc/x"', "a folder that can be written"),
        ("output.export_folder=/proc/x/y", "output.export_folder", "a folder that can be written"),
        ("checkpoint.folder=/proc/x", 'checkpoint.folder is "/proc/x"', "a folder that can be written"),
        ("model.config.hidden_size=0", "hidden_size is 0", "from 1 to 1048576"),
        ("tokenizer.source=folder.svg", "must be left out when tokenizer.source is given"),
        ("--steps 3", "no argument --steps; fields", "without dashes: training.steps=3"),
        ("--learning-rate=1e-3", "no argument --learning-rate=1e-3; ", ": optimizer.learning_rate=1e-3"),
        ("--data.sequence-length 8", "data.sequence_length=8"),
        ("--source", "model.source=VALUE or tokenizer.source=VALUE"),
        ("--forse", "no argument --forse, did you mean --force?"),
        ("--trace output.tensorboard=false training.steps=many", 'training.steps is "many"'),
        ("--trace text.txt/x", 'output.trace_folder is "text.txt/x"', "Not a directory"),
    ],
}
WITH_JSON = ("simulate", "check", "search", "estimate", "explain", "plan")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder to work in, with all these files, and nobody who could start processes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    for name, content in FILES.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(content)
    launcher: Any = types.ModuleType("evenpipe.processes.launcher")
    launcher.prepare_launch = lambda *modules: None
    launcher.launch = None
    monkeypatch.setitem(sys.modules, "evenpipe.processes.launcher", launcher)


def fault_of(arguments: list[str], words: Iterable[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return what is wrong with how a command refuses its arguments; "" if nothing is."""
    before = sorted(Path().rglob("*"))
    code = main(arguments)
    shown = capsys.readouterr()
    sentence, *others = shown.err.removeprefix("reading 1 file\n").splitlines() or [""]
    faults = [f"{word!r} is missing" for word in words if word not in sentence]
    if code != 2 or shown.out or not sentence.startswith("evenpipe: "):
        faults.append(f"exit code {code}, output {shown.out!r}")
    if not sentence.isprintable() or len(sentence) > MOST or (others and " fault" not in sentence):
        faults.append("this is not one sentence")
    if sorted(Path().rglob("*")) != before:
        faults.append("files have changed")
    return f"{arguments}: {shown.err!r}: {'; '.join(faults)}" if faults else ""


def test_wrong_files(capsys: pytest.CaptureFixture[str]) -> None:
    faults = []
    for command, contents in CONTENTS.items():
        file = Path(command.replace("=", " ").split()[-1])
        for content, *words in contents:
            file.write_bytes(content if isinstance(content, bytes) else content.encode())
            faults.append(fault_of(command.split(), words, capsys))
        file.unlink()
    faults = list(filter(None, faults))
    assert not faults, "\n".join(faults)


def test_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    """Every other command that can print JSON is asked to."""
    cases = [(command, *case) for command, others in ARGUMENTS.items() for case in others]
    faults = []
    for number, (command, others, *words) in enumerate(cases):
        arguments = [*command.split(), *shlex.split(others)]
        json_too = number % 2 and arguments[0] in WITH_JSON
        faults.append(fault_of([*arguments, *(["--json"] if json_too else [])], words, capsys))
    faults = list(filter(None, faults))
    assert not faults, "\n".join(faults)
    assert Path("kept.svg").read_text() == "<svg/>" and Path("kept.toml").read_text() == FILES["kept.toml"]
