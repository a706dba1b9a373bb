"""The rest of a planned configuration besides its pipeline: model, data, tokenizer, and the sections of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from evenpipe.errors import InputError
from evenpipe.model import Description
from evenpipe.train.config_file import config_from_dict, sections
from evenpipe.train.found_data import find_data
from evenpipe.train.input_sections import BYTE_VALUES
from evenpipe.train.new_config import BYTES_PER_TOKEN, LEAST_STEPS, MOST_STEPS, field_comments, run_tables
from evenpipe.train.planned_config import model_tables
from evenpipe.train.run_sections import OptimizerConfig
from evenpipe.train.tokenizer import load_tokenizer, tokenizer_size
from evenpipe.words import show

PLACEHOLDER = "REPLACE-ME/**/*.txt"
"""Value of data.files if no data is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """The configuration of a run before its pipeline is planned."""

    tables: Mapping[str, Any]
    bytes: int | None = None
    """Size of the data, if known."""
    remarks: tuple[str, ...] = ()
    """Sentences for the user about the configuration."""
    replace: tuple[str, ...] = ()
    """Fields with a placeholder."""
    comments: Mapping[str, str] = field(default_factory=dict)
    """Comments above fields, as for `write_tables`; fields that the user has written have none."""

    @property
    def has_data(self) -> bool:
        return not self.replace

    def sequences_per_step(self, sequence: int, usual: int) -> int:
        """Return `usual`, or a smaller number if the size of the data would otherwise allow too few steps."""
        if self.bytes is None:
            return usual
        maximum = max(1, self.bytes // BYTES_PER_TOKEN // sequence // LEAST_STEPS)
        return usual if maximum >= usual else 2 ** (maximum.bit_length() - 1)

    def check_amount(self, sequence: int, sequences_per_step: int) -> None:
        """Raise InputError if the data is not enough for one step. It is read only as far as needed."""
        from evenpipe.train.data import check_enough

        if self.has_data:
            data = {**self.tables["data"], "sequence_length": sequence}
            check_enough(config_from_dict({**self.tables, "data": data}), sequences_per_step)

    def with_sections(self, sequence: int, sequences_per_step: int) -> dict[str, Any]:
        """Return the tables with the sections for the length of a run, its learning rate and its checkpoints."""
        passes = MOST_STEPS
        if self.bytes is not None:
            passes = self.bytes // BYTES_PER_TOKEN // sequence // sequences_per_step
        rate = None if "source" in self.tables["model"] else OptimizerConfig().learning_rate
        tables = {**self.tables, **run_tables(passes, rate)}
        return {section: tables[section] for section in sections() if section in tables}


def planned_run(description: Description, source: str, data: str | None, tokenizer: str | None) -> PlannedRun:
    """Return the configuration of a run for a model given by name, folder or config file.

    data: a file or folder, as for `evenpipe init`; None: a placeholder. tokenizer: a name or folder; None: the
    tokenizer of the model or, without weights, one that the run trains, with one entry per row of the embedding.

    Raises InputError for data without text, and for a tokenizer with more entries than the model has rows.
    """
    tables = model_tables(description, source)
    rows = description.vocabulary_size
    remarks: list[str] = []
    tables.pop("tokenizer", None)
    comments, size = field_comments(), None
    if data is None:
        tables["data"] = {"files": [PLACEHOLDER]}
        comments["data.files"] = f"REPLACE THIS by your text. {comments['data.files']}"
    else:
        source_data = find_data(data)
        tables["data"], size = dict(source_data.table), source_data.bytes
        remarks += source_data.remarks
    if tokenizer is not None:
        tables["tokenizer"] = {"source": tokenizer}
        remarks += _fitting(tokenizer, rows)
    elif "source" not in tables["model"]:
        if rows <= BYTE_VALUES:
            raise InputError(
                f"the model has a vocabulary of {rows}, but a tokenizer that is trained on bytes has at least"
                f" {BYTE_VALUES + 1}: give --tokenizer"
            )
        tables["tokenizer"] = {"vocabulary_size": rows}
        remarks.append(f"the run trains a tokenizer of at most {rows:,} entries on the data; --tokenizer names another")
    elif data is not None:
        remarks += _fitting(tables["model"]["source"], rows)
    return PlannedRun(
        tables=tables,
        bytes=size,
        remarks=tuple(remarks),
        replace=("data.files",) if data is None else (),
        comments=comments,
    )


def _fitting(source: str, rows: int) -> list[str]:
    """Return remarks about using a tokenizer with an embedding of `rows` rows. Raises InputError if it has more
    entries."""
    entries = tokenizer_size(load_tokenizer(source, None))
    if entries > rows:
        raise InputError(
            f"the tokenizer {show(source)} has {entries:,} entries, but the model has only {rows} rows for them:"
            " give --tokenizer with one that fits, or plan for a model with a larger vocab_size"
        )
    if entries > rows // 2:  # the others are padding
        return []
    return [f"the tokenizer {show(source)} has {entries:,} entries, so {rows - entries:,} rows of the model are unused"]
