"""Schedulers compared: ratio to the lower bound, SIMULATED 1F1B makespan, and measured solve time.

Shapes are real (benchmarks/traces) or synthetic, sample times are FLOPs of a SigLIP-so400m + Qwen2.5-7B
model at a fixed rate, makespans come from an event simulation. Only the solve times are measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a file as well

from benchmarks import baselines, environment, instances
from dflop_ds.scheduling.assignment import Assignment, scaled_loads_s
from dflop_ds.scheduling.bound import lower_bound_s
from dflop_ds.scheduling.ordering import step_makespan_s
from dflop_ds.scheduling.problem import Problem
from dflop_ds.scheduling.schedule import Effort, schedule
from dflop_ds.scheduling.solve import solve
from dflop_ds.simulation.pipeline import simulate_1f1b

SCHEMA_VERSION = 1
NUM_MICROBATCHES = 16
STAGES = (2, 4, 8)
SIZES = ((512, 64), (128, 16), (2048, 256), (8192, 1024))
MAX_QUADRATIC_SAMPLES = 2048
METHODS = (
    "random",
    "group_by_length",
    "rebalance",
    "textbook_lpt",
    "karmarkar_karp",
    "textbook_cp_sat",
    "lpt",
)
FAMILIES = ("mixed", *instances.MIXTURE, *instances.SYNTHETIC)
TITLES = {
    "random": "random",
    "group_by_length": "group by length",
    "rebalance": "Trainer BatchRebalanceSampler",
    "textbook_lpt": "LPT alone",
    "karmarkar_karp": "Karmarkar-Karp",
    "textbook_cp_sat": "textbook CP-SAT",
    "lpt": "dflop_ds LPT + descent",
    "ours": "dflop_ds",
}


def main() -> int:
    """Run the comparison, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    parser.add_argument("--num-samples", type=int, help="one size only; with --num-bins")
    parser.add_argument("--num-bins", type=int, help="a multiple of 16 runs 16 microbatches per replica")
    parser.add_argument("--time-limit-s", type=float, default=1.0, help="of each solve; default: 1")
    parser.add_argument("--trace", type=Path, help="shapes of your own, see benchmarks/traces/PROVENANCE.md")
    parser.add_argument("--num-seeds", type=int, default=5, help="medians are over them; default: 5")
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    args = parser.parse_args()
    if (args.num_samples is None) != (args.num_bins is None):
        parser.error("--num-samples and --num-bins go together")
    sizes = SIZES if args.num_samples is None else ((args.num_samples, args.num_bins),)
    families = ["trace"] if args.trace else args.families
    machine = environment.describe()
    print_head(machine, args)
    cases = []
    for num_samples, num_bins in sizes:
        for family in families:
            if num_samples != 512 and family not in ("mixed", "trace") and args.num_samples is None:
                continue
            case = run_case(family, num_samples, num_bins, args)
            print_case(case)
            cases.append(case)
    summary = summarise(cases)
    content = {
        "schema_version": SCHEMA_VERSION,
        "title": "schedulers: solve times measured, makespans simulated, sample times from FLOPs",
        "environment": machine,
        "seeds": list(range(args.num_seeds)),
        "time_limit_s": args.time_limit_s,
        "cases": cases,
        "summary": summary,
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(content, indent=1))
    print("\nsummary: " + ", ".join(f"{key} {value:.5g}" for key, value in summary.items()))
    return 0


