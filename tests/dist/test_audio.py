"""A tiny Qwen2-Audio model on generated recordings, two stages, against ``transformers`` alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflop_ds.data.dataset import from_pretrained_dir
from dflop_ds.data.demo_audio import build_audio_demo
from dflop_ds.scheduling.order import EpochOrder
from tests.support.ranks import run_ranks
from tests.support.tiny import TINY_DIMS
from tests.support.training import demo_paths, ds_config, reference_loss, reference_model

pytestmark = pytest.mark.dist

NUM_STEPS, BATCH, CLIP, SEED = 3, 8, 0.5, 7
LR, EPS = 0.01, 1e-3
ADAM = {"type": "Adam", "params": {"lr": LR, "eps": EPS, "weight_decay": 0.0, "torch_adam": True}}


def test_training_equals_a_single_process(tmp_path: Path) -> None:
    demo = build_audio_demo(tmp_path / "demo", num_samples=24, dims=TINY_DIMS, with_weights=True)
    block = {"parallel": {"pipeline_stages": 2}}
    top = {"train_batch_size": BATCH, "gradient_clipping": CLIP, "optimizer": ADAM}
    config = ds_config(demo_paths(demo), tmp_path / "run", block, **top)
    arguments = {"config": config, "num_steps": NUM_STEPS, "checkpoint": True}
    reports = run_ranks("trajectory", arguments, tmp_path / "run")

    dataset = from_pretrained_dir(demo.model_dir, demo.train_path, media_root=demo.media_root)
    model = reference_model(str(demo.model_dir)).double()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, eps=EPS, weight_decay=0.0)
    order = EpochOrder(len(dataset), BATCH, seed=SEED)
    losses = []
    for step in range(NUM_STEPS):
        loss = reference_loss(model, dataset, order.batch(step).positions.tolist())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        losses.append(loss.item())
    for report in reports:
        assert report["losses"] == pytest.approx(losses, rel=1e-4)
        assert report["moved"] > 1e-4
        assert report["restored"] == 0.0
    assert losses[-1] < losses[0]
    # The encoder is large enough for its blocks to be part of the first stage, the decoder of the second.
    assert 0 < reports[0]["parts"][1] < reports[0]["parts"][2]
