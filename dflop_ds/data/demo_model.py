"""A tiny LLaVA-OneVision model directory: configuration, tokenizer and image processor."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessorPil,
    PreTrainedTokenizerFast,
    Qwen2Config,
    SiglipVisionConfig,
)

PAD_TOKEN = "<|pad|>"
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
_TURN_TOKENS = (PAD_TOKEN, TURN_START, TURN_END)
_MEDIA_TOKENS = ("<image>", "<video>")
_SIGLIP_MEAN_STD = [0.5, 0.5, 0.5]

CHAT_TEMPLATE = (
    "{%- for turn in messages -%}"
    f"{{{{- '{TURN_START}' ~ turn.role ~ '\\n' ~ turn.content ~ '{TURN_END}\\n' -}}}}"
    "{%- endfor -%}"
    f"{{%- if add_generation_prompt -%}}{{{{- '{TURN_START}assistant\\n' -}}}}{{%- endif -%}}"
)


@dataclasses.dataclass(frozen=True)
class TinyModelDims:
    """Sizes of the demo model; the defaults have about 4 million parameters.

    Attributes
    ----------
    tile_px, patch_px : int
        The default gives 5 patches a side: an odd number, so that pooling rounds up.
    grid_side : int
        Grids of up to this many tiles in each direction.
    vocab_size : int
        Rows of the embedding; the tokenizer has a few fewer.
    """

    tile_px: int = 70
    patch_px: int = 14
    grid_side: int = 6
    vision_hidden: int = 128
    vision_intermediate: int = 256
    vision_layers: int = 6
    vision_heads: int = 4
    text_hidden: int = 192
    text_intermediate: int = 512
    text_layers: int = 8
    text_heads: int = 6
    text_kv_heads: int = 2
    vocab_size: int = 1024


def write_tiny_model(
    model_dir: str | Path,
    texts: Iterable[str],
    *,
    dims: TinyModelDims | None = None,
    seed: int = 0,
    with_weights: bool = False,
) -> Path:
    """Write a model directory that ``from_pretrained`` methods can read.

    Parameters
    ----------
    model_dir : str or Path
    texts : iterable of str
        The tokenizer is trained on them.
    dims : TinyModelDims, optional
    seed : int
        Of the random weights.
    with_weights : bool
        Also write ``model.safetensors``.

    Returns
    -------
    Path
        ``model_dir``.
    """
    model_dir = Path(model_dir)
    dims = TinyModelDims() if dims is None else dims
    tokenizer = train_tokenizer(texts, vocab_size=dims.vocab_size - 24)
    config = tiny_config(dims, tokenizer)
    config.save_pretrained(model_dir)
    tokenizer.save_pretrained(model_dir)
    LlavaOnevisionImageProcessorPil(
        size={"height": dims.tile_px, "width": dims.tile_px},
        image_grid_pinpoints=config.image_grid_pinpoints,
        image_mean=_SIGLIP_MEAN_STD,
        image_std=_SIGLIP_MEAN_STD,
    ).save_pretrained(model_dir)
    if with_weights:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            LlavaOnevisionForConditionalGeneration(config).save_pretrained(model_dir)
    return model_dir


def tiny_config(dims: TinyModelDims, tokenizer: PreTrainedTokenizerFast) -> LlavaOnevisionConfig:
    """Configuration of the demo model for a tokenizer."""
    image, video = (int(tokenizer.convert_tokens_to_ids(token)) for token in _MEDIA_TOKENS)
    sides = [dims.tile_px * k for k in range(1, dims.grid_side + 1)]
    return LlavaOnevisionConfig(
        architectures=["LlavaOnevisionForConditionalGeneration"],
        vision_config=SiglipVisionConfig(
            image_size=dims.tile_px,
            patch_size=dims.patch_px,
            hidden_size=dims.vision_hidden,
            intermediate_size=dims.vision_intermediate,
            num_hidden_layers=dims.vision_layers,
            num_attention_heads=dims.vision_heads,
            vision_use_head=False,
        ).to_dict(),
        text_config=tiny_text_config(dims, tokenizer),
        image_grid_pinpoints=[[height, width] for height in sides for width in sides],
        image_token_index=image,
        video_token_index=video,
        tie_word_embeddings=False,
    )


def tiny_text_config(dims: TinyModelDims, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Configuration of the demo's language model for a tokenizer."""
    return Qwen2Config(
        vocab_size=dims.vocab_size,
        hidden_size=dims.text_hidden,
        intermediate_size=dims.text_intermediate,
        num_hidden_layers=dims.text_layers,
        num_attention_heads=dims.text_heads,
        num_key_value_heads=dims.text_kv_heads,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    ).to_dict()


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, media_tokens: Sequence[str] = _MEDIA_TOKENS
) -> PreTrainedTokenizerFast:
    """Byte-level BPE tokenizer with ChatML turns and media placeholders."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = (*_TURN_TOKENS, *media_tokens)
    special = [AddedToken(token, special=True, normalized=False) for token in names]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=TURN_END,
        extra_special_tokens=[TURN_START, *media_tokens],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
