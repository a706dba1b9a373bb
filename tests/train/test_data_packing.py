"""Tokens, rows and batches: the file, the validation rows, the order of the data, and where a run continues in it."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rows_of_runs import LENGTH, prepared
from rows_of_runs import batches as rows_of_run

from evenpipe.train import packing
from evenpipe.train.packing import Batches, open_ends, open_rows, positions_of, split_rows, write_tokens
from evenpipe.train.position import resumed_position

END = 0


def encode(texts):
    """A tokenizer of one token per character."""
    return [[ord(character) for character in text] for text in texts]


def batches(rows, batch_size=3, seed=5, validation_fraction=0.0, validation=None, **ends):
    tokens = np.arange(rows * 4, dtype=np.int32).reshape(rows, 4)
    return Batches(
        tokens, batch_size=batch_size, seed=seed, validation_fraction=validation_fraction, validation=validation, **ends
    )


def written(folder, texts, encode=encode):
    """Tokens and ends of documents in the files that are written, and what is returned."""
    files = folder / "tokens.bin", folder / "documents.bin"
    counts = write_tokens(texts, encode, END, *files)
    return np.fromfile(files[0], dtype="<i4").tolist(), np.fromfile(files[1], dtype="<i8").tolist(), counts


def test_documents_are_joined_by_the_end_of_text(tmp_path):
    """Documents end where texts do, and not at the end of text that a text is, begins or ends with, or contains."""
    for texts, documents in ((["ab", "c"], 2), (["", "a", ""], 1), ([], 0), (["\0", "\0ab", "c\0", "d\0\0e"], 4)):
        tokens, ends, counts = written(tmp_path, texts)
        kept = [text for text in texts if text]
        assert tokens == [token for text in kept for token in [*map(ord, text), END]]
        assert ends == np.cumsum([len(text) + 1 for text in kept]).tolist()
        assert counts == (documents, len(tokens))
    assert positions_of(open_ends(tmp_path / "documents.bin"), [0, 1], 7).tolist() == [
        [0, 1, 0, 1, 2, 3, 0],
        [0, 1, 0, 1, 2, 3, 4],
    ]


@settings(max_examples=100)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=30), length=st.integers(1, 9), data=st.data())
def test_positions_count_from_the_start_of_the_document_or_of_the_row(lengths, length, data):
    ends = np.cumsum(lengths)
    rows = int(ends[-1]) // length
    numbers = data.draw(st.lists(st.integers(0, rows - 1), max_size=5)) if rows else []
    found = positions_of(ends, numbers, length)
    assert found.shape == (len(numbers), length)
    starts = {0, *ends.tolist()}
    for number, row in zip(numbers, found, strict=True):
        place = None
        for at, position in enumerate(row.tolist()):
            place = 0 if at == 0 or number * length + at in starts else place + 1
            assert position == place


def test_validation_batches_of_separate_documents_have_positions():
    """Those that are trained on: tests/fuzz/test_fuzz.py."""
    own, ends, other = np.full((2, 4), 7, dtype=np.int32), np.array([3, 5, 12, 30, 40]), np.array([1, 8])
    data = batches(10, validation_fraction=0.1, ends=ends)
    assert data.batch(12).labels is None and batches(10).batch(0).position_ids is None
    validation = positions_of(ends, data.validation_rows.tolist(), 4)
    assert torch.equal(data.validation_batch(0).position_ids, torch.from_numpy(validation))
    apart = batches(10, validation=own, ends=ends, validation_ends=other)
    assert apart.validation_batch(0).position_ids.tolist() == [[0, 0, 1, 2], [0, 1, 2, 3]]


def test_long_documents_are_cut_behind_line_ends_and_stay_one_document(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "PIECE_CHARACTERS", 8)
    monkeypatch.setattr(packing, "BATCH_CHARACTERS", 10)
    seen: list[str] = []

    def remember(texts):
        seen.extend(texts)
        return encode(texts)

    texts = ["one\ntwo\nthree\nfour", "x" * 20, "12345678", "\n" * 9]
    tokens, ends, _ = written(tmp_path, texts, remember)
    assert seen == ["one\ntwo\n", "three\n", "four", "x" * 8, "x" * 8, "x" * 4, "12345678", "\n" * 8, "\n"]
    assert tokens == [token for text in texts for token in [*map(ord, text), END]]
    assert ends == np.cumsum([len(text) + 1 for text in texts]).tolist()


def test_the_incomplete_row_at_the_end_is_dropped(tmp_path):
    for tokens, rows in ((0, 0), (3, 0), (4, 1), (11, 2)):
        np.arange(tokens, dtype="<i4").tofile(tmp_path / "tokens.bin")
        opened = open_rows(tmp_path / "tokens.bin", 4)
        assert opened.shape == (rows, 4) and opened.ravel().tolist() == list(range(rows * 4))


@given(rows=st.integers(0, 400), fraction=st.floats(0, 0.99))
def test_rows_are_held_back_evenly_and_nothing_is_lost(rows, fraction):
    training, validation = split_rows(rows, fraction)
    assert sorted([*training, *validation]) == list(range(rows))
    if rows == 0 or fraction == 0:
        assert len(validation) == 0
    else:
        assert len(validation) == max(1, round(rows * fraction))
        gaps = np.diff(validation)
        assert len(gaps) == 0 or gaps.max() - gaps.min() <= 1


def test_epochs_and_seeds_have_orders_of_their_own_which_are_the_same_on_every_machine():
    orders = [batches(50, 50, seed).row_numbers(50 * epoch) for seed in (1, 2) for epoch in (0, 1)]
    assert len({tuple(rows) for rows in [*orders, range(50)]}) == 5
    assert batches(12, 6, seed=3).row_numbers(0) == [0, 4, 9, 7, 1, 10]


STEPS_OF_EPOCHS = [
    # rows, batch size, epochs, steps
    (12, 4, 1, 3),
    (13, 4, 3, 10),
    (10, 1, 0.1, 1),
    (30, 1, 0.1, 3),  # 0.1 * 30 is 3.0000000000000004
    (12, 4, 1e-9, 1),
]


def test_steps_of_epochs():
    for rows, batch_size, epochs, steps in STEPS_OF_EPOCHS:
        data = batches(rows, batch_size)
        assert data.steps_of(epochs) == steps
        for done in range(steps + 1):  # at any point as many are left; none is more than all
            assert done + data.steps_of(epochs, done * batch_size) == steps
        assert data.steps_of(epochs, (steps + 1) * batch_size) == 0


# ---- the position in the data of a run that is resumed (that each row is read once per epoch: tests/fuzz)


def state_of_old_version(step, size, *, tokens=None, length=LENGTH, fraction=0.0):
    """What a checkpoint without a position says."""
    identity = {"data.sequence_length": length, "data.validation_fraction": fraction, "sequences per step": size}
    return {"data": identity, "tokens": step * size * length if tokens is None else tokens}


OTHER_SIZES = [
    # state, step, rows per epoch now, rows per step now, position
    # a checkpoint of an older version says how many rows its steps had
    (state_of_old_version(6, 4), 6, 40, 4, 24),
    (state_of_old_version(6, 4), 6, 40, 3, 24),
    (state_of_old_version(0, 4), 0, 40, 8, 0),
    # with other rows it continues at the same share of the epoch
    ({"position": {"rows": 30, "rows_per_epoch": 20}}, 3, 40, 2, 60),  # half of the second epoch, rows half as long
    ({"position": {"rows": 40, "rows_per_epoch": 20}}, 3, 7, 2, 14),  # two whole epochs
    ({"position": {"rows": 1, "rows_per_epoch": 20}}, 3, 10, 2, 0),  # rather once more than not at all
    # rows were of 8 tokens, and a quarter of them validation rows; 15 of 15 training rows were read
    (state_of_old_version(5, 3, length=8, fraction=0.25), 5, 40, 2, 40),
]


def test_a_run_with_other_rows_or_steps_continues_at_the_same_place():
    for state, step, rows, size, position in OTHER_SIZES:
        assert resumed_position(state, step, prepared(rows * LENGTH), rows_of_run(rows, size)) == (position, [])
    # three steps of 8 rows, then three of 4: at the position that the older version would have gone on from
    state = state_of_old_version(6, 4, tokens=(3 * 8 + 3 * 4) * LENGTH)
    position, (remark,) = resumed_position(state, 6, prepared(40 * LENGTH), rows_of_run(40, 4))
    assert position == 24
    assert "continues after 24 rows, and some rows of this epoch may be read twice or not at all" in remark
