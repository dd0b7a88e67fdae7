"""Whole training runs against plain ``transformers`` and ``torch.optim`` in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dflop_ds.data.dataset import from_pretrained_dir
from dflop_ds.scheduling.order import EpochOrder
from tests.support.ranks import run_ranks
from tests.support.training import demo_paths, ds_config, reference_loss, reference_model

pytestmark = pytest.mark.dist

NUM_STEPS, BATCH, CLIP, SEED = 3, 8, 0.5, 7
# A large eps keeps Adam from turning rounding noise in vanishing gradients into full steps.
LR, EPS = 0.01, 1e-3
ADAM = {"type": "Adam", "params": {"lr": LR, "eps": EPS, "weight_decay": 0.0, "torch_adam": True}}


@pytest.fixture(scope="module")
def reference(tiny_demo: Any) -> dict[str, list[float]]:
    """Losses of the same global batches, and of the whole set before each step, in double precision."""
    dataset = from_pretrained_dir(tiny_demo.model_dir, tiny_demo.train_path, media_root=tiny_demo.media_root)
    model = reference_model(str(tiny_demo.model_dir)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=0.0)
    order = EpochOrder(len(dataset), BATCH, seed=SEED)
    everything = list(range(len(dataset)))
    losses, evals = [], []
    with torch.no_grad():
        evals.append(reference_loss(model, dataset, everything).item())
    for step in range(NUM_STEPS):
        loss = reference_loss(model, dataset, order.batch(step).positions.tolist())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        evals.append(reference_loss(model, dataset, everything).item())
    return {"losses": losses, "evals": evals}


def train(
    tiny_demo: Any, out: Path, *, stages: int, dflop: dict[str, Any] | None = None, **top: Any
) -> list[dict[str, Any]]:
    options = {key: top.pop(key) for key in ("evaluate", "checkpoint") if key in top}
    top = {"train_batch_size": BATCH, "gradient_clipping": CLIP, "optimizer": ADAM, **top}
    block = {"parallel": {"pipeline_stages": stages}, **(dflop or {})}
    config = ds_config(demo_paths(tiny_demo), out, block, **top)
    return run_ranks("trajectory", {"config": config, "num_steps": NUM_STEPS, **options}, out)


def test_pipeline_with_evaluation_and_checkpoint(
    tiny_demo: Any, reference: dict[str, Any], tmp_path: Path
) -> None:
    first, last = train(tiny_demo, tmp_path, stages=2, evaluate=True, checkpoint=True)
    assert first["losses"] == pytest.approx(reference["losses"], rel=1e-4)
    assert first["losses"][-1] < first["losses"][0]
    # Evaluation sees all samples, in other microbatches, and leaves training untouched.
    assert first["evals"][0] == pytest.approx(reference["evals"][0], rel=1e-5)
    assert first["evals"][-1] == pytest.approx(reference["evals"][1], rel=1e-4)
    assert last["evals"] == first["evals"]
    for rank in (first, last):
        assert rank["stopped"] == [True, True], "one rank was told to stop before an evaluation"
        assert rank["moved"] > 1e-4
        assert rank["restored"] == 0.0
    # Rank 0 also times one layer of each of the seven kinds; nobody builds another stage's layers.
    num_first, num_layers = first["parts"][1], first["parts"][2]
    assert (first["num_built"], last["num_built"]) == (num_first + 7, num_layers - num_first)
    # Three steps and one more after saving, of 4 microbatches; evaluation checks tags as well.
    num_steps, num_evals = NUM_STEPS + 1, NUM_STEPS + 1
    assert first["calls"]["backward_once"] == 4 * num_steps
    assert first["calls"]["backward"] == 4 * num_steps
    assert last["calls"]["backward"] == 4 * num_steps
    assert "backward_once" not in last["calls"]
    assert "_check_tag" not in first["calls"]
    assert last["calls"]["_check_tag"] == 4 * num_steps + 12 * num_evals
    assert first["calls"]["fill_missing_gradients"] == last["calls"]["fill_missing_gradients"] == num_steps


def test_a_cut_inside_the_encoder(tiny_demo: Any, reference: dict[str, Any], tmp_path: Path) -> None:
    """Between two vision blocks travels what SigLIP's embeddings leave as a transposed view."""
    block = {"parallel": {"pipeline_stages": 2, "split": [2, 7]}}
    for rank in train(tiny_demo, tmp_path, stages=2, dflop=block):
        assert rank["losses"] == pytest.approx(reference["losses"], rel=1e-4)


ZERO1 = {"zero_optimization": {"stage": 1}}
BF16 = {"bf16": {"enabled": True}}
RUNS = {
    "dp2-zero1": (1, ZERO1, "torch.float32", 1e-4),
    "pp2-bf16": (2, BF16, "torch.bfloat16", 2e-2),
    "dp2-bf16-zero1": (1, BF16 | ZERO1, "torch.bfloat16", 2e-2),
}


