"""Hugging Face Trainer with data-aware microbatches against its own samplers.

    python benchmarks/hf_trainer.py --json runs/hf_trainer.json

Measured: two CPU ranks through the `deepspeed` launcher train a small LLaVA-OneVision model on the mixed
trace
(tile counts and sequence lengths of real samples, content random, lengths divided by 11) with each sampler.
Predicted: the step time of 8, 32 and 128 ranks, from the costs that the callback measured in that run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.trainer_pt_utils import BatchRebalanceSampler, get_length_grouped_indices

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import environment, instances
from benchmarks.hf_data import Sample, SyntheticSamples, tiny_llava
from dflop_ds.cost.microbatch_cost import MicrobatchCost
from dflop_ds.scheduling.rank_bins import plan_rank_bins
from dflop_ds.scheduling.rank_step import Bins, RankStep, blind_bins

SCHEMA_VERSION = 1
ROOT = Path(__file__).resolve().parents[1]
STRATEGIES = ("random", "group_by_length", "batch_rebalance", "ours")
COLLATORS = ("padded", "packed")
PREDICTED_RANKS = (8, 32, 128)
BATCH_SIZE, ACCUMULATION = 4, 2
LENGTH_DIVISOR = 11
MODEL = {
    "tile_px": 56,
    "hidden": 192,
    "vision_hidden": 192,
    "num_layers": 4,
    "vocab_size": 512,
    "grid_side": 2,
}
NUM_ROUNDS = 2
LAUNCH_TIMEOUT_S = 1200


def reduced_samples(num_samples: int, seed: int) -> list[Sample]:
    """Samples with the tiles of the mixed trace and its sequence lengths divided by `LENGTH_DIVISOR`.

    Tiles and frames become whole images of one tile each (a lone one becomes two tiles, the least that the
    model allows); what the placeholders leave of the length is text.
    """
    drawn = instances.draw("mixed", num_samples, seed)
    side = int(MODEL["tile_px"])
    tokens_per_image = (side // 14) ** 2 + 1
    samples = []
    for inputs, tokens in zip(drawn.encoder_inputs.astype(int), drawn.llm_tokens, strict=True):
        media = int(inputs) * tokens_per_image
        samples.append(Sample(max(8, round(tokens / LENGTH_DIVISOR) - media), ((side, side),) * int(inputs)))
    return samples


def measure(samples: list[Sample], seed: int, stage: int, out: Path) -> dict[str, dict[str, list[float]]]:
    """Step times of the slower rank, by collator and strategy."""
    spec = {
        "out": str(out),
        "model": MODEL,
        "samples": [(sample.text_tokens, sample.images_px) for sample in samples],
        "strategies": STRATEGIES,
        "batch_size": BATCH_SIZE,
        "accumulation": ACCUMULATION,
        "seed": seed,
        "num_rounds": NUM_ROUNDS,
        "warmup_steps": 8,
        "ds_config": {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "zero_optimization": {"stage": stage},
        },
    }
    (out / "spec.json").write_text(json.dumps(spec))
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", "29577"]
    command += ["--module", "benchmarks.hf_worker", str(out / "spec.json")]
    with (out / "launcher.log").open("w") as log:
        done = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, timeout=LAUNCH_TIMEOUT_S)
    if done.returncode:
        raise SystemExit(f"the launcher failed:\n{(out / 'launcher.log').read_text()[-4000:]}")
    ranks = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]
    return {
        collator: {
            strategy: np.maximum(*(rank[collator][strategy] for rank in ranks)).tolist()
            for strategy in STRATEGIES
        }
        for collator in COLLATORS
    }


def predict_steps_s(
    strategy: str,
    shapes: np.ndarray,
    cost: MicrobatchCost,
    num_ranks: int,
    padded: bool,
    sync: str,
    seed: int,
) -> list[float]:
    """Predicted seconds of every step of an epoch.

    Parameters
    ----------
    shapes : ndarray, shape (num_samples, 2)
        LLM tokens and encoder inputs.
    """
    lengths, size = shapes[:, 0].astype(int).tolist(), num_ranks * BATCH_SIZE * ACCUMULATION
    generator = torch.Generator().manual_seed(seed)
    if strategy == "group_by_length":
        order = get_length_grouped_indices(lengths, BATCH_SIZE * ACCUMULATION, generator=generator)
    else:
        order = torch.randperm(len(lengths), generator=generator).tolist()
    times_s = []
    for start in range(0, len(lengths), size):
        rows = np.array(order[start : start + size])
        step = RankStep(shapes[rows, 0], shapes[rows, 1], num_ranks, ACCUMULATION, padded, sync)
        if strategy == "ours":
            bins = plan_rank_bins(step, cost).bins
        elif strategy == "batch_rebalance":
            bins = rebalanced_bins(step)
        else:
            bins = blind_bins(step)
        times_s.append(step.predict_s(bins, cost))
    return times_s


def rebalanced_bins(step: RankStep) -> Bins:
    """Bins of the Trainer's own sampler, for all ranks at once: its iterator would solve once per rank."""
    lengths = step.llm_tokens.astype(int).tolist()
    sampler = BatchRebalanceSampler(lengths, len(lengths), step.num_ranks, step.num_slots, shuffle=False)
    by_rank = sampler._assign(list(range(len(lengths))), lengths)
    return tuple(tuple(members) for slots in by_rank for members in slots)


