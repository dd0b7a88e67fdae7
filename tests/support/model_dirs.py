"""Model directories of any family, tiny and made in code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from dflop_ds.data.demo_model import train_tokenizer
from dflop_ds.data.demo_text import answer_text

VOCAB_SIZE = 400


def tiny_tokenizer(media_tokens: Sequence[str]) -> PreTrainedTokenizerFast:
    """Byte-level tokenizer with ChatML turns and the placeholders of a family."""
    rng = np.random.default_rng(0)
    texts = [answer_text(rng) for _ in range(50)]
    return train_tokenizer(texts, vocab_size=VOCAB_SIZE - len(media_tokens) - 3, media_tokens=media_tokens)


def write_model_dir(path: Path, config: Any, tokenizer: PreTrainedTokenizerFast, *processors: Any) -> Path:
    """Save configuration, tokenizer and processors as ``save_pretrained`` does."""
    path.mkdir(parents=True, exist_ok=True)
    for part in (config, tokenizer, *processors):
        part.save_pretrained(path)
    return path
