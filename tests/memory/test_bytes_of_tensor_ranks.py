"""What tensor ranks hold, against real layers of ranks in threads, and against the parameters of real stages."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from stages import Case, closed
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from evenpipe.memory.bench import Bench
from evenpipe.memory.bytes import StageBytes
from evenpipe.memory.parameters import Parameters
from evenpipe.memory.tracker import Tracker
from evenpipe.model import Description, build_stage, describe, fill_parameters
from evenpipe.tensor.check import cut_of_model
from evenpipe.tensor.threads import ThreadExchange, in_threads, thread_exchanges

HIDDEN, MLP, HEADS, BATCH, SEQUENCE = 64, 224, 8, 2, 16


class Apart(ThreadExchange):
    """Ranks exchange copies that no tracker counts: it does not know when others are done with them."""

    def gather(self, rows: Tensor) -> Tensor:
        return self._apart(super().gather, rows)

    def scatter(self, partial: Tensor) -> Tensor:
        return self._apart(super().scatter, partial)

    def _apart(self, way: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
        with _disable_current_modes():
            moved = way(tensor.clone())
        return moved.clone()


def llama() -> Description:
    from transformers import LlamaConfig

    return describe(
        LlamaConfig(
            vocab_size=64,
            hidden_size=HIDDEN,
            intermediate_size=MLP,
            num_hidden_layers=3,
            num_attention_heads=HEADS,
            num_key_value_heads=4,
        )
    )


def real(ranks: int, checkpointing: str) -> list[StageBytes]:
    """What each rank's thread counts of one layer in the middle."""
    description = llama()
    cut = cut_of_model(description, ranks, check=False)
    exchanges = [Apart(one._meeting, one.rank) for one in thread_exchanges(ranks)]
    stages = []
    for exchange in exchanges:
        held = cut.placements(description, 1, exchange.rank, ranks)
        stage = build_stage(
            description, 1, 2, is_first=False, is_last=False, dtype=torch.bfloat16, held=held, tensor_ranks=ranks
        )
        fill_parameters(stage, description, 0)
        again = [] if checkpointing == "none" else [1]
        cut.make_local(stage, {1: stage.get_submodule("model.layers.1")}, exchange, again)
        stages.append(stage)

    def run(rank: int) -> StageBytes:
        with Tracker() as tracker:
            tracker.add(*stages[rank].parameters(), *stages[rank].buffers())
            bench = Bench(
                stages[rank],
                ["model.layers.1"],
                [checkpointing],
                argument="hidden_states",
                shape=(BATCH, SEQUENCE, HIDDEN),
                dtype=torch.bfloat16,
                tracker=tracker,
                exchange=exchanges[rank],
            )
            return bench.trace(split=True, recompute=False).over([0])

    return in_threads(exchanges, run)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.sampled(1)
def test_one_real_layer_keeps_what_the_closed_forms_say(ranks: int, checkpointing: str) -> None:
    """From F to W and from I to W, on every rank."""
    expected = closed(
        Case(
            family="llama",
            model=llama,
            layers=(1, 2),
            dtype=torch.bfloat16,
            batch=BATCH,
            sequence=SEQUENCE,
            checkpointing=checkpointing,
            ranks=ranks,
        )
    )
    r, q, unit = 4 / HEADS, MLP / HIDDEN, BATCH * SEQUENCE * HIDDEN
    between = 4 + (8 + 4 * r + 6 * q) / ranks if checkpointing == "none" else 8 + (4 + 4 * r + 6 * q) / ranks
    for counted in real(ranks, checkpointing):
        assert (counted.input, counted.output, counted.stored) == (expected.input, expected.output, expected.stored)
        assert counted.queued == expected.queued == between * unit


def test_the_first_rank_holds_the_parameters_that_are_counted(sample) -> None:
    from families import tiny_config

    wrong = []
    families = ["llama", "phi3", "gpt_neox", "starcoder2", "gpt2", "olmo2", "bloom"]  # bloom's attention is not cut
    for family, ranks in sample([("llama", 4), *((family, 2) for family in families)], 4):
        description = describe(tiny_config(family))
        cut, parameters = cut_of_model(description, ranks, check=False), Parameters(description)
        for first, last in ((0, 2), (2, 4)):
            ends = {"is_first": first == 0, "is_last": last == 4}
            held, alone = {}, set()
            for index in range(first, last):
                held |= cut.placements(description, index, 0, ranks)
                alone |= cut.alone(description, index)
            stage = build_stage(description, first, last, **ends, held=held, tensor_ranks=ranks)
            sizes = {name: parameter.numel() for name, parameter in stage.named_parameters()}
            bucket = 0
            for name, size in sizes.items():
                places = math.prod(one.parts for one in held[name].cuts) if name in held else 1
                bucket += size * places if places < ranks and name not in alone else 0
            counted = parameters.stage(first, last, ranks, **ends, cut=cut)
            if (counted.elements, counted.tensors, counted.shared) != (sum(sizes.values()), len(sizes), bucket):
                wrong.append((family, ranks, first, counted, bucket))
    assert wrong == []
