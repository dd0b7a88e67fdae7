"""The real engine on an EMULATED cluster: simulated against measured steps, data-aware against data-blind.

Eight ranks (two cores suffice) are started by the ``deepspeed`` launcher. Their pipeline layers do not
compute: they wait, forward and backward, for the time that FLOPs of a 7B-like model predict for the
samples at hand (one after the other without gaps, as on a device), and hand over tiny tensors. Everything
else is real: the plans, the loader, DeepSpeed's instruction stream and its messages. Each layout runs the
same global batches of the mixed real-shape trace twice, in turn:

- ``blind``: stock DeepSpeed, microbatches by position;
- ``aware``: dflop_ds, balanced microbatches. Both sides have the same stages, balanced by predicted time.

What the emulation adds to the waits (Python between instructions, messages, the end of a step) is measured
on warm-up steps of *one* run, the data-blind one of the first layout, and added in the simulation of all.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a file as well

from benchmarks import emulated_times, environment
from benchmarks.demo import free_port
from benchmarks.emulated_measure import (
    WARMUP_STEPS,
    Layout,
    Measured,
    Overheads,
    calibrate,
    simulate,
    simulated_steps_per_s,
)
from benchmarks.emulated_times import EmulatedModel
from dflop_ds.scheduling.blind import solve_blind
from dflop_ds.scheduling.order import EpochOrder
from dflop_ds.scheduling.problem import Problem

SCHEMA_VERSION = 1
ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 900.0
RUNS = ("blind", "aware")
TITLES = {"blind": "stock DeepSpeed, data-blind", "aware": "dflop_ds, data-aware"}

Bins = list[list[list[list[int]]]]
"""Samples by step, replica and microbatch."""


def main() -> int:
    """Run the ranks, simulate what they ran, print both, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    parser.add_argument("--out", type=Path, default=Path("runs/emulated_cluster"), help="logs and plans")
    parser.add_argument(
        "--layouts", nargs="+", default=["4x2", "2x4"], help="pipeline stages x replicas, all of one size"
    )
    parser.add_argument("--num-steps", type=int, default=10, help="steps per run, warm-up included")
    parser.add_argument(
        "--pass-s", type=float, default=0.035, help="mean forward of a stage of the first layout, seconds"
    )
    parser.add_argument("--batch-size", type=int, default=64, help="samples of a step; default: 64")
    parser.add_argument("--micro-batch-size", type=int, default=2, help="of a microbatch; default: 2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="6 steps")
    args = parser.parse_args()
    if args.quick:
        args.num_steps = 6
    if args.num_steps <= WARMUP_STEPS:
        parser.error(f"--num-steps must be more than the {WARMUP_STEPS} warm-up steps")
    layouts = [Layout.parse(text, args.batch_size, args.micro_batch_size) for text in args.layouts]
    if len({layout.num_stages * layout.num_replicas for layout in layouts}) > 1:
        parser.error("--layouts must all have the same number of ranks")
    if any(args.batch_size % (args.micro_batch_size * layout.num_replicas) for layout in layouts):
        parser.error("--batch-size must be a multiple of --micro-batch-size x replicas")
    num_ranks = layouts[0].num_stages * layouts[0].num_replicas
    machine = environment.describe()
    print(f"EMULATED cluster of {num_ranks} ranks: the engine is real, its layers wait")
    print(f"{machine['cpu']}, {machine['num_cores']} cores, seed {args.seed}, {machine['versions']}")
    table = emulated_times.mixed_shapes(args.batch_size * args.num_steps, args.seed)
    model = EmulatedModel.scaled(table, args.micro_batch_size, layouts[0].num_stages, args.pass_s)
    runs = []
    for layout in layouts:
        jobs = write_jobs(args, layout, model, table)
        # DeepSpeed keeps one grid of ranks per process: every layout is a launch of its own.
        launch(args, layout)
        ranks = [json.loads(path.read_text()) for path in sorted(folder(args, layout).glob("rank*.json"))]
        runs += [Measured.read(job, ranks, model, layout) for job in jobs]
    overheads = calibrate(runs[0])
    rows = [row(run, overheads, calibrated=index == 0) for index, run in enumerate(runs)]
    content = {
        "schema_version": SCHEMA_VERSION,
        "title": "EMULATED cluster: real engine, layers that wait; simulated against measured steps",
        "environment": machine,
        "seed": args.seed,
        "num_steps": args.num_steps,
        "warmup_steps": WARMUP_STEPS,
        "batch_size": args.batch_size,
        "micro_batch_size": args.micro_batch_size,
        "mean_forward_s": args.pass_s,
        "overheads": dataclasses.asdict(overheads),
        "runs": rows,
        "summary": {**summarise(rows), "simulated_steps_per_s": simulated_steps_per_s(args.seed)},
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(content, indent=1))
    report(content)
    return 0


def folder(args: argparse.Namespace, layout: Layout) -> Path:
    """Where the launch of a layout keeps its files."""
    return (args.out / layout.name).resolve()


def write_jobs(args: argparse.Namespace, layout: Layout, model: EmulatedModel, table: Any) -> list[Any]:
    """Leave everything that the ranks need in their folder."""
    out = folder(args, layout)
    out.mkdir(parents=True, exist_ok=True)
    for path in out.glob("rank*.json"):
        path.unlink()
    table.save(out / "shapes.npz")
    order = EpochOrder(len(table), args.batch_size, args.seed)
    jobs = []
    for run in RUNS:
        config = {
            "train_batch_size": args.batch_size,
            "train_micro_batch_size_per_gpu": args.micro_batch_size,
            "steps_per_print": 1_000_000,
            "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
            "dflop": {
                "enabled": run == "aware",
                "seed": args.seed,
                "data": {"num_workers": 0},
                "telemetry": {"plan_log": str(out / "plans.jsonl")},
            },
        }
        job = {"label": f"{layout.name} {run}", "num_stages": layout.num_stages, "config": config}
        job["bins"] = blind_bins(order, layout, args.num_steps) if run == "blind" else []
        job["plan_log"] = config["dflop"]["telemetry"]["plan_log"]
        jobs.append(job)
    content = {"flops_per_s": model.times.flops_per_s, "num_steps": args.num_steps, "runs": jobs}
    (out / "job.json").write_text(json.dumps(content))
    return jobs


def blind_bins(order: EpochOrder, layout: Layout, num_steps: int) -> Bins:
    """What stock data-parallel DeepSpeed makes of the same global batches."""
    problem = Problem(np.zeros((order.batch_size, 1)), layout.num_replicas, layout.num_microbatches)
    bins = solve_blind(problem).bins
    steps = []
    for step in range(num_steps):
        rows = order.batch(step).positions
        members = [[int(rows[position]) for position in positions] for positions in bins]
        size = layout.num_microbatches
        steps.append([members[start : start + size] for start in range(0, len(members), size)])
    return steps


def launch(args: argparse.Namespace, layout: Layout) -> None:
    """Start the ranks through the deepspeed launcher and wait for them."""
    out, num_ranks = folder(args, layout), layout.num_stages * layout.num_replicas
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(num_ranks)]
    command += ["--master_port", str(free_port()), "--module", "benchmarks.emulated_worker"]
    command += ["--out", str(out)]
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)}
    log = out / "ranks.log"
    print(f"{args.num_steps} steps of {layout.name}, blind and aware in turn (log: {log}) ...", flush=True)
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
        try:
            process.wait(TIMEOUT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
    if process.returncode != 0:
        raise SystemExit(f"the ranks failed with code {process.returncode}:\n{log.read_text()[-4000:]}")


def row(run: Measured, overheads: Overheads, *, calibrated: bool) -> dict[str, Any]:
    """Figures of one run, over the steps after the warm-up."""
    used = slice(WARMUP_STEPS, None)
    simulated, ideal = simulate(run, overheads), simulate(run, Overheads())
    measured_s = run.step_s[used]
    return {
        "label": run.label,
        "calibrated_here": calibrated,
        "measured_s": measured_s.tolist(),
        "simulated_s": simulated.step_time_s[used].tolist(),
        "simulated_without_overheads_s": ideal.step_time_s[used].tolist(),
        "mean_measured_s": float(measured_s.mean()),
        "mean_simulated_s": float(simulated.step_time_s[used].mean()),
        "mean_error": float(np.abs(simulated.step_time_s[used] / measured_s - 1.0).mean()),
        "mean_error_without_overheads": float(np.abs(ideal.step_time_s[used] / measured_s - 1.0).mean()),
        "bubble_measured": float(run.bubble[used].mean()),
        "bubble_simulated": float(simulated.bubble_fraction[used].mean()),
    }


def summarise(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Error over all steps of all runs; speed-up over the sum of all layouts, and of each."""
    errors = [row["mean_error"] for row in rows]
    totals = {run: sum(row["mean_measured_s"] for row in rows if row["label"].endswith(run)) for run in RUNS}
    times = {row["label"]: row["mean_measured_s"] for row in rows}
    layouts = [label.split()[0] for label in times if label.endswith("aware")]
    return {
        "simulation_error_mean": statistics.mean(errors),
        "simulation_error_worst_run": max(errors),
        "speedup_over_blind": totals["blind"] / totals["aware"],
        **{f"speedup_over_blind_{name}": times[f"{name} blind"] / times[f"{name} aware"] for name in layouts},
    }


def report(content: dict[str, Any]) -> None:
    """Print the tables."""
    overheads = {name: f"{1e3 * value:.2f} ms" for name, value in content["overheads"].items()}
    print(
        f"\nEMULATED step times, mean of {content['num_steps'] - WARMUP_STEPS} steps after the warm-up; "
        f"{content['batch_size']} samples a step, {content['micro_batch_size']} a microbatch"
    )
    heads = f"{'measured s':>11}{'simulated s':>12}{'error':>8}{'ideal err.':>11}{'bubble':>8}{'sim.':>7}"
    print(f"{'':<38}{heads}")
    for each in content["runs"]:
        layout, run = each["label"].split()
        print(
            f"{layout + '  ' + TITLES[run]:<38}{each['mean_measured_s']:>11.3f}"
            f"{each['mean_simulated_s']:>12.3f}{each['mean_error']:>8.1%}"
            f"{each['mean_error_without_overheads']:>11.1%}"
            f"{each['bubble_measured']:>8.1%}{each['bubble_simulated']:>7.1%}"
        )
    print(f"overheads, from the warm-up of {content['runs'][0]['label']}: {overheads}")
    print("summary: " + ", ".join(f"{key} {value:.4g}" for key, value in content["summary"].items()))


if __name__ == "__main__":
    start_s = time.perf_counter()
    code = main()
    print(f"took {time.perf_counter() - start_s:.0f} s")
    sys.exit(code)
