"""Qwen2-Audio (Whisper-style encoder with Qwen2 or Llama) as pipeline layers.

``transformers`` encodes whole windows of 30 s, masks what lies behind the end of a recording, and drops
it after the encoder. Here that is not computed in the first place: mel frames of all recordings are
concatenated, each up to one frame behind its end, which is how far the convolutions reach, and
attention stays inside each recording. The values are the same.

Layer order: convolutions with positions, encoder blocks, pool with norm and projector, language model.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Qwen2AudioConfig
from transformers.models.qwen2_audio.modeling_qwen2_audio import (
    Qwen2AudioEncoderLayer,
    Qwen2AudioMultiModalProjector,
)

from dflop_ds.data.layout import PackedLayout
from dflop_ds.errors import ModelError
from dflop_ds.models.attention import SEGMENTS_NAME, register_attention
from dflop_ds.models.layers import Carry, LayerPlan, PipelineLayer, PlanList
from dflop_ds.models.llm import add_language_model, qwen2_or_llama

_KERNEL_FRAMES = 3
_POOL = 2
_TOWER = "model.audio_tower"


class AudioEmbed(PipelineLayer):
    """Mel frames (frames, mel bins) to positions (positions, encoder hidden), two frames each."""

    kind = "vision_embed"

    def __init__(self, config: Qwen2AudioConfig) -> None:
        super().__init__()
        audio = config.audio_config
        self.conv1 = nn.Conv1d(audio.num_mel_bins, audio.d_model, _KERNEL_FRAMES, padding=1)
        self.conv2 = nn.Conv1d(audio.d_model, audio.d_model, _KERNEL_FRAMES, stride=_POOL, padding=1)
        self.embed_positions = nn.Embedding(audio.max_source_positions, audio.d_model)
        self.embed_positions.requires_grad_(False)
        self.dropout = float(audio.dropout)

    def forward(self, carry: Carry) -> Carry:
        frames, vector = carry
        frames = frames.to(self.conv1.weight.dtype)
        layout = PackedLayout.decode(vector)
        if not layout.media:
            # No frames, but a path for the gradient.
            return self._convolve(frames[..., None].expand(-1, -1, _POOL)).flatten(0, 1), vector
        parts = zip(frames.split(layout.rows_per_item), layout.media, strict=True)
        hidden = torch.cat([self._positions(part, item.num_inputs) for part, item in parts])
        return F.dropout(hidden, p=self.dropout, training=self.training), vector

    def _positions(self, frames: torch.Tensor, num_positions: int) -> torch.Tensor:
        """Positions of one recording, shape (num_positions, hidden)."""
        hidden = self._convolve(frames.transpose(0, 1)[None])[0, :num_positions]
        return hidden + self.embed_positions.weight[:num_positions]

    def _convolve(self, frames: torch.Tensor) -> torch.Tensor:
        """(batch, mel bins, frames) to (batch, positions, hidden)."""
        hidden = F.gelu(self.conv1(frames))
        return F.gelu(self.conv2(hidden)).transpose(1, 2)

    def hf_prefixes(self) -> dict[str, str]:
        return {name: f"{_TOWER}.{name}" for name in ("conv1", "conv2", "embed_positions")}


class AudioBlock(PipelineLayer):
    """One encoder block; a microbatch without recordings passes through untouched, at no cost."""

    kind = "vision_frame_block"

    def __init__(self, config: Qwen2AudioConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.block = Qwen2AudioEncoderLayer(config.audio_config)

    def forward(self, carry: Carry) -> Carry:
        hidden, vector = carry
        lengths = tuple(item.num_inputs for item in PackedLayout.decode(vector).media)
        if not lengths:
            return carry
        return self.block(hidden[None], None, segment_lengths=lengths)[0], vector

    def hf_prefixes(self) -> dict[str, str]:
        return {"block": f"{_TOWER}.layers.{self.index}"}


class AudioProjector(PipelineLayer):
    """Positions to media tokens (media tokens, LLM hidden): two each, an odd last one is left out."""

    kind = "projector"

    def __init__(self, config: Qwen2AudioConfig) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(config.audio_config.d_model)
        self.projector = Qwen2AudioMultiModalProjector(config)

    def forward(self, carry: Carry) -> Carry:
        hidden, vector = carry
        media = PackedLayout.decode(vector).media
        if media:
            parts = zip(hidden.split([item.num_inputs for item in media]), media, strict=True)
            whole = torch.cat([part[: _POOL * item.num_tokens] for part, item in parts])
            hidden = whole.unflatten(0, (-1, _POOL)).mean(dim=1)
        return self.projector(self.layer_norm(hidden)), vector

    def hf_prefixes(self) -> dict[str, str]:
        return {"layer_norm": f"{_TOWER}.layer_norm", "projector": "model.multi_modal_projector"}


def check_config(config: Qwen2AudioConfig) -> None:
    """Refuse configurations whose forward pass these layers do not reproduce.

    Raises
    ------
    ModelError
    """
    audio = config.audio_config
    if audio.model_type != "qwen2_audio_encoder":
        raise ModelError(
            f'audio_config.model_type must be "qwen2_audio_encoder", found "{audio.model_type}"; '
            "use a Qwen2-Audio checkpoint."
        )
    if audio.encoder_layerdrop > 0:
        raise ModelError(
            f"audio_config.encoder_layerdrop must be 0, found {audio.encoder_layerdrop}; "
            "pipeline stages cannot skip layers at random: set it to 0."
        )


def pipeline_layers(
    config: Qwen2AudioConfig, *, attention: str = SEGMENTS_NAME, seed: int = 0
) -> list[LayerPlan]:
    """Layers of the whole model, in order; nothing is built.

    Parameters
    ----------
    config : Qwen2AudioConfig
        Left unchanged.
    attention : str
        Name of the attention in ``transformers.AttentionInterface``.
    seed : int
        Layer ``i`` is initialised from ``seed + i``.
    """
    check_config(config)
    register_attention()
    config = copy.deepcopy(config)
    config.text_config._attn_implementation = attention
    config.audio_config._attn_implementation = attention
    audio_std = float(getattr(config.audio_config, "initializer_range", 0.02))
    text_std = float(getattr(config.text_config, "initializer_range", 0.02))

    plans = PlanList(seed)
    plans.add(AudioEmbed, audio_std, config)
    for index in range(config.audio_config.encoder_layers):
        plans.add(AudioBlock, audio_std, config, index)
    plans.add(AudioProjector, text_std, config)
    # The family's model class ties nothing, whatever the configuration says.
    add_language_model(plans, qwen2_or_llama(config.text_config, (config.audio_token_id,), tied=False))
    return plans
