"""The Trainer benchmark: bins of the peers are those of their samplers, ours is predicted fastest."""

from __future__ import annotations

import numpy as np
import pytest
from transformers.trainer_pt_utils import BatchRebalanceSampler

from benchmarks import hf_trainer
from benchmarks.hf_data import SyntheticSamples, tiny_llava
from dflop_ds.cost.microbatch_cost import MicrobatchCost
from dflop_ds.scheduling.rank_step import RankStep

COST = MicrobatchCost(3e-4, 1e-8, 6e-3, 5e-3)


@pytest.fixture(scope="module")
def shapes():
    dataset = SyntheticSamples(hf_trainer.reduced_samples(128, seed=1), tiny_llava(**hf_trainer.MODEL))
    known = [dataset.shape(index) for index in range(len(dataset))]
    for index in (0, 1, 2):
        assert len(dataset[index]["input_ids"]) == known[index]["llm_tokens"]
    return np.array([[shape["llm_tokens"], shape["num_tiles"]] for shape in known], dtype=float)


def test_rebalanced_bins_are_what_each_rank_would_load(shapes):
    step = RankStep(shapes[:, 0], shapes[:, 1], 4, 2, True, "step")
    bins = hf_trainer.rebalanced_bins(step)
    lengths = shapes[:, 0].astype(int).tolist()
    for rank in range(4):
        sampler = BatchRebalanceSampler(lengths, 128, 4, 2, shuffle=False, rank=rank)
        assert [list(members) for members in bins[rank * 2 : rank * 2 + 2]] == list(sampler)


@pytest.mark.parametrize("padded", [True, False])
def test_ours_is_predicted_fastest(shapes, padded):
    times_s = {
        name: np.mean(hf_trainer.predict_steps_s(name, shapes, COST, 8, padded, "step", 0))
        for name in hf_trainer.STRATEGIES
    }
    assert min(times_s, key=times_s.get) == "ours"


def test_summary_is_the_geometric_mean_over_collators():
    table = {"random": 4.0, "group_by_length": 3.0, "batch_rebalance": 2.0, "ours": 1.0}
    packed = {**table, "random": 9.0}
    measured_s = {"padded": table, "packed": packed}
    predicted_s = {name: {str(n): measured_s[name] for n in (8, 32, 128)} for name in measured_s}
    summary = hf_trainer.summarize(measured_s, predicted_s)
    assert summary["random_over_ours"] == pytest.approx(6.0)
    assert summary["rebalance_over_ours"] == pytest.approx(2.0)
    assert summary["random_over_ours_packed_predicted_32"] == pytest.approx(9.0)
    assert {"random_over_ours_predicted_32", "rebalance_over_ours_predicted_32"} <= set(summary)
