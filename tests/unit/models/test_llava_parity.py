"""LLaVA-OneVision: what the parity cases of all families leave out."""

from __future__ import annotations

import pytest
import torch

from benchmarks.parity.compare import TOLERANCE, Media, Pair
from benchmarks.parity.llava_onevision import make_config, make_variant
from dflop_ds.data.layout import PackedLayout
from dflop_ds.models.llava_onevision import pipeline_layers

IMAGE = Media(((37, 61),))


@pytest.mark.parametrize("feature_layer", [-2, 2])
def test_feature_layer_drops_blocks(feature_layer: int) -> None:
    pair = Pair(make_variant("other layer", make_config(feature_layer=feature_layer)))
    found = pair.compare("image")
    assert max(found.logits, found.gradient) <= TOLERANCE
    assert len(pair.layers) == len(pipeline_layers(make_config())) - 1


def test_logits_only_where_wanted() -> None:
    pair = Pair(make_variant("all", make_config()))
    sample = pair.sample(IMAGE, seed=1)
    with torch.no_grad():
        full = pair.logits([sample])
        wanted = torch.tensor([0, 4, len(sample.input_ids) - 1])
        layout = PackedLayout(0, (len(sample.input_ids),), sample.items, sample.input_ids, wanted)
        carry = (sample.values, layout.encode())
        for layer in pair.layers:
            carry = layer(carry)
    assert torch.allclose(carry, full[wanted], atol=1e-6)
