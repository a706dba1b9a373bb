"""evenpipe: pipeline-parallel training for Hugging Face language models, with nothing out of balance."""

from __future__ import annotations

__version__ = "0.1.0"
