"""evenpipe explain: what it prints and writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_run import as_json, printed
from transformers import LlamaConfig


def test_report_page_and_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "max_position_embeddings": 2048}
    LlamaConfig(**sizes, num_attention_heads=16, num_key_value_heads=4, vocab_size=32000).save_pretrained("model")
    text = printed(capsys, "explain", "model", "--gpus", "4")
    assert "on 4 GPUs (H100-80G" in text
    for part in ("Out of balance: 1f1b + first-last", "Alternatives", "1f1b, vocab-2", "Next commands"):
        assert part in text
    assert "evenpipe plan --model model --gpus 4 --hardware H100-80G --sequence 2048 --explain" in text
    figures = as_json(capsys, "explain", "model", "--gpus", "4", "-o", "page.html")
    assert figures["usual"]["vocabulary"] == "first-last" and len(figures["usual"]["devices"]) == 4
    assert figures["next"][0].startswith("evenpipe plan ")
    assert "1f1b, vocab-2" in Path("page.html").read_text(encoding="utf-8")