def run_case(family: str, num_samples: int, num_bins: int, args: argparse.Namespace) -> dict[str, Any]:
    """Medians over the seeds of every method on one family and size."""
    rows: dict[str, list[dict[str, float]]] = {}
    facts = []
    for seed in range(args.num_seeds):
        samples = instances.draw(family, num_samples, seed, args.trace)
        num_microbatches = NUM_MICROBATCHES if num_bins % NUM_MICROBATCHES == 0 else num_bins
        problem = Problem(instances.module_costs_s(samples), num_bins // num_microbatches, num_microbatches)
        mean_s = float(problem.costs_s.sum(axis=0).max()) / num_bins
        facts.append((lower_bound_s(problem) / mean_s, float(problem.costs_s.max()) / mean_s))
        stage_s = {stages: instances.stage_times_s(samples, stages) for stages in STAGES}
        for method in METHODS:
            if num_samples > MAX_QUADRATIC_SAMPLES and method in ("rebalance", "karmarkar_karp"):
                continue
            found = timed(solver_of(method, problem, samples, seed, args.time_limit_s))
            if found is not None:
                rows.setdefault(method, []).append(rate(problem, *found, stage_s))
        rows.setdefault("ours", []).append(rate_ours(problem, stage_s, seed, args.time_limit_s))
    return {
        "family": family,
        "num_samples": num_samples,
        "num_bins": num_bins,
        "bound_over_mean_bin": statistics.median(bound for bound, _ in facts),
        "largest_sample_over_mean_bin": statistics.median(largest for _, largest in facts),
        "ours_never_above_lpt": all(
            ours["ratio"] <= lpt["ratio"] * (1 + 1e-12)
            for ours, lpt in zip(rows["ours"], rows["lpt"], strict=True)
        ),
        "methods": {
            method: {key: statistics.median(row[key] for row in found) for key in found[0]}
            | {"num_solved": len(found)}
            for method, found in rows.items()
        },
    }


def solver_of(
    method: str, problem: Problem, samples: instances.Samples, seed: int, time_limit_s: float
) -> Callable[[], Any]:
    """The method as a function without arguments that returns the bin of every sample, or None."""
    lengths = samples.llm_tokens
    return {
        "random": lambda: baselines.random_bins(problem, seed),
        "group_by_length": lambda: baselines.group_by_length(problem, lengths),
        "rebalance": lambda: baselines.batch_rebalance(problem, lengths),
        "textbook_lpt": lambda: baselines.textbook_lpt(problem),
        "karmarkar_karp": lambda: baselines.karmarkar_karp(problem),
        "textbook_cp_sat": lambda: baselines.textbook_cp_sat(problem, time_limit_s),
        "lpt": lambda: solve(problem, policy="lpt").assignment.bin_of(),
    }[method]


def timed(function: Callable[[], Any]) -> tuple[Any, float] | None:
    """Result and seconds; None without a result."""
    start_s = time.perf_counter()
    bin_of = function()
    return None if bin_of is None else (bin_of, time.perf_counter() - start_s)


def rate(problem: Problem, bin_of: Any, solve_time_s: float, stage_s: dict[int, Any]) -> dict[str, float]:
    """Ratio to bound, and simulated makespans over those of perfectly equal microbatches."""
    assignment = Assignment.from_bin_of(bin_of, problem.num_bins)
    row = {
        "ratio": float(scaled_loads_s(problem, bin_of).max()) / lower_bound_s(problem),
        "solve_time_s": solve_time_s,
    }
    for stages, forward_s in stage_s.items():
        makespan_s = step_makespan_s(
            assignment,
            forward_s=forward_s,
            backward_s=2.0 * forward_s,
            num_replicas=problem.num_replicas,
            num_microbatches=problem.num_microbatches,
        )
        row[f"pp{stages}"] = makespan_s / equal_makespan_s(problem, forward_s)
    return row


def rate_ours(problem: Problem, stage_s: dict[int, Any], seed: int, time_limit_s: float) -> dict[str, float]:
    """Our solver on the two modules, and our schedule on the stages of each pipeline."""
    effort = {"deterministic_time_s": 10.0 * time_limit_s, "deadline_s": time_limit_s, "seed": seed}
    found = solve(problem, policy="cp_sat", **effort)
    row = {"ratio": found.ratio_to_bound, "solve_time_s": found.solve_time_s}
    for stages, forward_s in stage_s.items():
        staged = Problem(3.0 * forward_s, problem.num_replicas, problem.num_microbatches)
        start_s = time.perf_counter()
        best = schedule(staged, forward_s, 2.0 * forward_s, Effort(**effort))
        row[f"pp{stages}_time_s"] = time.perf_counter() - start_s
        row[f"pp{stages}"] = best.makespan_s / equal_makespan_s(problem, forward_s)
    return row


def equal_makespan_s(problem: Problem, forward_s: Any) -> float:
    """Simulated step if every bin held exactly the same share of every stage's work."""
    share_s = np.repeat((forward_s.sum(axis=0) / problem.num_bins)[:, None], problem.num_microbatches, axis=1)
    return simulate_1f1b(share_s, 2.0 * share_s).makespan_s


def summarise(cases: list[dict[str, Any]]) -> dict[str, float]:
    """The figures that the targets speak of, as far as their cases were run."""
    at = {(case["family"], case["num_samples"], case["num_bins"]): case for case in cases}
    summary: dict[str, float] = {}
    small, large = at.get(("mixed", 512, 64)), at.get(("mixed", 2048, 256))
    if small is not None:
        methods = small["methods"]
        summary["ours_ratio_512_64"] = methods["ours"]["ratio"]
        summary["lpt_ratio_512_64"] = methods["lpt"]["ratio"]
        for name in ("random", "rebalance"):
            summary[f"{name}_over_ours_mixed"] = methods[name]["pp8"] / methods["ours"]["pp8"]
            summary[f"{name}_over_ours_mixed_max_bin"] = methods[name]["ratio"] / methods["ours"]["ratio"]
        summary["ramp_gain_pp8_m16"] = 1.0 - methods["ours"]["pp8"]
    if large is not None:
        summary["ours_ratio_2048_256"] = large["methods"]["ours"]["ratio"]
        summary["lpt_2048_256_ms"] = 1e3 * large["methods"]["lpt"]["solve_time_s"]
    summary["worst_ours_ratio"] = max(case["methods"]["ours"]["ratio"] for case in cases)
    return summary


def print_head(machine: dict[str, Any], args: argparse.Namespace) -> None:
    """What, on what, with what."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    print("Schedulers: ratio of the fullest bin to the lower bound; solve time MEASURED on one core;")
    print("makespan SIMULATED (1F1B, 16 microbatches), 1.0 = perfectly equal microbatches")
    print(f"{machine['num_cores']} cores of {machine['cpu']}; {versions}")
    print(f"seeds 0..{args.num_seeds - 1}, medians; {args.time_limit_s} s per solve; baselines know no ramp")


def print_case(case: dict[str, Any]) -> None:
    """One table."""
    print(
        f"\n{case['family']}: {case['num_samples']} samples, {case['num_bins']} bins; "
        f"the bound is {case['bound_over_mean_bin']:.3f} x the mean bin, the largest sample "
        f"{case['largest_sample_over_mean_bin']:.3f} x"
    )
    print(f"{'':<32}{'ratio':>9}{'time ms':>10}{'pp=2':>8}{'pp=4':>8}{'pp=8':>8}")
    for method in (*METHODS, "ours"):
        row = case["methods"].get(method)
        if row is None:
            print(f"{TITLES[method]:<32}{'none within the limit, or not run at this size':>50}")
            continue
        print(
            f"{TITLES[method]:<32}{row['ratio']:>9.5f}{1e3 * row['solve_time_s']:>10.1f}"
            f"{row['pp2']:>8.3f}{row['pp4']:>8.3f}{row['pp8']:>8.3f}"
        )


if __name__ == "__main__":
    sys.exit(main())
