"""Mixtures of experts from a folder of transformers to a folder through a step, with the grouped products of experts
that transformers takes by default."""

from __future__ import annotations

from pathlib import Path

import reference
import torch
import torch.distributed as dist
from families import PROMISED_EXPERTS, tiny_config, whole_model
from harness import run_processes
from transformers import AutoModelForCausalLM

from evenpipe import Pipeline


def from_a_folder(folder: Path) -> list[str]:
    faults = []
    for family in [*PROMISED_EXPERTS[:3], "deepseek_v3"]:
        model = whole_model(tiny_config(family), torch.float32)
        source, written = folder / family, folder / f"{family}-trained"
        if dist.get_rank() == 0:
            model.save_pretrained(source)
        dist.barrier()
        pipeline = Pipeline(source, schedule="zbv", microbatches=2, self_check=False)
        ids, labels = reference.batches(503, 2, 7, 1)[0]
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        loss = pipeline.step(ids, labels).loss
        optimizer.step()
        pipeline.save_pretrained(written)
        pipeline.close()
        if dist.get_rank():
            continue
        model.config._experts_implementation = "grouped_mm"  # the default, which the pipeline has taken
        expected = reference.loss_of(model.train(), ids, labels)
        expected.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        read, report = AutoModelForCausalLM.from_pretrained(written, output_loading_info=True)
        if any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")):
            faults.append(f"{family}: {report}")
        state = model.state_dict()
        worst, name = reference.worst({key: value.detach() for key, value in read.state_dict().items()}, state)
        if not (worst < 1e-6 and abs(loss / expected.item() - 1) < 1e-6):
            faults.append(f"{family}: {name} {worst:.1e}, loss {loss} and {expected.item()}")
    return faults


def test_from_a_folder_to_a_folder_through_a_step(tmp_path: Path) -> None:
    assert run_processes(from_a_folder, 2, tmp_path)[0] == []
