"""Model directories of any family, tiny and made in code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import GotOcr2ImageProcessorPil, LlamaConfig, PreTrainedTokenizerFast

from benchmarks.parity import internvl
from dflop_ds.data.demo_model import train_tokenizer
from dflop_ds.data.demo_text import answer_text
from dflop_ds.families import import_families

VOCAB_SIZE = 400
TOY_FAMILY = "tests.support.toy_family"


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


def write_toy_model(folder: Path) -> Path:
    """Model directory of the family in ``toy_family.py``, without weights."""
    import_families(TOY_FAMILY)
    from tests.support.toy_family import BandsConfig

    tokenizer = tiny_tokenizer(["<band>"])
    text = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    config = BandsConfig(text_config=text, image_token_id=tokenizer.convert_tokens_to_ids("<band>"))
    write_model_dir(folder, config, tokenizer)
    (folder / "preprocessor_config.json").write_text('{"band_px": 16}')
    return folder


def write_internvl_model(folder: Path) -> Path:
    """Model directory of a tiny InternVL, without weights; at most 5 tiles an image."""
    tokenizer = tiny_tokenizer(["<IMG_CONTEXT>", "<img>", "</img>"])
    config = internvl.make_config()
    config.image_token_id = tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>")
    config.text_config.vocab_size = VOCAB_SIZE
    side = internvl.TILE_PX
    processor = GotOcr2ImageProcessorPil(size={"height": side, "width": side}, max_patches=5)
    return write_model_dir(folder, config, tokenizer, processor)
