"""Documents from files, data sets and the standard library; and what is said about those that cannot be read."""

from __future__ import annotations

import json
import sys

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet
from refusals import wrong_refusals

from evenpipe.errors import InputError
from evenpipe.train.input_sections import DataConfig
from evenpipe.train.sources import find_documents, find_files


def documents(folder, **settings):
    return find_documents(DataConfig(**settings), folder / "cache")


def read(folder, **settings):
    found = documents(folder, **settings)
    found.fingerprint()
    return list(found)


def write(folder, **files):
    """Files by name (a double underscore stands for the dot), content as bytes, text, or JSON lines."""
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        if isinstance(content, list):
            content = "".join(json.dumps(record) + "\n" for record in content)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def test_files_come_sorted_and_once(tmp_path):
    (tmp_path / "sub").mkdir()
    write(tmp_path, b__txt="b", a__txt="a")
    (tmp_path / "sub" / "c.txt").write_text("c")
    patterns = (f"{tmp_path}/b.txt", f"{tmp_path}/**/*.txt")
    assert [path.name for path in find_files(patterns)] == ["a.txt", "b.txt", "c.txt"]
    assert read(tmp_path, files=patterns) == ["a", "b", "c"]


def test_names_that_look_like_patterns_are_taken_as_they_are(tmp_path):
    names = ["100%.txt", "a[1].txt", "b*.txt", "bzz.txt", "c d?.txt", "hash#.txt"]
    for name in names:
        (tmp_path / name).write_text(name)
    for pattern, matched in (("a[1].txt", ["a[1].txt"]), ("b*.txt", ["b*.txt"]), ("*.txt", names)):
        assert read(tmp_path, files=(f"{tmp_path}/{pattern}",)) == matched


def test_a_text_file_is_one_document_with_plain_line_ends(tmp_path):
    write(tmp_path, a__txt=b"one\r\ntwo\rthree\n", b__txt="", c__md="\ufeffü\n\n\n")
    assert read(tmp_path, files=(f"{tmp_path}/*",)) == ["one\ntwo\nthree\n", "", "ü\n\n\n"]


def test_json_lines_may_differ_in_everything_but_the_text(tmp_path):
    records = '{"text": "a", "m": 1}\n\n{"m": {"x": [2]}, "text": "b\\nB"}\r\n{"text": null}\n{"text": "c", "m": "s"}'
    write(tmp_path, a__jsonl=b"\xef\xbb\xbf" + records.encode(), b__json=[{"text": "\ud800!"}])
    assert read(tmp_path, files=(f"{tmp_path}/*",)) == ["a", "b\nB", "", "c", "?!"]


def test_kinds_may_be_mixed_and_the_field_chosen(tmp_path):
    write(tmp_path, a__jsonl=[{"text": "1"}, {"text": "2"}], b__txt="3", c__jsonl=[{"text": "4"}])
    parquet.write_table(pa.table({"n": [1, 2, 3], "text": ["5", None, "6"]}), tmp_path / "d.parquet")
    assert read(tmp_path, files=(f"{tmp_path}/*.*",)) == ["1", "2", "3", "4", "5", "", "6"]
    write(tmp_path, e__jsonl=[{"content": "a", "text": 5}])
    assert read(tmp_path, files=(f"{tmp_path}/e.jsonl",), text_field="content") == ["a"]


