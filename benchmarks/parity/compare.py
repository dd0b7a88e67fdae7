"""Logits and gradients of pipeline layers against the ``transformers`` model of the same weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dflop_ds.data.layout import PackedLayout
from dflop_ds.families import MediaItem, MediaKind, MediaRule, Modality, family_of, media_rule
from dflop_ds.models.attention import SEGMENTS_NAME
from dflop_ds.models.weights import load_layers

TOLERANCE = 1e-4
"""Largest difference of a logit, and of a gradient relative to the largest one of its parameter."""

GRADIENT_FLOOR = 1e-4
"""A gradient is compared to the largest one of its parameter, but at least to this share of the largest
one of the model: biases of keys without rotary positions have no gradient, as softmax ignores them, and
so nothing but rounding noise."""

_WEIGHT_STD = 0.2
_NUM_TEXT_IDS = 90
_CLIP_PX = (20, 24)
CLIP_INTERVAL_S = 0.5
"""Seconds from one frame of a clip to the next."""


@dataclasses.dataclass(frozen=True)
class Media:
    """Media of one sample, by their sizes.

    Attributes
    ----------
    images : tuple of (int, int)
        Height and width in pixels.
    clips : tuple of int
        Numbers of frames.
    recordings : tuple of int
        Numbers of audio samples.
    """

    images: tuple[tuple[int, int], ...] = ()
    clips: tuple[int, ...] = ()
    recordings: tuple[int, ...] = ()

    def items(self, rule: MediaRule) -> list[tuple[Modality, MediaItem]]:
        """What a family makes of them."""
        images = [(Modality.IMAGE, rule.image(*size, len(self.images))) for size in self.images]
        clips = [(Modality.VIDEO, rule.clip(num, *_CLIP_PX, CLIP_INTERVAL_S)) for num in self.clips]
        return images + clips + [(Modality.AUDIO, rule.audio(num)) for num in self.recordings]


TEXT_CASES = {"text": [Media()], "text, packed": [Media()] * 3}

IMAGE_CASES = {
    "image": [Media(((37, 61),))],
    "image 1x1": [Media(((1, 1),))],
    "image 1x499": [Media(((1, 499),))],
    "image 1093x5": [Media(((1093, 5),))],
    "image 16x16": [Media(((16, 16),))],
    "several images": [Media(((20, 20), (64, 9), (5, 80)))],
    "images, packed": [Media(((160, 159),)), Media(), Media(((9, 9), (30, 90)))],
}

CLIP_CASES = {
    "clip of 1 frame": [Media(clips=(1,))],
    "clip of 2 frames": [Media(clips=(2,))],
    "clip of 31 frames": [Media(clips=(31,))],
    "image and clips": [Media(((33, 44),), (3, 3))],
    "all, packed": [Media(((37, 61),)), Media(), Media(clips=(3,)), Media(((9, 9), (30, 90)), (1,)), Media()],
}

AUDIO_CASES = {
    **{f"audio of {num}": [Media(recordings=(num,))] for num in (159, 160, 161, 480_000, 480_001)},
    "several recordings": [Media(recordings=(16_000, 700, 40_000))],
    "all, packed": [Media(recordings=(16_000,)), Media(), Media(recordings=(9_999, 80_000))],
}


@dataclasses.dataclass(frozen=True)
class ParitySample:
    """One sample for both models.

    Attributes
    ----------
    media : Media
    items : tuple of MediaItem
    input_ids : Tensor of int64, shape (num_tokens,)
    values : Tensor of float32, shape (num_rows, *row_shape)
    """

    media: Media
    items: tuple[MediaItem, ...]
    input_ids: torch.Tensor
    values: torch.Tensor

    def values_of(self, *kinds: MediaKind) -> list[torch.Tensor]:
        """Rows of each item of these kinds."""
        blocks = self.values.split([item.num_rows for item in self.items])
        return [block for item, block in zip(self.items, blocks, strict=True) if item.kind in kinds]


@dataclasses.dataclass(frozen=True)
class Variant:
    """A model family with one of its language models.

    Attributes
    ----------
    name : str
    config : PreTrainedConfig
        Tiny; text ids below 90 are no placeholders.
    reference : type
        Model class of ``transformers``.
    row_shape : tuple of int
        Of the media tensor.
    reference_inputs : callable
        ``reference_inputs(sample)`` gives what the reference takes besides ``input_ids``.
    cases : mapping of str to sequence of Media
        The samples of one packed microbatch each.
    settings : mapping
        Of the processor, as the rule takes them.
    """

    name: str
    config: Any
    reference: type[nn.Module]
    row_shape: tuple[int, ...]
    reference_inputs: Callable[[ParitySample], dict[str, torch.Tensor]]
    cases: Mapping[str, Sequence[Media]]
    settings: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Difference:
    """What :func:`compare` found for one case.

    Attributes
    ----------
    logits : float
        Largest absolute difference of a logit.
    gradient : float
        Largest difference of a gradient, relative to the largest gradient of its parameter.
    parameter : str
        Where that is.
    logit_std : float
        Spread of the reference logits, to compare with.
    """

    logits: float
    gradient: float
    parameter: str
    logit_std: float

    @property
    def holds(self) -> bool:
        """Whether both differences are within the tolerance."""
        return self.logits <= TOLERANCE and self.gradient <= TOLERANCE


class Pair:
    """Both models of a variant, with the same random weights.

    Parameters
    ----------
    variant : Variant
    seed : int
    """

    def __init__(self, variant: Variant, seed: int = 0) -> None:
        self.variant = variant
        content = variant.config.to_dict()
        self.rule = media_rule(content, variant.settings)
        torch.manual_seed(seed)
        self.reference = variant.reference(variant.config).eval()
        with torch.no_grad():
            for name, parameter in self.reference.named_parameters():
                parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, _WEIGHT_STD)
        self.plans = family_of(content).pipeline_layers(variant.config, attention=SEGMENTS_NAME, seed=seed)
        shared: dict[str, nn.Module] = {}
        self.layers = [
            shared.setdefault(plan.tied_key, plan.build()) if plan.tied_key else plan.build()
            for plan in self.plans
        ]
        load_layers(self.layers, self.reference.state_dict())

    def sample(self, media: Media, seed: int) -> ParitySample:
        """Random text around random media of the given sizes."""
        generator = torch.Generator().manual_seed(seed)
        ids = [torch.randint(0, _NUM_TEXT_IDS, (3 + seed % 5,), generator=generator)]
        items = media.items(self.rule)
        for modality, item in items:
            token_id = self.rule.placeholders[modality].token_id
            for run in self.rule.runs(item):
                text = torch.randint(0, _NUM_TEXT_IDS, (2,), generator=generator)
                ids += [torch.full((run,), token_id), text]
        num_rows = sum(item.num_rows for _, item in items)
        values = torch.randn(num_rows, *self.variant.row_shape, generator=generator)
        return ParitySample(media, tuple(item for _, item in items), torch.cat(ids), values)

    def logits(self, samples: Sequence[ParitySample]) -> torch.Tensor:
        """Of the pipeline layers, for samples packed into one microbatch: (tokens, vocab)."""
        ids = torch.cat([sample.input_ids for sample in samples])
        layout = PackedLayout(
            tag=0,
            segment_lengths=tuple(len(sample.input_ids) for sample in samples),
            media=tuple(item for sample in samples for item in sample.items),
            input_ids=ids,
            logit_positions=torch.arange(len(ids)),
        )
        carry: Any = (torch.cat([sample.values for sample in samples]), layout.encode())
        for plan, layer in zip(self.plans, self.layers, strict=True):
            carry = layer(carry) if plan.forward_fn is None else plan.forward_fn(layer, carry)
        return carry

    def reference_logits(self, samples: Sequence[ParitySample]) -> torch.Tensor:
        """Of the ``transformers`` model, for one sample after the other: (tokens, vocab)."""
        logits = []
        for sample in samples:
            inputs = self.variant.reference_inputs(sample)
            logits.append(self.reference(input_ids=sample.input_ids[None], **inputs).logits[0])
        return torch.cat(logits)

    def compare(self, case: str) -> Difference:
        """Run one case through both models, forward and backward."""
        samples = [self.sample(media, seed) for seed, media in enumerate(self.variant.cases[case])]
        targets = torch.cat([sample.input_ids for sample in samples])
        logits, expected = self.logits(samples), self.reference_logits(samples)
        self.reference.zero_grad()
        for layer in self.layers:
            layer.zero_grad()
        F.cross_entropy(logits, targets).backward()
        F.cross_entropy(expected, targets).backward()
        name, gradient = self._largest_gradient_difference()
        difference = (logits - expected).detach().abs().max()
        return Difference(float(difference), gradient, name, float(expected.detach().std()))

    def _largest_gradient_difference(self) -> tuple[str, float]:
        found = dict(self._gradients())
        expected = {
            name: parameter.grad
            for name, parameter in self.reference.named_parameters()
            if parameter.grad is not None
        }
        largest = max(float(gradient.abs().max()) for gradient in expected.values())
        relative = {
            name: float((found[name] - gradient).abs().max())
            / max(float(gradient.abs().max()), GRADIENT_FLOOR * largest)
            for name, gradient in expected.items()
        }
        for name, gradient in found.items():
            if name not in expected:
                relative[name] = float(gradient.abs().max()) / largest
        name = max(relative, key=lambda key: relative[key])
        return name, relative[name]

    def _gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        for layer in self.layers:
            for name, parameter in layer.named_parameters():
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                yield layer.hf_name(name), gradient
