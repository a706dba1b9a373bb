"""`evenpipe init` looks at all data, says what it leaves out, and writes only what trains as it stands."""

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
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from evenpipe.cli.main import main
from evenpipe.errors import InputError
from evenpipe.train.config_file import load_config
from evenpipe.train.data import prepare
from evenpipe.train.model_source import check_pipeline
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


def accepted(path: str = "train.toml") -> Any:
    """The written configuration, after all that a run does before its processes start."""
    config = load_config(path)
    check_pipeline(config)
    prepare(config, lambda text: None)
    return config


QUICK = """
import resource, sys
from evenpipe.cli.main import main
code = main(sys.argv[1:])
assert not {"torch", "transformers"} & {*sys.modules}, "they take seconds to import"
print(code, resource.getrusage(resource.RUSAGE_SELF).ru_utime < 1)
"""
WRONG = [
    (["--data", "date"], '--data is "date", but there is no such file or folder; did you mean "data"?'),
    (["--data", "data", "--model", "./modl"], "--model is ./modl, but there is no such file or folder"),
    (["--data", "data"], "that folder has no text, JSON lines or parquet"),
    (["--data", "chat.jsonl"], NO_CHAT),
    (["--example", "zvb"], 'did you mean "zbv"?'),
    (["-o", "there.toml"], '"there.toml" exists already'),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=str)
def test_what_is_wrong_is_said_at_once(arguments: list[str], words: str) -> None:
    Path("there.toml").touch()
    Path("chat.jsonl").write_text(CHAT)
    before = {path.name for path in Path().iterdir()}
    done = subprocess.run([sys.executable, "-c", QUICK, "init", *arguments], capture_output=True, text=True, check=True)
    assert words in done.stderr and done.stderr.count("\n") == 1
    assert done.stdout == "2 True\n"
    assert {path.name for path in Path().iterdir()} == before


