"""Training of a part of the model, against ``transformers`` and ``torch.optim`` in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflop_ds.data.dataset import from_pretrained_dir
from dflop_ds.scheduling.order import EpochOrder
from tests.support.ranks import run_ranks
from tests.support.training import demo_paths, ds_config, reference_loss, reference_model

pytestmark = pytest.mark.dist

NUM_STEPS, BATCH, CLIP, LR, EPS = 3, 8, 0.5, 0.01, 1e-3
ADAM = {"type": "Adam", "params": {"lr": LR, "eps": EPS, "weight_decay": 0.0, "torch_adam": True}}
WARMUP = {"warmup_min_lr": LR / 2, "warmup_max_lr": LR, "warmup_num_steps": 2, "warmup_type": "linear"}
VISION, TEXT = "model.vision_tower.", ("model.language_model.", "lm_head.")
FROZEN_FIRST = {
    "parallel": {"pipeline_stages": 2, "split": [4, 5]},
    "finetune": {"freeze": ["encoder", "projector"]},
}
FROZEN_LAST = {"parallel": {"pipeline_stages": 2, "split": [4, 5]}, "finetune": {"freeze": ["llm"]}}
GROUPED = {
    "parallel": {"pipeline_stages": 1},
    "finetune": {
        "freeze": ["encoder.layers.1", "*.bias", "llm.embed"],
        "param_groups": [
            {"match": ["encoder"], "lr": LR / 10},
            {"match": ["*norm.weight"], "weight_decay": 0.1},
        ],
    },
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Any, float]] = {
    "frozen-first-stage": (FROZEN_FIRST, {}, lambda name: not name.startswith(TEXT), 1e-4),
    "frozen-last-stage": (FROZEN_LAST, {}, lambda name: name.startswith(TEXT), 1e-4),
    "frozen-first-stage-bf16": (
        FROZEN_FIRST,
        {"bf16": {"enabled": True}, "communication_data_type": "fp32"},
        lambda name: not name.startswith(TEXT),
        2e-2,
    ),
    "groups-zero1": (
        GROUPED,
        {"zero_optimization": {"stage": 1}, "scheduler": {"type": "WarmupLR", "params": WARMUP}},
        lambda name: (
            name.startswith(f"{VISION}encoder.layers.1.") or name.endswith(".bias") or "embed_tokens" in name
        ),
        1e-4,
    ),
}


def optimizer_of(model: Any, case: str) -> torch.optim.Optimizer:
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if case != "groups-zero1":
        return torch.optim.AdamW(named.values(), lr=LR, eps=EPS, weight_decay=0.0)
    vision = [p for name, p in named.items() if name.startswith(VISION)]
    norms = [p for name, p in named.items() if name.endswith("norm.weight") and not name.startswith(VISION)]
    rest = [p for p in named.values() if all(p is not q for q in [*vision, *norms])]
    groups = [{"params": rest}, {"params": vision, "lr": LR / 10}, {"params": norms, "weight_decay": 0.1}]
    return torch.optim.AdamW(groups, lr=LR, eps=EPS, weight_decay=0.0)


def reference(demo: Any, case: str) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Losses, gradients of the first step (before clipping) and final weights, in double precision."""
    dataset = from_pretrained_dir(demo.model_dir, demo.train_path, media_root=demo.media_root)
    model = reference_model(str(demo.model_dir)).double()
    is_frozen = CASES[case][2]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_frozen(name))
    optimizer = optimizer_of(model, case)
    peak = [group["lr"] for group in optimizer.param_groups]
    order = EpochOrder(len(dataset), BATCH, seed=7)
    losses: list[float] = []
    first: dict[str, torch.Tensor] = {}
    for step in range(NUM_STEPS):
        loss = reference_loss(model, dataset, order.batch(step).positions.tolist())
        optimizer.zero_grad()
        loss.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        first = first or grads
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], CLIP)
        if case == "groups-zero1":
            for group, lr in zip(optimizer.param_groups, peak, strict=True):
                group["lr"] = lr * (0.5 + 0.25 * max(0, step - 1))
        optimizer.step()
        losses.append(loss.item())
    return losses, first, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("case", CASES)
def test_a_part_is_trained_as_in_one_process(case: str, tiny_demo: Any, tmp_path: Path) -> None:
    block, top, is_frozen, tolerance = CASES[case]
    top = {"train_batch_size": BATCH, "gradient_clipping": CLIP, "optimizer": ADAM, **top}
    config = ds_config(demo_paths(tiny_demo), tmp_path, block, **top)
    exact = tolerance < 1e-3
    arguments = {"config": config, "num_steps": NUM_STEPS, "gradients": case.startswith("frozen")}
    reports = run_ranks("finetune", arguments, tmp_path)
    losses, grads, weights = reference(tiny_demo, case)
    largest = max(float(grad.norm()) for grad in grads.values())
    for rank, found in enumerate(reports):
        assert found["losses"] == pytest.approx(losses, rel=tolerance)
        state = np.load(tmp_path / f"state{rank}.npz")
        for key in state.files:
            part, name = key.split("/", 1)
            expected = (grads if part == "grad" else weights)[name].numpy()
            scale = max(float(np.linalg.norm(expected)), 1e-3 * largest if part == "grad" else 1e-3)
            if not exact and part == "grad":
                assert np.linalg.norm(state[key] - expected) / scale <= 0.02, key
                summed = torch.from_numpy(state[key])
                assert not torch.equal(summed, summed.bfloat16().double()), "summed in fp32"
            if exact:
                error = float(np.linalg.norm(state[key] - expected)) / scale
                assert error <= (1e-5 if part == "grad" else 5e-3), key
        local = {key.split("/", 1)[1] for key in state.files if key.startswith("weight/")}
        assert {name for name in local if is_frozen(name)} <= set(found["unchanged"])
        # The encoder blocks that the model does not use for features are not in the pipeline at all.
        assert not [name for name in found["unchanged"] if not is_frozen(name)]
    first, last = reports
    if case.startswith("frozen-first-stage"):
        assert last["gradients_sent"] == 0
        assert first["num_optimized"] <= 2, "the anchor, and bf16's alignment"
    if case == "frozen-last-stage":
        assert last["gradients_sent"] == 4 * NUM_STEPS
        assert last["num_optimized"] == 1
    if "bf16" in top:
        assert last["dtype"] == "torch.float32"
