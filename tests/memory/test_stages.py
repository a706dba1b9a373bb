"""Bytes of stages: real tensors take what is traced, to the byte."""

from __future__ import annotations

import dataclasses
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from families import EXPERTS, NAMED, PROMISED_EXPERTS, tiny_config
from stages import Case, counted, described, traced

from evenpipe.errors import InputError
from evenpipe.memory.bytes import StageBytes
from evenpipe.memory.pieces import Piece
from evenpipe.memory.stretches import window
from evenpipe.memory.trace_files import TraceFiles
from evenpipe.memory.traced import StageTracer, Tracing, kinds_of_layers
from evenpipe.model import Description, describe, describe_modules

MODELS = Path(__file__).resolve().parents[2] / "examples" / "models"
FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64
ENDS = ((0, 2), (2, 4))


@cache
def family_with(family: str, **changes: object) -> Description:
    return describe(tiny_config(family, **changes))


def difference(one: StageBytes, other: StageBytes) -> dict[str, tuple[object, object]]:
    left, right = dataclasses.asdict(one), dataclasses.asdict(other)
    return {name: (left[name], right[name]) for name in left if left[name] != right[name] and name != "recomputed"}


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(16), torch.nn.Linear(16, 40), torch.nn.Linear(40, 16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))


@cache
def plain_modules() -> Description:
    embedding, norm, head = torch.nn.Embedding(20, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 20)
    return describe_modules(embedding, [Block() for _ in range(6)], norm, head)


llama_of_eight_layers = partial(family_with, "llama", num_hidden_layers=8)
REAL = [
    *(Case(family=family, layers=layers) for family in NAMED for layers in ENDS),
    *(Case(family=family, dtype=BF16) for family in (*NAMED, *EXPERTS)),
    *(Case(family=family, layers=layers)
      for family in ("gpt2", "phi", "bloom", "olmo3", "nanochat", "modernbert-decoder") for layers in ENDS),
    *(Case(family="plain modules", layers=layers, model=plain_modules) for layers in ((0, 6), (1, 5), (5, 6))),
    *(Case(family=family, layers=(1, 4), checkpointing=choice)
      for family in ("llama", "gemma2", "gpt2") for choice in ("full", "selective", ("none", "full", "selective"))),
    # in fp64 products are made expert by expert, here for experts without rows
    *(Case(family=family, dtype=dtype) for family in PROMISED_EXPERTS for dtype in (FP32, FP64)),
    *(Case(family=family, dtype=dtype, checkpointing=choice)
      for family in PROMISED_EXPERTS for choice in ("full", "selective") for dtype in (FP32, BF16, FP64)),
    # equal layers of several choices follow from those of one; in bf16, many keep an fp32 copy of their input
    *(Case(family=family, layers=layers, checkpointing=choices, dtype=dtype)
      for family in ("llama", "gpt2", "qwen3", "mixtral", "phi") for dtype in (FP32, BF16)
      for layers, choices in (((0, 2), ("full", "none")), ((1, 4), ("selective", "none", "none")),
                              ((0, 4), ("full", "full", "selective", "none")))),
    # at most three layers are traced, for any number of them
    *(Case(family="llama of 8 layers", layers=layers, checkpointing=choice, model=llama_of_eight_layers)
      for layers, choice in (((0, 1), "none"), ((0, 3), "none"), ((2, 8), "none"), ((4, 8), "full"))),
]  # fmt: skip


@pytest.mark.parametrize("case", REAL, ids=str)
@pytest.mark.sampled(6)
def test_real_tensors_take_what_is_traced(case: Case) -> None:
    assert difference(traced(case), counted(case)) == {}


@pytest.mark.slow
def test_layers_of_two_kinds() -> None:
    """The mask of one kind goes with its first layer: a little earlier or later than in the run that stands for all."""
    types = ["sliding_attention", "sliding_attention", "full_attention"] * 4
    description = describe(tiny_config("qwen2", num_hidden_layers=12, layer_types=types))
    assert kinds_of_layers(description) == (0, 0, 1) * 4
    case = Case(family="qwen2", layers=(0, 12), model=lambda: description)
    real, found = counted(case), traced(case)
    assert (found.stored, found.queued, found.parameters) == (real.stored, real.queued, real.parameters)
    for name in ("forward", "backward", "input", "weight"):
        assert getattr(found.peaks, name) == pytest.approx(getattr(real.peaks, name), rel=2e-3), name


def test_a_traced_run_has_the_fewest_layers_that_stand_for_all() -> None:
    assert window([0] * 9) == (0, 3, (0, 1, 1, 1, 1, 1, 1, 1, 2))
    assert window([0, 0, 1] * 3) == (1, 5, (0, 3, 1, 3, 3, 1, 3, 3, 4))
    assert {name: kinds_of_layers(described(name)) for name in ("gemma2", "smollm3")} == {
        "gemma2": (0, 1, 0, 1),
        "smollm3": (0, 0, 1, 0),
    }
    assert set(kinds_of_layers(plain_modules())) == {0}


def test_what_asks_for_values_cannot_be_traced() -> None:
    from transformers import JetMoeConfig

    config = JetMoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_key_value_heads=2, kv_channels=8, intermediate_size=48,
        num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    with pytest.raises(InputError, match="asks for the values of its tensors"):
        traced(Case(family="jetmoe", layers=(0, 2), model=lambda: describe(config)))


@pytest.mark.parametrize("piece", [None, Piece(ends=(6, 12), index=1, ranks=1)], ids=["whole sequences", "a slice"])
def test_traces_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: Piece | None) -> None:
    """A trace that was kept is the same, and no other is made; an unreadable one is made again. Of models whose code
    may change none is kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    description = described("llama")
    how = Tracing(sequence=12, piece=piece, compute_dtype=torch.bfloat16, backwards="both", recompute=True)

    def stages() -> tuple[list[StageBytes], int]:
        tracer, runs = StageTracer(description, how, files=TraceFiles.of(description)), []
        run = tracer._run
        tracer._run = lambda *key, **options: runs.append(key) or run(*key, **options)
        found = [
            tracer.stage(0, 4, is_first=True, is_last=True, sequences=sequences, checkpointing=choice)
            for sequences in (2, 3)
            for choice in ("none", "full")
        ]
        return found, len(runs)

    made, runs = stages()
    files = list(tmp_path.rglob("*.json"))
    assert len(files) == runs == 2
    assert stages() == (made, 0)
    files[0].write_text("{")
    assert stages() == (made, 1)
    assert TraceFiles.of(plain_modules()) is None


@pytest.mark.parametrize(
    ("model", "piece"),
    [
        ("olmo-3-7b", Piece(ends=(2048,), index=0, ranks=4, kernels_of="cuda")),
        ("granite-4.0-h-small", Piece(ends=(1024, 2048), index=0, ranks=4, exchange="heads", kernels_of="cuda")),
        ("qwen3-8b", None),
    ],
    ids=["keys", "heads of slices", "whole sequences"],
)
def test_one_trace_serves_all_sizes_that_share_it(model: str, piece: Piece | None) -> None:
    """As if every size had its own."""
    how = Tracing(sequence=2048, piece=piece, compute_dtype=torch.bfloat16, backwards="both")
    description = describe(MODELS / f"{model}.json")
    shared, alone = (StageTracer(description, how) for _ in range(2))
    alone._is_alone = lambda sequences, exactly: True
    for sequences in (1, 2, 3):
        of_stage = {"is_first": False, "is_last": False, "sequences": sequences}
        assert shared.stage(2, 6, **of_stage) == alone.stage(2, 6, **of_stage), sequences
