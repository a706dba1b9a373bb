"""A schedule of your own: write it as a function, check, simulate and draw it, and run it on real processes.

    python examples/own_schedule.py [PICTURE.svg]

It prints the figures of the schedule, the step as a diagram, and the difference between the gradients of two processes
and of one: only rounding, for any order of the passes.
"""

from __future__ import annotations

import sys
from itertools import product

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig

import evenpipe
from evenpipe.draw import draw, terminal
from evenpipe.schedule import Costs, Order, Placement, check_order, plan_program
from evenpipe.simulate import simulate

DEVICES, MICROBATCHES = 2, 6


def eager(devices: int, microbatches: int) -> Order:
    """Return a V of two stages per device. Each device runs any ready pass, gradients first; weight gradients fill the
    gaps."""
    placement = Placement.v_shape(devices)

    def needed(kind: str, stage: int, i: int) -> str:
        if kind == "F":
            return f"{stage - 1}F{i}"
        from_behind = kind == "I" and stage < placement.stages - 1
        return f"{stage + 1}I{i}" if from_behind else f"{stage}{'F' if kind == 'I' else 'I'}{i}"

    rows, done = [[] for _ in range(devices)], {f"-1F{i}" for i in range(microbatches)}
    while len(done) < (3 * placement.stages + 1) * microbatches:
        chosen = {}  # passes of this tick, by device
        for device, row in enumerate(rows):
            full = sum("F" in item for item in row) - sum("W" in item for item in row) >= 2 * devices
            kinds, stages = "IW" if full else "IFW", placement.stages_of(device)[::-1]
            for kind, stage, i in product(kinds, stages, range(microbatches)):
                if f"{stage}{kind}{i}" not in done and needed(kind, stage, i) in done:
                    chosen.setdefault(device, f"{stage}{kind}{i}")
        for device, item in chosen.items():
            rows[device].append(item)
        done.update(chosen.values())
    return Order.from_csv("\n".join(",".join(row) for row in rows))


CONFIG = LlamaConfig(
    vocab_size=500,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=False,
)


def batch() -> torch.Tensor:
    """Return [sequences, tokens]."""
    return torch.randint(0, CONFIG.vocab_size, (2 * MICROBATCHES, 16), generator=torch.Generator().manual_seed(1))


def step() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Run one step under the schedule in each process. Return weights and gradients, whole on the first process."""
    pipeline = evenpipe.Pipeline(
        CONFIG, schedule=eager, vocabulary="vocab-2", microbatches=MICROBATCHES, parameter_dtype=torch.float64
    )
    pipeline.step(batch())
    return pipeline.full_state_dict(), pipeline.full_gradients()


def one_process(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the gradients that transformers computes without evenpipe."""
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float64)
    model.load_state_dict(weights)
    logits = model(input_ids=batch()).logits  # its own loss would round to float32
    functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch()[:, 1:].flatten()).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def main() -> None:
    order = eager(DEVICES, MICROBATCHES)
    report = check_order(order)
    report.raise_if_faulty()
    print(f"sound; most stage activations in flight, per device: {' '.join(map(str, report.in_flight))}")

    costs = Costs(F=1, I=1, W=1, S=0.4, T=0.4, E=0, G=0)
    _, program = plan_program(order, DEVICES, MICROBATCHES, "vocab-2", costs)  # with vocabulary passes and transfers
    simulation = simulate(program, costs)
    print(f"with vocab-2: span {simulation.span:g}, bubble {100 * simulation.bubble_rate:.1f} %")
    timelines = {"eager, vocab-2": simulation.timeline}
    print(terminal(timelines), end="")
    if len(sys.argv) > 1:
        draw(timelines, sys.argv[1], title="A schedule of your own")
        print(f"wrote {sys.argv[1]}")

    weights, gradients = evenpipe.launch(step, processes=DEVICES)[0]
    expected = one_process(weights)
    errors = {name: float((gradients[name] - wanted).norm() / wanted.norm()) for name, wanted in expected.items()}
    worst = max(errors, key=errors.__getitem__)
    print(f"largest relative error of {len(errors)} gradients against one process: {errors[worst]:.1e} ({worst})")
    assert errors[worst] < 1e-10


if __name__ == "__main__":
    main()
