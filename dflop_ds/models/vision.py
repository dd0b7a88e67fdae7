"""What the vision families have in common."""

from __future__ import annotations

from typing import Any

from dflop_ds.errors import ModelError


def num_vision_blocks(config: Any) -> int:
    """Encoder blocks up to the feature layer that the projector reads.

    Parameters
    ----------
    config : PreTrainedConfig
        With ``vision_config`` and ``vision_feature_layer``.

    Raises
    ------
    ModelError
        If the feature layer is not one layer of the encoder.
    """
    layer = config.vision_feature_layer
    if not isinstance(layer, int):
        raise ModelError(
            f"vision_feature_layer must be one integer, found {layer}; "
            "concatenated feature layers are not supported."
        )
    total = int(config.vision_config.num_hidden_layers)
    used = total + 1 + layer if layer < 0 else layer
    if not 0 <= used <= total:
        raise ModelError(
            f"vision_feature_layer must point into {total} encoder blocks, found {layer}; correct "
            f"config.json."
        )
    return used
