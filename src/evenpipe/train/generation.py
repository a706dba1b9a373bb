"""Generates text with an exported model, on the CPU, using only transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evenpipe.checkpoints.folder import is_checkpoint
from evenpipe.errors import InputError
from evenpipe.given import nearest_path, plain, reason_of
from evenpipe.train.tokenizer import open_tokenizer
from evenpipe.words import refused, show


def _model_in(folder: Path) -> Path:
    """Return the folder, or the exported model inside it if it is the folder of a run, which also has a config.json."""
    exported = folder / "model"
    if (exported / "config.json").is_file() and not any(folder.glob("*.safetensors")):
        return exported
    if (folder / "checkpoints").is_dir() or is_checkpoint(folder):
        raise InputError(
            f"{show(str(folder))} has checkpoints but no exported model; evenpipe export {plain(folder)} -o FOLDER"
            " makes one"
        )
    if not (folder / "config.json").is_file():
        raise InputError(
            f"{show(str(folder))} is not a model folder: it must have config.json, weights and"
            f" tokenizer{nearest_path(str(folder))}"
        )
    return folder


class Generator:
    """A model from a Hugging Face folder or from the folder of a run. Raises `InputError` if the folder has no model or
    no tokenizer."""

    def __init__(self, model_folder: str | Path, trust_remote_code: bool = False) -> None:
        folder = _model_in(Path(model_folder))
        from safetensors import SafetensorError
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        quiet: Any = logging
        quiet.disable_progress_bar()
        remedy = "put the tokenizer of the model into the folder"
        self._tokenizer: Any = open_tokenizer(str(folder), trust_remote_code, remedy)
        options = {"local_files_only": True, "trust_remote_code": trust_remote_code, "output_loading_info": True}
        try:
            loader: Any = AutoModelForCausalLM
            model, loading_info = loader.from_pretrained(folder, **options)
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise InputError(f"the model folder {show(str(folder))} cannot be loaded: {reason_of(error)}") from error
        if loading_info["missing_keys"]:  # transformers would draw them at random
            missing = ", ".join(sorted(loading_info["missing_keys"])[:3])
            raise InputError(f"the model folder {show(str(folder))} lacks weights: {missing}")
        self._model = model.eval()

    def __call__(
        self, prompt: str, *, max_new_tokens: int = 120, temperature: float = 0.7, top_k: int = 40, seed: int = 0
    ) -> str:
        """Return `prompt` and its continuation.

        `temperature` 0 always takes the likeliest token; `top_k` 0 draws among all. The same seed gives the same text,
        and the caller's random state does not change.
        """
        import torch

        if max_new_tokens < 1:
            raise refused("max_new_tokens", max_new_tokens, "at least 1")
        if temperature < 0 or top_k < 0:
            raise InputError(f"temperature and top_k are {temperature} and {top_k}; it must be at least 0")
        encoded = self._tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
        if encoded.shape[1] == 0:  # an empty prompt: begin like a document, after an end of text
            encoded = torch.tensor([[self._tokenizer.eos_token_id]])
        sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k} if temperature > 0 else {}
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            written = self._model.generate(
                encoded.long(),
                attention_mask=torch.ones_like(encoded, dtype=torch.long),
                max_new_tokens=max_new_tokens,
                pad_token_id=self._tokenizer.eos_token_id,
                eos_token_id=self._tokenizer.eos_token_id,
                **(sampling or {"do_sample": False}),
            )
        text: str = self._tokenizer.decode(written[0, encoded.shape[1] :], skip_special_tokens=True)
        return prompt + text
