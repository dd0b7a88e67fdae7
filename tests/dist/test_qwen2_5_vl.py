"""Qwen2.5-VL on two ranks with data-aware microbatches, against ``transformers`` in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2_5_VLForConditionalGeneration

from dflop_ds.data.dataset import LlavaDataset, from_pretrained_dir
from dflop_ds.scheduling.order import EpochOrder
from tests.dist.test_gradient_equivalence import worst_error
from tests.support.ranks import run_ranks
from tests.support.tiny_qwen2_5_vl import reference_loss, write_tiny_qwen2_5_vl
from tests.support.training import demo_paths, ds_config

pytestmark = pytest.mark.dist

NUM_STEPS, BATCH, SEED, LR = 3, 8, 7, 0.1
GRADIENT_TOLERANCE = 2e-5
"""The reference normalises in single precision, whatever its weights are."""


@pytest.fixture(scope="module")
def paths(tiny_demo: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Data of the demo, and a tied model."""
    model_dir = write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("qwen"), tiny_demo.model_dir, tied=True)
    return {**demo_paths(tiny_demo), "model_dir": str(model_dir)}


@pytest.fixture(scope="module")
def dataset(paths: dict[str, str]) -> LlavaDataset:
    return from_pretrained_dir(paths["model_dir"], paths["train_path"], media_root=paths["media_root"])


@pytest.fixture
def model(paths: dict[str, str]) -> Any:
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(paths["model_dir"]).eval()


def _batch(dataset: LlavaDataset, step: int) -> list[int]:
    return [int(i) for i in EpochOrder(len(dataset), BATCH, seed=SEED).batch(step).positions]


def test_gradient_over_two_stages(
    paths: dict[str, str], dataset: LlavaDataset, model: Any, tmp_path: Path
) -> None:
    """Cut inside the encoder's and the decoder's range: tied embeddings are on both stages."""
    loss = reference_loss(model, dataset, _batch(dataset, 0))
    loss.backward()
    expected = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    split = {"parallel": {"pipeline_stages": 2, "split": [6, 4]}}
    reports = run_ranks("gradients", {"config": ds_config(paths, tmp_path, split)}, tmp_path)
    found: dict[str, np.ndarray] = {}
    for rank in range(2):
        found.update(np.load(tmp_path / f"grads{rank}.npz"))
    assert reports[0]["parts"] == [0, 6, 10]
    assert [report["loss"] for report in reports] == [pytest.approx(loss.item(), rel=1e-5)] * 2
    assert worst_error(found, expected) <= GRADIENT_TOLERANCE


def test_steps_of_two_replicas(
    paths: dict[str, str], dataset: LlavaDataset, model: Any, tmp_path: Path
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = reference_loss(model, dataset, _batch(dataset, step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    block = {"parallel": {"pipeline_stages": 1}}
    config = ds_config(paths, tmp_path, block, gradient_clipping=0.0)
    reports = run_ranks("trajectory", {"config": config, "num_steps": NUM_STEPS}, tmp_path)
    for report in reports:
        assert report["losses"] == pytest.approx(losses, rel=1e-4)
    for step, bins in enumerate(reports[0]["plans"]):
        assert sorted(index for members in bins for index in members) == sorted(_batch(dataset, step))
