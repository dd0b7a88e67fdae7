"""Prediction error of the cost model on shapes it has not seen, measured on this CPU.

The demo model is profiled layer by layer. Then whole pipeline stages are run forward and backward on
other microbatches, and on microbatches twice as large as the largest profiled one, and their measured
times are compared with the predictions. Profile and test are measured in turn, so that both see the
same machine; each test is run in five passes, far apart in time. Errors are those against the median of
the passes; the difference of two passes is the noise floor, and errors without noise are taken across
passes. The quantiles must cover single runs. They are calibrated and tested in five folds: those of a
fifth of the microbatches on single runs of the other four, none of which was profiled.
Nothing is emulated. Times are CPU times of the one computing thread.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a file as well

from benchmarks import environment
from dflop_ds.config import load_ds_config, parse_dflop
from dflop_ds.cost.alternatives import fit_predictors
from dflop_ds.cost.evaluation import (
    NUM_FOLDS,
    ErrorSummary,
    coverage,
    cross_calibrated,
    error_without_noise,
    predict_stages,
    summarise_errors,
)
from dflop_ds.cost.features import FloatArray, MicrobatchFeatures, ProfileRow
from dflop_ds.cost.model import CostModel, LayerCostModel
from dflop_ds.cost.quantiles import StageQuantiles
from dflop_ds.cost.split import balanced_split, expected_layer_times
from dflop_ds.data.demo import build_demo
from dflop_ds.data.probe import probe
from dflop_ds.data.probed import ProbedDataset
from dflop_ds.families import model_dims
from dflop_ds.flops import ModelDims
from dflop_ds.models.layers import LayerPlan
from dflop_ds.profiling.harness import Bench, profile_layers
from dflop_ds.profiling.selection import choose_microbatches
from dflop_ds.profiling.timer import BuiltLayer, LayerTimer, Timings
from dflop_ds.runtime import data_setup, model_setup
from dflop_ds.runtime.loss import packed_loss
from dflop_ds.shapes import ShapeTable

SCHEMA_VERSION = 1
CONFIG = Path("ds_configs/llava_onevision_tiny_cpu.json")
SAMPLES_PER_BIN = 2
NUM_STAGES = 2
NUM_CHUNKS = 4
NUM_PREDICTED = 4096
NUM_PASSES = 5
TARGETS = {
    "stage_mape": "<= 8 %",
    "p95_error": "<= 20 %",
    "extrapolation_error": "<= 15 %",
    "p90_coverage": "85-95 %",
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes
    ----------
    samples, profiled, tested, doubled : int
        Samples of the demo data set; microbatches that are profiled, that are held out, and that are twice
        as large.
    """

    samples: int
    profiled: int
    tested: int
    doubled: int


FULL = Sizes(samples=240, profiled=90, tested=40, doubled=3)
QUICK = Sizes(samples=80, profiled=50, tested=6, doubled=1)


class Measurer:
    """Profiles layers and runs whole stages on the same bench.

    Parameters
    ----------
    plans : list of LayerPlan
    bench : Bench
    """

    def __init__(self, plans: list[LayerPlan], bench: Bench) -> None:
        self.plans, self.bench = plans, bench
        self.layers = [(plan, plan.build()) for plan in plans]
        self.stages: list[list[BuiltLayer]] = []

    def cut(self, boundaries: Sequence[int]) -> None:
        """Cut the model into stages."""
        pairs = itertools.pairwise(boundaries)
        self.stages = [self.layers[start:stop] for start, stop in pairs]

    def profile(self, microbatches: Sequence[Sequence[int]]) -> list[ProfileRow]:
        """Rows of single layers."""
        return profile_layers(
            self.plans,
            self.bench.probed,
            microbatches,
            collate_fn=self.bench.collate_fn,
            loss_fn=packed_loss,
            device=self.bench.timer.device,
            dtype=self.bench.dtype,
            budget_s=float("inf"),
        ).rows

    def stage_times(self, members: Sequence[int]) -> list[float]:
        """Forward plus backward seconds of every stage on one microbatch, one run after a warm-up."""
        _, hidden, vector, labels = self.bench.inputs(members)
        times_s = []
        for stage in self.stages:
            self.bench.timer.run(stage, hidden, vector, labels, Timings())
            timing = Timings()
            hidden = self.bench.timer.run(stage, hidden, vector, labels, timing)
            times_s += timing.totals_s()
        return times_s


