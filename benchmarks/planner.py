"""The planner: regret, another rule, search times (all SIMULATED), and a REAL run on two ranks.

- Regret: on small cases every layout is simulated by a search of its own; how much slower is the planner's
  choice?
- Rule of the reference release: the same space, memory limit and simulator; only the choice differs.
- Budget: the 20 simulations of the default search against a search until it is proven.
- Search time from 8 to 16,384 GPUs: scoring of all candidates, and simulation of the best 20.
- Real: see `benchmarks/planner_real.py`.

Shapes are those of the mixed real-shape trace; layer times are FLOPs over the speed of a data sheet, so
simulated steps are predictions. The real run is measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a file as well

from benchmarks import environment, instances
from benchmarks.planner_real import LABELS, real_run
from benchmarks.planner_reference import exhaustive_best, reference_rule
from dflop_ds.flops import LlmDims, ModelDims, VisionDims
from dflop_ds.planning.analytic import analytic_layer_model, analytic_memory_model, model_layers
from dflop_ds.planning.evaluation import Evaluator
from dflop_ds.planning.hardware import PRESETS
from dflop_ds.planning.layout import SearchSpace
from dflop_ds.planning.model import ModelCosts
from dflop_ds.planning.search import search
from dflop_ds.planning.stages import StageTable
from dflop_ds.planning.workload import Workload
from dflop_ds.shapes import ShapeTable

SCHEMA_VERSION = 1
HEADROOM = 0.9

# As wide as real models and a few layers deep, so that everything can be simulated.
SHALLOW = {
    "siglip-qwen2-0.5b": ModelDims(
        VisionDims(1152, 4304, 16, 4, 384, 14), LlmDims(896, 4864, 14, 2, 64, 4, 151936)
    ),
    "siglip-qwen2.5-7b": ModelDims(
        VisionDims(1152, 4304, 16, 4, 384, 14), LlmDims(3584, 18944, 28, 4, 128, 4, 152064)
    ),
    "internvit-6b-like": ModelDims(
        VisionDims(3200, 12800, 25, 4, 448, 14), LlmDims(3584, 18944, 28, 4, 128, 3, 151674)
    ),
}
# Name, GPUs, batch, data, hardware, memory in GB of one GPU
REGRET_CASES = [
    (name, gpus, batch, data, hardware, memory)
    for name, memory in (("siglip-qwen2-0.5b", 30), ("siglip-qwen2.5-7b", 40), ("internvit-6b-like", 60))
    for gpus, batch in ((2, 8), (4, 8), (4, 16), (6, 12))
    for data, hardware in (("mixed", "a100-80g"), ("video", "h100-80g"))
]
RULE_CASES = [
    (gpus, batch, data, hardware)
    for gpus, batch in ((8, 128), (16, 256))
    for data in ("mixed", "image", "multi_image", "video")
    for hardware in ("a100-80g", "h100-80g")
]
SEARCH_GPUS = (8, 64, 256, 1024, 4096, 16384)
MAX_TENSOR = 8


def main() -> int:
    """Run all parts, print tables, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    parser.add_argument("--work", type=Path, default=Path("runs/planner"), help="folder of the real run")
    parser.add_argument("--num-steps", type=int, default=10, help="of the real run, warm-up included")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    start_s = time.perf_counter()
    machine = environment.describe()
    print(f"{machine['num_cores']} cores of {machine['cpu']}; seed {args.seed}; {machine['versions']}")
    regret = regret_part(args.seed)
    rule = rule_part(args.seed)
    budget = budget_part(args.seed)
    times = search_part(args.seed)
    real = real_part(args.work, args.num_steps, args.seed)
    by_gpus = {row["num_gpus"]: row for row in times}
    step_s = {label: real["runs"][label]["median_step_time_s"] for label in LABELS}
    summary = {
        "regret_max": max(row["regret"] for row in regret),
        "num_regret_cases": len(regret),
        "budget_regret_max": max(row["regret"] for row in budget),
        "reference_rule_max_ratio": max(row["ratio"] for row in rule),
        "reference_rule_min_ratio": min(row["ratio"] for row in rule),
        "generous_rule_max_ratio": max(row["generous_ratio"] for row in rule),
        "generous_rule_min_ratio": min(row["generous_ratio"] for row in rule),
        "search_ms_1024": by_gpus[1024]["scoring_s"] * 1e3,
        "search_ms_16384": by_gpus[16384]["scoring_s"] * 1e3,
        "rescoring_s_1024": by_gpus[1024]["simulation_s"],
        "rescoring_s_16384": by_gpus[16384]["simulation_s"],
        "real_speedup_over_parameters": step_s["parameters"] / step_s["planned"],
        "real_speedup_over_uniform": step_s["uniform"] / step_s["planned"],
    }
    print("\nsummary: " + ", ".join(f"{key} {value:.4g}" for key, value in summary.items()))
    print(f"the benchmark took {time.perf_counter() - start_s:.0f} s")
    content = {
        "schema_version": SCHEMA_VERSION,
        "environment": machine,
        "seed": args.seed,
        "regret": regret,
        "reference_rule": rule,
        "budget": budget,
        "search_times": times,
        "real": real,
        "summary": summary,
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(content, indent=1))
    return 0


