"""`evenpipe init` looks at all data, says what it leaves out, and writes only what trains as it stands; examples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from small_run import printed, refused
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from evenpipe.errors import InputError
from evenpipe.train.config_file import config_from_dict, load_config
from evenpipe.train.data import prepare
from evenpipe.train.examples import example_configurations, examples
from evenpipe.train.found_data import find_data
from evenpipe.train.model_source import check_pipeline
from evenpipe.train.new_config import new_tables
from evenpipe.train.sources import find_files
from evenpipe.train.tokenizer import train_tokenizer

TEXT = "Permission is granted, free of charge, to any person.\n" * 400
CHAT = json.dumps({"id": "a", "messages": [{"role": "user", "content": TEXT[:40]}]}) + "\n"
NO_CHAT = "on which evenpipe cannot train yet; expected one text per record"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    return tmp_path


def write(files: dict[str, str | bytes]) -> None:
    for name, content in files.items():
        path = Path("data", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def init(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """What `evenpipe init` prints that writes a configuration for two processes and for the data."""
    data = () if "--data" in options else ("--data", "data")
    return printed(capsys, "init", *data, "--processes", "2", *options)


def accepted(path: str = "train.toml") -> Any:
    """The written configuration, after all that a run does before its processes start."""
    config = load_config(path)
    check_pipeline(config)
    prepare(config, lambda text: None)
    return config


QUICK = """
import sys
from evenpipe.cli.main import main
for data in sys.argv[1:]:
    assert main(["init", "--data", data]) == 2
