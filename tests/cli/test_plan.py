"""evenpipe plan: what it prints, its exit codes, and what it writes with -o or refuses to write."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from process_groups import send
from small_run import as_json, refused
from small_run import printed as printed_by
from transformers import LlamaConfig

from evenpipe.cli import printing
from evenpipe.cli.main import main
from evenpipe.costs.hardware import KNOWN, hardware_from_dict, write_hardware
from evenpipe.plan import configuration_search
from evenpipe.train.config_file import load_config
from evenpipe.train.data import check_enough
from evenpipe.train.new_config import LEAST_STEPS, MOST_STEPS
from evenpipe.train.planned_run import PLACEHOLDER
from evenpipe.train.tokenizer import train_tokenizer

TRAINING = """
[model]
architecture = "llama"
[model.config]
hidden_size = 256
intermediate_size = 512
num_hidden_layers = 8
num_attention_heads = 4
[data]
files = "text.txt"
sequence_length = 128
[tokenizer]
vocabulary_size = 4096
[pipeline]
processes = 2
microbatches = 4
nccl_channels = 8
timeout_seconds = 120
[training]
steps = 7
[output]
folder = "runs/small"
export_folder = "exported"
[checkpoint]
folder = "saved"
"""
QUICK = ["--workers", "1", "--no-cache"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder to work in, with a model's config, a training configuration and a machine of two processes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(printing, "EVERY_SECONDS", float("inf"))  # on a busy machine too
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "num_attention_heads": 16}
    LlamaConfig(**sizes, vocab_size=128256).save_pretrained("model")
    Path("train.toml").write_text(TRAINING)
    Path("text.txt").write_text("def f(x):\n    return x\n" * 200)
    host = {"name": "host", "torch_device": "cpu", "devices_per_node": 2, "contention": 1.1}
    write_hardware(hardware_from_dict(KNOWN["A100-80G"].to_dict() | host), "host.toml")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    return printed_by(capsys, "plan", *arguments, *QUICK, code=code)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    return as_json(capsys, "plan", *arguments, *QUICK, code=code)


SMALL = ["--model", "model", "--gpus", "4", "--sequence", "2048", "--batch", "32", "--cp", "1", "--zero", "1"]
HOST = ["--model", "train.toml", "--gpus", "2", "--hardware", "host.toml", "--schedule", "1f1b"]


def test_json_has_every_figure(capsys):
    answer = planned(capsys, *SMALL, "--schedule", "1f1b,zbv", "--best", "4", "--explain")
    assert len(answer["plans"]) == 4 and answer["evaluated"] >= 4
    times = [plan["seconds"] for plan in answer["plans"]]
    assert times == sorted(times)
    for plan in answer["plans"]:
        assert plan["dp"] * plan["tp"] * plan["cp"] * plan["pp"] == 4
        assert plan["dp"] * plan["microbatches"] * plan["microbatch_size"] == 32
        assert plan["fits"] and 0 < plan["model_flops_utilization"] < 0.9
        assert plan["tokens_per_second"] == pytest.approx(32 * 2048 / plan["seconds"])
        assert len(plan["devices"]) == plan["pp"] and len(plan["checkpointing"]) == 16
        assert all(device["spare"] >= 0 and device["event"] for device in plan["devices"])


@pytest.mark.slow
def test_if_nothing_fits_it_says_what_would(capsys):
    narrow = (*SMALL, "--gpu-memory", "9GiB", "--schedule", "1f1b", "--tp", "1", "--cp", "1")
    near = planned(capsys, *narrow, code=1)
    assert near["plans"] == [] and near["nearest"]["lacking_bytes"] > 0
    host, more = near["would_fit"]
    assert host["change"].startswith("--host-share 1")
    gpus = int(more["change"].removesuffix(" GPUs"))
    assert gpus in (8, 16, 32, 64)
    assert printed(capsys, *narrow, "--explain", code=1).count("out of memory by up to") > 1
    text = printed(capsys, *narrow, code=1).splitlines()
    assert text[1] == "no plan fits"
    assert text[2].startswith(f"nearest: {near['nearest']['name']}: out of memory by up to ")
    assert text[3] == "would fit:"
    assert [line.split(":")[0].strip() for line in text[4:]] == [host["change"], more["change"]]
    wider = (*(str(gpus) if argument == "4" else argument for argument in narrow), "--best", "1")
    assert planned(capsys, *wider)["plans"][0]["name"] == more["plan"]


def test_plans_for_a_cpu_are_written_for_training(capsys):
    out = printed(capsys, *HOST[:-2], "-o", "planned.toml")
    assert "wrote planned.toml" in out and "2 GPUs (host" in out
    config = load_config("planned.toml")
    assert config.pipeline.processes == 2 and config.pipeline.timeout_seconds == 120
    assert config.pipeline.nccl_channels == 8 and config.pipeline.nccl_high_priority
    assert config.pipeline.sequences_per_step == 4, "the batch is that of the configuration"
    assert config.training.steps == 7 and config.data.files == ("text.txt",)
    assert config.model.config["hidden_size"] == 256
    assert not config.pipeline.compile_layers


def test_compiled_layers_are_planned_for_a_run_with_them(capsys):
    printed(capsys, *HOST, "--kernels", "compiled", "-o", "compiled.toml")
    assert load_config("compiled.toml").pipeline.compile_layers
    again = printed(capsys, "--model", "compiled.toml", *HOST[2:])
    assert again == printed(capsys, *HOST, "--kernels", "compiled")
    assert again != printed(capsys, *HOST)


FOLDERS = [
    # output.folder of the configuration, name of the file, folder of the planned run
    ("runs/small", "planned.toml", "runs/planned"),
    ("runs/small", "runs.toml", "runs/runs"),
    ("runs/planned", "planned.toml", "runs/planned-planned"),
    ("here", "planned.toml", "planned"),
    (None, "planned.toml", "runs/planned"),
]


def test_a_plan_gets_folders_of_its_own(capsys, sample):
    """Or it would resume the run that it was planned from, or write over its model."""
    for before, name, own in sample(FOLDERS, 1):
        text = TRAINING.replace("runs/small", before) if before else TRAINING[: TRAINING.index("[output]")]
        Path("train.toml").write_text(text)
        assert f"wrote {name}; the run will write to {own}" in printed(capsys, *HOST, "-o", name)
        config = load_config(name)
        assert set(config.folders.values()) == {Path(own), Path(own) / "data", Path(own) / "checkpoints"}
        assert config.export_folder == Path(own) / "model"
        Path(name).unlink()


@pytest.mark.slow
def test_estimates_only_are_called_so(capsys):
    plan = ["--dp", "2", "--pp", "2", "--schedule", "1f1b", "--best", "1"]
    assert "estimate only" not in printed(capsys, *SMALL[:-2], *plan)
    plan = [*SMALL, *plan]
    assert "estimate only" in printed(capsys, *plan)
    assert main(["plan", *plan, "-o", "no.toml", *QUICK]) == 2
    assert "is an estimate only, evenpipe train does not run it: data_parallel" in capsys.readouterr().err


@pytest.mark.slow
def test_tensor_parallelism_is_planned_where_the_model_can_be_cut(capsys):
    """Three groups of heads: three or six ranks share them. Two would need half a head of keys and
    values."""
    model = LlamaConfig(
        hidden_size=768, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=12, num_key_value_heads=3
    )
    model.save_pretrained("three")
    plan = ["--model", "three", "--gpus", "6", "--sequence", "768", "--batch", "12", "--schedule", "1f1b", "--cp", "1"]
    plans = planned(capsys, *plan, "--best", "40")["plans"]
    assert {row["tp"] for row in plans} == {1, 3, 6} and all(row["runnable"] for row in plans)
    printed(capsys, *plan, "--tp", "3", "--pp", "2", "-o", "planned.toml")
    pipeline = load_config("planned.toml").pipeline
    assert (pipeline.processes, pipeline.tp, pipeline.devices) == (6, 3, 2)
    error = refused(capsys, "plan", *plan, "--tp", "2", *QUICK)
    assert "self_attn cannot be cut so: 2 ranks cannot share 3 heads of keys and values" in error


@pytest.mark.slow
def test_the_cache_answers_again(capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    arguments = ["plan", *SMALL, "--schedule", "1f1b", "--workers", "1"]
    first = as_json(capsys, *arguments)
    (path,) = Path("cache/evenpipe/plan").glob("*.json")
    entries = path.read_text()
    assert as_json(capsys, *arguments) == first and path.read_text() == entries


# ---- what is in the file besides the pipeline, and what is said and refused

ROWS = 1000
"""Of the vocabulary of the small model."""
TEXT = "The committee met on a rainy day, and said little about what it had found in the old harbour.\n"


@pytest.fixture
def texts() -> None:
    """Small models, texts and tokenizers."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    for name, entries in (("small", ROWS), ("narrow", 200)):
        LlamaConfig(**shape, vocab_size=entries, max_position_embeddings=256).save_pretrained(name)
    Path("texts").mkdir()
    for number in range(4):
        Path(f"texts/{number}.txt").write_text(TEXT * 200)
    lines = [json.dumps({"id": "x", "body": TEXT * 20}) for _ in range(40)]
    Path("lines.jsonl").write_text("\n".join(lines))
    Path("little.txt").write_text(TEXT)
    many = [f"{chr(97 + first)}{chr(97 + second)} " * 20 for first in range(26) for second in range(26)]
    for name, corpus, entries in (("fits", [TEXT], 300), ("letters", ["ab"], 258), ("too large", many, 1200)):
        train_tokenizer(corpus, entries, "<|endoftext|>").save_pretrained(name)


