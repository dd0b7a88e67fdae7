"""Checkpoints of one layout in another: state bit for bit, the same global batches, the same losses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, LlavaOnevisionForConditionalGeneration

from dflop_ds.cli.main import main
from dflop_ds.data.dataset import from_pretrained_dir
from dflop_ds.scheduling.order import EpochOrder
from tests.support.ranks import run_ranks
from tests.support.training import demo_paths, ds_config, reference_loss

pytestmark = pytest.mark.dist

BATCH, SEED = 8, 7
ADAM = {"type": "Adam", "params": {"lr": 0.01, "eps": 1e-3, "torch_adam": True}}
WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_num_steps": 9, "warmup_max_lr": 0.01, "warmup_type": "linear"},
}
ZERO1 = {"zero_optimization": {"stage": 1}}
BF16 = {"bf16": {"enabled": True}}


@pytest.fixture(scope="module")
def tied_model(tiny_demo: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the demo with tied embeddings."""
    directory = tmp_path_factory.mktemp("tied") / "model"
    shutil.copytree(tiny_demo.model_dir, directory)
    config = AutoConfig.from_pretrained(directory)
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = True
    torch.manual_seed(3)
    LlavaOnevisionForConditionalGeneration(config).save_pretrained(directory)
    return directory


def noted(folder: Path, file: str, rank: int) -> dict[str, np.ndarray]:
    return dict(np.load(folder / f"{file}{rank}.npz"))


def everything(folder: Path, file: str) -> dict[str, np.ndarray]:
    """State of both ranks; what both have must be the same."""
    first, second = noted(folder, file, 0), noted(folder, file, 1)
    for name in set(first) & set(second):
        assert np.array_equal(first[name], second[name]), name
    return first | second


def assert_equal(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    assert set(left) == set(right)
    for name, value in left.items():
        assert np.array_equal(value, right[name]), name


def test_other_stages_replicas_and_precision(tiny_demo: Any, tied_model: Path, tmp_path: Path) -> None:
    demo = demo_paths(tiny_demo) | {"model_dir": str(tied_model)}

    def launch(name: str, stages: int, split: Any, load: str | None = None, **top: Any) -> Any:
        block = {
            "parallel": {"pipeline_stages": stages, "split": split},
            "train": {"num_steps": 9, "output_dir": str(tmp_path)},
        }
        common = {"train_batch_size": BATCH, "gradient_clipping": 0.5}
        top = {**common, "optimizer": ADAM, "scheduler": WARMUP, **top}
        arguments = {"config": ds_config(demo, tmp_path, block, **top), "num_steps": 2, "export": True}
        if load is not None:
            arguments["load"] = str(tmp_path / load / "checkpoints")
        return run_ranks("relocated", arguments, tmp_path / name)

    order = EpochOrder(24, BATCH, seed=SEED)

    def expected(start: int) -> list[list[int]]:
        return [sorted(order.batch(step).positions.tolist()) for step in range(start, start + 2)]

    first = launch("first", 2, [6, 3])
    # The tied weight is on both ranks, bit-equal after training.
    tied = "tied_modules.token_embedding.embed_tokens.weight weight"
    assert tied in noted(tmp_path / "first", "trained", 0)
    assert tied in noted(tmp_path / "first", "trained", 1)
    whole = everything(tmp_path / "first", "trained")

    other = launch("other", 2, [3, 6], load="first")
    assert other[0]["client"] == 42
    assert other[1]["steps"] == [2.0]
    assert other[0]["lr"] == pytest.approx([0.01 * 2 / 9], rel=0.6)
    assert_equal(everything(tmp_path / "other", "loaded"), whole)
    assert other[0]["batches"] == expected(2)
    assert other[0]["losses"] == pytest.approx(first[0]["next"], rel=1e-6)

    rounded = launch("rounded", 2, [6, 3], load="first", **BF16)
    loaded = everything(tmp_path / "rounded", "loaded")
    for name, value in whole.items():
        if name.endswith(("exp_avg", "exp_avg_sq", "master")):
            assert np.array_equal(loaded[name], value), name
    assert rounded[0]["losses"] == pytest.approx(first[0]["next"], rel=2e-2)

    replicas = launch("replicas", 1, "auto", load="other", **ZERO1)
    assert_equal(everything(tmp_path / "replicas", "loaded"), everything(tmp_path / "other", "trained"))
    assert replicas[0]["batches"] == expected(4)
    assert replicas[0]["losses"] == pytest.approx(other[0]["next"], rel=1e-4)

    narrow = launch("narrow", 2, "auto", load="replicas", **BF16)
    loaded, before = everything(tmp_path / "narrow", "loaded"), everything(tmp_path / "replicas", "trained")
    for name, value in before.items():
        if name.endswith(("exp_avg", "exp_avg_sq", "master")):
            assert np.array_equal(loaded[name], value), name
    assert narrow[0]["batches"] == expected(6)
    assert narrow[0]["losses"] == pytest.approx(replicas[0]["next"], rel=2e-2)

    again = launch("again", 1, "auto", load="narrow", **(BF16 | ZERO1))
    assert_equal(everything(tmp_path / "again", "loaded"), everything(tmp_path / "narrow", "trained"))
    assert again[0]["batches"] == expected(8)
    check_exports(tmp_path, tiny_demo, first)


def check_exports(folder: Path, tiny_demo: Any, first: Any) -> None:
    """Ranks export what the command line makes of their checkpoint, and transformers reads it."""
    for name in ("first", "narrow"):
        checkpoint, out = folder / name / "checkpoints", folder / f"{name}-exported"
        assert main(["export", str(checkpoint), str(out), "--dtype", "fp32", "--max-shard-gb", "0.0001"]) == 0
        assert len(list(out.glob("*.safetensors"))) > 1
        ours, theirs = (
            {key: value for path in where.glob("*.safetensors") for key, value in load_file(path).items()}
            for where in (out, folder / name / "export")
        )
        assert set(ours) == set(theirs)
        assert all(torch.equal(value, theirs[key]) for key, value in ours.items())
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == set(ours)
    out = folder / "first-exported"
    model, info = LlavaOnevisionForConditionalGeneration.from_pretrained(out, output_loading_info=True)
    assert [info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")] == [set()] * 3
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight
    dataset = from_pretrained_dir(out, tiny_demo.train_path, media_root=tiny_demo.media_root)
    batch = EpochOrder(24, BATCH, seed=SEED).batch(2).positions.tolist()
    loss = reference_loss(model.double().eval(), dataset, batch)
    assert first[0]["next"][0] == pytest.approx(loss.item(), rel=1e-5)
