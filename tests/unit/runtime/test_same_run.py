"""What another run may change before it goes on from a checkpoint; no process group is needed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflop_ds.errors import ConfigError, EnvironmentProblem, ModelError
from dflop_ds.runtime.checkpoint import _FailsLater, _require_same_run, _write_own_files
from dflop_ds.runtime.optimizer_state import restore
from dflop_ds.runtime.saved import SavedCheckpoint, SavedParameter
from tests.support.checkpoints import write_checkpoint


class _Layer(torch.nn.Module):
    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))

    def hf_name(self, local_name: str) -> str:
        return f"model.embed.{local_name}"


def engine(layer: _Layer, optimizer: Any = None) -> Any:
    module = SimpleNamespace(
        layer_kinds=["token_embed", "head"],
        local_layers=lambda: [layer],
        weight_names=lambda: {0: {"weight": "model.embed.weight"}},
    )
    return SimpleNamespace(module=module, optimizer=optimizer, feed=None)


def check(folder: Path, run: Any, *, strict: bool = True, with_optimizer: bool = True) -> None:
    saved = SavedCheckpoint(write_checkpoint(folder / "global_step4"))
    _require_same_run(run, saved, strict, weights_only=False, with_optimizer=with_optimizer)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"weight": (3,)}, r"model\.embed\.weight of shape \(2,\) instead of \(3,\) and 0 other"),
        ({"weight": (2,), "lora_A": (1, 2)}, r"model\.embed\.lora_A of shape None instead of \(1, 2\)"),
        ({}, r"model\.embed\.weight of shape \(2,\) instead of None.*or start from .*export"),
    ],
)
def test_other_weights_are_named(tmp_path: Path, shapes: Any, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        check(tmp_path, engine(_Layer(**shapes)))


def test_the_same_weights_pass(tmp_path: Path) -> None:
    weights = [torch.zeros(2)]
    check(tmp_path, engine(_Layer(weight=(2,)), torch.optim.AdamW(weights)))


def test_another_optimizer_is_refused_unless_its_state_is_not_wanted(tmp_path: Path) -> None:
    weights = [torch.zeros(2)]
    run = engine(_Layer(weight=(2,)), torch.optim.SGD(weights))
    with pytest.raises(ConfigError, match="found SGD instead of AdamW; change it back"):
        check(tmp_path / "with", run)
    check(tmp_path / "without", run, with_optimizer=False)


@pytest.mark.parametrize(("keep_rates", "rate"), [(False, 0.1), (True, 0.5)])
def test_a_new_schedule_keeps_its_rate(keep_rates: bool, rate: float) -> None:
    module = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    run = SimpleNamespace(module=module, optimizer=optimizer, lr_scheduler=object())
    state = {"momentum_buffer": torch.ones(2)}
    known = SavedParameter(None, state, {"lr": 0.1, "weight_decay": 0.3})
    restore(run, SimpleNamespace(parameter=lambda name: known), keep_rates=keep_rates)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (rate, 0.3)
    assert optimizer.state[module.weight]["momentum_buffer"].tolist() == [[1.0, 1.0]]


def test_a_rank_that_cannot_write_says_so_after_all_have_written(tmp_path: Path) -> None:
    written = []

    def save(state_dict: Any, path: str) -> None:
        if path == "second":
            raise OSError(28, "No space left on device")
        written.append(path)

    later = _FailsLater(SimpleNamespace(save=save, is_decoupled=lambda: False))
    for path in ("first", "second", "third"):
        later.save({}, path)
    assert written == ["first"]
    assert not later.is_decoupled()
    with pytest.raises(EnvironmentProblem, match=r"found .*No space left on device; free space"):
        _write_own_files(None, tmp_path / "one", keeper=True, stream=None, error=later.error)