WRITE = ["--gpus", "2", "--hardware", "host.toml", "--schedule", "1f1b", "--best", "1", *QUICK]
SHORT = ["--sequence", "64"]


def plan(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    """What `evenpipe plan` prints on stdout and stderr."""
    model = () if "--model" in arguments else ("--model", "small")
    assert main(["plan", *model, *WRITE, *arguments]) == code
    output = capsys.readouterr()
    return output.out, output.err


WRITTEN = {
    "a folder of text": (["--data", "texts"], ("texts/**/*.txt",), "text", None),
    "records with another field": (["--data", "lines.jsonl"], ("lines.jsonl",), "body", None),
    "a tokenizer": (["--data", "texts", "--tokenizer", "fits"], ("texts/**/*.txt",), "text", "fits"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.usefixtures("texts")
def test_with_data_the_file_is_complete(name, capsys):
    options, files, field, tokenizer = WRITTEN[name]
    out, _ = plan(capsys, *SHORT, "--batch", "8", *options, "-o", "run.toml")
    assert "wrote run.toml; the run will write to runs/run" in out and "replace" not in out
    config, text = load_config("run.toml"), Path("run.toml").read_text()
    assert (config.data.files, config.data.text_field) == (files, field)
    assert config.data.sequence_length == 64 and config.pipeline.sequences_per_step == 8
    assert config.model.config["vocab_size"] == ROWS
    assert config.tokenizer.source == tokenizer
    assert config.trained_tokenizer_entries == (None if tokenizer else ROWS)
    assert ("trains a tokenizer of at most 1,000 entries" in out) == (tokenizer is None)
    unused = 'the tokenizer "fits" has 300 entries, so 700 rows of the model are unused'
    assert (unused in out) == (tokenizer is not None)
    for section in ("optimizer", "training", "checkpoint", "output", "pipeline"):
        assert f"\n[{section}]\n" in text
    assert LEAST_STEPS <= (config.training.steps or 0) <= MOST_STEPS
    assert "# Tokens per row\nsequence_length = 64" in text and PLACEHOLDER not in text
    check_enough(config, 8)


@pytest.mark.usefixtures("texts")
def test_without_data_the_file_says_what_to_replace(capsys):
    out, _ = plan(capsys, *SHORT, "--batch", "8", "-o", "run.toml")
    assert "replace data.files in run.toml before evenpipe train, or give --data" in out
    text = Path("run.toml").read_text()
    assert "# REPLACE THIS by your text. Files or patterns (`corpus/**/*.py`), read in the order" in text
    assert f'files = ["{PLACEHOLDER}"]' in text and "\n[training]\n" in text
    assert main(["train", "run.toml"]) == 2
    assert PLACEHOLDER in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("texts")
def test_little_data_gives_a_smaller_step_unless_one_is_asked_for(capsys):
    _, err = plan(capsys, *SHORT, "--data", "texts", "-o", "run.toml")
    batch = load_config("run.toml").pipeline.sequences_per_step
    assert batch == 8 and f"a step has {batch} sequences instead of 65536: --data is small" in err
    out, err = plan(capsys, *SHORT, "--data", "texts", "--batch", "4096", "-o", "no.toml", code=2)
    assert out == "" and err.count("\n") == 1 and not Path("no.toml").exists()
    assert "tokens, but one step of 4096 sequences of 64 tokens needs" in err


@pytest.mark.slow
@pytest.mark.usefixtures("texts")
def test_tokens_are_counted_as_the_tokenizer_of_the_run_counts_them(capsys):
    """One that is trained on this text has tokens of whole words, the other one of single letters."""
    step = [*SHORT, "--data", "texts", "-o", "run.toml", "--batch", "320"]
    _, err = plan(capsys, *step, code=2)
    assert "the data has 17,604 tokens" in err and "needs 20,672" in err
    assert plan(capsys, *step, "--tokenizer", "letters")[0]


@pytest.mark.slow
@pytest.mark.usefixtures("texts")
def test_a_configuration_keeps_its_own_sections_and_the_planned_vocabulary(capsys):
    """A small text may give a tokenizer with fewer entries; the model has as many rows as planned all the same."""
    plan(capsys, *SHORT, "--batch", "8", "--data", "texts", "-o", "run.toml")
    text = Path("run.toml").read_text().replace("vocab_size = 1000\n", "")
    text = re.sub(r"\[checkpoint\]\n[^\[]*", "", text)
    Path("own.toml").write_text(re.sub("learning_rate = .*", "learning_rate = 0.5", text))
    plan(capsys, "--model", "own.toml", "-o", "again.toml")
    before, after = load_config("own.toml"), load_config("again.toml")
    assert "vocab_size" not in before.model.config and after.model.config["vocab_size"] == ROWS
    assert (after.data.files, after.training, after.optimizer) == (before.data.files, before.training, before.optimizer)
    assert "\n[checkpoint]\n" not in Path("again.toml").read_text()


NOT_RUN = {
    "--data texts": "--data goes into the configuration that -o writes, but there is no -o",
    "--tokenizer fits": "--tokenizer goes into the configuration that -o writes",
    "--kernels megatron -o run.toml": '--kernels with -o is "megatron"; it must be transformers or compiled, which',
    "--gradient-dtype bf16 -o run.toml": "-o writes what evenpipe train runs, with gradients, masters and moments in",
    "--measured 'dp2: 1 h'": '--measured is "dp2: 1 h"; it must be a layout as a plan is called',
    "--data nowhere -o run.toml": '--data is "nowhere", but there is no such file or folder',
    "--data little.txt -o run.toml --batch 8": "tokens, but one step of 8 sequences of 64 tokens needs",
    "--tokenizer 'too large' -o run.toml": "but the model has only 1000 rows for them",
    "--data texts -o run.toml --sequence 257": "--sequence is 257; it must be at most 256, the model's",
    "--tokenizer nowhere -o run.toml": 'the tokenizer "nowhere" cannot be loaded',
    "--model narrow -o run.toml": "the model has a vocabulary of 200, but a tokenizer that is trained",
    "--model own.toml --data texts -o run.toml": "but own.toml has its own",
    "--model own.toml --tokenizer fits -o run.toml": "but own.toml has its own",
}


@pytest.mark.usefixtures("texts")
def test_what_would_not_run_is_refused_before_the_search(capsys, monkeypatch):
    monkeypatch.setattr(configuration_search, "search_configurations", lambda *_, **__: pytest.fail("it searches"))
    Path("own.toml").write_text('[model]\narchitecture = "llama"\n[data]\nfiles = "little.txt"\n')
    for arguments, words in NOT_RUN.items():
        out, err = plan(capsys, *SHORT, *shlex.split(arguments), code=2)
        assert out == "" and words in err and err.count("\n") == 1
        assert not Path("run.toml").exists()


# ---- while it searches: progress on stderr, Ctrl-C, and a limit on its time


SEARCH = ["plan", "--model", "large", "--gpus", "64", "--cp", "1", "--no-cache"]
END_SECONDS = 120


@pytest.fixture
def large() -> None:
    """A model so large that a search for 64 GPUs takes minutes: Llama 3.1 70B."""
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    LlamaConfig(**sizes, num_key_value_heads=8, vocab_size=128256).save_pretrained("large")


COMMAND = """
import signal
import sys
from evenpipe.cli import printing
from evenpipe.cli.main import main
printing.EVERY_SECONDS = 0.0
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background ignore Ctrl-C
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("options", [["--workers", "2", "--json"], ["--workers", "1", "-o", "planned.toml"]])
def test_ctrl_c_in_a_terminal_prints_what_was_found(options):
    """All processes of the terminal get the signal; none stays behind, and none complains."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    search = subprocess.Popen([sys.executable, "-c", COMMAND, *SEARCH, *options], env=environment, **streams)
    assert any("best step" in line for line in search.stderr)
    send(search, signal.SIGINT)
    out, err = search.communicate(timeout=END_SECONDS)
    assert search.returncode == 130, err
    assert "Traceback" not in err and "Error" not in err
    if "--json" in options:
        found = json.loads(out)
        assert (found["finished"], found["ended_by"]) == (False, "interrupt")
        assert found["plans"] and found["layouts_left"] + found["configurations_left"] > 0
    else:
        assert "unfinished, interrupted after" in out and "wrote planned.toml" in out
        assert Path("planned.toml").is_file()
    deadline = time.monotonic() + END_SECONDS
    while send(search, 0) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not send(search, 0)


@pytest.mark.usefixtures("large")
def test_a_plan_is_there_when_the_time_is_up(capsys, monkeypatch):
    """A second passes whenever the search looks at the time."""
    ticks = itertools.count()
    monkeypatch.setattr(configuration_search, "MANY", 1)
    monkeypatch.setattr(configuration_search.time, "monotonic", lambda: float(next(ticks)))
    few = ["--tp", "8", "--pp", "4,8", "--microbatch-size", "1", "--schedule", "1f1b,zb-h1"]
    assert main([*SEARCH, *few, "--workers", "1", "--minutes", "3", "-o", "planned.toml"]) == 0
    out = capsys.readouterr().out
    assert "unfinished, the time is up after 3." in out and "wrote planned.toml" in out
    assert load_config("planned.toml").pipeline.tp == 8


@pytest.mark.usefixtures("large")
def test_no_time_is_no_answer(capsys):
    """It is not known that nothing fits."""
    assert main([*SEARCH, "--workers", "1", "--minutes", "1e-9"]) == 3
    text = capsys.readouterr().out
    assert "unfinished, the time is up after" in text and "no plan was found so far" in text
    assert "no plan fits" not in text and "would fit" not in text


# --- the line --------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_line_that_is_removed(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "20")
    with printing.progress_line() as show:
        show("a plan in a line that is longer than the terminal")
        show("two\nlines")
    first, second, last = terminal.getvalue().split("\r\033[K")[1:]
    assert first == "a plan in a line th" and "\n" not in second and last == ""


def test_a_file_gets_a_line_per_minute(monkeypatch):
    monkeypatch.setattr(printing, "EVERY_SECONDS", 60.0)
    file, now = io.StringIO(), [0.0]
    monkeypatch.setattr(sys, "stderr", file)
    monkeypatch.setattr(printing.time, "monotonic", lambda: now[0])
    with printing.progress_line() as show:
        for second in range(0, 200, 5):
            now[0] = float(second)
            show(f"after {second} s")
    assert file.getvalue().splitlines() == ["after 60 s", "after 120 s", "after 180 s"]