@pytest.mark.parametrize("run", RUNS)
def test_precision_and_zero(run: str, tiny_demo: Any, reference: dict[str, Any], tmp_path: Path) -> None:
    stages, top, dtype, tolerance = RUNS[run]
    reports = train(tiny_demo, tmp_path, stages=stages, **top)
    for rank in reports:
        assert rank["dtype"] == dtype
        assert rank["losses"] == pytest.approx(reference["losses"], rel=tolerance)


def test_replicas_without_any_image(tiny_demo: Any, tmp_path: Path) -> None:
    """With ZeRO-1, a replica that has text only must still take part in the encoder's reduction."""
    records = [line for line in Path(tiny_demo.train_path).read_text().splitlines() if '"video"' not in line]
    texts = [line for line in records if '"image"' not in line][:3]
    image = next(line for line in records if '"image"' in line)
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join([*texts, image]) + "\n")
    demo = demo_paths(tiny_demo) | {"train_path": str(path)}
    block = {
        "parallel": {"pipeline_stages": 1},
        "scheduler": {"policy": "blind"},
        "data": {"shuffle": False},
    }
    top = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": ADAM,
        **ZERO1,
        "gradient_clipping": 0.0,
    }
    config = ds_config(demo, tmp_path, block, **top)
    reports = run_ranks("trajectory", {"config": config, "num_steps": 2}, tmp_path)
    # Samples 0 and 2 go to replica 0 (text only), 1 and 3 to replica 1 (which has the image).
    assert reports[0]["plans"][0] == [[0], [2], [1], [3]]
    dataset = from_pretrained_dir(tiny_demo.model_dir, path, media_root=tiny_demo.media_root)
    model = reference_model(str(tiny_demo.model_dir)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=0.0)
    for step in range(2):
        loss = reference_loss(model, dataset, [0, 1, 2, 3])
        assert reports[0]["losses"][step] == pytest.approx(loss.item(), rel=1e-4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_own_microbatches_are_one_mean(tiny_demo: Any, reference: dict[str, Any], tmp_path: Path) -> None:
    """The second global batch, binned unevenly by hand, gives the loss that the plan would give."""
    second = EpochOrder(24, BATCH, seed=SEED).batch(1).positions.tolist()
    bins = [second[:1], second[1:2], second[2:7], second[7:]]
    block = {"parallel": {"pipeline_stages": 2}, "data": {"num_workers": 1}}
    top = {"train_batch_size": BATCH, "gradient_clipping": CLIP, "optimizer": ADAM}
    config = ds_config(demo_paths(tiny_demo), tmp_path, block, **top)
    for rank in run_ranks("own_batches", {"config": config, "bins": bins}, tmp_path):
        assert rank["planned"] == pytest.approx(reference["losses"][0], rel=1e-4)
        assert rank["own"] == pytest.approx(reference["losses"][1], rel=1e-4)
        # The plan goes on where it was: the second batch once more, now better known.
        assert rank["again"] < rank["own"]
        assert (rank["workers"], rank["left"]) == (1, 0)
        assert rank["segments"] == []


def test_same_seed_same_plans_and_every_sample_once(tiny_demo: Any, tmp_path: Path) -> None:
    """24 samples in batches of 10: two full steps and one of 4 samples per epoch."""
    block = {"train": {"output_dir": str(tmp_path / "shared"), "num_steps": 2}}
    top = {"train_batch_size": 10, "optimizer": ADAM}
    config = ds_config(demo_paths(tiny_demo), tmp_path, block, **top)
    arguments = {"config": config, "num_steps": 6}
    one = run_ranks("trajectory", arguments, tmp_path / "one")
    two = run_ranks("trajectory", arguments, tmp_path / "two")
    assert one[0]["plans"] == two[0]["plans"]
    assert one[0]["losses"] == two[0]["losses"]
    assert one[0]["digests"] == one[1]["digests"]
    for epoch in range(2):
        steps = one[0]["plans"][3 * epoch : 3 * epoch + 3]
        assert [len(bins) for bins in steps] == [5, 5, 2]
        seen = sorted(index for bins in steps for members in bins for index in members)
        assert seen == list(range(24))
    first, second = (sorted(index for members in one[0]["plans"][i] for index in members) for i in (0, 3))
    assert first != second


def test_every_sample_once_over_two_replicas(tiny_demo: Any, tmp_path: Path) -> None:
    config = ds_config(
        demo_paths(tiny_demo), tmp_path, {"parallel": {"pipeline_stages": 1}}, train_batch_size=8
    )
    reports = run_ranks("trajectory", {"config": config, "num_steps": 3}, tmp_path)
    plans = reports[0]["plans"]
    assert reports[1]["plans"] == plans
    assert sorted(index for bins in plans for members in bins for index in members) == list(range(24))
    assert [len(bins) for bins in plans] == [4, 4, 4]