def test_a_data_set_with_splits_and_parts(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    write(folder, train__jsonl=[{"text": f"t{i}"} for i in range(10)], test__jsonl=[{"text": "held"}])
    assert read(tmp_path, dataset=str(folder)) == [f"t{i}" for i in range(10)]
    assert read(tmp_path, dataset=str(folder), dataset_split="train[:20%]") == ["t0", "t1"]
    assert read(tmp_path, dataset=str(folder), dataset_split="test") == ["held"]
    first, again = (documents(tmp_path, dataset=str(folder)).fingerprint() for _ in range(2))
    assert first == again != documents(tmp_path, dataset=str(folder), dataset_split="test").fingerprint()


TEXTS = ["one\ntwo\n\nthree", "four\n", "five"]


def test_in_a_folder_of_text_every_file_is_a_document(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    write(folder, **{f"{number}__txt": text for number, text in enumerate(TEXTS)})
    assert read(tmp_path, dataset=str(folder)) == read(tmp_path, files=(f"{folder}/*.txt",)) == TEXTS


SPLITS = [
    ({"train": TEXTS}, "train", TEXTS),
    ({"train": TEXTS}, "train[1:]", TEXTS[1:]),
    ({"train": TEXTS, "test": ["held"]}, "train", TEXTS),
    ({"train": TEXTS, "test": ["held"]}, "train[:2]+test", [*TEXTS[:2], "held"]),
]


def test_a_folder_that_save_to_disk_wrote(tmp_path):
    for number, (splits, split, texts) in enumerate(SPLITS):
        folder = str(tmp_path / str(number))
        sets = {name: datasets.Dataset.from_dict({"text": lines}) for name, lines in splits.items()}
        (datasets.DatasetDict(sets) if len(sets) > 1 else sets["train"]).save_to_disk(folder)
        assert read(tmp_path, dataset=folder, dataset_split=split) == texts
    with pytest.raises(InputError, match=r'^data\.dataset is .*split "dev".*cannot be loaded: .*"dev"'):
        read(tmp_path, dataset=folder, dataset_split="dev")


def test_nothing_is_written_outside_the_cache(tmp_path, monkeypatch):
    home = tmp_path / "home"
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(home))
    write(tmp_path, a__txt="a")
    assert read(tmp_path, files=(f"{tmp_path}/a.txt",)) == ["a"]
    assert not home.exists()


PIECE = 1 << 20
"""Bytes that are decoded at once."""
NOT_UTF_8 = [
    # content, position of the first byte that is not UTF-8
    (b"abc\xe9def", 3),
    (b"a" * (PIECE - 1) + "ü".encode() + b"\xff", PIECE + 1),
    (b"a" * (PIECE - 1) + b"\xc3", PIECE - 1),
    (b"a" * (PIECE - 1) + b"\xc3a", PIECE - 1),
]


def test_bytes_that_are_not_utf_8_are_named_by_file_and_position(tmp_path):
    for content, position in NOT_UTF_8:
        write(tmp_path, good__txt="ü", latin__txt=content)
        with pytest.raises(InputError, match=rf"latin\.txt.* is not UTF-8 at byte {position};.*encoding_errors"):
            read(tmp_path, files=(f"{tmp_path}/*.txt",))


def test_bytes_that_are_not_utf_8_can_be_replaced(tmp_path):
    write(tmp_path, a__txt=b"caf\xe9", b__jsonl=b'{"text": "caf\xe9"}\n')
    assert read(tmp_path, files=(f"{tmp_path}/*",), encoding_errors="replace") == ["caf\ufffd", "caf\ufffd"]


UNREADABLE = [
    # name, content, words of the sentence
    ("a.jsonl", b'{"text": "a"}\n\n{"text": \n', ['a.jsonl", line 3 is not JSON']),
    ("a.jsonl", b"[1, 2]\n", ['a.jsonl", line 1 must be a JSON object', "text"]),
    ("a.jsonl", b'{"text": "a"}\n{"txt": "b"}\n', ["line 2", "data.text_field", "txt"]),
    ("a.jsonl", b'{"text": 5}\n', ["line 1", "must be text"]),
    ("a.jsonl", b"[" * 100_000, ["line 1 is not JSON"]),
    ("a.parquet", b"PAR1 no", ['a.parquet" is not a parquet file']),
]
NO_DATASET = [
    ({"dataset": "./nowhere"}, ["data.dataset", "./nowhere"]),
    ({"dataset_split": "validation"}, ["data.dataset", 'split "validation"']),
    ({"dataset_config": "german"}, ["data.dataset", 'config "german"']),
    ({"text_field": "body"}, ["data.text_field", '"body"', "text"]),
]


def test_what_cannot_be_read_is_one_sentence(tmp_path):
    def read_file(name, content):
        (tmp_path / name).write_bytes(content)
        read(tmp_path, files=(str(tmp_path / name),))

    assert not wrong_refusals(read_file, UNREADABLE)
    parquet.write_table(pa.table({"texts": ["a"], "text": [1]}), tmp_path / "t.parquet")
    files = [
        (f"{tmp_path}/t.parquet", ["data.text_field", "t.parquet", "texts"]),
        (f"{tmp_path}/nowhere*.txt", ['data.files names "', 'nowhere*.txt", but there is no such file']),
        (str(tmp_path), ["names the folder", "/**/*.txt"]),
    ]
    assert not wrong_refusals(lambda name: read(tmp_path, files=(name,)), files)
    folder = tmp_path / "set"
    folder.mkdir()
    write(folder, train__jsonl=[{"text": "a"}])
    assert not wrong_refusals(lambda options: read(tmp_path, **{"dataset": str(folder), **options}), NO_DATASET)
    unknown = {"corpus": "python-standard-library:asyncoi"}
    words = ['data.corpus names "asyncoi"', 'did you mean "asyncio"']
    assert not wrong_refusals(lambda options: documents(tmp_path, **options), [(unknown, words)])


def test_the_fingerprint_follows_contents_order_field_and_errors(tmp_path):
    write(tmp_path, a__txt="a", b__txt="b")
    base = {"files": (f"{tmp_path}/*.txt",)}
    variants = [base, {**base, "text_field": "other"}, {**base, "encoding_errors": "replace"}]
    prints = [documents(tmp_path, **settings).fingerprint() for settings in variants]
    write(tmp_path, a__txt="A")
    prints.append(documents(tmp_path, **base).fingerprint())
    write(tmp_path, a__txt="b", b__txt="A")
    prints.append(documents(tmp_path, **base).fingerprint())
    assert len(set(prints)) == len(prints)
    write(tmp_path, a__txt="a", b__txt="b")
    assert documents(tmp_path, **base).fingerprint() == prints[0]


def test_the_standard_library(tmp_path):
    whole = documents(tmp_path, corpus="python-standard-library")
    modules = {path.stem for path in whole.paths}
    assert {"argparse", "dataclasses", "decoder"} <= modules
    folders = {part for path in whole.paths for part in path.parts[-3:-1]}
    assert not folders & {"test", "tests", "encodings", "idlelib", "lib2to3", "pydoc_data", "site-packages"}
    part = read(tmp_path, corpus="python-standard-library:json, this")
    assert len(part) == 6
    assert sum("JSONDecodeError" in text for text in part) >= 2
    assert "Gur Mra bs Clguba" in part[-1]


def test_the_documentation(tmp_path, monkeypatch):
    texts = read(tmp_path, corpus="python-documentation")
    assert len(texts) > 70 and sum(map(len, texts)) > 400_000
    assert any(text.startswith('The "for" statement') for text in texts)
    whole = documents(tmp_path, corpus="python-documentation")
    assert whole.fingerprint() == documents(tmp_path, corpus="python-documentation").fingerprint()
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(InputError, match=r"python-documentation.* no module pydoc_data"):
        whole.fingerprint()
