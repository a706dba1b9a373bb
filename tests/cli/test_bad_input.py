"""Wrong input of every kind, over all commands: exit code 2, one sentence that says what is wrong, nothing written."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest
from small_run import TOML

from evenpipe.cli.main import MOST, main
from evenpipe.costs.hardware import KNOWN, hardware_to_toml

MODEL = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "vocab_size": 300,
}

TRACE = {
    "format": "evenpipe trace",
    "version": 1,
    "about": {"schedule": "1f1b"},
    "placement": [0],
    "microbatches": 1,
    "barriers": 0,
    "forward_only": False,
    "costs": None,
    "devices": [
        {
            "row": "0F0,0B0",
            "start": 0,
            "end": 2,
            "clock": {"offset": 0, "drift": 0, "uncertainty": 0},
            "passes": [["0F0", 0, 1, 0], ["0B0", 1, 2, 0]],
            "waits": [],
            "transfers": [],
        }
    ],
}

MANY = "9" * 5000
HEX = "0x" + "f" * 5000
DEEP = "[" * 500 + "]" * 500
ESCAPE = "\x1b[31m"

COSTS = "F = 1\nB = 2\n"
HARDWARE = hardware_to_toml(KNOWN["H100-80G"])


def traced(**changes: object) -> str:
    return json.dumps({**TRACE, **changes})


def device(**changes: object) -> str:
    return traced(devices=[{**TRACE["devices"][0], **changes}])


FILES: dict[str, str | bytes] = {
    "text.txt": "def f(x):\n    return x\n" * 100,
    "config.toml": TOML,
    "model.json": json.dumps(MODEL),
    "costs.toml": COSTS,
    "order.csv": "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n",
    "trace.json": traced(),
    "empty": b"",
    "kept.toml": "# of another day\n",
    "kept.svg": "<svg/>",
    "lama.json": json.dumps({"model_type": "lama"}),
    "empty.csv": b"",
    "empty.toml": b"",
    "empty.json": b"",
    "binary.csv": bytes(range(256)),
    "binary.toml": b"\x7fELF\x00\x01" + bytes(range(256)),
    "binary.json": b"\x7fELF\x00\x01" + bytes(range(256)),
    f"{ESCAPE}.csv": "0F0\x1b]0;title\x07,0B0\n",
    "title.csv": "0F0\x1b]0;title\x07,0B0\n",
    "digits.csv": f"0F{MANY},0B0\n",
    "parts.csv": "(" + ";".join(["0F0"] * 3000) + ")OVERLAP_F_X\n",
    "digits.toml": f"F = {MANY}\nB = 2\n",
    "hex.toml": f"F = {HEX}\nB = 2\n",
    "wide.toml": "F = 1\nB = 100000000000000000000\n",
    "large.toml": "F = 1.7e308\nB = 2\n",
    "beyond.toml": "F = 1e309\nB = 2\n",
    "nan.toml": "F = nan\nB = 2\n",
    "minus.toml": "F = 1\nB = -2\n",
    "name.toml": 'F = 1\nB = "two"\n',
    "table.toml": "F = 1\nB = {a = 1}\n",
    "nested.toml": f"F = 1\nB = {DEEP}\n",
    "key.toml": 'F = 1\nB = 2\n"\\u001b[31m" = 3\n',
    "twice.toml": "F = 1\nF = 1\nB = 2\n",
    "links.toml": "F = 1\nB = 2\n[links]\np2p = 3\n",
    "streams.toml": "F = 1\nB = 2\n[engine]\nstreams = [1]\n",
    "shared.toml": 'F = 1\nB = 2\n[engine]\nshared = [["a"]]\n',
    "twice.json": '{"F": 1, "B": 2, "F": 1}',
    "digits.json": f'{{"F": {MANY}, "B": 2}}',
    "nested.json": f'{{"F": 1, "B": {DEEP}}}',
    "nul.json": '{"F": 1, "B": "\\u0000"}',
    "half.json": '{"F": 1, "B": "\\ud800"}',
    "long.json": json.dumps({"F": 1, "B": ["x"] * 100_000}),
    "t-late.json": device(end=1.7e308),
    "t-digits.json": device(end=1).replace('"end": 1,', f'"end": {MANY},'),
    "t-wide.json": device(end=10**400),
    "t-text.json": device(start="now"),
    "t-row.json": device(row=["0F0"]),
    "t-passes.json": device(passes=[["0F0", 0, 1, 0]]),
    "t-list.json": device(passes=[[["0F0"], 0, 1, 0]]),
    "t-clock.json": device(clock=3),
    "t-stages.json": traced(placement=[0] * 5000),
    "t-device.json": traced(placement=["0"]),
    "t-hop.json": device(row="0F0,0SEND_F0,0B0", transfers=[["0SEND_F0", 1, 1, None]]),
    "t-about.json": traced(about=[1]),
    "t-empty.json": traced(devices=[], placement=[]),
    "t-half.json": traced(about={"schedule": "\ud800"}),
    "h-name.toml": HARDWARE.replace('name = "H100-80G"', "name = [1]"),
    "h-device.toml": HARDWARE.replace('torch_device = "cuda"', 'torch_device = "tpu"'),
    "h-digits.toml": HARDWARE.replace("units = 1\n", f"units = {MANY}\n"),
    "h-large.toml": HARDWARE.replace("units = 1\n", "units = 1e300\n"),
    "h-zero.toml": HARDWARE.replace("units = 1\n", "units = 0\n"),
    "h-peak.toml": HARDWARE.replace("[peak_flops]", "[peaks]"),
    "c-digits.toml": TOML.replace("= 300", f"= {MANY}"),
    "c-hex.toml": TOML.replace("= 300", f"= {HEX}"),
    "c-list.toml": TOML.replace('architecture = "llama"', "architecture = [1]"),
    "c-nested.toml": TOML + f"log_every_steps = {DEEP}\n",
    "c-nul.toml": TOML.replace('"run"', '"r\\u0000n"'),
    "c-key.toml": TOML + '"a\\u001b[31m\\nb" = 1\n',
    "c-table.toml": "model = 3\n",
}

TRAIN = ["train", "config.toml"]
SIMULATE = ["simulate", "--schedule", "1f1b", "--devices", "2", "--microbatches", "2"]
COSTED = [*SIMULATE, "--costs"]
ESTIMATE = ["estimate", "--model", "model.json"]
EXPLAIN = ["explain", "model.json", "--gpus", "4"]
PLAN = ["plan", "--model", "model.json", "--gpus", "4", "--no-cache", "--workers", "1"]
PROFILE = ["profile", "--from", "trace.json"]
SEARCH = ["search", "--devices", "2", "--microbatches", "2"]
DRAW = ["draw", "--schedule", "1f1b", "--devices", "2", "--microbatches", "2", "-o"]

WRONG: list[tuple[list[str], list[str]]] = [
    # arguments, words of the sentence
    # --- schedules
    (["check", "empty.csv"], ["empty.csv", "the file is empty"]),
    (["check", "binary.csv"], ["binary.csv", "not UTF-8 at byte 128"]),
    (["check", "."], [". cannot be read", "Is a directory"]),
    (["check", ""], ["the name of a file is empty"]),
    (["check", "title.csv"], ["row 1, column 1", "'0F0\\x1b]0;title\\x07' is not a pass"]),
    (["check", f"{ESCAPE}.csv"], ["\\x1b[31m.csv: row 1"]),
    (["check", "a\nb.csv"], ["a\\nb.csv cannot be read", "No such file"]),
    (["check", "digits.csv"], ["row 1, column 1", "...' is not a pass"]),
    (["check", "parts.csv"], ["row 1, column 1", "...' is not a pass"]),
    (["check", "x" * 300 + ".csv"], ["cannot be read", "too long"]),
    (["check", "/dev/null/x.csv"], ["cannot be read", "Not a directory"]),
    (["simulate", "--schedule", f"{ESCAPE}"], ["'\\x1b[31m' is unknown"]),
    ([*SIMULATE[:4], "1000000000", "--microbatches", "2"], ["2000000000", "too many to simulate"]),
    # --- arguments that are no text
    (["check", "\udcff.csv"], ["'\\udcff.csv' is not UTF-8"]),
    (["check", "a\0b.csv"], ["'a\\x00b.csv'", "contains NUL"]),
    ([*TRAIN, "output.folder=\udcff"], ["\\udcff", "not UTF-8"]),
    (["generate", "\udcff"], ["'\\udcff' is not UTF-8"]),
    (["check", "order.csv", f"--{ESCAPE}"], ["has no argument --\\x1b[31m"]),
    # --- costs
    ([*COSTED, "empty.toml"], ["empty.toml", "F is missing"]),
    ([*COSTED, "empty.json"], ["empty.json is not JSON"]),
    ([*COSTED, "binary.toml"], ["binary.toml is not UTF-8"]),
    ([*COSTED, "binary.json"], ["binary.json is not UTF-8"]),
    ([*COSTED, "digits.toml"], ["digits.toml is not TOML", "thousands of digits"]),
    ([*COSTED, "digits.json"], ["digits.json is not JSON", "thousands of digits"]),
    ([*COSTED, "hex.toml"], ["hex.toml contains a whole number beyond 64 bits", "too large to show"]),
    ([*COSTED, "wide.toml"], ["whole number beyond 64 bits", "100000000000000000000"]),
    ([*COSTED, "large.toml"], ["F must be at most 1e+100", "1.7e+308"]),
    ([*COSTED, "beyond.toml"], ["F must be a finite number", "inf"]),
    ([*COSTED, "nan.toml"], ["F must be a finite number", "nan"]),
    ([*COSTED, "minus.toml"], ["B must be a finite number of at least 0", "-2"]),
    ([*COSTED, "name.toml"], ["B must be a finite number", "'two'"]),
    ([*COSTED, "table.toml"], ["B must be a finite number", "{'a': 1}"]),
    ([*COSTED, "nested.toml"], ["nested.toml", "more than 100 nested tables or lists"]),
    ([*COSTED, "nested.json"], ["nested.json", "more than 100 nested tables or lists"]),
    ([*COSTED, "key.toml"], ["unknown key", "\\x1b[31m"]),
    ([*COSTED, "twice.toml"], ["twice.toml is not TOML", "Cannot overwrite"]),
    ([*COSTED, "twice.json"], ["twice.json is not JSON", "'F' appears twice"]),
    ([*COSTED, "nul.json"], ["nul.json", "an invalid character", "\\x00"]),
    ([*COSTED, "half.json"], ["half.json", "an invalid character", "\\ud800"]),
    ([*COSTED, "long.json"], ["B[0] must be a finite number", "'x'"]),
    ([*COSTED, "links.toml"], ["links.p2p must be a table", "3"]),
    ([*COSTED, "streams.toml"], ["engine.streams must be 1 or 2", "[1]"]),
    ([*COSTED, "shared.toml"], ["engine.shared", "'a' is not a device"]),
    # --- traces
    (["draw", "empty.json"], ["empty.json is not JSON"]),
    (["draw", "binary.json"], ["binary.json is not UTF-8"]),
    (["draw", "."], [". cannot be read"]),
    (["draw", "t-late.json"], ["devices[0] has the time 1.7e+308, expected seconds"]),
    (["draw", "t-digits.json"], ["t-digits.json is not JSON", "thousands of digits"]),
    (["draw", "t-wide.json"], ["whole number beyond 64 bits"]),
    (["draw", "t-text.json"], ["devices[0] has the time 'now'"]),
    (["draw", "t-row.json"], ["row is ['0F0'], expected a text"]),
    (["draw", "t-passes.json"], ["devices[0].passes are not the passes of devices[0].row"]),
    (["draw", "t-list.json"], ["devices[0].passes[0] is [['0F0'], 0, 1, 0]"]),
    (["draw", "t-clock.json"], ["devices[0].clock is 3, expected a table"]),
    (["draw", "t-stages.json"], ["placement has 5000 stages, but the rows have only 2"]),
    (["draw", "t-device.json"], ["placement is ['0'], expected the device of each stage"]),
    (["draw", "t-hop.json"], ["transfers[0] is '0SEND_F0', a transfer that no pass of this placement needs"]),
    (["draw", "t-about.json"], ["about is [1], expected a table"]),
    (["draw", "t-empty.json"], ["t-empty.json"]),
    (["draw", "t-half.json"], ["an invalid character"]),
    (["draw", "trace.json", "--unit-seconds", "1e308"], ["--unit-seconds is 1e+308", "1e+100"]),
    (["draw", "trace.json", "--unit-seconds", "nan"], ["--unit-seconds is nan"]),
    (["profile", "--from", "t-late.json"], ["t-late.json: devices[0] has the time 1.7e+308"]),
    # --- pictures and other output
    ([*DRAW, "/proc/x.svg"], ["/proc/x.svg cannot be written"]),
    ([*DRAW, "/dev/null/x.svg"], ["there is no folder '/dev/null'"]),
    ([*DRAW, "text.txt/x.svg"], ["there is no folder 'text.txt'"]),
    ([*DRAW, "folder.svg"], ["folder.svg cannot be written", "Is a directory"]),
    ([*DRAW, "x" * 300 + ".svg"], ["cannot be written", "too long"]),
    ([*DRAW, f"{ESCAPE}/x.svg"], ["there is no folder '\\x1b[31m'"]),
    ([*SEARCH, "-o", "a\nb.txt"], ["'a\\nb.txt'", "must end in .csv"]),
    ([*PLAN, "-o", "/dev/null/x.toml"], ["there is no folder '/dev/null'"]),
    ([*ESTIMATE, "-o", "text.txt/x.svg"], ["there is no folder 'text.txt'"]),
    (["profile", "--from", "trace.json", "-o", "/proc/x.toml"], ["/proc/x.toml cannot be written"]),
    # --- hardware and numbers
    ([*EXPLAIN, "--hardware", "h-name.toml"], ["hardware: name is [1], expected a text"]),
    ([*EXPLAIN, "--hardware", "h-device.toml"], ["torch_device is 'tpu'"]),
    ([*EXPLAIN, "--hardware", "h-digits.toml"], ["h-digits.toml is not TOML", "thousands of digits"]),
    ([*EXPLAIN, "--hardware", "h-large.toml"], ["units is 1e+300, expected a number above 0"]),
    ([*EXPLAIN, "--hardware", "h-zero.toml"], ["units is 0, expected a number above 0"]),
    ([*EXPLAIN, "--hardware", "h-peak.toml"], ["unknown key 'peaks', did you mean peak_flops"]),
    ([*EXPLAIN, "--hardware", "."], ["hardware '.' is unknown"]),
    ([*EXPLAIN, "--hardware", f"{ESCAPE}"], ["hardware '\\x1b[31m' is unknown"]),
    ([*EXPLAIN, "--gpu-memory", "9" * 400 + "GiB"], ["--gpu-memory", "less than 8 EiB"]),
    ([*ESTIMATE, "--gpu-memory", "1" + "0" * 30 + "B"], ["--gpu-memory", "less than 8 EiB"]),
    ([*ESTIMATE, "--gpu-memory", "nan GiB"], ["--gpu-memory is 'nan GiB'", "as in 80GiB"]),
    ([*ESTIMATE, "--pp", "1000000000"], ["too many to simulate"]),
    ([*EXPLAIN[:3], "1000000000"], ["--gpus is 1000000000", "at most 100000"]),
    ([*PLAN[:4], "1000000000"], ["--gpus is 1000000000", "at most 100000"]),
    ([*ESTIMATE, "--memory-limit", "nan"], ["memory_limit", "nan"]),
    (["estimate", "--model", "empty.json"], ["empty.json"]),
    (["estimate", "--model", f"{ESCAPE}.json"], ["'\\x1b[31m.json'", "no such file"]),
    ([*PLAN, "--host-share", "nan"], ["host"]),
    ([*SIMULATE, "--offload", "nan"], ["offload", "nan"]),
    ([*SIMULATE, "--memory-limit", "inf"], ["memory_limit"]),
    # --- configurations
    (["train", "empty.toml"], ["model needs either source or architecture"]),
    (["train", "binary.toml"], ["binary.toml", "not UTF-8"]),
    (["train", "."], ['the configuration "." cannot be read: Is a directory']),
    (["train", f"{ESCAPE}.toml"], ['"\\x1b[31m.toml" cannot be read']),
    (["train", "c-digits.toml"], ["c-digits.toml", "is not TOML", "thousands of digits"]),
    (["train", "c-hex.toml"], ["c-hex.toml", "whole number beyond 64 bits"]),
    (["train", "c-list.toml"], ["model.architecture is [1], but must be text"]),
    (["train", "c-nested.toml"], ["c-nested.toml", "more than 100 nested tables"]),
    (["train", "c-nul.toml"], ["an invalid character", "r\\x00n"]),
    (["train", "c-key.toml"], ["output.a\\x1b[31m\\nb is no field"]),
    (["train", "c-table.toml"], ["[model] must be a table, not 3"]),
    ([*TRAIN, f"training.steps={MANY}"], ["training.steps is", "must be an integer"]),
    ([*TRAIN, f"training.steps={HEX}"], ["training.steps is", "must be an integer"]),
    ([*TRAIN, "training.steps=[1, 2]"], ["training.steps is [1, 2], but must be an integer"]),
    ([*TRAIN, "optimizer.learning_rate=1e309"], ["optimizer.learning_rate is inf", "finite number"]),
    ([*TRAIN, "optimizer.learning_rate=nan"], ["optimizer.learning_rate is nan", "finite number"]),
    ([*TRAIN, "optimizer.learning_rate=1e200"], ["optimizer.learning_rate is 1e+200", "below 1e+100"]),
    ([*TRAIN, "optimizer.learning_rate=-1"], ["optimizer.learning_rate is -1", "above 0"]),
    ([*TRAIN, f"optimizer.betas={DEEP}"], ["optimizer.betas is", "list of 2 numbers"]),
    ([*TRAIN, "pipeline.timeout_seconds=1e50"], ["pipeline.timeout_seconds is 1e+50", "at most 1e+09"]),
    ([*TRAIN, "tokenizer.vocabulary_size=4000000000"], ["tokenizer.vocabulary_size is 4000000000", "at most 10000000"]),
    ([*TRAIN, "pipeline.processes=1000000000"], ["pipeline.processes is 1000000000", "at most 4"]),
    ([*TRAIN, "pipeline.microbatches=1000000000"], ["order of 2000000000 forwards"]),
    ([*TRAIN, f"pipeline.schedule={ESCAPE}"], ['pipeline.schedule is "\\x1b[31m"']),
    ([*TRAIN, "pipeline.schedule={a = 1}"], ["pipeline.schedule"]),
    ([*TRAIN, f"{ESCAPE}.a=1"], ["[\\x1b[31m] is no section"]),
    ([*TRAIN, "offload.host_memory=1000000000000000000000000000000B"], ["offload.host_memory", "less than 8 EiB"]),
    ([*TRAIN, f"offload.host_memory={'9' * 400}GiB"], ["offload.host_memory", "less than 8 EiB"]),
    ([*TRAIN, "offload.copy_time=inf"], ["offload.copy_time", "finite number"]),
    ([*TRAIN, "offload.directory=/proc/x"], ['offload.directory is "/proc/x"', "an existing directory"]),
    ([*TRAIN, "output.folder=/proc/x"], ['output.folder is "/proc/x"', "a folder that can be written"]),
    ([*TRAIN, "output.folder=/dev/null/x"], ['output.folder is "/dev/null/x"', "Not a directory"]),
    ([*TRAIN, "output.folder=text.txt"], ['output.folder is "text.txt"', "Not a directory"]),
    ([*TRAIN, f"output.folder={'x' * 300}"], ["output.folder", "too long"]),
    ([*TRAIN, "checkpoint.folder=/proc/x"], ['checkpoint.folder is "/proc/x"', "a folder that can be written"]),
    ([*TRAIN, "checkpoint.folder=text.txt/x"], ['checkpoint.folder is "text.txt/x"', "Not a directory"]),
    ([*TRAIN, "data.cache_folder=/dev/null/x"], ['data.cache_folder is "/dev/null/x"', "Not a directory"]),
    ([*TRAIN, "output.export_folder=/proc/x/y"], ["output.export_folder", "a folder that can be written"]),
    ([*TRAIN, "--steps", "3"], ["no argument --steps; fields", "without dashes: training.steps=3"]),
    ([*TRAIN, "--learning-rate=1e-3"], ["no argument --learning-rate=1e-3; ", ": optimizer.learning_rate=1e-3"]),
    ([*TRAIN, "--data.sequence-length", "8"], ["data.sequence_length=8"]),
    ([*TRAIN, "--source"], ["model.source=VALUE or tokenizer.source=VALUE"]),
    ([*TRAIN, "--forse"], ["no argument --forse, did you mean --force?"]),
    ([*TRAIN, "steps=3"], ['the override "steps=3" must be written section.key=value; did you mean training.steps']),
    (["tarin", "config.toml"], ["there is no command 'tarin', did you mean train?"]),
    (["xyz"], ["there is no command 'xyz', known: explain, init, train,"]),
    ([*TRAIN, "--force", "training.steps=many"], ['training.steps is "many"']),
    ([*TRAIN, "--trace", "training.steps=many"], ['training.steps is "many"']),
    ([*TRAIN, "--trace", "output.tensorboard=false", "training.steps=many"], ['training.steps is "many"']),
    ([*TRAIN, "--trace", "text.txt/x"], ['output.trace_folder is "text.txt/x"', "Not a directory"]),
    ([*TRAIN, "data.validation_fraction=nan"], ["data.validation_fraction is nan", "finite number"]),
    ([*TRAIN, "pipeline.costs=empty.toml"], ["empty.toml", "F is missing"]),
    # --- what argparse finds
    (["check"], ["required: FILE.csv", "evenpipe check --help"]),
    (["train"], ["required: CONFIG.toml;", "evenpipe train --help"]),
    (["explain", "model.json"], ["required: --gpus"]),
    (["export", "run"], ["required: -o/--output"]),
    (["search"], ["required: --devices, --microbatches"]),
    ([*SIMULATE[:4], "two"], ["--devices: expected a whole number, not 'two'"]),
    ([*SEARCH, "--seconds", "long"], ["--seconds: expected a number, not 'long'"]),
    ([*SIMULATE, "--sort", "x"], ["--sort: invalid choice: 'x'", "choose from", "--help"]),
    ([*ESTIMATE, "--zero", "4"], ["--zero: invalid choice: 4", "choose from 0, 1, 2, 3"]),
    (["init", "extra"], ["init has no argument extra", "evenpipe init --help"]),
    # --- what files that exist are kept for
    ([*DRAW, "kept.svg", "--costs", "nan.toml"], ["nan.toml", "F must be a finite number"]),
    (["init", "-o", "kept.toml"], ['"kept.toml" exists already', "-o names another one"]),
    (["profile", "--from", "empty.json", "-o", "kept.toml"], ["empty.json is not JSON"]),
    ([*PLAN, "-o", "kept.toml", "--batch", "0"], ["sequences per step is 0", "at least 1"]),
    # --- sizes and names
    (["simulate"], ["no schedule is given", "--schedule NAME"]),
    (["draw"], ["no schedule is given", "--schedule FILE.csv"]),
    ([*SIMULATE[:4], "0", "--microbatches", "2"], ["devices must be a whole number of at least 1, not 0"]),
    ([*SIMULATE[:3]], ["devices: not given", "at least 1"]),
    (["simulate", "--schedule", "zvb"], ["schedule 'zvb' is unknown, did you mean 'zbv'?", "Accepted: gpipe, 1f1b"]),
    (["simulate", "--schedule", "nowhere.csv"], ["nowhere.csv cannot be read", "No such file"]),
    (["simulate", "--schedule", "order.csv", "--devices", "3"], ["'order.csv' is for 2 devices", "not 3"]),
    ([*SIMULATE, "--stages-per-device", "2"], ["'1f1b' has 1 stage per device, not 2"]),
    ([*SIMULATE, "--group-size", "2"], ["'1f1b' has no option 'group_size'", "none"]),
    ([*SIMULATE, "--memory-limit", "1,2,3"], ["memory_limit has 3 numbers for 2 devices"]),
    ([*SIMULATE, "--vocabulary", "vocab-3"], ["'vocab-3' is unknown, did you mean 'vocab-2'?", "Accepted: first-last"]),
    ([*SIMULATE, "--sort", "step"], ["--sort is given", "--compare"]),
    ([*SIMULATE, "--offload", "some"], ["offload: 'some', expected one of scheduled, none, free, all"]),
    (["check", "nowhere.csv"], ["nowhere.csv cannot be read", "No such file"]),
    (["check", "order.csv", "--bytes-limit", "3"], ["a limit in bytes needs costs"]),
    (["draw", "nowhere.json"], ["nowhere.json cannot be read"]),
    (["draw", "trace.json", "--devices", "2"], ["--devices is given", "leave one of them out"]),
    (["draw", "trace.json", "--reshard"], ["--reshard is given", "leave one of them out"]),
    (["draw", "trace.json", "--data-parallel", "shard"], ["--data-parallel is given", "leave one of them out"]),
    ([*DRAW, "x.pdf"], ["'x.pdf' cannot be drawn", ".html", ".svg", ".json"]),
    ([*COSTED, "config.toml"], ["unknown key 'model'", "Accepted: F, B"]),
    ([*COSTED, "nowhere.toml"], ["nowhere.toml cannot be read"]),
    ([*ESTIMATE, "--sequence", "0"], ["sequence is 0", "at least 1"]),
    ([*ESTIMATE, "--tp", "3"], ["tp is 3, expected a divisor of the model's 2 attention heads"]),
    ([*ESTIMATE, "--layers-per-stage", "1,2"], ["layers_per_stage: [1, 2]", "add up to the model's 4 layers"]),
    ([*ESTIMATE, "--kernels", "fuse"], ["kernels is 'fuse', expected one of transformers, fused"]),
    ([*ESTIMATE, "--gpu-memory", "80"], ["--gpu-memory is '80', which has no unit", "as in 80GiB"]),
    ([*ESTIMATE, "--traced", "--cp", "2", "--kernels", "megatron"], ["traced: with cp = 2", "expected 1"]),
    ([*ESTIMATE, "-o", "x.pdf"], ["--output is 'x.pdf'", "must end in .svg"]),
    (["estimate", "--model", "lama.json"], ["'lama.json'", "model type `lama`"]),
    (["estimate", "--model", "nowhere/x"], ["model = 'nowhere/x' is neither a folder", "nor a model that the hub"]),
    (["explain", "nowhere.json", "--gpus", "4"], ["the model is 'nowhere.json', but there is no such file"]),
    ([*EXPLAIN[:3], "0"], ["--gpus is 0, expected a whole number of at least 1"]),
    ([*EXPLAIN, "--sequence", "0"], ["--sequence is 0, expected a whole number of at least 1"]),
    ([*EXPLAIN, "--hardware", "H100"], ["hardware 'H100' is unknown, did you mean 'H100-80G'?"]),
    ([*PLAN, "--vocabulary", "x"], ["vocabulary mode 'x' is unknown", "Accepted: first-last"]),
    ([*PLAN, "--host-share", "2"], ["host share is 2", "between 0 and 1"]),
    ([*SEARCH, "--placement", "y"], ["placement is 'y', expected linear, looped, v"]),
    ([*SEARCH, "--placement", "0,5"], ["stage 1 is placed on device 5", "devices are 0 to 1"]),
    ([*SEARCH, "--seconds", "nan"], ["seconds must be a number above 0, not nan"]),
    ([*SEARCH, "-o", "x.txt"], ["'x.txt'", "must end in .csv"]),
    (["profile"], ["either CONFIG.toml or --from TRACE.json, but neither is given"]),
    (["profile", "config.toml", "--steps", "0"], ["steps is 0, expected a whole number of at least 1"]),
    (["profile", "--hardware", "--processes", "0"], ["processes is 0, expected at least 1"]),
    ([*PROFILE, "--processes", "2"], ["--processes needs --hardware"]),
    ([*PROFILE, "-o", "x.csv"], ["'x.csv' cannot be written", "must end in .toml"]),
    (["init", "--data", "nowhere.txt"], ['--data is "nowhere.txt"', "no such file or folder"]),
    (["init", "--data", "empty"], ['--data is "empty"', "empty; expected text"]),
    (["init", "--processes", "0"], ["--processes is 0, but must be at least 1"]),
    (
        ["init", "--example", "zvb"],
        ['--example is "zvb"', "must be one of all, experts, quickstart", 'did you mean "zbv"?'],
    ),
    (["init", "-o", "x.csv"], ["--output is 'x.csv'", "must end in .toml"]),
    # --- every section of a configuration
    ([*TRAIN, "model.architecture=lama"], ['model.architecture is "lama"', 'did you mean "llama"?']),
    ([*TRAIN, "model.source=nowhere/x"], ["either source or architecture, but both are given"]),
    ([*TRAIN, "model.config.hidden_size=0"], ["hidden_size is 0", "from 1 to 1048576"]),
    ([*TRAIN, "model.config.hidden_sise=8"], ["hidden_sise is no field of LlamaConfig", '"hidden_size"?']),
    ([*TRAIN, "data.dataset=folder.svg"], ["exactly one of files, dataset and corpus", "has files and dataset"]),
    ([*TRAIN, "data.sequence_length=1000"], ["data.sequence_length is 1000", "at most 64"]),
    ([*TRAIN, "tokenizer.vocabulary_size=1"], ["tokenizer.vocabulary_size is 1", "at least 257"]),
    ([*TRAIN, "tokenizer.source=folder.svg"], ["must be left out when tokenizer.source is given"]),
    ([*TRAIN, "pipeline.schedule=zb"], ['pipeline.schedule is "zb"', "one of gpipe", 'did you mean "zbv"?']),
    ([*TRAIN, "pipeline.checkpointing=some"], ['pipeline.checkpointing is ["some"]', "none, full, selective"]),
    ([*TRAIN, "pipeline.vocab=x"], ["pipeline.vocab is no field", 'did you mean "vocabulary"?']),
    ([*TRAIN, "offload.activations=x"], ['offload.activations is "x"', "one of scheduled, none, free, all"]),
    ([*TRAIN, "loss.label_smoothing=2"], ["loss.label_smoothing is 2", "below 1"]),
    ([*TRAIN, "optimizer.betas=[0.9]"], ["optimizer.betas is [0.9]", "a list of 2 numbers"]),
    ([*TRAIN, "training.minutes=-1"], ["training.minutes is -1", "above 0"]),
    ([*TRAIN, "checkpoint.keep=0"], ["checkpoint.keep is 0", "at least 1"]),
    ([*TRAIN, "output.trace_steps=[0]"], ["output.trace_steps is [0]", "at least 1"]),
    ([*TRAIN, "sample.top_k=-1"], ["sample.top_k is -1", "at least 0"]),
    ([*TRAIN, "wandb.x=1"], ["[wandb] is no section", "known: model, data"]),
    # --- models
    (["export", "folder.svg", "-o", "out"], ["'folder.svg' has no checkpoint", "expected a checkpoint's folder"]),
    (["generate", "folder.svg"], ['"folder.svg" is not a model folder', "config.json"]),
    (["export", "nowhere", "-o", "out"], ["nowhere"]),
    (["generate", f"{ESCAPE}"], ["\\x1b[31m"]),
    (["generate", "text.txt"], ["text.txt"]),
]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder to work in, with all these files, and nobody who could start processes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    Path("folder.svg").mkdir()
    for name, content in FILES.items():
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    launcher = types.ModuleType("evenpipe.processes.launcher")
    launcher.prepare_launch = lambda *modules: None
    launcher.launch = None
    monkeypatch.setitem(sys.modules, "evenpipe.processes.launcher", launcher)
    return tmp_path


@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=lambda value: ascii(value)[:80])
def test_wrong_input_is_one_sentence(arguments, words, folder, capsys):
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    *before, sentence = shown.err.splitlines()
    assert before in ([], ["reading 1 file"])
    assert sentence.startswith("evenpipe: ")
    assert sentence.isprintable()
    assert len(sentence) <= MOST
    for word in words:
        assert word in sentence
    assert {path.name for path in folder.iterdir()} == {*FILES, "folder.svg"}
    assert not list(Path("folder.svg").iterdir())
