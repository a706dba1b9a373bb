"""A damaged checkpoint is never used, an index cannot run code, and a full disk costs no checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint_run import Run, assert_same, flip, save_three, saved_steps, truncate
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, StorageMeta

from evenpipe.checkpoints import checkpoint as module
from evenpipe.checkpoints import find_latest, load, open_checkpoint
from evenpipe.checkpoints.manifest import MANIFEST, DamagedError, FileEntry, Manifest, hash_file, read_manifest
from evenpipe.checkpoints.state import tensors_to_save
from evenpipe.checkpoints.storage import tensor_entries
from evenpipe.errors import InputError, RunError


@pytest.fixture
def three(tmp_path: Path) -> Path:
    return save_three(tmp_path)


def append(path: Path, chance: random.Random) -> None:
    with path.open("ab") as file:
        file.write(chance.randbytes(1))


def delete(path: Path, chance: random.Random) -> None:
    path.unlink()


def zero_a_block(path: Path, chance: random.Random) -> None:
    """What a disk gives back after a crash: the size is right and a stretch was never written."""
    content = bytearray(path.read_bytes())
    nonzero = [position for position, byte in enumerate(content) if byte]
    start = chance.choice(nonzero)
    content[start : start + 64] = bytes(len(content[start : start + 64]))
    path.write_bytes(content)


NEWEST = "step-00000003"
FILES = ["__0_0.distcp", ".metadata", "run.json", MANIFEST]


@pytest.mark.sampled()
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", [flip, truncate, append, delete, zero_a_block], ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_never_picked_up(three, file, damage, request):
    chance = random.Random(f"{file} {damage.__name__}")
    rounds = 1 if damage is delete else 4 if request.config.option.quick else 30
    newest, whole = three / NEWEST, three.parent / f"{three.name}-whole"
    shutil.copytree(newest, whole)
    for _ in range(rounds):
        damage(newest / file, chance)
        latest = find_latest(three)
        assert latest.checkpoint is not None and latest.checkpoint.step == 2
        assert [(each.path, file in each.reason) for each in latest.rejected] == [(newest, True)]
        with pytest.raises(InputError, match=f"{NEWEST}' cannot be used: .*{file}"):
            open_checkpoint(newest)
        shutil.rmtree(newest)
        shutil.copytree(whole, newest)
    assert find_latest(three).checkpoint.step == 3


def test_the_one_before_the_one_before(three: Path) -> None:
    flip(three / NEWEST / MANIFEST, random.Random(0))
    delete(three / "step-00000002" / ".metadata", random.Random(0))
    found = find_latest(three)
    assert found.checkpoint.step == 1
    assert [each.path.name for each in found.rejected] == [NEWEST, "step-00000002"]
    assert found.rejected[1].reason == ".metadata is missing"
    truncate(three / "step-00000001" / "__0_0.distcp", random.Random(0))
    assert find_latest(three).checkpoint is None


def test_a_checkpoint_under_another_step_is_not_believed(three: Path) -> None:
    (three / NEWEST).rename(three / "step-00000009")
    found = find_latest(three)
    assert (found.checkpoint.step, found.rejected[0].reason) == (2, "manifest.json says step 3")
    (three / "step-00000009").rename(three / "my-favourite")
    assert open_checkpoint(three / "my-favourite").step == 3


def test_half_written_and_foreign_folders_are_no_candidates(three: Path) -> None:
    (three / NEWEST).rename(three / "step-00000003.tmp")
    (three / "step-4").mkdir()
    (three / "step-00000005").touch()
    (three / "notes").mkdir()
    found = find_latest(three)
    assert (found.checkpoint.step, found.rejected) == (2, ())


# ---- the manifest


VERSION_1 = b"""{
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
"""Written by evenpipe before version 2 of the format."""


def test_every_flipped_bit_truncation_and_addition_is_noticed() -> None:
    assert Manifest.from_bytes(VERSION_1) == Manifest(7, {"a": FileEntry(3, "aa")}, {})
    flipped = []
    for position, byte in enumerate(VERSION_1):
        flipped += [VERSION_1[:position] + bytes([byte ^ (1 << bit)]) + VERSION_1[position + 1 :] for bit in range(8)]
    cut = [VERSION_1[:length] for length in range(len(VERSION_1))]
    for damaged in (*flipped, *cut, VERSION_1 + b"\n", b" " + VERSION_1):
        with pytest.raises(DamagedError):
            Manifest.from_bytes(damaged)


def with_own_hash(**changes: object) -> bytes:
    """A manifest that someone else has made: sound in itself, whatever it says."""
    content = json.loads(VERSION_1) | changes
    content.pop("sha256")
    digest = hashlib.sha256(as_text(content)).hexdigest()
    return as_text({**content, "sha256": digest})


def as_text(content: dict[str, object]) -> bytes:
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()


NOT_A_FILE = "which is not one of its folder"
FORGED = [
    ({"version": 3}, "is of version 3, and this evenpipe reads 1 and 2"),
    *(({"files": {name: {"bytes": 1, "sha256": ""}}}, NOT_A_FILE) for name in ("../secret", "..", "/etc/passwd")),
    *(({"files": {name: {"bytes": 1, "sha256": ""}}}, NOT_A_FILE) for name in ("manifest.json", "a\0b")),
    ({"version": 2}, "does not have the fields"),
    ({"version": 2, "id": "../../etc"}, "does not have the fields"),
    ({"id": "0" * 32}, "does not have the fields"),
    ({"tensors": {"x": {"dtype": "float32"}}}, "does not have the fields"),
]


def test_a_forged_manifest_is_refused() -> None:
    assert Manifest.from_bytes(with_own_hash(step=21)).step == 21, "the forger of these tests cannot forge"
    for changes, says in FORGED:
        with pytest.raises(DamagedError, match=says):
            Manifest.from_bytes(with_own_hash(**changes))


# ---- files of two saves in one folder


def vouch_for(path: Path, **changes: object) -> None:
    """The manifest anew, for the files as they are: what came of two saves into one folder, once."""
    manifest = read_manifest(path)
    files = {name: hash_file(path / name) for name in manifest.files}
    (path / MANIFEST).write_bytes(replace(manifest, files=files, **changes).to_bytes())


def test_a_file_of_another_save_is_noticed_though_its_hash_is_right(three: Path) -> None:
    newest, whole = three / NEWEST, three / "whole"
    vouch_for(newest)
    shutil.copytree(newest, whole)
    assert find_latest(three).checkpoint.step == 3, "the forger of this test cannot forge"
    for file in ("__0_0.distcp", ".metadata", "run.json"):
        shutil.copy(three / "step-00000002" / file, newest / file)
        vouch_for(newest)
        says = f"{file} does not carry the id of the save that manifest.json names"
        latest = find_latest(three)
        assert (latest.checkpoint.step, [each.reason for each in latest.rejected]) == (2, [says])
        with pytest.raises(InputError, match=re.escape(says)):
            open_checkpoint(newest)
        shutil.copy(whole / file, newest / file)
    own = read_manifest(newest).id
    vouch_for(newest, id=read_manifest(three / "step-00000002").id)
    assert "does not carry the id" in find_latest(three).rejected[0].reason
    vouch_for(newest, id=own)
    for content in (b"[]", b'{"id": 3}', b"no JSON"):
        (newest / "run.json").write_bytes(content)
        vouch_for(newest)
        assert find_latest(three).rejected[0].reason.startswith("run.json does not ")


class WriterOfVersion1(dcp.FileSystemWriter):
    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_from_before_saves_had_ids_is_loaded(tmp_path: Path) -> None:
    """Written as evenpipe did it then: torch's files as torch writes them, and a manifest of version 1."""
    run, other = Run(), Run(seed=5)
    run.take_step(1)
    path = tmp_path / "step-00000001"
    tensors = {key: held.tensor for key, held in tensors_to_save(run.shards, run.optimizer).items()}
    index = dcp.save(tensors, storage_writer=WriterOfVersion1(path), no_dist=True)
    (path / "run.json").write_text('{"step": 1}')
    files = {file.name: hash_file(file) for file in path.iterdir()}
    (path / MANIFEST).write_bytes(Manifest(1, files, tensor_entries(index)).to_bytes())
    found = find_latest(tmp_path)
    assert load(found.checkpoint, other.shards, other.optimizer) == {"step": 1}
    assert_same(run.tensors(), other.tensors())
    other.save(tmp_path, 2)
    assert [read_manifest(folder).id is None for folder in sorted(tmp_path.glob("step-*"))] == [True, False]


# ---- an index that would run code


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.path,))


