"""Text from an exported folder: reproducible, and a sentence where there is no model."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from evenpipe.errors import InputError
from evenpipe.train.generation import Generator
from evenpipe.train.tokenizer import train_tokenizer

PROMPT = "import os\n"


def generate(folder, prompt, **options):
    return Generator(folder)(prompt, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with fresh weights and its tokenizer, as an export leaves them."""
    path = tmp_path_factory.mktemp("exported")
    tokenizer = train_tokenizer(["import os\n\ndef f(x):\n    return x\n"], 300, "<|endoftext|>")
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": True}
    config = LlamaConfig(**sizes, **tokens, max_position_embeddings=64)
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def test_the_same_seed_writes_the_same_text_and_leaves_the_callers_random_state(folder):
    before = torch.random.get_rng_state()
    generator = Generator(folder)
    texts = [generate(folder, PROMPT, max_new_tokens=20, seed=seed) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] == generator(PROMPT, max_new_tokens=20, seed=0) != texts[2]
    assert all(text.startswith(PROMPT) and len(text) > len(PROMPT) for text in texts)
    assert isinstance(generator("", max_new_tokens=5), str), "an empty prompt begins a document"
    assert torch.equal(torch.random.get_rng_state(), before)


def test_temperature_zero_and_one_candidate_take_the_likeliest_token(folder):
    generator = Generator(folder)
    text = generator(PROMPT, max_new_tokens=4, temperature=0.0, seed=1)
    assert text == generator(PROMPT, max_new_tokens=4, temperature=0.0, seed=2)
    assert text == generator(PROMPT, max_new_tokens=4, temperature=5.0, top_k=1, seed=3)
    assert text != generator(PROMPT, max_new_tokens=4, temperature=5.0, top_k=0, seed=3)
    tokens = generator._tokenizer(PROMPT)["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for _ in range(4):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert text == generator._tokenizer.decode(tokens, skip_special_tokens=True)


def test_folders_without_a_model(folder, tmp_path):
    with pytest.raises(InputError, match=r"nowhere.*is not a model folder"):
        generate(tmp_path / "nowhere", PROMPT)
    with pytest.raises(InputError, match="is not a model folder"):
        generate(tmp_path, PROMPT)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(InputError, match=r"has no tokenizer: .* put the tokenizer of the model into"):
        generate(tmp_path, PROMPT)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:100])
    with pytest.raises(InputError, match="cannot be loaded"):
        generate(tmp_path, PROMPT)
    weights = load_file(folder / "model.safetensors")
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"lacks weights: model\.layers\.1\.mlp\.up_proj\.weight"):
        generate(tmp_path, PROMPT)


def test_numbers_that_cannot_be_and_similar_names(folder):
    for wrong in ({"max_new_tokens": 0}, {"temperature": -1.0}, {"top_k": -1}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            generate(folder, PROMPT, **wrong)
    with pytest.raises(InputError, match=rf'did you mean "{folder}"\?$'):
        Generator(f"{folder}x")


def test_the_folder_of_a_run_stands_for_its_model(folder, tmp_path):
    (tmp_path / "config.json").write_text("{}")  # the run's own
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(InputError, match=r'^".*" has checkpoints but no exported model; evenpipe export .* -o FOLDER'):
        Generator(tmp_path)
    shutil.copytree(folder, tmp_path / "model")
    assert generate(tmp_path, PROMPT, max_new_tokens=5) == generate(folder, PROMPT, max_new_tokens=5)