def main() -> int:
    """Measure, compare, print the table, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    parser.add_argument("--quick", action="store_true", help="fewer shapes: under a minute")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    start_s = time.perf_counter()
    for name in ("DeepSpeed", "dflop_ds"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    sizes = QUICK if args.quick else FULL
    with tempfile.TemporaryDirectory() as folder:
        result = measure(sizes, args.seed, Path(folder))
    result |= {"seconds": time.perf_counter() - start_s, "cpu_seconds": time.process_time()}
    content = {
        "schema_version": SCHEMA_VERSION,
        "environment": environment.describe(),
        "seed": args.seed,
        "quick": args.quick,
        "sizes": dataclasses.asdict(sizes),
        **result,
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(content, indent=1))
    print_report(content)
    return 0


def measure(sizes: Sizes, seed: int, folder: Path) -> dict[str, Any]:
    """Everything that the report states."""
    demo = build_demo(folder, num_samples=sizes.samples, seed=seed)
    ds_config = load_ds_config(CONFIG)
    ds_config["dflop"]["model"]["path"] = str(demo.model_dir)
    ds_config["dflop"]["data"]["train_path"] = str(demo.train_path)
    config = parse_dflop(ds_config)
    model_config = model_setup.read_model_config(config)
    dims = model_dims(json.loads(model_config.to_json_string(use_diff=False)))
    dataset = data_setup.open_dataset(config)
    found = probe(dataset, max_tokens=32768, progress=False)
    timer = LayerTimer(torch.device("cpu"), False, packed_loss)
    bench = Bench(
        ProbedDataset(dataset, found.table, found.rows),
        data_setup.make_collator(dataset, config),
        timer,
        torch.float32,
    )
    plans = model_setup.layer_plans(ds_config, config, model_config)
    measurer = Measurer(plans, bench)
    table = found.table
    bins = Bins(
        profiled=choose_microbatches(table, SAMPLES_PER_BIN, sizes.profiled, seed),
        tested=random_bins(table, sizes.tested, seed + 2),
        doubled=double_bins(table, SAMPLES_PER_BIN, sizes, seed),
    )
    rows, passes_s = run_all(measurer, table, dims, bins)
    stages = [[plan.kind for plan, _ in stage] for stage in measurer.stages]
    return {"stages": stages, **compare(rows, dims, stages, table, bins, passes_s)}


@dataclasses.dataclass(frozen=True)
class Bins:
    """Microbatches by their purpose, see :class:`Sizes`."""

    profiled: list[list[int]]
    tested: list[list[int]]
    doubled: list[list[int]]


def random_bins(table: ShapeTable, number: int, seed: int) -> list[list[int]]:
    """Held-out microbatches: one to four random samples, as training would see them."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 2 * SAMPLES_PER_BIN + 1, number)
    return [rng.choice(len(table), size=size, replace=False).tolist() for size in sizes]


def double_bins(table: ShapeTable, samples_per_bin: int, sizes: Sizes, seed: int) -> list[list[int]]:
    """The profiled microbatches with the most tokens and with the most encoder inputs, each twice."""
    profiled = choose_microbatches(table, samples_per_bin, sizes.profiled, seed)
    features = MicrobatchFeatures.from_bins(table, profiled)
    by_tokens = np.argsort(-features.llm_tokens, kind="stable")
    by_inputs = np.argsort(-features.encoder_inputs, kind="stable")
    order = [int(index) for pair in zip(by_tokens, by_inputs, strict=True) for index in pair]
    return [profiled[index] * 2 for index in dict.fromkeys(order)][: sizes.doubled]


