"""A training loop of your own with checkpoints: started again, it continues where it stopped.

python examples/own_loop.py [STEPS]
"""

import sys

import torch
from transformers import LlamaConfig

import evenpipe


def batch(step):
    """Sequences that count upwards from a random number: [8 sequences, 32 tokens]."""
    start = torch.randint(0, 900, (8, 1), generator=torch.Generator().manual_seed(step))
    return start + torch.arange(32)


def train(folder, steps):
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    pipeline = evenpipe.Pipeline(config, schedule="zbv", vocabulary="balanced", microbatches=4)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    step = 0
    checkpoint = evenpipe.newest_checkpoint(folder)
    if checkpoint is not None:
        pipeline.load_checkpoint(checkpoint, optimizer, scheduler)
        step = checkpoint.step
    while step < steps:
        step += 1
        result = pipeline.step(batch(step))
        pipeline.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()
        pipeline.zero_grad()
        if pipeline.device == 0:
            print(f"step {step}  loss {result.loss:.1f}", flush=True)
        if step % 5 == 0 or step == steps:
            pipeline.save_checkpoint(folder, step, optimizer, scheduler)


if __name__ == "__main__":
    steps = int(sys.argv[1]) if sys.argv[1:] else 20
    evenpipe.launch(train, "checkpoints", steps, processes=2)
