"""Formulas against values worked out by hand."""

import json

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from dflop_ds import flops
from dflop_ds.errors import CostModelError
from dflop_ds.families.patches import PatchGrid
from dflop_ds.families.qwen2_5_vl import Qwen25VlRule

VISION = flops.VisionDims(hidden=4, intermediate=8, num_heads=2, num_layers=3, tile_px=28, patch_px=14)
LLM = flops.LlmDims(
    hidden=8, intermediate=16, num_heads=4, num_kv_heads=2, head_dim=2, num_layers=2, vocab=100
)
DIMS = flops.ModelDims(VISION, LLM)


def hf_config():
    return {
        "vision_config": {
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_attention_heads": 16,
            "num_hidden_layers": 26,
            "image_size": 384,
            "patch_size": 14,
        },
        "text_config": {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "num_hidden_layers": 24,
            "vocab_size": 152000,
        },
    }


def test_matmul():
    assert flops.matmul_flops(3.0, 5.0, 7.0) == 210


def test_attention_causal_is_half():
    assert flops.attention_flops(100.0, 8, causal=False) == 4 * 100 * 8
    assert flops.attention_flops(100.0, 8, causal=True) == 2 * 100 * 8


def test_vision():
    # 28 / 14 = 2 patches a side; a patch has 3 * 14 * 14 = 588 values.
    assert VISION.patches_per_tile == 4
    assert flops.vision_embed_flops(VISION, 3.0) == 3 * 2 * 4 * 588 * 4
    # projections 4 * 4 * 4 = 64, MLP 2 * 4 * 8 = 64 weights; attention 4 * 4^2 * 4 = 256.
    assert flops.vision_block_flops(VISION, 2.0) == 2 * (2 * 4 * 128 + 256)


def test_projector():
    # 4 * 8 + 8 * 8 = 96 weights on 4 patches.
    assert flops.projector_flops(DIMS, 5.0) == 5 * 2 * 4 * 96


def test_native_resolution_equals_counted_matrix_products():
    """One window block, the patch embedding and the merger of transformers, counted by PyTorch."""
    patches, grid = 48, torch.tensor([[1, 6, 8]])
    config = Qwen2_5_VLConfig(
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_heads": 2,
            "out_hidden_size": 24,
            "fullatt_block_indexes": [],
            "window_size": 56,
        }
    ).vision_config
    config._attn_implementation = "eager"
    encoder = Qwen2_5_VisionTransformerPretrainedModel(config)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        encoder(torch.zeros(patches, 3 * 2 * 14 * 14), grid_thw=grid)
    vision = flops.NativeVisionDims(32, 40, 2, 1, 14, 2, 2, ())
    rule = Qwen25VlRule.from_config({"vision_config": {"window_size": 56}})
    squared = rule.sum_squared_windows(PatchGrid(1, 6, 8))
    expected = flops.vision_embed_flops(vision, float(patches))
    expected += flops.vision_block_flops(vision, float(patches))
    expected += flops.attention_flops(float(squared), 32, causal=False)
    dims = flops.ModelDims(vision, flops.LlmDims(24, 16, 4, 2, 6, 2, 100))
    expected += flops.projector_flops(dims, float(patches))
    assert counter.get_total_flops() == expected


def test_native_dims_in_plain_form():
    vision = flops.NativeVisionDims(32, 40, 2, 3, 14, 2, 2, (1,))
    dims = flops.ModelDims(vision, LLM)
    assert flops.ModelDims.from_dict(json.loads(json.dumps(dims.to_dict()))) == dims
    assert vision.layer_kinds == ["vision_window_block", "vision_frame_block", "vision_window_block"]


def test_decoder():
    # query and output 8 * 8 each, key and value 8 * 4 each, gate, up and down 8 * 16 each: 576 weights.
    assert flops.decoder_linear_flops(LLM, 10.0) == 2 * 576 * 10
    # segments of 6 and 8 tokens: 36 + 64 = 100.
    assert flops.decoder_attention_flops(LLM, 100.0) == 2 * 100 * 8


def test_head_and_bytes():
    assert flops.head_flops(LLM, 7.0) == 2 * 8 * 100 * 7
    assert flops.copy_bytes(7.0, 8) == 7 * 8 * 2 * 2
    np.testing.assert_array_equal(flops.copy_bytes(np.array([1.0, 2.0]), 8), [32, 64])