def regret_part(seed: int) -> list[dict[str, Any]]:
    """The planner against simulating everything."""
    print(f"\nRegret against exhaustive search (SIMULATED), {len(REGRET_CASES)} small cases")
    head = ("model", "GPUs", "batch", "data", "simulated", "of", "step s", "regret")
    print("{:<20}{:>5}{:>6} {:<7}{:>10}{:>6}{:>9}{:>9}  plan".format(*head))
    rows = []
    for name, gpus, batch, data, hardware, memory_gb in REGRET_CASES:
        workload = make_workload(SHALLOW[name], data, batch, hardware, seed, num_batches=2)
        limit_bytes = memory_gb * 1e9 * HEADROOM
        space = SearchSpace(gpus, ("uniform", "separate"), MAX_TENSOR)
        found = search(workload, space, limit_bytes=limit_bytes, max_simulations=0)
        best, num_all = exhaustive_best(workload, gpus, MAX_TENSOR, limit_bytes)
        if found.best is None:
            raise SystemExit(f"the planner found nothing where {best.layout} fits")
        regret = found.best.step_s / best.step_s - 1.0
        rows.append(
            {
                "model": name,
                "num_gpus": gpus,
                "batch_size": batch,
                "data": data,
                "hardware": hardware,
                "num_candidates": found.num_candidates,
                "num_exhaustive": num_all,
                "num_simulated": found.num_simulated,
                "step_s": found.best.step_s,
                "regret": regret,
                "plan": str(found.best.layout),
                "exhaustive_plan": str(best.layout),
            }
        )
        print(
            f"{name:<20}{gpus:>5}{batch:>6} {data:<7}{found.num_simulated:>10}{num_all:>6}"
            f"{found.best.step_s:>9.4g}{regret:>9.2%}  {found.best.layout}"
        )
    return rows


def rule_part(seed: int) -> list[dict[str, Any]]:
    """The planner's choice against the acceptance rule of the reference release, in the same space."""
    print("\nRule of the reference release, restated, against the planner (SIMULATED). Both with separate")
    print("layouts, checkpointing, ZeRO-0, 80 GB, the same simulator; SigLIP-so400m with Qwen2.5-7B.")
    print("generous: a rule that also accepts every layout that it expects to be faster")
    print(
        f"{'GPUs':>5}{'batch':>6} {'data':<12}{'hardware':<10}{'rule s':>9}{'generous s':>12}{'plan s':>9}"
        f"{'ratio':>7}{'gen.':>6}  rule | generous | plan"
    )
    rows = []
    for gpus, batch, data, hardware in RULE_CASES:
        workload = make_workload(instances.DIMS, data, batch, hardware, seed, num_batches=2)
        limit_bytes = 80e9 * HEADROOM
        space = SearchSpace(gpus, ("separate",), MAX_TENSOR, checkpointing=(True,), zero_stages=(0,))
        evaluator = Evaluator(StageTable(workload))
        found = search(workload, space, limit_bytes=limit_bytes, max_simulations=40, evaluator=evaluator)
        layouts = [
            reference_rule(workload, gpus, MAX_TENSOR, limit_bytes, generous=generous)
            for generous in (False, True)
        ]
        if found.best is None or layouts[0] is None or layouts[1] is None:
            continue
        rule, generous = (evaluator.evaluate(layout) for layout in layouts if layout)
        plan = found.best
        rows.append(
            {
                "num_gpus": gpus,
                "batch_size": batch,
                "data": data,
                "hardware": hardware,
                "rule_step_s": rule.step_s,
                "generous_step_s": generous.step_s,
                "plan_step_s": plan.step_s,
                "ratio": rule.step_s / plan.step_s,
                "generous_ratio": generous.step_s / plan.step_s,
                "rule": str(rule.layout),
                "generous": str(generous.layout),
                "plan": str(plan.layout),
                "rule_fits": rule.peak_bytes <= limit_bytes,
                "generous_fits": generous.peak_bytes <= limit_bytes,
            }
        )
        print(
            f"{gpus:>5}{batch:>6} {data:<12}{hardware:<10}{rule.step_s:>9.4g}{generous.step_s:>12.4g}"
            f"{plan.step_s:>9.4g}{rule.step_s / plan.step_s:>7.2f}{generous.step_s / plan.step_s:>6.2f}  "
            f"{rule.layout} | {generous.layout} | {plan.layout}"
        )
    return rows


