"""The manifest notices everything: no byte of it, nor of the files it names, can change unseen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from evenpipe.checkpoints import manifest as module
from evenpipe.checkpoints.manifest import (
    DamagedError,
    FileEntry,
    Manifest,
    TensorEntry,
    check_hash,
    check_sizes,
    hash_file,
)
from evenpipe.errors import InputError

MANIFEST = Manifest(
    step=20,
    files={".metadata": FileEntry(3, "a" * 64), "__0_0.distcp": FileEntry(0, "b" * 64)},
    tensors={
        "parameters.model.norm.weight": TensorEntry((64,), "float32"),
        "optimizer.step.model.norm.weight": TensorEntry((), "float32"),
    },
    versions={"torch": "2.13.0"},
)


def test_it_reads_what_it_writes_and_so_do_other_tools() -> None:
    named = replace(MANIFEST, id="0123456789abcdef" * 2)
    for manifest, version in ((MANIFEST, 1), (named, 2)):
        assert Manifest.from_bytes(manifest.to_bytes()) == manifest
        content = json.loads(manifest.to_bytes())
        assert content["version"] == version
        assert content["files"]["__0_0.distcp"] == {"bytes": 0, "sha256": "b" * 64}
        assert content["tensors"]["parameters.model.norm.weight"] == {"shape": [64], "dtype": "float32"}


def test_one_from_before_saves_had_ids_is_read() -> None:
    """Written by evenpipe before version 2 of the format."""
    text = b"""{
 "files": {
  "a": {
   "bytes": 3,
   "sha256": "aa"
  }
 },
 "format": "evenpipe checkpoint",
 "sha256": "041b83ce56a0d8edd4240c6a4ee83dc6f637c37cdc55b0eb3edcc4746ddba9e3",
 "step": 7,
 "tensors": {},
 "version": 1,
 "versions": {}
}
"""
    assert Manifest.from_bytes(text) == Manifest(7, {"a": FileEntry(3, "aa")}, {})


def test_every_flipped_bit_truncation_and_addition_is_noticed() -> None:
    text = MANIFEST.to_bytes()
    flipped = []
    for position, byte in enumerate(text):
        flipped += [text[:position] + bytes([byte ^ (1 << bit)]) + text[position + 1 :] for bit in range(8)]
    for damaged in (*flipped, *(text[:length] for length in range(len(text))), text + b"\n", b" " + text):
        with pytest.raises(DamagedError):
            Manifest.from_bytes(damaged)


def with_own_hash(**changes: object) -> bytes:
    """A manifest that someone else has made: sound in itself, whatever it says."""
    content = json.loads(MANIFEST.to_bytes()) | changes
    content.pop("sha256")
    digest = module.hashlib.sha256(module._canonical(content)).hexdigest()
    return module._canonical({**content, "sha256": digest})


NOT_A_FILE = "which is not one of its folder"
FORGED = [
    ({"version": 3}, "is of version 3, and this evenpipe reads 1 and 2"),
    ({"format": "something else"}, "does not say"),
    *(({"files": {name: {"bytes": 1, "sha256": ""}}}, NOT_A_FILE) for name in ("../secret", "..", "/etc/passwd")),
    *(({"files": {name: {"bytes": 1, "sha256": ""}}}, NOT_A_FILE) for name in ("manifest.json", "a\0b")),
    ({"files": []}, "does not have the fields"),
    ({"version": 2}, "does not have the fields"),
    ({"version": 2, "id": 3}, "does not have the fields"),
    ({"version": 2, "id": "../../etc"}, "does not have the fields"),
    ({"id": "0" * 32}, "does not have the fields"),
    ({"tensors": {"x": {"dtype": "float32"}}}, "does not have the fields"),
]


def test_a_forged_manifest_is_refused() -> None:
    assert Manifest.from_bytes(with_own_hash(step=21)).step == 21, "the forger of these tests cannot forge"
    for changes, says in FORGED:
        with pytest.raises(DamagedError, match=says):
            Manifest.from_bytes(with_own_hash(**changes))


def test_a_missing_manifest_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"manifest\.json is missing"):
        module.read_manifest(tmp_path)


def test_files_are_held_against_it(tmp_path: Path) -> None:
    entries = {"a": module.write_synced(tmp_path / "a", b"content"), "b": module.write_synced(tmp_path / "b", b"")}
    manifest = Manifest(1, entries, {})
    check_sizes(tmp_path, manifest)
    for name, entry in entries.items():
        check_hash(tmp_path, name, entry)
        assert hash_file(tmp_path / name) == entry
    (tmp_path / "a").write_bytes(b"Content")
    check_sizes(tmp_path, manifest)
    with pytest.raises(DamagedError, match="the content of a does not have the hash"):
        check_hash(tmp_path, "a", entries["a"])
    (tmp_path / "a").write_bytes(b"conten")
    with pytest.raises(DamagedError, match="a has 6 bytes, but the manifest says 7"):
        check_sizes(tmp_path, manifest)
    (tmp_path / "a").unlink()
    with pytest.raises(DamagedError, match="a is missing"):
        check_sizes(tmp_path, manifest)
    with pytest.raises(DamagedError, match="a cannot be read: No such file"):
        check_hash(tmp_path, "a", entries["a"])
