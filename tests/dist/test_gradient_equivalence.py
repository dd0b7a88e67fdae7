"""The summed gradient is that of one process, for any assignment of the same global batch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.ranks import run_ranks
from tests.support.training import ds_config, reference_loss, reference_model

pytestmark = pytest.mark.dist

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def hard_batch(tiny_demo: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Eight samples: media of every kind, text only, one or hundreds of targets, and none at all."""
    root = tmp_path_factory.mktemp("hard")
    records = [json.loads(line) for line in Path(tiny_demo.train_path).read_text().splitlines()]
    with_one = next(r for r in records if isinstance(r.get("image"), str))
    with_many = next(r for r in records if isinstance(r.get("image"), list))
    with_clip = next(r for r in records if "video" in r)
    text_only = [r for r in records if "image" not in r and "video" not in r]
    short = {
        "id": "short",
        "conversations": [{"from": "human", "value": "Yes?"}, {"from": "gpt", "value": "Yes."}],
    }
    long = {
        "id": "long",
        "conversations": [
            {"from": "human", "value": "Tell me."},
            {"from": "gpt", "value": "the river is wide " * 60},
        ],
    }
    masked = {"id": "masked", "conversations": [{"from": "human", "value": "Nobody answers this question."}]}
    masked_image = {**with_one, "id": "masked-image", "conversations": [with_one["conversations"][0]]}
    chosen = [with_one, with_many, with_clip, text_only[0], short, long, masked, masked_image]
    path = root / "train.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in chosen))
    return {
        "model_dir": str(tiny_demo.model_dir),
        "train_path": str(path),
        "media_root": str(tiny_demo.media_root),
    }


@pytest.fixture(scope="module")
def reference(hard_batch: dict[str, str]) -> dict[str, tuple[float, dict[str, torch.Tensor]]]:
    """Loss and gradients by ``transformers`` in double precision, per reduction."""
    from dflop_ds.data.dataset import from_pretrained_dir

    dataset = from_pretrained_dir(
        hard_batch["model_dir"], hard_batch["train_path"], media_root=hard_batch["media_root"]
    )
    model = reference_model(hard_batch["model_dir"]).double()
    found = {}
    for reduction in ("token", "sample"):
        model.zero_grad()
        loss = reference_loss(model, dataset, list(range(8)), reduction)
        loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found[reduction] = (loss.item(), grads)
    return found


def pipeline_step(
    hard_batch: dict[str, str], out: Path, *, stages: int, dflop: dict[str, Any], **top: Any
) -> Any:
    config = ds_config(hard_batch, out, {"parallel": {"pipeline_stages": stages}, **dflop}, **top)
    reports = run_ranks("gradients", {"config": config}, out)
    grads: dict[str, np.ndarray] = {}
    for rank in range(2):
        grads.update(np.load(out / f"grads{rank}.npz"))
    return reports, grads


def tie(model_dir: str, out: Path) -> str:
    """A model like the given one, freshly made, with its output weights tied to its embeddings."""
    from transformers import AutoConfig, LlavaOnevisionForConditionalGeneration

    shutil.copytree(model_dir, out)
    config = AutoConfig.from_pretrained(model_dir)
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = True
    (out / "model.safetensors").unlink()
    torch.manual_seed(0)
    LlavaOnevisionForConditionalGeneration(config).save_pretrained(out)
    return str(out)


def worst_error(found: dict[str, np.ndarray], expected: dict[str, torch.Tensor]) -> float:
    """Largest relative error over the parameters; a gradient that is zero by symmetry must be tiny."""
    assert found.keys() == expected.keys()
    largest = max(float(grad.norm()) for grad in expected.values())
    errors = {}
    for name, grad in expected.items():
        scale = max(float(grad.norm()), 1e-3 * largest)
        errors[name] = float(np.linalg.norm(found[name] - grad.numpy())) / scale
    return max(errors.values())


CASES = {
    "pp2-blind": (2, {"scheduler": {"policy": "blind"}, "parallel": {"pipeline_stages": 2}}, {}),
    "pp2-aware": (2, {}, {}),
    "pp2-aware-sample-mean": (2, {"loss": {"reduction": "sample"}}, {}),
    "pp2-aware-checkpointed": (2, {"parallel": {"pipeline_stages": 2, "activation_checkpointing": True}}, {}),
    "dp2-blind": (1, {"scheduler": {"policy": "blind"}}, {}),
    "dp2-aware": (1, {}, {}),
    "dp2-one-sample-bins": (1, {}, {"train_micro_batch_size_per_gpu": 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_gradient_equals_one_process(
    case: str, hard_batch: dict[str, str], reference: dict[str, Any], tmp_path: Path
) -> None:
    stages, dflop, top = CASES[case]
    loss, expected = reference[dflop.get("loss", {}).get("reduction", "token")]
    block = {key: value for key, value in dflop.items() if key != "parallel"}
    parallel = {"pipeline_stages": stages, **dflop.get("parallel", {})}
    reports, grads = pipeline_step(
        hard_batch, tmp_path, stages=stages, dflop={**block, "parallel": parallel}, **top
    )
    assert reports[0]["loss"] == pytest.approx(loss, rel=1e-5)
    assert reports[1]["loss"] == pytest.approx(loss, rel=1e-5)
    assert sorted(index for members in reports[0]["bins"] for index in members) == list(range(8))
    assert worst_error(grads, expected) <= TOLERANCE


def test_tied_embeddings_across_stages(hard_batch: dict[str, str], tmp_path: Path) -> None:
    """The embedding is used by both stages; its gradient is the sum of both uses."""
    from dflop_ds.data.dataset import from_pretrained_dir

    batch = {**hard_batch, "model_dir": tie(hard_batch["model_dir"], tmp_path / "tied")}
    dataset = from_pretrained_dir(batch["model_dir"], batch["train_path"], media_root=batch["media_root"])
    model = reference_model(batch["model_dir"]).double()
    loss = reference_loss(model, dataset, list(range(8)))
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    split = {"parallel": {"pipeline_stages": 2, "split": [5, 4]}}
    reports, grads = pipeline_step(batch, tmp_path / "run", stages=2, dflop=split)
    assert reports[0]["parts"] == [0, 5, 9]
    assert reports[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert "lm_head.weight" not in grads
    assert worst_error(grads, expected) <= TOLERANCE
    both = [
        np.load(tmp_path / "run" / f"grads{rank}.npz")["model.language_model.embed_tokens.weight"]
        for rank in (0, 1)
    ]
    assert np.array_equal(both[0], both[1])
