"""Memory of loading a stage: its own layers and one shard, measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, math, sys
from pathlib import Path
import torch
from transformers import LlavaOnevisionConfig, Qwen2Config, SiglipVisionConfig
from dflop_ds.models.export import HuggingFaceWriter, whole_model_shapes
from dflop_ds.models.llava_onevision import pipeline_layers
from dflop_ds.models.weights import Checkpoint, load_layers, uninitialised

folder = Path(sys.argv[1])
vision = SiglipVisionConfig(image_size=8, patch_size=4, hidden_size=8, intermediate_size=12,
                            num_hidden_layers=1, num_attention_heads=2, vision_use_head=False)
text = Qwen2Config(vocab_size=50, hidden_size=512, intermediate_size=2048, num_hidden_layers=8,
                   num_attention_heads=8, num_key_value_heads=8, tie_word_embeddings=False)
config = LlavaOnevisionConfig(vision_config=vision, text_config=text, image_grid_pinpoints=[[8, 8]],
                              image_token_index=48, video_token_index=49, tie_word_embeddings=False)
config.save_pretrained(folder / "config")
shapes = whole_model_shapes(config)

def status(key):
    line = next(line for line in open("/proc/self/status") if line.startswith(key))
    return 1024 * int(line.split()[1])

result = {"whole": 4 * sum(math.prod(shape) for shape in shapes.values())}
for dtype in (torch.bfloat16, torch.float32):
    out = folder / str(dtype)
    out.mkdir()
    writer = HuggingFaceWriter(out, folder / "config", config, [shapes], dtype, max_shard_bytes=20_000_000)
    writer.write_stage(0, lambda name: torch.zeros(shapes[name]))
    writer.write_rest()
    plans = pipeline_layers(config)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    with uninitialised():
        layers = [plan.build() for plan in plans[8:]]
    load_layers(layers, Checkpoint(out))
    own = sum(p.numel() * p.element_size() for layer in layers for p in layer.parameters())
    total = sum(float(p.detach().sum()) for layer in layers for p in layer.parameters())
    shards = len(list(out.glob("*.safetensors")))
    result[str(dtype)] = {"own": own, "peak": status("VmHWM") - before, "shards": shards}
    del layers
print(json.dumps(result))
"""


def test_a_stage_needs_its_own_layers_and_one_shard(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if "clear_refs" in done.stderr:
        pytest.skip("this system does not let a process reset its peak")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    for dtype in ("torch.bfloat16", "torch.float32"):
        found = result[dtype]
        assert found["shards"] >= 4
        assert found["own"] < 0.7 * result["whole"]
        assert found["peak"] <= found["own"] + 20_000_000 + 4_000_000
