"""Backward work of frozen layers, against hand-counted FLOPs."""

from __future__ import annotations

import numpy as np
import pytest

from dflop_ds.cost.features import LAYER_KINDS, MicrobatchFeatures, ProfileRow
from dflop_ds.cost.gradients import LayerTraining, backward_factor, layer_training
from dflop_ds.cost.memory import MemoryModel, TrainingSetting
from dflop_ds.cost.model import CostModel
from dflop_ds.cost.split import balanced_split, expected_layer_times
from dflop_ds.errors import CostModelError
from dflop_ds.flops import LlmDims, ModelDims, VisionDims

DIMS = ModelDims(
    VisionDims(hidden=8, intermediate=16, num_heads=2, num_layers=2, tile_px=28, patch_px=14),
    LlmDims(hidden=4, intermediate=8, num_heads=2, num_kv_heads=1, head_dim=2, num_layers=2, vocab=10),
)
FEATURES = MicrobatchFeatures(
    encoder_inputs=np.array([2.0, 0.0]),
    media_tokens=np.array([8.0, 0.0]),
    llm_tokens=np.array([20.0, 6.0]),
    sum_squared_tokens=np.array([200.0, 36.0]),
    num_segments=np.array([2.0, 1.0]),
    target_tokens=np.array([4.0, 3.0]),
    sum_squared_windows=np.zeros(2),
    sum_squared_frames=np.zeros(2),
)
KINDS = ["vision_embed", "vision_block", "projector", "token_embed", "decoder_block", "norm"]
FULL, INPUTS, NOTHING = LayerTraining(), LayerTraining(0.0, True), LayerTraining(0.0, False)


@pytest.mark.parametrize("kind", [kind for kind in LAYER_KINDS if kind in KINDS])
def test_all_or_nothing(kind: str) -> None:
    assert backward_factor(kind, FEATURES, DIMS, FULL).tolist() == [1, 1]
    assert backward_factor(kind, FEATURES, DIMS, NOTHING).tolist() == [0, 0]
    inner = backward_factor(kind, FEATURES, DIMS, INPUTS)
    assert ((inner >= 0.5) & (inner < 1)).all()
    assert (backward_factor(kind, FEATURES, DIMS, LayerTraining(0.5, True)) > inner).all()


def test_a_decoder_block_by_hand() -> None:
    """Weights: q 4x4, k and v 4x2, o 4x4, three of 4x8: 144; attention: 2 x width 4 x sum of squares."""
    linear, attention = 2 * 144 * 20, 2 * 4 * 200
    backward = 2 * (linear + attention)
    found = backward_factor("decoder_block", FEATURES, DIMS, INPUTS)[0]
    assert found == pytest.approx((backward - linear) / backward)
    again = backward_factor("decoder_block", FEATURES, DIMS, INPUTS, activation_checkpointing=True)[0]
    assert again == pytest.approx((1.5 * backward - linear) / (1.5 * backward))


def test_states_of_a_model() -> None:
    states = layer_training([0, 3, 0, 1], [5, 6, 7, 1])
    assert states == [NOTHING, LayerTraining(0.5, False), INPUTS, FULL]
    with pytest.raises(CostModelError, match="between 0 and 1"):
        LayerTraining(1.5)


class Fixed:
    """Layer model in which every layer takes one second forward and two backward."""

    dims_ = DIMS

    def predict(self, kind: str, features: MicrobatchFeatures) -> tuple[np.ndarray, np.ndarray]:
        return np.ones(len(features)), np.full(len(features), 2.0)


def test_stage_times_and_split_leave_out_what_is_frozen() -> None:
    states = layer_training([0, 0, 0, 1, 1, 1], [1] * 6)
    stages = [KINDS[:3], KINDS[3:]]
    model = CostModel(Fixed(), stages, [states[:3], states[3:]])  # type: ignore[arg-type]
    forward_s, backward_s = model.stage_times(FEATURES)
    assert forward_s.tolist() == [[3, 3], [3, 3]]
    assert backward_s.tolist() == [[0, 6], [0, 6]]
    times_s = expected_layer_times(Fixed(), KINDS, FEATURES, states)  # type: ignore[arg-type]
    assert times_s.tolist() == [1, 1, 1, 3, 3, 3]
    assert balanced_split(KINDS, times_s, 2) == [0, 4, 6]
    assert balanced_split(KINDS, expected_layer_times(Fixed(), KINDS, FEATURES), 2) == [0, 3, 6]  # type: ignore[arg-type]


def test_frozen_parameters_have_no_gradients_and_no_state() -> None:
    rows = [
        ProfileRow("vision_block", n, 4 * n, 20, 200, 2, 4, 0.1, 0.2, activation_bytes=1000 * n)
        for n in (1, 2)
    ]
    model = MemoryModel(rows, {"vision_block": 100}, DIMS)
    stages = [["vision_block", "vision_block"], ["vision_block"]]
    whole = model.stage(stages, 0, FEATURES, TrainingSetting())
    frozen = model.stage(stages, 0, FEATURES, TrainingSetting(), [NOTHING, NOTHING])
    half = model.stage(stages, 0, FEATURES, TrainingSetting(), [NOTHING, FULL])
    assert frozen.parameters_bytes == whole.parameters_bytes == 200 * 4
    assert (frozen.gradients_bytes, frozen.optimizer_bytes, frozen.activations_bytes) == (0, 0, 0)
    assert half.gradients_bytes == whole.gradients_bytes / 2
    assert half.activations_bytes == pytest.approx(whole.activations_bytes / 2)
    checkpointed = TrainingSetting(activation_checkpointing=True)
    again = model.stage(stages, 0, FEATURES, checkpointed, [NOTHING, NOTHING])
    assert again.recompute_bytes == 0
