"""`evenpipe generate FOLDER --prompt TEXT`."""

from __future__ import annotations

from evenpipe.cli.printing import say


def run(
    folder: str, *, prompt: str = "", new_tokens: int = 120, temperature: float = 0.7, top_k: int = 40, seed: int = 0
) -> int:
    """Print the generated text.

    FOLDER           a run, or an exported model: a Hugging Face folder with a tokenizer
    --prompt TEXT    beginning of the text
    --new-tokens N   tokens to write, at most
    --temperature X  below 1 favours likely tokens, 0 takes the likeliest
    --top-k K        sample from this many of the likeliest tokens, 0: from all
    --seed N         the same seed gives the same text
    """
    from evenpipe.train.generation import Generator

    generator = Generator(folder)
    say(generator(prompt, max_new_tokens=new_tokens, temperature=temperature, top_k=top_k, seed=seed))
    return 0