def test_seven_billion_parameters_cost_two_flops_each():
    qwen = flops.LlmDims(3584, 18944, 28, 4, 128, 28, 152064)
    per_token = 28 * flops.decoder_linear_flops(qwen, 1.0) + flops.head_flops(qwen, 1.0)
    assert per_token == pytest.approx(2 * 7.07e9, rel=0.01)


def test_from_hf_config():
    dims = flops.ModelDims.from_hf_config(hf_config())
    assert dims.vision.patches_per_tile == 27 * 27
    assert dims.llm == flops.LlmDims(896, 4864, 14, 2, 64, 24, 152000)
    assert flops.ModelDims.from_dict(dims.to_dict()) == dims


def test_from_hf_config_defaults_and_square_sizes():
    config = hf_config()
    del config["text_config"]["num_key_value_heads"]
    config["text_config"]["head_dim"] = 128
    config["vision_config"]["image_size"] = [448, 448]
    dims = flops.ModelDims.from_hf_config(config)
    assert (dims.llm.num_kv_heads, dims.llm.head_dim, dims.vision.tile_px) == (14, 128, 448)


@pytest.mark.parametrize("value", [None, 0, -1, 1.5, True, "896", [384, 448]])
def test_bad_entry_is_named(value):
    config = hf_config()
    config["text_config"]["hidden_size"] = value
    with pytest.raises(CostModelError, match=r"text_config\.hidden_size"):
        flops.ModelDims.from_hf_config(config)


def test_missing_part_is_named():
    with pytest.raises(CostModelError, match="vision_config"):
        flops.ModelDims.from_hf_config({"text_config": {}})


def test_bad_dims():
    with pytest.raises(CostModelError, match="tile_px=10"):
        flops.VisionDims(4, 8, 2, 3, tile_px=10, patch_px=14)
    with pytest.raises(CostModelError, match="VisionDims"):
        flops.ModelDims.from_dict({"vision": {}, "llm": {}})
    with pytest.raises(CostModelError, match=r"LlmDims\.vocab"):
        flops.LlmDims(8, 16, 4, 2, 2, 2, vocab=0)


AUDIO = flops.AudioDims(hidden=16, intermediate=24, num_heads=2, num_layers=3, num_mel_bins=8)


def audio_config():
    return {
        "audio_config": {
            "d_model": 16,
            "encoder_ffn_dim": 24,
            "encoder_attention_heads": 2,
            "encoder_layers": 3,
            "num_mel_bins": 8,
            "max_source_positions": 50,
        },
        "text_config": hf_config()["text_config"],
    }


def test_audio_by_hand():
    assert (AUDIO.values_per_input, AUDIO.positions_per_input) == (16, 1)
    # two frames through 3 * 8 -> 16, one position through 3 * 16 -> 16.
    assert flops.vision_embed_flops(AUDIO, 2.0) == 2 * (2 * 2 * 24 * 16 + 2 * 48 * 16)
    # projections 4 * 16 * 16, MLP 2 * 16 * 24; attention is counted apart.
    assert flops.vision_block_flops(AUDIO, 5.0) == 5 * 2 * (1024 + 768)
    # one token, so one row of 16 -> 8, for two positions.
    assert flops.projector_flops(flops.ModelDims(AUDIO, LLM), 4.0) == 2 * (2 * 16 * 8)


def test_audio_window_costs_what_torch_counts():
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import Qwen2AudioEncoder, Qwen2AudioEncoderConfig

    config = Qwen2AudioEncoderConfig(**audio_config()["audio_config"])
    encoder = Qwen2AudioEncoder._from_config(config, attn_implementation="eager")
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        encoder(torch.zeros(1, 8, 100))
    attention = flops.attention_flops(50.0**2, AUDIO.hidden, causal=False)
    blocks = AUDIO.num_layers * (flops.vision_block_flops(AUDIO, 50.0) + attention)
    assert counter.get_total_flops() == flops.vision_embed_flops(AUDIO, 50.0) + blocks


def test_from_audio_config():
    dims = flops.ModelDims.from_audio_config(audio_config())
    assert dims == flops.ModelDims(AUDIO, flops.LlmDims(896, 4864, 14, 2, 64, 24, 152000))
    assert flops.ModelDims.from_dict(dims.to_dict()) == dims
    with pytest.raises(CostModelError, match="audio_config"):
        flops.ModelDims.from_audio_config(hf_config())
