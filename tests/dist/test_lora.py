"""Adapters on both stages against ``peft`` on the ``transformers`` model in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dflop_ds.cli.main import main
from dflop_ds.data.dataset import from_pretrained_dir
from dflop_ds.scheduling.order import EpochOrder
from tests.support.ranks import run_ranks
from tests.support.training import demo_paths, ds_config, reference_loss, reference_model

pytestmark = pytest.mark.dist
peft = pytest.importorskip("peft")

NUM_STEPS, BATCH, CLIP, LR = 3, 8, 0.05, 0.5
RUNS: dict[str, tuple[bool, dict[str, Any]]] = {
    "plain": (False, {}),
    "checkpointed": (True, {}),
    "checkpointed-reentrant": (True, {"pipeline": {"use_reentrant": True}}),
}


def with_adapter(demo: Any, folder: Path, trainable: bool) -> Any:
    """The ``transformers`` model with an exported adapter and the weights that were trained as a whole."""
    model = reference_model(str(demo.model_dir))
    _, unexpected = model.load_state_dict(load_file(folder / "trained.safetensors"), strict=False)
    assert not unexpected
    return peft.PeftModel.from_pretrained(model, str(folder), is_trainable=trainable).double()


@pytest.mark.parametrize("run", RUNS)
def test_adapters_learn_as_in_one_process(run: str, tiny_demo: Any, tmp_path: Path) -> None:
    checkpointed, top = RUNS[run]
    lora = {"match": ["encoder", "llm"], "rank": 4, "alpha": 12.0, "also_train": ["projector"]}
    parallel = {"pipeline_stages": 2, "split": [6, 3], "activation_checkpointing": checkpointed}
    block = {"finetune": {"lora": lora}, "parallel": parallel}
    sgd = {"type": "SGD", "params": {"lr": LR}}
    top = {"train_batch_size": BATCH, "gradient_clipping": CLIP, "optimizer": sgd, **top}
    config = ds_config(demo_paths(tiny_demo), tmp_path, block, **top)
    arguments = {"config": config, "num_steps": NUM_STEPS, "export": run == "plain"}
    reports = run_ranks("lora", arguments, tmp_path)

    model = with_adapter(tiny_demo, tmp_path / "before", trainable=True)
    for name, parameter in model.named_parameters():
        if "multi_modal_projector" in name or "image_newline" in name:
            parameter.requires_grad_(True)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=LR)
    dataset = from_pretrained_dir(tiny_demo.model_dir, tiny_demo.train_path, media_root=tiny_demo.media_root)
    order, losses = EpochOrder(len(dataset), BATCH, seed=7), []
    for step in range(NUM_STEPS):
        loss = reference_loss(model, dataset, order.batch(step).positions.tolist())
        optimizer.zero_grad()
        loss.backward()
        grads = {n.removeprefix("base_model.model."): p.grad.clone() for n, p in trained.items()}
        torch.nn.utils.clip_grad_norm_(trained.values(), CLIP)
        optimizer.step()
        losses.append(loss.item())

    found: dict[str, np.ndarray] = {}
    for rank, result in enumerate(reports):
        assert result["losses"] == pytest.approx(losses, rel=1e-5)
        assert result["unchanged"]
        assert result["num_frozen"]
        found |= dict(np.load(tmp_path / f"grads{rank}.npz"))
    # The last encoder block's adapters and those of every other block, A and B.
    assert found.keys() == grads.keys()
    largest = max(float(grad.norm()) for grad in grads.values())
    for name, grad in grads.items():
        scale = max(float(grad.norm()), 1e-3 * largest)
        assert np.linalg.norm(found[name] - grad.numpy()) / scale <= 1e-4, name
        assert float(grad.norm()) > 0

    loaded = with_adapter(tiny_demo, tmp_path / "after", trainable=False)
    with torch.no_grad():
        everything = reference_loss(loaded, dataset, list(range(len(dataset)))).item()
    assert reports[0]["eval"] == pytest.approx(everything, rel=1e-5)
    assert losses[-1] < losses[0]
    if run == "plain":
        check_exports(tiny_demo, tmp_path, loaded)


def check_exports(tiny_demo: Any, folder: Path, trained: Any) -> None:
    """The ranks and the command line write what ``peft`` makes of the adapter and its base."""
    assert main(["export", str(folder / "checkpoints"), str(folder / "by_command")]) == 0
    merged = trained.merge_and_unload()
    for name in ("merged", "by_command"):
        model, info = type(merged).from_pretrained(folder / name, output_loading_info=True)
        assert [info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")] == [set()] * 3
        for key, value in merged.state_dict().items():
            torch.testing.assert_close(model.state_dict()[key].double(), value, rtol=1e-5, atol=1e-6, msg=key)
    before = reference_model(str(tiny_demo.model_dir)).state_dict()
    key = "model.language_model.layers.0.mlp.down_proj.weight"
    assert not torch.allclose(merged.state_dict()[key].float(), before[key], rtol=1e-3)