GIF = b"GIF89a\x00\xff\xfe"
FOLDERS: dict[str, tuple[dict[str, str | bytes], list[str], list[str]]] = {
    # what is in the folder, data.files, what is said
    "licences": (
        {"GPL": TEXT, "BSD": TEXT, "MIT.txt": TEXT, "old/APACHE-2": TEXT},
        ["data/BSD", "data/GPL", "data/old/APACHE-2", "data/**/*.txt"],
        [],
    ),
    "no ends at all": ({"GPL": TEXT, "a/BSD": TEXT}, ["data/**/*"], []),
    "a picture beside": (
        {"GPL": TEXT, "BSD": TEXT, "logo": GIF, "a.gif": GIF, "b.gif": GIF, ".git/config": "x", ".hidden": "x"},
        ["data/BSD", "data/GPL"],
        ["left out 3 files, not UTF-8 text: a.gif, b.gif, logo"],
    ),
    "one text in another encoding": (
        {"a.txt": TEXT, "b.txt": TEXT + "Stra\u00dfe", "c.txt": (TEXT + "Stra\u00dfe").encode("latin-1"), "d.txt": ""},
        ["data/a.txt", "data/b.txt"],
        ["left out 1 file, empty: d.txt", "left out 1 file, not UTF-8 text: c.txt"],
    ),
    "records beside a card": (
        {"a.jsonl": json.dumps({"text": TEXT}), "README.md": "# Data", "LICENSE": "MIT", "x.json": "[\n1]\n"},
        ["data/**/*.jsonl"],
        [
            "left out 1 file, not one JSON object per line: x.json",
            "left out 2 files, text beside tables: LICENSE, README.md",
        ],
    ),
    "code beside records": (
        {"a.py": TEXT, "b.py": TEXT, "package.json": '{"name": "x"}', "data.json": "[\n"},
        ["data/**/*.py"],
        [
            "left out 1 file, .json beside text: package.json",
            "left out 1 file, not one JSON object per line: data.json",
        ],
    ),
    "another field": (
        {
            "a.jsonl": json.dumps({"id": "1", "body": TEXT}) + "\n" + json.dumps({"id": "2", "body": None}),
            "b.jsonl": '{"id": "3"}',
        },
        ["data/**/a.jsonl"],
        ['the text in "body" of each record is read, not in "id"; data.text_field names another field'],
    ),
    "chats beside text": (
        {"a.txt": TEXT, "chat.jsonl": CHAT},
        ["data/**/*.txt"],
        ["left out 1 file, chats, on which evenpipe cannot train yet: chat.jsonl"],
    ),
    "many of a kind": (
        {"a.txt": TEXT, **{f"{number}.bin": b"\xff\x00" for number in range(9)}},
        ["data/**/*.txt"],
        ["left out 9 files, not UTF-8 text: 0.bin, 1.bin, 2.bin and 6 more"],
    ),
    "names that are patterns": ({"[a]/x[1].txt": TEXT, "[a]/y.bin": GIF}, ["data/**/*.txt"], ["left out 1 file"]),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_every_file_is_trained_on_or_listed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    files, patterns, said = FOLDERS[name]
    write(files)
    assert main(["init", "--data", "data", "--processes", "2"]) == 0
    *remarks, last = capsys.readouterr().out.splitlines()
    assert last == "wrote train.toml; next: evenpipe train train.toml"
    for words in said:
        assert any(remark.startswith(words) for remark in remarks), remarks
    config = accepted()
    if name == "another field":
        patterns = ["data/a.jsonl"]
        assert any("b.jsonl" in remark for remark in remarks)
        assert config.data.text_field == "body"
    else:
        assert len(remarks) == len(said)
    assert list(config.data.files) == patterns
    visible = {Path("data", file) for file in files if not file.startswith(".")}
    left_out = {path for path in visible if any(path.relative_to("data").as_posix() in remark for remark in remarks)}
    if name not in ("many of a kind", "names that are patterns"):
        assert set(find_files(config.data.files)) == visible - left_out


def test_links_and_what_is_no_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A link to a folder above, one to nothing, one to text elsewhere, and a pipe that nobody writes to."""
    write({"a": TEXT})
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "b").write_text(TEXT)
    for name, target in (("loop", folder / "data"), ("nothing", folder / "gone"), ("b", folder / "elsewhere" / "b")):
        (folder / "data" / name).symlink_to(target)
    os.mkfifo(folder / "data" / "pipe")
    assert main(["init", "--data", "data", "--processes", "2"]) == 0
    assert accepted().data.files == ("data/a", "data/b")
    said = capsys.readouterr().out
    assert "left out 2 files, not a file, or a link to nothing: nothing, pipe" in said


def test_a_folder_whose_name_is_a_pattern_and_a_single_file() -> None:
    Path("[x]").mkdir()
    Path("[x]", "a.txt").write_text(TEXT)
    assert main(["init", "--data", "[x]", "--processes", "2", "-o", "a.toml"]) == 0
    assert find_files(accepted("a.toml").data.files) == [Path("[x]/a.txt")]
    assert main(["init", "--data", "[x]/a.txt", "--processes", "2", "-o", "b.toml"]) == 0
    assert accepted("b.toml").data.files == ("[x]/a.txt",)


def table(rows: list[dict[str, Any]]) -> None:
    parquet.write_table(pa.Table.from_pylist(rows), "data/a.parquet")


CHATS = {
    "lines": lambda: write({"chat.jsonl": CHAT * 9, "README.md": "# Chats"}),
    "sharegpt": lambda: write({"a.json": json.dumps({"conversations": [{"from": "human", "value": "x"}], "id": "1"})}),
    "parquet": lambda: table([{"messages": [{"role": "user", "content": "x"}], "source": "a"}]),
    "saved": lambda: datasets.Dataset.from_list(
        [{"messages": [{"role": "user", "content": "x"}], "source": "a"}]
    ).save_to_disk("data"),
}


@pytest.mark.parametrize("kind", CHATS)
def test_chats_are_refused_by_init_and_by_training(kind: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    CHATS[kind]()
    assert main(["init", "--data", "data"]) == 2
    said = capsys.readouterr()
    assert NO_CHAT in said.err and "next:" not in said.out and not Path("train.toml").exists()
    where = ["dataset=data"] if kind == "saved" else ['files=["data/*[!d]"]']
    for text_field in ("text", "messages"):
        overrides = [f"data.{where[0]}", f"data.text_field={text_field}", "output.folder=run"]
        Path("mine.toml").write_text('[model]\narchitecture = "llama"\n[model.config]\nhidden_size = 16\n[data]\n')
        with pytest.raises(InputError, match=NO_CHAT):
            prepare(load_config("mine.toml", overrides), lambda text: None)


BROKEN = {
    # a file, and what is said of it
    "a.jsonl": (json.dumps({"text": TEXT}) + '\n{"text": 5}\n', 'line 2: the field "text" must be text'),
    "b.json": ('[{"text": "x"}]', "not one JSON object per line"),
    "c.json": ('{\n"text": "x"\n}', "not one JSON object per line"),
    "d.parquet": ("PAR1", "not a parquet file"),
    "e.gif": (GIF, "e.gif: not UTF-8 text"),
    "f.jsonl": ('{"number": 1}\n', 'but "data/f.jsonl", line 1 has no text of that name; it has number'),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_cannot_be_trained_on(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    content, words = BROKEN[name]
    write({name: content})
    for data in ("data", f"data/{name}"):
        assert main(["init", "--data", data]) == 2
        error = capsys.readouterr().err
        assert words in error and "has no text, JSON lines or parquet to train on (" in error and error.count("\n") == 1


def test_rows_with_text_beside_messages_are_text() -> None:
    write({"a.jsonl": json.dumps({"text": TEXT, "messages": []}) + "\n"})
    assert main(["init", "--data", "data", "--processes", "2"]) == 0
    assert accepted().data.text_field == "text"


def test_a_saved_dataset_without_train_and_with_another_column() -> None:
    rows = datasets.Dataset.from_list([{"number": 1, "content": TEXT}])
    datasets.DatasetDict({"all": rows}).save_to_disk("saved")
    assert main(["init", "--data", "saved", "--processes", "2"]) == 0
    config = accepted()
    assert (config.data.dataset_split, config.data.text_field) == ("all", "content")


SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 300}
LIMITS = [
    # family, fields, model_max_length of the tokenizer, longest sequence
    ("llama", {"intermediate_size": 32, "max_position_embeddings": 256}, None, 256),
    ("llama", {"intermediate_size": 32, "max_position_embeddings": 2048}, 100, 64),
    ("gpt2", {"n_positions": 200}, None, 128),
    ("gpt2", {"n_positions": 12}, 1024, 12),
    ("opt", {"ffn_dim": 32, "word_embed_proj_dim": 16, "max_position_embeddings": 64}, None, 64),
    ("roberta", {"intermediate_size": 32, "max_position_embeddings": 33, "is_decoder": True}, None, 16),
]


@pytest.mark.parametrize("with_weights", [True, False])
@pytest.mark.parametrize(("family", "fields", "of_tokenizer", "longest"), LIMITS, ids=str)
@pytest.mark.sampled(6)
def test_sequences_fit_the_model(
    family: str, fields: dict[str, Any], of_tokenizer: int | None, longest: int, with_weights: bool
) -> None:
    write({"a.txt": TEXT * 40, "b.txt": "".join(map(str, range(300_000)))})
    config = CONFIG_MAPPING[family](**SMALL, **fields)
    config.save_pretrained("model")
    if with_weights:
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained("model")
        tokenizer = train_tokenizer([TEXT], 300, "<|end|>")
        tokenizer.model_max_length = of_tokenizer or tokenizer.model_max_length
        tokenizer.save_pretrained("model")
    elif of_tokenizer == 100:
        longest = 1024
    assert main(["init", "--model", "model", "--data", "data", "--processes", "2"]) == 0
    assert accepted().data.sequence_length == longest


def test_a_length_that_nobody_wrote_is_called_the_default() -> None:
    write({"a.txt": TEXT})
    CONFIG_MAPPING["gpt2"](**SMALL, n_positions=256).save_pretrained("model")
    Path("own.toml").write_text('[model]\nsource = "model"\nfresh_weights = true\n[data]\nfiles = ["data/*"]\n')
    with pytest.raises(InputError, match=r"data\.sequence_length is 1024, its default, but must be at most 256"):
        check_pipeline(load_config("own.toml", ["pipeline.processes=2"]))
    with pytest.raises(InputError, match=r"data\.sequence_length is 300, but must be at most 256"):
        check_pipeline(load_config("own.toml", ["pipeline.processes=2", "data.sequence_length=300"]))


LITTLE = {
    # data, and what is said if it is too little
    "words": ("one two three four five six seven\n" * 30, None),
    "one word again and again": ("again " * 4000, None),
    "one letter": ("x" * 40_000, None),
    "few words": ("one two three", "tokens, but must have at least 48: a sequence of 16 for each of 2 processes"),
}


@pytest.mark.parametrize("name", LITTLE)
def test_little_data_trains_or_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By the tokens that a tokenizer makes of it, not by its size."""
    text, words = LITTLE[name]
    write({"a.txt": text})
    code = main(["init", "--data", "data", "--processes", "2"])
    if words is None:
        assert code == 0
        accepted()
    else:
        assert code == 2 and words in capsys.readouterr().err


def test_records_that_are_mostly_other_fields() -> None:
    write({"a.jsonl": "".join(json.dumps({"text": "a b c", "vector": [0.5] * 500}) + "\n" for _ in range(60))})
    assert main(["init", "--data", "data", "--processes", "2"]) == 0
    assert accepted().data.sequence_length == 16
