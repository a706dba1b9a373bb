"""Writes docs/families.md from the outcomes of `make families`, benchmarks/results/families.json.

python tools/families_page.py
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "families.json"
FILE = ROOT / "docs" / "families.md"
HEAD = """# Model families

Every model type for which transformers {transformers} has a causal language model, in {count} small random
configurations: **{equal} train as in one process, {refused} are refused with a sentence, {wrong} are wrong.** With
tensor parallelism **{tensor_equal} train as in one process, {tensor_refused} are refused, {tensor_wrong} are wrong**,
and with [sequences in pieces](long_sequences.md) **{pieces_equal}, {pieces_refused} and {pieces_wrong}.**

Each configuration has 4 layers of width 64, every multiplier away from its default, and noise on every parameter. A
pipeline of two processes makes one step under `zbv` and one under `1f1b`, self-check included, and every gradient is
compared with those of transformers in one process. "Equal" gives the largest relative error of any gradient: up to
1e-10 in fp64, 1e-6 where the family itself computes something in fp32 on the way, 1e-5 in fp32 where it cannot run in
fp64.

`make families` repeats it (`make families PART=1/8` an eighth of it, `make families TYPES="llama gemma2"` some types)
and writes this page. A type that is not listed is newer than this page; the self-check compares it before it trains.
Models that also see or hear train on text: their towers get no gradient. What is equal also starts from fresh weights,
and runs in bf16 (`tests/families`), where parameters that transformers keeps in fp32 stay in it (routers of Ernie 4.5,
decays of Bailing-hybrid), and Mamba, Mamba-2 and Falcon-Mamba need `residual_in_fp32 = false`.

"Tensor ranks" compares a step of two processes that share every layer in the same way; there, what a family computes in
fp32 on the way is in fp64 too, so that the order of sums hides nothing, and 1e-10 is the limit (1e-5 for XGLM, which
runs in fp32 only). Parts of layers that cannot be cut, which every process then computes for all tokens, are listed.

"Pieces" does so with two processes that share every sequence, and with two devices on sequences in two slices.

## A family that needs help

How a model is cut is found by running it: which list holds its layers, what they take and return, which parameters act
behind them, what is done to logits. Where that fails, a [`ModelSpec`](api.md) gives single answers, and the rest is
still found:

```python
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from evenpipe import InputError, ModelSpec
from evenpipe.model import describe, self_check


class Captions(GPT2LMHeadModel):  # has layers for pictures, which text passes over
    def __init__(self, config):
        super().__init__(config)
        self.transformer.pictures = nn.ModuleList(nn.Linear(64, 64) for _ in range(config.n_layer))


model = Captions(GPT2Config(n_embd=64, n_layer=4, n_head=4))
for spec in (ModelSpec(), ModelSpec(layers_name="transformer.h")):
    try:
        self_check(describe(model, spec=spec))
        print("cut in three, a small copy has the gradients of the whole model")
    except InputError as error:
        print(error)
```

```text
Captions cannot be cut into stages: it needs exactly one list of layers, and its module lists are h (4), pictures (4).
cut in three, a small copy has the gradients of the whole model
```

`Pipeline(model, spec=...)` takes it. Answers that depend on sizes come from a function of the config,
`spec=lambda config: ModelSpec(logit_scale=1 / config.divisor)`, which the self-check also calls for its small copy. The
model in transformers, where no spec applies, stays the judge: a wrong answer is refused as a wrong cut would be.
`ModelSpec.adapt` changes the copies of a model in which stages run. RoFormer's keeps its table of positions, a frozen
parameter that all layers read, as a buffer on every stage; RWKV's leaves out a change of all weights in evaluation;
that of Llama 3.2 Vision calls the layers for images, which text passes over.

These three are files in
[`model/families/`](https://github.com/evenpipe/evenpipe/blob/main/src/evenpipe/model/families), named after the
config's `model_type`, with a function `spec(config)`. A file there is used for its type, and `make families` compares
the type with one process.

## Every type

| model type | configuration | result | largest error, or why not | tensor ranks | pieces |
|---|---|---|---|---|---|
"""


def draw() -> str:
    """The text of the page."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    rows = results["configurations"]
    words = Counter(row["word"] for row in rows)
    others = {one: Counter(row.get(one, "") for row in rows) for one in ("tensor", "pieces")}
    head = HEAD.format(
        transformers=results["transformers"],
        count=len(rows),
        equal=words["equal"],
        refused=words["refused"] + words["cannot run"],
        wrong=words["wrong"] + words["traceback"],
        **{f"{one}_{word}": found[word] for one, found in others.items() for word in ("equal", "refused", "wrong")},
    )
    return head + "".join(map(_line, sorted(rows, key=_place)))


def _place(row: dict[str, Any]) -> tuple[str, bool, str]:
    return row["model_type"], row["variant"] != "plain", row["variant"]


def _line(row: dict[str, Any]) -> str:
    if row["word"] == "equal":
        dtype = {"float64": "fp64", "float32": "fp32"}[row["dtype"]]
        said = f"{row['error']:.0e}, {dtype}"
    else:
        said = row["sentence"].splitlines()[0] if row["sentence"] else ""
    others = f"{_plain(said)} | {_plain(_ranks(row))} | {_plain(_pieces(row))}"
    return f"| `{row['model_type']}` | {row['variant']} | {row['word']} | {others} |\n"


def _ranks(row: dict[str, Any]) -> str:
    if row.get("tensor") == "equal":
        whole = f"; whole: {row['tensor_sentence']}" if row["tensor_sentence"] else ""
        return f"equal, {row['tensor_error']:.0e}{whole}"
    return f"{row['tensor']}: {row['tensor_sentence'].splitlines()[0]}" if row.get("tensor") else ""


def _pieces(row: dict[str, Any]) -> str:
    if row.get("pieces") == "equal":
        return f"equal, {row['pieces_error']:.0e}"
    return f"{row['pieces']}: {_without_name(row['pieces_sentence'])}" if row.get("pieces") else ""


def _without_name(sentences: str) -> str:
    """Return what follows the name and the option in refusals: it is the same of both options, or of one."""
    return re.split(r"\w+ cannot be trained with \w+: ", sentences.splitlines()[0])[-1]


def _plain(text: str) -> str:
    for sign in "\\|<*_[`":
        text = text.replace(sign, {"<": "&lt;"}.get(sign, f"\\{sign}"))
    return text


if __name__ == "__main__":
    FILE.write_text(draw(), encoding="utf-8")
