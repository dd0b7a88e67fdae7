"""Optimizer groups and their schedules, against DeepSpeed's own warm-up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.runtime.lr_schedules import WarmupDecayLR, WarmupLR
from torch import nn

from dflop_ds.errors import ConfigError
from dflop_ds.models.layers import PipelineLayer
from dflop_ds.runtime.finetune import Finetuning
from dflop_ds.runtime.param_groups import group_parameters, with_groups, with_schedule


class Two(PipelineLayer):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def hf_prefixes(self) -> dict[str, str]:
        return {"first": "a", "second": "b"}


GROUPS = ((frozenset({"a.weight", "a.bias"}), {"lr": 0.001}), (frozenset({"a.bias", "b.bias"}), {"lr": 0.1}))
FINETUNING = Finetuning(frozenset(), (), GROUPS)


class Model:
    finetuning = FINETUNING

    def __init__(self) -> None:
        self.layer = Two()

    def parameters(self) -> Any:
        return self.layer.parameters()

    def local_layers(self) -> list[PipelineLayer]:
        return [self.layer]


def test_the_first_match_counts_and_empty_groups_are_left_out() -> None:
    layer = Two()
    names = {id(p): name for name, p in layer.named_parameters()}
    groups = group_parameters([layer], FINETUNING, layer.parameters())
    found = [[names[id(p)] for p in group["params"]] for group in groups]
    assert found == [["second.weight"], ["first.weight", "first.bias"], ["second.bias"]]
    assert [group.get("lr") for group in groups] == [None, 0.001, 0.1]
    only_second = group_parameters([layer], FINETUNING, layer.second.parameters())
    assert [group.get("lr") for group in only_second] == [None, 0.1]


@pytest.mark.parametrize("schedule", [WarmupLR, WarmupDecayLR])
def test_warm_up_keeps_the_ratio_of_the_groups(schedule: Any) -> None:
    groups, config = with_groups(
        {
            "optimizer": {"params": {"lr": 0.01}},
            "scheduler": {
                "type": schedule.__name__,
                "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 4, "total_num_steps": 10}
                if schedule is WarmupDecayLR
                else {"warmup_max_lr": 0.01, "warmup_num_steps": 4},
            },
        },
        Model(),
        None,
        None,
    )
    optimizer = torch.optim.SGD(groups, lr=0.01)
    steps = schedule(optimizer, **config["scheduler"]["params"])
    seen = []
    for _ in range(6):
        steps.step()
        seen.append([group["lr"] for group in optimizer.param_groups])
    assert max(first for first, _, _ in seen) == pytest.approx(0.01)
    for first, slow, fast in seen:
        assert (slow, fast) == pytest.approx((first / 10, first * 10))


def test_what_cannot_keep_the_ratio_is_refused() -> None:
    groups = [{"params": [], "lr": 1.0}]
    with pytest.raises(ConfigError, match="OneCycle"):
        with_schedule({"scheduler": {"type": "OneCycle"}}, groups)
    with pytest.raises(ConfigError, match="positive number"):
        with_schedule({"scheduler": {"type": "WarmupLR"}}, groups)
    cosine = {"scheduler": {"type": "WarmupCosineLR"}}
    assert with_schedule(cosine, groups) is cosine


def test_groups_of_the_caller_are_refused() -> None:
    model = Model()
    with pytest.raises(ConfigError, match="optimizer of your own"):
        with_groups({}, model, torch.optim.SGD(model.parameters(), lr=1.0), None)
    with pytest.raises(ConfigError, match="in groups"):
        with_groups({}, model, None, [{"params": list(model.parameters())}])
