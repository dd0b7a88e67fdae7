"""Layouts for a model of which a part is frozen."""

from __future__ import annotations

import numpy as np

from dflop_ds.cost.gradients import LayerTraining, layer_training
from dflop_ds.planning.analytic import model_layers
from dflop_ds.planning.evaluation import Evaluator
from dflop_ds.planning.layout import Degrees, Layout
from dflop_ds.planning.stages import StageTable
from tests.support.planning import DIMS, small_workload

LAYERS = model_layers(DIMS)
CUT = LAYERS.index("token_embed")
FROZEN_ENCODER = layer_training([0] * CUT + [1] * (len(LAYERS) - CUT), [1] * len(LAYERS))


def test_a_frozen_encoder_has_no_backward_and_no_state() -> None:
    plain, frozen = small_workload(), small_workload(training=FROZEN_ENCODER)
    one, other = (workload.layer_costs(1, False, 4) for workload in (plain, frozen))
    cut = frozen.kinds.index("token_embed")
    assert not other.backward_s[:cut].any()
    np.testing.assert_array_equal(other.backward_s[cut:], one.backward_s[cut:])
    np.testing.assert_array_equal(other.forward_s, one.forward_s)
    assert frozen.kept_bytes(False)[:cut].tolist() == [0] * cut
    trained = StageTable(frozen).trained
    assert trained[:cut].tolist() == [0] * cut
    assert (trained[cut:] > 0).all()


def test_adapters_cost_the_input_gradient() -> None:
    """Half of the products' backward pass; attention is differentiated in full."""
    adapters = [LayerTraining(0.0, index > 0) for index in range(len(LAYERS))]
    plain, lora = small_workload(), small_workload(training=adapters)
    one, other = (workload.layer_costs(1, False, 4) for workload in (plain, lora))
    head = lora.kinds.index("head")
    np.testing.assert_allclose(other.backward_s[head], one.backward_s[head] / 2)
    block = lora.kinds.index("decoder_block")
    ratio = other.backward_s[block].sum() / one.backward_s[block].sum()
    assert 0.5 < ratio < 0.75


def test_step_and_memory_of_a_plan_follow() -> None:
    layout = Layout(None, Degrees(1, 2, 1), 4, activation_checkpointing=False, zero_stage=0)
    found = [
        Evaluator(StageTable(small_workload(training=training))).evaluate(layout)
        for training in (None, FROZEN_ENCODER)
    ]
    assert found[1].sizes[0] >= found[0].sizes[0]
    assert found[1].step_s < found[0].step_s
    assert found[1].peak_bytes < found[0].peak_bytes
