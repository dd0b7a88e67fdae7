"""Every family trains on two stages with the gradient of one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.model_dirs import TOY_FAMILY, write_internvl_model, write_toy_model
from tests.support.ranks import run_ranks
from tests.support.training import ds_config

pytestmark = pytest.mark.dist

MODELS: dict[str, tuple[Callable[[Path], Path], dict[str, str], list[str]]] = {
    "internvl": (write_internvl_model, {}, ["image", "video"]),
    "from outside": (write_toy_model, {"family_module": TOY_FAMILY}, ["image"]),
}


def one_process(batch: dict[str, str], seed: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of all samples, one after the other, by the family's layers in fp64."""
    from transformers import AutoConfig

    from dflop_ds.data.collate import PackedCollator
    from dflop_ds.data.dataset import from_pretrained_dir
    from dflop_ds.families import family_of
    from dflop_ds.models.attention import SEGMENTS_NAME

    data = from_pretrained_dir(batch["model_dir"], batch["train_path"], media_root=batch["media_root"])
    config = AutoConfig.from_pretrained(batch["model_dir"])
    family = family_of(json.loads(config.to_json_string(use_diff=False)))
    plans = family.pipeline_layers(config, attention=SEGMENTS_NAME, seed=seed)
    shared: dict[str, torch.nn.Module] = {}
    layers = [shared.setdefault(p.tied_key or str(i), p.build()).double() for i, p in enumerate(plans)]
    collate = PackedCollator(0, row_shape=data.processor.row_shape)
    total, num_terms = torch.zeros((), dtype=torch.float64), 0
    for index in range(len(data)):
        (rows, vector), (targets, _, _) = collate([data[index]])
        carry: Any = (rows.double(), vector)
        for plan, layer in zip(plans, layers, strict=True):
            carry = layer(carry) if plan.forward_fn is None else plan.forward_fn(layer, carry)
        total = total + torch.nn.functional.cross_entropy(carry, targets, reduction="sum")
        num_terms += len(targets)
    loss = total / num_terms
    loss.backward()
    grads = {layer.hf_name(name): p.grad for layer in layers for name, p in layer.named_parameters()}
    return loss.item(), grads


@pytest.mark.parametrize("name", MODELS)
def test_gradient_equals_one_process(name: str, tiny_demo: Any, tmp_path: Path) -> None:
    write, model, media = MODELS[name]
    records = [json.loads(line) for line in Path(tiny_demo.train_path).read_text().splitlines()]
    usable = [record for record in records if not {"image", "video"} - set(media) & set(record)]
    chosen = sorted(usable, key=lambda record: not any(key in record for key in media))[:6] + usable[-2:]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in chosen))
    batch = {
        "model_dir": str(write(tmp_path / "model")),
        "train_path": str(path),
        "media_root": str(tiny_demo.media_root),
    }
    config = ds_config(batch, tmp_path, {"model": model})
    reports = run_ranks("gradients", {"config": config}, tmp_path)
    loss, expected = one_process(batch, config["dflop"]["seed"])
    assert [report["loss"] for report in reports] == pytest.approx([loss, loss], rel=1e-5)
    found: dict[str, np.ndarray] = {}
    for rank in range(2):
        found.update(np.load(tmp_path / f"grads{rank}.npz"))
    assert found.keys() == expected.keys()
    largest = max(float(grad.norm()) for grad in expected.values())
    for key, grad in expected.items():
        scale = max(float(grad.norm()), 1e-3 * largest)
        assert float(np.linalg.norm(found[key] - grad.numpy())) / scale <= 1e-5, key
