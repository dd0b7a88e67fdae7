"""The language model of every family as pipeline layers: embeddings with merge, blocks, norm, head.

The blocks are those of ``transformers``; they work on the packed sequence of a microbatch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm, Qwen2RotaryEmbedding

from dflop_ds.data.layout import PackedLayout
from dflop_ds.errors import ModelError
from dflop_ds.models.layers import Carry, PipelineLayer, PlanList

_TIED_KEY = "token_embedding"


@dataclasses.dataclass(frozen=True)
class DecoderParts:
    """Classes of ``transformers`` that make up a decoder.

    Attributes
    ----------
    block : type
        ``block(text_config, index)``.
    norm : type
        ``norm(hidden_size, eps)``.
    rotary : type
        ``rotary(text_config)``.
    """

    block: type[nn.Module]
    norm: type[nn.Module]
    rotary: type[nn.Module]


_DECODERS = {
    "qwen2": DecoderParts(Qwen2DecoderLayer, Qwen2RMSNorm, Qwen2RotaryEmbedding),
    "llama": DecoderParts(LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding),
}


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """Which language model, and where it is in the Hugging Face state dict.

    Attributes
    ----------
    config : PreTrainedConfig
        The ``text_config``.
    media_ids : tuple of int
        Placeholder tokens, at which the media tokens go.
    tied : bool
        The head uses the embedding weights.
    parts : DecoderParts
    body, head : str
        Weight name prefixes of the decoder and of the head.
    """

    config: Any
    media_ids: tuple[int, ...]
    tied: bool
    parts: DecoderParts
    body: str = "model.language_model"
    head: str = "lm_head"


def check_decoder(config: Any) -> None:
    """Refuse language models that treat a sample by what else is in its microbatch, or by its window.

    Raises
    ------
    ModelError
    """
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        raise ModelError(
            "every decoder layer must use full attention, found a sliding window; set "
            "use_sliding_window to false."
        )
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        raise ModelError(
            'rope_type must not be "longrope", found it in rope_parameters of text_config; its frequencies '
            "follow the longest sample of a microbatch: use a model with another one."
        )


def qwen2_or_llama(config: Any, media_ids: tuple[int, ...], tied: bool) -> LanguageModel:
    """A Qwen2 or Llama language model.

    Raises
    ------
    ModelError
        If the configuration is of another one, or :func:`check_decoder` refuses it.
    """
    if config.model_type not in _DECODERS:
        raise ModelError(
            f'text_config.model_type must be one of {sorted(_DECODERS)}, found "{config.model_type}"; '
            "use a Qwen2 or Llama language model."
        )
    check_decoder(config)
    return LanguageModel(config, media_ids, tied, _DECODERS[config.model_type])


class TokenEmbed(PipelineLayer):
    """Embed the token ids and put the media tokens at their placeholders: (tokens, hidden)."""

    kind = "token_embed"

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model
        self.embed_tokens = nn.Embedding(model.config.vocab_size, model.config.hidden_size)

    def forward(self, carry: Carry) -> Carry:
        media, vector = carry
        ids = PackedLayout.decode(vector).input_ids
        hidden = self.embed_tokens(ids)
        is_media = torch.zeros_like(ids, dtype=torch.bool)
        for token_id in self.model.media_ids:
            is_media |= ids == token_id
        where = is_media.nonzero(as_tuple=True)
        return hidden.index_put(where, media.to(hidden.dtype)), vector

    def hf_prefixes(self) -> dict[str, str]:
        return {"embed_tokens": f"{self.model.body}.embed_tokens"}


class DecoderBlock(PipelineLayer):
    """One decoder block on the packed sequence (tokens, hidden)."""

    kind = "decoder_block"

    def __init__(self, model: LanguageModel, index: int) -> None:
        super().__init__()
        self.model = model
        self.index = index
        self.block = model.parts.block(model.config, index)
        # Not a submodule: casting the model to bf16 would round the rotary frequencies.
        self._rotary = (model.parts.rotary(model.config),)

    def forward(self, carry: Carry) -> Carry:
        hidden, vector = carry
        layout = PackedLayout.decode(vector)
        states = hidden[None]
        states = self.block(
            states,
            attention_mask=None,
            position_embeddings=self._position_embeddings(states, vector, layout),
            segment_lengths=layout.segment_lengths,
        )
        return states[0], vector

    def position_ids(self, layout: PackedLayout) -> torch.Tensor:
        """What the rotary embedding takes, here shape (1, tokens)."""
        return layout.position_ids()[None]

    def _position_embeddings(
        self, states: torch.Tensor, vector: torch.Tensor, layout: PackedLayout
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotary cosine and sine, computed once per microbatch and stage."""
        known = _ROTARY.get(vector)
        if known is None or known[0].dtype != states.dtype:
            known = self._rotary[0].to(states.device)(states, self.position_ids(layout))
            _ROTARY[vector] = known
        return known

    def hf_prefixes(self) -> dict[str, str]:
        return {"block": f"{self.model.body}.layers.{self.index}"}


_ROTARY: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class FinalNorm(PipelineLayer):
    """Final normalisation of the positions at which logits are wanted: (logits, hidden)."""

    kind = "norm"

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model
        self.norm = model.parts.norm(model.config.hidden_size, eps=model.config.rms_norm_eps)

    def forward(self, carry: Carry) -> Carry:
        hidden, vector = carry
        return self.norm(hidden[PackedLayout.decode(vector).logit_positions]), vector

    def hf_prefixes(self) -> dict[str, str]:
        return {"norm": f"{self.model.body}.norm"}


class Head(PipelineLayer):
    """Vocabulary logits (logits, vocab) at the wanted positions."""

    kind = "head"

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model
        self.lm_head = nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False)

    def forward(self, carry: Carry) -> torch.Tensor:
        return self.lm_head(carry[0])

    def hf_prefixes(self) -> dict[str, str]:
        return {"lm_head": self.model.head}


def tied_head(embedding: TokenEmbed, carry: Carry) -> torch.Tensor:
    """Head of a model whose output weights are its input embeddings."""
    return F.linear(carry[0], embedding.embed_tokens.weight)


def add_language_model(
    plans: PlanList,
    model: LanguageModel,
    decoder_block: type[DecoderBlock] = DecoderBlock,
    *decoder_arguments: Any,
) -> None:
    """Append the layers of a language model, tied where it is tied.

    Parameters
    ----------
    plans : PlanList
    model : LanguageModel
    decoder_block : type
        Subclass with other positions.
    *decoder_arguments
        What it takes behind ``(model, index)``.
    """
    std = float(getattr(model.config, "initializer_range", 0.02))
    tie: dict[str, Any] = {}
    if model.tied:
        tie = {"tied_key": _TIED_KEY, "tied_weights": ("embed_tokens.weight",)}
    embedding = plans.add(TokenEmbed, std, model, **tie)
    for index in range(model.config.num_hidden_layers):
        plans.add(decoder_block, std, model, index, *decoder_arguments)
    plans.add(FinalNorm, std, model)
    if model.tied:
        plans.append(dataclasses.replace(embedding, kind=Head.kind, forward_fn=tied_head))
    else:
        plans.add(Head, std, model)