assert not {"torch", "transformers"} & {*sys.modules}, "they take seconds to import"
"""


def test_what_is_wrong_with_data_is_said_at_once():
    Path("chat.jsonl").write_text(CHAT)
    command = [sys.executable, "-c", QUICK, "date", "data", "chat.jsonl"]
    missing, empty, chat = subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()
    assert '--data is "date", but there is no such file or folder; did you mean "data"?' in missing
    assert "that folder has no text, JSON lines or parquet" in empty and NO_CHAT in chat
    assert {path.name for path in Path().iterdir()} == {"data", "chat.jsonl"}


GIF = b"GIF89a\x00\xff\xfe"
FOLDERS: list[tuple[dict[str, str | bytes], list[str], dict[str, str]]] = [
    # what is in the folder, data.files, the names of what is left out by reason
    (
        {"GPL": TEXT, "BSD": TEXT, "MIT.txt": TEXT, "old/APACHE-2": TEXT},
        ["data/BSD", "data/GPL", "data/old/APACHE-2", "data/**/*.txt"],
        {},
    ),
    (
        {"GPL": TEXT, "BSD": TEXT, "logo": GIF, "a.gif": GIF, "b.gif": GIF, ".git/config": "x", ".hidden": "x"},
        ["data/BSD", "data/GPL"],
        {"3 files, not UTF-8 text": "a.gif, b.gif, logo"},
    ),
    (
        {"a.txt": TEXT, "b.txt": TEXT + "Stra\u00dfe", "c.txt": (TEXT + "Stra\u00dfe").encode("latin-1"), "d.txt": ""},
        ["data/a.txt", "data/b.txt"],
        {"1 file, empty": "d.txt", "1 file, not UTF-8 text": "c.txt"},
    ),
    (
        {"a.jsonl": json.dumps({"text": TEXT}), "README.md": "# Data", "LICENSE": "MIT", "x.json": "[\n1]\n"},
        ["data/**/*.jsonl"],
        {"1 file, not one JSON object per line": "x.json", "2 files, text beside tables": "LICENSE, README.md"},
    ),
    (
        {"a.py": TEXT, "b.py": TEXT, "package.json": '{"name": "x"}', "data.json": "[\n"},
        ["data/**/*.py"],
        {"1 file, .json beside text": "package.json", "1 file, not one JSON object per line": "data.json"},
    ),
    (
        {"a.txt": TEXT, "chat.jsonl": CHAT, **{f"{number}.bin": b"\xff\x00" for number in range(9)}},
        ["data/**/*.txt"],
        {"1 file, chats, on which evenpipe cannot train yet": "chat.jsonl"}
        | {"9 files, not UTF-8 text": "0.bin, 1.bin, 2.bin and 6 more"},
    ),
    ({"[a]/x[1].txt": TEXT, "[a]/y.bin": GIF}, ["data/**/*.txt"], {"1 file, not UTF-8 text": "[a]/y.bin"}),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("number", range(len(FOLDERS)))
def test_every_file_is_trained_on_or_listed(number, capsys):
    files, patterns, left_out = FOLDERS[number]
    write(files)
    *remarks, last = init(capsys).splitlines()
    assert last == "wrote train.toml; next: evenpipe train train.toml"
    assert sorted(remarks) == sorted(f"left out {reason}: {names}" for reason, names in left_out.items())
    config = accepted()
    assert list(config.data.files) == patterns
    texts = {Path("data", file) for file, content in files.items() if content and not file.startswith(".")}
    refused = {path for path in texts if path.name in " ".join(left_out.values()) or path.suffix == ".bin"}
    assert set(find_files(config.data.files)) == texts - refused


def test_links_and_what_is_no_file(folder, capsys):
    """A link to a folder above, one to nothing, one to text elsewhere, and a pipe that nobody writes to."""
    write({"a": TEXT})
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "b").write_text(TEXT)
    for name, target in (("loop", folder / "data"), ("nothing", folder / "gone"), ("b", folder / "elsewhere" / "b")):
        (folder / "data" / name).symlink_to(target)
    os.mkfifo(folder / "data" / "pipe")
    assert "left out 2 files, not a file, or a link to nothing: nothing, pipe" in init(capsys)
    assert accepted().data.files == ("data/a", "data/b")
    (folder / "data").rename("[x]")  # a folder whose name is a pattern, and a single file
    init(capsys, "--data", "[x]/a", "-o", "one.toml")
    assert accepted("one.toml").data.files == ("[x]/a",)


def table(rows: list[dict[str, Any]]) -> None:
    parquet.write_table(pa.Table.from_pylist(rows), "data/a.parquet")


def saved(rows: list[dict[str, Any]]) -> None:
    datasets.Dataset.from_list(rows).save_to_disk("data")


CHATS = {
    "lines": lambda: write({"chat.jsonl": CHAT * 9, "README.md": "# Chats"}),
    "sharegpt": lambda: write({"a.json": json.dumps({"conversations": [{"from": "human", "value": "x"}], "id": "1"})}),
    "parquet": lambda: table([json.loads(CHAT)]),
    "saved": lambda: saved([json.loads(CHAT)]),
}


@pytest.mark.parametrize("kind", CHATS)
def test_chats_are_refused_by_init_and_by_training(kind, capsys):
    CHATS[kind]()
    assert NO_CHAT in refused(capsys, "init", "--data", "data") and not Path("train.toml").exists()
    data = {"dataset": "data"} if kind == "saved" else {"files": ["data/*[!d]"]}
    for text_field in ("text", "messages"):
        tables = {"model": {"architecture": "llama"}, "data": {**data, "text_field": text_field}}
        with pytest.raises(InputError, match=NO_CHAT):
            prepare(config_from_dict({**tables, "output": {"folder": "run"}}), lambda text: None)


BROKEN = {
    # a file, and what is said of it
    "a.jsonl": (json.dumps({"text": TEXT}) + '\n{"text": 5}\n', 'line 2: the field "text" must be text'),
    "d.parquet": ("PAR1", "not a parquet file"),
    "f.jsonl": ('{"number": 1}\n', 'but "data/f.jsonl", line 1 has no text of that name; it has number'),
}


def test_a_file_that_cannot_be_trained_on(capsys):
    for name, (content, words) in BROKEN.items():
        write({name: content})
        for data in ("data", f"data/{name}"):
            error = refused(capsys, "init", "--data", data)
            assert words in error and "has no text, JSON lines or parquet to train on (" in error
        Path("data", name).unlink()


def test_text_in_another_field(capsys):
    write({"a.jsonl": json.dumps({"text": TEXT, "messages": []}) + "\n"})
    init(capsys, "-o", "a.toml")
    assert accepted("a.toml").data.text_field == "text", "messages beside it do not make it a chat"
    records = [{"id": "1", "body": TEXT}, {"id": "2", "body": None}]
    write({"a.jsonl": "\n".join(map(json.dumps, records)), "b.jsonl": '{"id": "3"}'})
    field, left_out, _ = init(capsys).splitlines()
    assert field == 'the text in "body" of each record is read, not in "id"; data.text_field names another field'
    assert left_out.startswith("left out 1") and "b.jsonl" in left_out
    assert (accepted().data.files, accepted().data.text_field) == (("data/a.jsonl",), "body")
    table([{"id": "1", "body": "a long text"}])
    assert find_data("data/a.parquet").table == {"files": ["data/a.parquet"], "text_field": "body"}
    rows = datasets.Dataset.from_list([{"number": 1, "content": TEXT}])
    datasets.DatasetDict({"all": rows}).save_to_disk("saved")
    init(capsys, "--data", "saved", "-o", "b.toml")
    config = accepted("b.toml")
    assert (config.data.dataset, config.data.dataset_split, config.data.text_field) == ("saved", "all", "content")


SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 300}
LIMITS = [
    # family, fields, model_max_length of the tokenizer, longest sequence
    ("llama", {"intermediate_size": 32, "max_position_embeddings": 256}, None, 256),
    ("llama", {"intermediate_size": 32, "max_position_embeddings": 2048}, 100, 64),
    ("gpt2", {"n_positions": 12}, 1024, 12),
    ("opt", {"ffn_dim": 32, "word_embed_proj_dim": 16, "max_position_embeddings": 64}, None, 64),
    ("roberta", {"intermediate_size": 32, "max_position_embeddings": 33, "is_decoder": True}, None, 16),
]


@pytest.mark.parametrize("with_weights", [True, False])
@pytest.mark.parametrize(("family", "fields", "of_tokenizer", "longest"), LIMITS, ids=str)
@pytest.mark.sampled(1)
def test_sequences_fit_the_model(family, fields, of_tokenizer, longest, with_weights, capsys):  # noqa: PLR0917
    size = 10 if of_tokenizer == 100 else 1  # without that tokenizer, data must be enough for 1024
    write({"a.txt": TEXT * 4 * size, "b.txt": "".join(map(str, range(30_000 * size)))})
    config = CONFIG_MAPPING[family](**SMALL, **fields)
    config.save_pretrained("model")
    if with_weights:
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained("model")
        tokenizer = train_tokenizer([TEXT], 300, "<|end|>")
        tokenizer.model_max_length = of_tokenizer or tokenizer.model_max_length
        tokenizer.save_pretrained("model")
    elif of_tokenizer == 100:
        longest = 1024
    init(capsys, "--model", "model")
    assert accepted().data.sequence_length == longest


def test_a_length_that_nobody_wrote_is_called_the_default():
    write({"a.txt": TEXT})
    CONFIG_MAPPING["gpt2"](**SMALL, n_positions=256).save_pretrained("model")
    Path("own.toml").write_text('[model]\nsource = "model"\nfresh_weights = true\n[data]\nfiles = ["data/*"]\n')
    with pytest.raises(InputError, match=r"data\.sequence_length is 1024, its default; it must be at most 256"):
        check_pipeline(load_config("own.toml", ["pipeline.processes=2"]))


def test_the_length_of_sequences_follows_from_the_tokens_of_the_data(capsys):
    """Also of one word or letter again and again, and of records that are mostly other fields."""
    for text in ("one two three four five six seven\n" * 30, "again " * 4000, "x" * 40_000):
        write({"a.txt": text})
        init(capsys, "-o", "little.toml")
        accepted("little.toml")
        Path("little.toml").unlink()
    for numbers, length in ((400, 16), (20_000, 256), (2_000_000, 1024)):
        write({"a.txt": " ".join(map(str, range(numbers)))})
        assert new_tables(None, find_data("data"), 2, "run")["data"]["sequence_length"] == length
    write({"a.txt": "one two three"})
    words = "tokens; it must have at least 48: a sequence of 16 for each of 2 processes"
    assert words in refused(capsys, "init", "--data", "data", "--processes", "2")
    Path("data/a.txt").unlink()
    write({"a.jsonl": "".join(json.dumps({"text": "a b c", "vector": [0.5] * 500}) + "\n" for _ in range(60))})
    init(capsys)
    assert accepted().data.sequence_length == 16


# --- models and examples ---------------------------------------------------------------------------------------------


def test_a_model_with_weights_is_continued_with_its_own_tokenizer():
    llama = CONFIG_MAPPING["llama"](**{**SMALL, "num_hidden_layers": 3}, intermediate_size=32)
    AutoModelForCausalLM.from_config(llama).save_pretrained("model")
    with pytest.raises(InputError, match=r'"model" has no tokenizer: it has no .*; give tokenizer\.source'):
        new_tables("model", None, 2, "run")
    train_tokenizer([TEXT], 300, "<|end|>").save_pretrained("model")
    tables = new_tables("model", None, 8, "run")
    assert tables["model"] == {"source": "model"} and "tokenizer" not in tables
    assert tables["pipeline"]["processes"] == 3, "no more than layers"


def test_the_examples(capsys):
    for name in example_configurations():
        text = printed(capsys, "init", "--example", name)
        assert text == f"wrote {name}.toml; next: evenpipe train {name}.toml\n"
        assert f"evenpipe train {name}.toml" in Path(f"{name}.toml").read_text()
        assert load_config(f"{name}.toml").output.folder.startswith("runs/")
        exists = f'"{name}.toml" exists already; -o names another one'
        assert exists in refused(capsys, "init", "--example", name)


def test_all_examples_reach_those_who_have_no_source_checkout(capsys):
    assert printed(capsys, "init", "--example", "all") == "wrote examples\n"
    copied = {path.relative_to("examples").as_posix() for path in Path("examples").rglob("*") if path.is_file()}
    assert {"own_loop.py", "own_loop.ipynb", "models/llama-3.1-8b.json", "train.slurm"} <= copied
    for path in copied:
        assert Path("examples", path).read_bytes() == (examples() / path).read_bytes()
    assert '"examples" exists already; -o names another one' in refused(capsys, "init", "--example", "all")
