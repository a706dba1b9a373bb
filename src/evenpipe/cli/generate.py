"""`evenpipe generate FOLDER --prompt TEXT`."""

from __future__ import annotations

import argparse

from evenpipe.cli.printing import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model, the prompt and the sampling options."""
    about = "a run, or an exported model: a Hugging Face folder with a tokenizer"
    parser.add_argument("folder", metavar="FOLDER", help=about)
    parser.add_argument("--prompt", default="", help="beginning of the text (default: none)")
    parser.add_argument("--new-tokens", type=int, default=120, help="tokens to write, at most (default: %(default)s)")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.7,
        help="below 1 favours likely tokens, 0 takes the likeliest (default: %(default)s)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=40,
        help="sample from this many of the likeliest tokens, 0: from all (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same text (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Print the generated text."""
    from evenpipe.train.generation import Generator

    text = Generator(arguments.folder)(
        arguments.prompt,
        max_new_tokens=arguments.new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        seed=arguments.seed,
    )
    say(text)
    return 0
