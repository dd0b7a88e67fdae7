"""The loss that does not depend on which samples share a microbatch.

DeepSpeed averages the loss over microbatches and replicas. Each microbatch therefore returns its
*weighted sum* of token losses; the weights (written by the collator, scaled by the loader) make
DeepSpeed's averages come out as the mean over the whole global batch:

``mean over bins of (num_bins / num_terms) * sum(token losses) = sum(token losses) / num_terms``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

Labels = tuple[torch.Tensor, ...]


def packed_loss(logits: torch.Tensor, labels: Labels) -> torch.Tensor:
    """Weighted sum of cross entropies of one microbatch.

    Parameters
    ----------
    logits : Tensor, shape (num_logits, vocab)
        At supervised positions only.
    labels : tuple
        ``(targets int64 (num_logits,), weights float32 (num_logits,), tag int64 (1,))``; targets
        are already shifted.

    Returns
    -------
    Tensor
        Scalar in fp32; exactly 0, with a gradient of 0, when nothing is supervised.
    """
    targets, weights = labels[0], labels[1]
    losses = F.cross_entropy(logits.float(), targets, reduction="none")
    return (losses * weights).sum()
