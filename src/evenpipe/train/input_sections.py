"""Sections of the configuration for what a run reads: model, data and tokenizer."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, Lt

from evenpipe.declaration import Declared, declare
from evenpipe.errors import InputError
from evenpipe.words import show

PYTHON_STANDARD_LIBRARY, PYTHON_DOCUMENTATION = "python-standard-library", "python-documentation"
DEFAULT_TOKENIZER_ENTRIES = 32768
DEFAULT_VALIDATION_FRACTION = 0.01
MOST_TOKENIZER_ENTRIES = 10_000_000
"""The trainer allocates memory for all entries at once, and kills the process if there is not enough."""
DEFAULT_END_OF_TEXT = "<|endoftext|>"
BYTE_VALUES = 256
JSON_LINES = (".jsonl", ".json", ".ndjson")
"""Ends of the names of files with one JSON object per line."""


@declare("model")
class ModelConfig(Declared):
    """The model to train: an existing one (`source`), or a new one (`architecture` and `config`)."""

    source: str | None = None
    """Hub name or local folder of a transformers causal language model; training continues from its weights."""
    fresh_weights: bool = False
    """Use only the shape of `source`, with random weights drawn from training.seed."""
    architecture: str | None = None
    """Model type of transformers, such as "llama" or "qwen3", for a model with fresh weights described by `config`."""
    config: dict[str, Any] = field(default_factory=dict)
    """Table [model.config]: fields of the transformers config of `architecture`. Other fields keep their defaults; the
    tokenizer decides the vocabulary size and the end-of-text id."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of activations and matrix products; parameters, gradients and optimizer state are always float32. "auto":
    bfloat16 on a GPU, float32 on the CPU."""
    trust_remote_code: bool = False
    """Run the Python code that comes with `source`."""
    self_check: bool = True
    """Before training, compare a small copy of the model, cut into stages, with the uncut copy. This takes about a
    second, and refuses an architecture that evenpipe would train wrongly."""

    def check(self) -> None:
        if (self.source is None) == (self.architecture is None):
            which = "neither is" if self.source is None else "both are"
            raise InputError(f"model needs either source or architecture, but {which} given")
        if self.source is not None:
            self.require("config", not self.config, "left out when model.source is given")
        self.require("fresh_weights", not self.fresh_weights or self.source is not None, "false without model.source")


@declare("data")
class DataConfig(Declared):
    """The training data: exactly one of `files`, `dataset` and `corpus`."""

    files: tuple[str, ...] = ()
    """Files or patterns (`corpus/**/*.py`), read in the order of their names. `.jsonl`, `.json` and `.ndjson` contain
    one JSON object per line, `.parquet` a table. Any other file is one UTF-8 document; line ends are read as \\n."""
    dataset: str | None = None
    """Dataset of the hub, or a local folder that `datasets.load_dataset` reads or `save_to_disk` wrote. In a folder of
    plain text, every file is one document."""
    dataset_config: str | None = None
    """Configuration of `dataset`, if it has several."""
    dataset_split: str = "train"
    """Split of `dataset`, or a part of one, such as "train[:1%]"."""
    corpus: str | None = None
    """Text that comes with Python. "python-documentation": the language reference, 0.5 MB of English.
    "python-standard-library": the sources of the library, without tests and character tables. Names after a colon
    select modules and packages: "python-standard-library:asyncio,json"."""
    text_field: str = "text"
    """Field or column of the document in JSON lines, parquet and datasets."""
    encoding_errors: Literal["strict", "replace"] = "strict"
    """For bytes that are not UTF-8: "strict" ends with an error that names file and byte, "replace" reads a replacement
    character."""
    sequence_length: Annotated[int, Ge(2)] = 1024
    """Tokens per row. The end-of-text token follows each document, and the documents, joined, are cut into rows of this
    length. So a row may contain several documents. The last incomplete row is dropped."""
    documents: Literal["separate", "joined"] | None = None
    """Whether documents that share a row attend to each other. "separate": they do not. Positions start at 0 in every
    document, no token attends to another document or is predicted from one, and a document that continues in the next
    row starts again there. "joined": rows are one stream of text. Default: "separate" if training continues from
    weights of model.source and the names of all `files` are those of JSON lines, else "joined"."""
    validation_files: tuple[str, ...] = ()
    """Files or patterns of documents to evaluate on, read like `files`. Documents that `files` matches too are not
    trained on."""
    validation_split: str | None = None
    """Split of `dataset` to evaluate on."""
    validation_fraction: Annotated[float, Ge(0), Lt(1)] | None = None
    """Share of the rows that becomes validation rows, evenly spread over the data; the run does not train on them.
    Default: 0.01, or 0 with validation_files or validation_split."""
    cache_folder: str | None = None
    """Folder of the prepared tokens; a run with the same sources and tokenizer uses them again. Default: `data` in
    output.folder."""

    def check(self) -> None:
        sources = [name for name in ("files", "dataset", "corpus") if getattr(self, name)]
        if len(sources) != 1:
            listed = " and ".join(sources) or "none"
            raise InputError(f"data needs exactly one of files, dataset and corpus, but has {listed}")
        self.require("dataset_config", self.dataset_config is None or self.dataset is not None, "none without dataset")
        self._check_validation()
        if self.corpus is not None:
            name, colon, parts = self.corpus.partition(":")
            accepted = f'"{PYTHON_DOCUMENTATION}", "{PYTHON_STANDARD_LIBRARY}", or the latter with ":" and modules'
            is_library = name == PYTHON_STANDARD_LIBRARY and bool(colon) == bool(parts)
            self.require("corpus", is_library or self.corpus == PYTHON_DOCUMENTATION, accepted)

    def _check_validation(self) -> None:
        split = self.validation_split
        if split is not None:
            self.require("validation_split", self.dataset is not None, "none without dataset")
            self.require("validation_split", split != self.dataset_split, "another split than data.dataset_split")
            self.require("validation_split", not self.validation_files, "none when validation_files are given")
        if separate := split or self.validation_files:
            field = "validation_split" if split else "validation_files"
            accepted = f"left out or 0 when data.{field} is {show(separate)}"
            self.require("validation_fraction", not self.held_back, accepted)

    @property
    def is_json_lines(self) -> bool:
        """Whether all documents are in JSON lines, by the names in `files`."""
        return bool(self.files) and all(name.lower().endswith(JSON_LINES) for name in self.files)

    @property
    def held_back(self) -> float:
        """`validation_fraction`, or its default."""
        if self.validation_fraction is not None:
            return self.validation_fraction
        return 0.0 if self.validation_files or self.validation_split else DEFAULT_VALIDATION_FRACTION

    @property
    def validates(self) -> bool:
        """Whether there is validation data."""
        return bool(self.held_back or self.validation_files or self.validation_split)


@declare("tokenizer")
class TokenizerConfig(Declared):
    """The tokenizer: an existing one, the one of model.source, or one trained on the data."""

    source: str | None = None
    """Hub name or local folder of a transformers tokenizer. Default: the tokenizer of model.source; without
    model.source, the run trains one."""
    vocabulary_size: Annotated[int, Ge(BYTE_VALUES + 1), Le(MOST_TOKENIZER_ENTRIES)] | None = None
    """Entries of the byte-level BPE tokenizer that the run trains on the data. Default: 32768; a small corpus may yield
    fewer."""
    end_of_text: str | None = None
    """Token that ends every document. Default: the tokenizer's own; "<|endoftext|>" in one that the run trains."""

    def check(self) -> None:
        if self.source is not None:
            self.require("vocabulary_size", self.vocabulary_size is None, "left out when tokenizer.source is given")
        self.require("end_of_text", self.end_of_text != "", "a token or none")