def budget_part(seed: int) -> list[dict[str, Any]]:
    """The search with its default budget of simulations against the one that goes on until it is proven."""
    print("\nDefault budget of 20 simulations against a proven search (SIMULATED), SigLIP with Qwen2.5-7B")
    print(f"{'GPUs':>5}{'batch':>6} {'layouts':<9}{'simulated':>10}{'proven by':>10}{'regret':>8}  plan")
    rows = []
    for gpus in (16, 32, 64):
        for kinds, max_tensor in ((("uniform",), 1), (("uniform", "separate"), MAX_TENSOR)):
            workload = make_workload(instances.DIMS, "mixed", 8 * gpus, "a100-80g", seed, num_batches=2)
            evaluator = Evaluator(StageTable(workload))
            space = SearchSpace(gpus, kinds, max_tensor)
            limit_bytes = 80e9 * HEADROOM
            short = search(workload, space, limit_bytes=limit_bytes, evaluator=evaluator)
            whole = search(workload, space, limit_bytes=limit_bytes, max_simulations=0, evaluator=evaluator)
            if short.best is None or whole.best is None:
                raise SystemExit(f"no layout of {gpus} GPUs fits")
            rows.append(
                {
                    "num_gpus": gpus,
                    "kinds": kinds,
                    "num_simulated": short.num_simulated,
                    "num_until_proven": whole.num_simulated,
                    "proven": whole.proven,
                    "regret": short.best.step_s / whole.best.step_s - 1.0,
                    "plan": str(short.best.layout),
                }
            )
            print(
                f"{gpus:>5}{8 * gpus:>6} {'runtime' if max_tensor == 1 else 'all':<9}"
                f"{short.num_simulated:>10}{whole.num_simulated:>10}{rows[-1]['regret']:>8.2%}  "
                f"{short.best.layout}"
            )
    return rows


def search_part(seed: int) -> list[dict[str, Any]]:
    """Wall-clock time of a search, all layouts."""
    print("\nSearch time, all layouts (uniform and separate, tensor degrees up to 8), SigLIP with Qwen2.5-7B")
    head = ("GPUs", "batch", "candidates", "scoring ms", "top 20 s", "simulated")
    print("{:>6}{:>7}{:>12}{:>12}{:>10}{:>11}  plan".format(*head))
    rows = []
    for gpus in SEARCH_GPUS:
        batch = max(256, min(8192, 2 * gpus))
        workload = make_workload(instances.DIMS, "mixed", batch, "a100-80g", seed)
        space = SearchSpace(gpus, ("uniform", "separate"), MAX_TENSOR)
        found = search(workload, space, limit_bytes=80e9 * HEADROOM)
        rows.append(
            {
                "num_gpus": gpus,
                "batch_size": batch,
                "num_candidates": found.num_candidates,
                "num_simulated": found.num_simulated,
                "scoring_s": found.scoring_s,
                "simulation_s": found.simulation_s,
                "plan": str(found.best.layout) if found.best else None,
                "step_s": found.best.step_s if found.best else None,
            }
        )
        print(
            f"{gpus:>6}{batch:>7}{found.num_candidates:>12}{found.scoring_s * 1e3:>12.0f}"
            f"{found.simulation_s:>10.1f}{found.num_simulated:>11}  {rows[-1]['plan']}"
        )
    return rows


def real_part(work: Path, num_steps: int, seed: int) -> dict[str, Any]:
    """Measured steps of the planned stages and of DeepSpeed's partitions."""
    print("\nREAL run on 2 ranks: LLaVA-OneVision-0.5B scaled down, clips; data-aware microbatches")
    real = real_run(work, num_steps, seed)
    print(real["plan_report"])
    print(f"{'partition':<14}{'step s':>9}{'predicted':>11}{'idle':>8}  first layers of stages (measured)")
    for label in LABELS:
        row = real["runs"][label]
        print(
            f"{label:<14}{row['median_step_time_s']:>9.3f}{row['predicted_step_time_s']:>11.3f}"
            f"{row['bubble_fraction']:>8.1%}  {row['stages']}"
        )
    return real


def make_workload(
    dims: ModelDims, data: str, batch_size: int, hardware: str, seed: int, num_batches: int = 0
) -> Workload:
    """A planning problem with shapes of the trace and times of a data sheet."""
    samples = instances.draw(data, max(1024, batch_size), seed)
    tokens = samples.llm_tokens.astype(np.int64)
    text = np.minimum(tokens, np.rint(samples.target_tokens / instances.TARGET_SHARE).astype(np.int64))
    columns = {
        "num_tiles": samples.encoder_inputs.astype(np.int64),
        "num_frames": np.zeros(len(tokens), dtype=np.int64),
        "text_tokens": text,
        "llm_tokens": tokens,
        "target_tokens": samples.target_tokens.astype(np.int64),
    }
    model = ModelCosts(
        tuple(model_layers(dims)),
        times=analytic_layer_model(dims, PRESETS[hardware], "bfloat16"),
        memory=analytic_memory_model(dims, 2),
        measured=False,
    )
    table = ShapeTable([f"{data}-{index}" for index in range(len(tokens))], columns)
    return Workload(model, table, batch_size, hardware=PRESETS[hardware], num_batches=num_batches, seed=seed)


if __name__ == "__main__":
    sys.exit(main())