def replace_index(path: Path, content: bytes) -> None:
    """Another index, with a manifest that vouches for it: what a folder from a stranger may look like."""
    (path / ".metadata").write_bytes(content)
    manifest = read_manifest(path)
    files = manifest.files | {".metadata": hash_file(path / ".metadata")}
    (path / MANIFEST).write_bytes(Manifest(manifest.step, files, manifest.tensors).to_bytes())


def assert_refused(path: Path, says: str) -> None:
    run = Run(seed=5)
    before = run.tensors()
    with pytest.raises(InputError, match=says):
        load(open_checkpoint(path), run.shards, run.optimizer)
    assert_same(before, run.tensors())


def test_an_index_that_runs_code_is_refused(three: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    content = pickle.dumps(Canary(canary))
    pickle.loads(content)
    assert canary.exists(), "the canary of this test does not sing"
    canary.unlink()
    replace_index(three / NEWEST, content)
    assert_refused(three / NEWEST, "which no index of tensors needs; it was not")
    assert not canary.exists()
    for function in (os.system, eval, torch.load, shutil.rmtree):
        replace_index(three / NEWEST, pickle.dumps(SimpleNamespace(state_dict_metadata=function)))
        assert_refused(three / NEWEST, "which no index of tensors needs")


KEY = "parameters.model.norm.weight"


def point_outside(index: Any) -> None:
    next(iter(index.storage_data.values())).relative_path = "../step-00000002/__0_0.distcp"


def unpack_it(index: Any) -> None:
    next(iter(index.storage_data.values())).transform_descriptors = ["stream.zstd/1"]


CHANGED_INDEX: list[tuple[Callable[[Any], object], str]] = [
    (lambda index: index.state_dict_metadata.update({KEY: BytesStorageMetadata()}), "BytesStorageMetadata, which no"),
    (lambda index: index.state_dict_metadata.pop(KEY), "same tensors"),
    (point_outside, "not a file of the manifest"),
    (unpack_it, "not a file of the manifest"),
    (lambda index: index.state_dict_metadata[KEY].chunks.clear(), "does not give the whole"),
    (lambda index: setattr(index.state_dict_metadata[KEY].chunks[0], "sizes", torch.Size([5])), "lies outside"),
]


def test_an_index_is_held_against_the_manifest(three: Path) -> None:
    path = three / NEWEST
    whole = (path / ".metadata").read_bytes()
    for change, says in CHANGED_INDEX:
        index = pickle.loads(whole)
        change(index)
        replace_index(path, pickle.dumps(index))
        assert_refused(path, says)
    replace_index(path, b"no pickle at all")
    assert_refused(path, "not an index of tensors")
    replace_index(path, whole)
    load(open_checkpoint(path), Run().shards)


# ---- a disk that does not hold it


def test_too_little_space_is_found_before_writing(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(three)
    little = SimpleNamespace(f_bavail=1, f_frsize=4096, f_blocks=real.f_blocks)
    monkeypatch.setattr(module.os, "statvfs", lambda path: little)
    with pytest.raises(RunError, match=r"step 4 was not saved: .* are needed and the disk of .* has 0\.00 MiB left"):
        Run().save(three, 4)
    assert saved_steps(three) == ["step-00000001", "step-00000002", "step-00000003"]


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata.tmp", "run.json", MANIFEST])
@pytest.mark.sampled(2)
def test_a_full_disk_while_writing(three: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that torch writes, and files that we write."""
    real_open = Path.open

    def open_full(path: Path, *arguments, **options):
        return real_open(Path("/dev/full") if path.name == file else path, *arguments, **options)

    monkeypatch.setattr(Path, "open", open_full)
    with pytest.raises(RunError, match=r"step 4 was not saved: process 0: No space left on device.*before it are as"):
        Run().save(three, 4)
    assert saved_steps(three) == ["step-00000001", "step-00000002", "step-00000003"]
    monkeypatch.undo()
    assert find_latest(three).checkpoint.step == 3
    Run().save(three, 4)
    assert find_latest(three).checkpoint.step == 4
