"""What the backward pass of a layer has to do where a part of the model is frozen.

A product ``y = x W`` costs as many FLOPs for the gradient of ``x`` as for that of ``W``, each as many
as the forward pass (Narayanan et al. 2021, arXiv 2104.04473, appendix). A frozen layer above trainable
ones needs the first only; a layer with nothing trainable in it or below needs neither.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from dflop_ds import flops
from dflop_ds.cost.features import FloatArray, MicrobatchFeatures
from dflop_ds.cost.prior import prior_terms
from dflop_ds.errors import CostModelError

_UNKNOWN_SHARE = 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class LayerTraining:
    """What training asks of one layer.

    Attributes
    ----------
    trainable_share : float
        Share of the layer's parameters that is trained, in [0, 1].
    trainable_below : bool
        Whether a layer below has trained parameters, so that the input needs a gradient.
    """

    trainable_share: float = 1.0
    trainable_below: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.trainable_share <= 1:
            raise CostModelError(
                f"a share of trained parameters must be between 0 and 1, found {self.trainable_share}. "
                "Divide the trained by all parameters."
            )

    @property
    def has_backward(self) -> bool:
        """Whether the layer has a backward pass at all."""
        return self.trainable_share > 0 or self.trainable_below


def layer_training(num_trainable: Sequence[int], num_parameters: Sequence[int]) -> list[LayerTraining]:
    """State of every layer of a model.

    Parameters
    ----------
    num_trainable, num_parameters : sequence of int, length num_layers
        Trained and all parameters of each layer, in pipeline order.
    """
    below = np.cumsum([0, *num_trainable])[:-1] > 0
    return [
        LayerTraining(trained / total if total else 0.0, bool(lower))
        for trained, total, lower in zip(num_trainable, num_parameters, below, strict=True)
    ]


def backward_factor(
    kind: str,
    features: MicrobatchFeatures,
    dims: flops.ModelDims,
    training: LayerTraining,
    activation_checkpointing: bool = False,
) -> FloatArray:
    """Backward time of a layer as a share of that with all its parameters trained, shape (n,).

    Parameters
    ----------
    kind : str
    features : MicrobatchFeatures, n microbatches
    dims : ModelDims
    training : LayerTraining
    activation_checkpointing : bool
        Whether the backward time contains a second forward pass, which a frozen layer needs too.
    """
    if not training.has_backward:
        return np.zeros(len(features))
    weight_share = _weight_gradient_share(kind, features, dims, activation_checkpointing)
    factor: FloatArray = 1.0 - weight_share * (1.0 - training.trainable_share)
    return factor


def _weight_gradient_share(
    kind: str, features: MicrobatchFeatures, dims: flops.ModelDims, activation_checkpointing: bool
) -> FloatArray:
    """Share of the backward FLOPs that the gradients of the weights take.

    Attention inside fixed tiles is counted with the products of its block, as in the prior.
    """
    terms = prior_terms(kind, "forward", features, dims)
    unknown = np.full(len(features), _UNKNOWN_SHARE)
    if "flops" not in terms:
        return unknown
    forward = terms["flops"] + terms.get("attention_flops", 0.0)
    backward = (flops.BACKWARD_RATIO + (1.0 if activation_checkpointing else 0.0)) * forward
    share: FloatArray = np.divide(terms["flops"], backward, out=unknown, where=backward > 0)
    return share