def predictions(costs: dict[str, MicrobatchCost], sync: str, seed: int) -> dict[str, Any]:
    """Mean predicted step by collator, number of ranks and strategy."""
    config = tiny_llava(**MODEL)
    result: dict[str, Any] = {}
    for num_ranks in PREDICTED_RANKS:
        num_steps = 2 if num_ranks > 64 else 4
        samples = reduced_samples(num_steps * num_ranks * BATCH_SIZE * ACCUMULATION, seed + num_ranks)
        dataset = SyntheticSamples(samples, config)
        known = [dataset.shape(index) for index in range(len(dataset))]
        shapes = np.array([[shape["llm_tokens"], shape["num_tiles"]] for shape in known], dtype=float)
        for collator in COLLATORS:
            padded, cost = collator == "padded", costs[collator]
            result.setdefault(collator, {})[str(num_ranks)] = {
                strategy: float(
                    np.mean(predict_steps_s(strategy, shapes, cost, num_ranks, padded, sync, seed))
                )
                for strategy in STRATEGIES
            }
    return result


def summarize(measured_s: dict[str, dict[str, float]], predicted_s: dict[str, Any]) -> dict[str, float]:
    """Ratios to ours: geometric mean over both collators, and each of them."""
    summary: dict[str, float] = {}
    sources = {"": measured_s} | {
        f"_predicted_{ranks}": {collator: predicted_s[collator][str(ranks)] for collator in COLLATORS}
        for ranks in PREDICTED_RANKS
    }
    short = {"random": "random", "rebalance": "batch_rebalance", "group_by_length": "group_by_length"}
    for suffix, table in sources.items():
        for name, strategy in short.items():
            ratios = {collator: table[collator][strategy] / table[collator]["ours"] for collator in COLLATORS}
            summary[f"{name}_over_ours{suffix}"] = float(np.exp(np.mean(np.log(list(ratios.values())))))
            for collator, ratio in ratios.items():
                summary[f"{name}_over_ours_{collator}{suffix}"] = ratio
    return summary


def print_table(title: str, rows: dict[str, dict[str, float]]) -> None:
    """Seconds per step, one line per case."""
    print(f"\n{title}")
    print(f"{'':20s}" + "".join(f"{name:>18s}" for name in STRATEGIES))
    for case, values in rows.items():
        best = min(values.values())
        cells = (f"{values[name]:.3f}{'*' if values[name] == best else ' '}" for name in STRATEGIES)
        print(f"{case:20s}" + "".join(f"{cell:>18s}" for cell in cells))


def main() -> None:
    """Measure, predict, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps per sampler and round")
    parser.add_argument("--zero", type=int, default=1, choices=(1, 2, 3))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    started_s = time.perf_counter()
    sync = {1: "step", 2: "microbatch", 3: "phase"}[options.zero]
    samples = reduced_samples(options.steps * 2 * BATCH_SIZE * ACCUMULATION, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        steps_s = measure(samples, options.seed, options.zero, Path(folder))
        costs = {name: MicrobatchCost.load(Path(folder) / f"cost_{name}.json") for name in COLLATORS}
    measured_s = {
        collator: {name: float(np.mean(times)) for name, times in by_name.items()}
        for collator, by_name in steps_s.items()
    }
    predicted_s = predictions(costs, sync, options.seed)
    summary = summarize(measured_s, predicted_s)
    hardware = environment.describe()
    print(json.dumps({**hardware, "seed": options.seed, "zero_stage": options.zero}, indent=1))
    print_table("measured: seconds per step, 2 CPU ranks (* fastest)", measured_s)
    for ranks in PREDICTED_RANKS:
        rows = {collator: predicted_s[collator][str(ranks)] for collator in COLLATORS}
        print_table(f"predicted: seconds per step, {ranks} ranks, from costs measured on 2 (* fastest)", rows)
    print("\n" + json.dumps(summary, indent=1))
    if options.json is not None:
        content = {
            "schema_version": SCHEMA_VERSION,
            "environment": hardware,
            "seed": options.seed,
            "zero_stage": options.zero,
            "batch_size": BATCH_SIZE,
            "accumulation": ACCUMULATION,
            "model": MODEL,
            "costs": {name: cost.to_dict() for name, cost in costs.items()},
            "measured_steps_s": steps_s,
            "measured_mean_step_s": measured_s,
            "predicted_mean_step_s": predicted_s,
            "summary": summary,
            "wall_s": time.perf_counter() - started_s,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