def run_all(
    measurer: Measurer,
    table: ShapeTable,
    dims: ModelDims,
    bins: Bins,
) -> tuple[list[ProfileRow], FloatArray]:
    """Profile and test in turn; five passes over the tests, every other one in the opposite order."""
    profiled, tested = bins.profiled, bins.tested + bins.doubled
    kinds = [plan.kind for plan in measurer.plans]
    begin = max(len(profiled) // NUM_CHUNKS, 8)
    rows = measurer.profile(profiled[:begin])
    times_s = expected_layer_times(
        LayerCostModel(warn=False).fit(rows, dims), kinds, MicrobatchFeatures.from_bins(table, profiled)
    )
    measurer.cut(balanced_split(kinds, times_s, NUM_STAGES))
    passes_s = np.zeros((NUM_PASSES, len(tested), NUM_STAGES))
    order = np.random.default_rng(0).permutation(len(tested)).tolist()
    jobs = [
        (which, index) for which in range(NUM_PASSES) for index in (reversed(order) if which % 2 else order)
    ]
    job_chunks = np.array_split(np.arange(len(jobs)), NUM_CHUNKS)
    chunks = [[], *np.array_split(np.arange(begin, len(profiled)), NUM_CHUNKS - 1)]
    for chunk, job_chunk in zip(chunks, job_chunks, strict=True):
        rows += measurer.profile([profiled[int(index)] for index in chunk])
        for job in job_chunk:
            which, index = jobs[int(job)]
            passes_s[which, index] = measurer.stage_times(tested[index])
    return rows, passes_s


def compare(
    rows: list[ProfileRow],
    dims: ModelDims,
    stages: list[list[str]],
    table: ShapeTable,
    bins: Bins,
    passes_s: FloatArray,
) -> dict[str, Any]:
    """Errors of the cost model and of the alternatives, and the summary."""
    num = len(bins.tested)
    measured_s = np.median(passes_s, axis=0)
    inside = MicrobatchFeatures.from_bins(table, bins.tested)
    outside = MicrobatchFeatures.from_bins(table, bins.doubled)
    predictors = fit_predictors(rows, dims)
    model = predictors["cost model"]
    assert isinstance(model, LayerCostModel)
    errors: dict[str, dict[str, ErrorSummary]] = {}
    without_noise: dict[str, float] = {}
    for name, predictor in predictors.items():
        predicted_s = predict_stages(predictor, stages, inside)
        doubled_s = predict_stages(predictor, stages, outside)
        errors[name] = {
            f"stage {s}": summarise_errors(predicted_s[:, s], measured_s[:num, s]) for s in range(len(stages))
        }
        errors[name]["all stages"] = summarise_errors(predicted_s.ravel(), measured_s[:num].ravel())
        without_noise[name] = error_without_noise(predicted_s, passes_s[:, :num])
        errors[name]["2x range"] = summarise_errors(doubled_s.ravel(), measured_s[num:].ravel())
    noise = summarise_errors(passes_s[1, :num].ravel(), passes_s[0, :num].ravel())
    quantiles = StageQuantiles().fit(rows, dims, stages)
    runs_s = passes_s[:, :num]
    upper_s = {level: cross_calibrated(quantiles, model, inside, runs_s, level) for level in (0.5, 0.9)}
    folds = [slice(fold, None, NUM_FOLDS) for fold in range(NUM_FOLDS)]
    predict_ms, difference = speed_and_identity(model, stages, table)
    profiled = MicrobatchFeatures.from_rows(rows)
    own = errors["cost model"]
    return {
        "errors": {name: {t: dataclasses.asdict(e) for t, e in by.items()} for name, by in errors.items()},
        "rms_without_noise": without_noise,
        "p50_coverage": coverage(upper_s[0.5], runs_s),
        "p90_coverage_of_folds": [coverage(upper_s[0.9][fold], runs_s[:, fold]) for fold in folds],
        "p90_coverage_of_stages": [coverage(upper_s[0.9][:, s], runs_s[:, :, s]) for s in range(len(stages))],
        "doubled_tokens": float(outside.llm_tokens.max() / profiled.llm_tokens.max()),
        "doubled_encoder_inputs": float(outside.encoder_inputs.max() / profiled.encoder_inputs.max()),
        "num_rows": len(rows),
        "summary": {
            "stage_mape": own["all stages"].mape,
            "p95_error": own["all stages"].p95,
            "extrapolation_error": own["2x range"].mape,
            "p90_coverage": coverage(upper_s[0.9], runs_s),
            "interpolation_mape": errors["throughput interpolation"]["all stages"].mape,
            "noise_floor_mape": noise.mape,
            "predict_4096_ms": predict_ms,
            "reload_max_difference": difference,
        },
    }


def speed_and_identity(
    model: LayerCostModel, stages: list[list[str]], table: ShapeTable
) -> tuple[float, float]:
    """Milliseconds of one call for 4,096 samples, and the largest change by saving and loading."""
    rng = np.random.default_rng(0)
    samples = table.take(rng.integers(len(table), size=NUM_PREDICTED))
    cost_model = CostModel(model, stages)
    cost_model.sample_costs(samples)
    times_s = []
    for _ in range(7):
        start_s = time.perf_counter()
        costs = cost_model.sample_costs(samples)
        times_s.append(time.perf_counter() - start_s)
    loaded = LayerCostModel.from_dict(json.loads(json.dumps(model.to_dict())))
    again = CostModel(loaded, stages).sample_costs(samples)
    difference = max(
        float(np.abs(costs.forward_s - again.forward_s).max()),
        float(np.abs(costs.backward_s - again.backward_s).max()),
    )
    return statistics.median(times_s) * 1e3, difference


def print_report(content: dict[str, Any]) -> None:
    """The table and where it was measured."""
    machine, sizes, summary = content["environment"], content["sizes"], content["summary"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    print(
        "\nMeasured prediction error of pipeline stage times (forward + backward; real computation, nothing "
        "emulated)"
    )
    print(f"{machine['num_cores']} cores of {machine['cpu']}, 1 thread; {versions}; seed {content['seed']}")
    print(
        f"{content['num_rows']} profile rows of {sizes['profiled']} microbatches; {sizes['tested']} held-out "
        f"microbatches x {NUM_STAGES} stages; {sizes['doubled']} at up to {content['doubled_tokens']:.1f}x "
        f"the most tokens and {content['doubled_encoder_inputs']:.1f}x the most tiles that were profiled\n"
    )
    print(f"{'predictor':<26}{'target':<12}{'MAPE':>8}{'p50':>8}{'p95':>8}{'max':>8}{'bias':>8}")
    for name, targets in content["errors"].items():
        for target, error in targets.items():
            cells = "".join(f"{error[key]:>8.1%}" for key in ("mape", "p50", "p95", "largest", "bias"))
            print(f"{name:<26}{target:<12}{cells}")
    print(f"\nnoise floor (same stage, same microbatch, measured again): {summary['noise_floor_mape']:.1%}")
    for key, target in TARGETS.items():
        print(f"{key:<24}{summary[key]:>8.1%}   target {target}")
    folds, of_stages = content["p90_coverage_of_folds"], content["p90_coverage_of_stages"]
    by_stage = ", ".join(f"{share:.1%}" for share in of_stages)
    print(f"  of single folds {min(folds):.1%} to {max(folds):.1%}; of stages {by_stage}")
    print("error at most half of throughput interpolation's:")
    half = summary["interpolation_mape"] / 2
    print(f"  MAPE, noise included {summary['stage_mape']:>12.1%}   target <= {half:.1%}")
    rms = content["rms_without_noise"]
    half = rms["throughput interpolation"] / 2
    print(f"  RMS without noise    {rms['cost model']:>12.1%}   target <= {half:.1%}")
    print(f"{'predict 4,096 samples':<24}{summary['predict_4096_ms']:>6.1f} ms   target <= 20 ms")
    print(f"{'change by reloading':<24}{summary['reload_max_difference']:>8.1g}   target 0")
    print(f"took {content['seconds']:.0f} s, of which this process computed {content['cpu_seconds']:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
