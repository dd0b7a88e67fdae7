"""Packing the samples of one microbatch into one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from dflop_ds.data.conversation import IGNORED_LABEL
from dflop_ds.data.dataset import LoadedSample
from dflop_ds.data.layout import PackedLayout, bin_tag
from dflop_ds.errors import ConfigError, DataError

Reduction = Literal["token", "sample"]
Normalise = Literal["none", "microbatch"]
Inputs = tuple[torch.Tensor, torch.Tensor]
Labels = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class PackedCollator:
    """Concatenates samples; labels are shifted inside each sample, so none leaks into its neighbour.

    Parameters
    ----------
    pad_token_id : int
        Fills an empty microbatch and, with ``pad_to_longest``, the shorter samples.
    row_shape : sequence of int
        Shape of one row of the media tensor, see :class:`dflop_ds.data.processor.MediaProcessor`.
    reduction : {"token", "sample"}
        Every supervised token counts the same, or every sample does.
    normalise : {"none", "microbatch"}
        ``"microbatch"``: the weights of a microbatch sum to 1, the mean that stock DeepSpeed takes.
    pad_to_longest : bool
        Extend every sample to the longest; under causal attention the values stay the same.
    """

    def __init__(
        self,
        pad_token_id: int,
        *,
        row_shape: Sequence[int],
        reduction: Reduction = "token",
        normalise: Normalise = "none",
        pad_to_longest: bool = False,
    ) -> None:
        if reduction not in ("token", "sample"):
            raise ConfigError(
                f"reduction must be 'token' or 'sample', found {reduction!r}; choose one of them."
            )
        if normalise not in ("none", "microbatch"):
            raise ConfigError(
                f"normalise must be 'none' or 'microbatch', found {normalise!r}; choose one of them."
            )
        self.pad_token_id = pad_token_id
        self.row_shape = tuple(row_shape)
        self.reduction = reduction
        self.normalise = normalise
        self.pad_to_longest = pad_to_longest

    def __call__(self, samples: Sequence[LoadedSample]) -> tuple[Inputs, Labels]:
        """Pack samples in the given order.

        Parameters
        ----------
        samples : sequence of LoadedSample
            May be empty: one pad token then, without media or targets.

        Returns
        -------
        inputs : tuple
            Media values float32 (num_rows, *row_shape) and the encoded
            :class:`~dflop_ds.data.layout.PackedLayout`. Without media values num_rows is 0.
        labels : tuple
            ``targets`` int64 (num_logits,), ``weights`` float32 (num_logits,) and ``tag`` int64 (1,).

        Raises
        ------
        DataError
            If the media values of a sample are not those of its media.
        """
        longest = max((sample.input_ids.numel() for sample in samples), default=1)
        ids, positions, targets, weights = [], [], [], []
        start = 0
        for sample in samples:
            where = torch.nonzero(sample.labels[1:] != IGNORED_LABEL).flatten()
            padding = longest - sample.input_ids.numel() if self.pad_to_longest else 0
            ids.append(torch.nn.functional.pad(sample.input_ids, (0, padding), value=self.pad_token_id))
            positions.append(where + start)
            targets.append(sample.labels[where + 1])
            share = 1.0 if self.reduction == "token" else 1.0 / max(where.numel(), 1)
            weights.append(torch.full((where.numel(),), share, dtype=torch.float64))
            start += ids[-1].numel()
        if not samples:
            ids.append(torch.tensor([self.pad_token_id]))
        tag = bin_tag(sample.index for sample in samples)
        layout = PackedLayout(
            tag=tag,
            segment_lengths=tuple(segment.numel() for segment in ids),
            media=tuple(item for sample in samples for item in sample.media),
            input_ids=torch.cat(ids),
            logit_positions=_concatenate(positions, torch.int64),
        )
        weight = _concatenate(weights, torch.float64)
        if self.normalise == "microbatch" and weight.numel():
            weight = weight / weight.sum()
        labels = (_concatenate(targets, torch.int64), weight.to(torch.float32), torch.tensor([tag]))
        return (self._media_values(samples), layout.encode()), labels

    def _media_values(self, samples: Sequence[LoadedSample]) -> torch.Tensor:
        blocks = [torch.empty(0, *self.row_shape)]
        if any(sample.media_values is None for sample in samples):
            return blocks[0]
        for sample in samples:
            values = sample.media_values
            expected = (sum(item.num_rows for item in sample.media), *self.row_shape)
            if values is None or tuple(values.shape) != expected:
                raise DataError(
                    f"media_values must have shape {expected} by the sample's media, found "
                    f"{None if values is None else tuple(values.shape)}; load it with LlavaDataset.",
                    sample.sample_id,
                )
            blocks.append(values)
        return torch.cat(blocks)


def _concatenate(parts: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return torch.cat([torch.empty(0, dtype=dtype), *parts])
