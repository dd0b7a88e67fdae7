"""The demo: the same global batches trained by stock DeepSpeed and data-aware, on 2 CPU ranks.

One small LLaVA-OneVision model on real photographs and clips is trained four ways by the same two
ranks, which the ``deepspeed`` launcher starts. The four take turns step by step, so that each
global batch is timed under the same conditions:

- ``padded``: stock engine, microbatches padded to their longest sample, DeepSpeed's split by parameters;
- ``blind``: stock engine, packed microbatches in data-blind order, the same split;
- ``split``: dflop_ds in data-blind order, stages balanced by predicted time;
- ``aware``: dflop_ds, balanced microbatches.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import environment
from benchmarks.timeline import draw
from dflop_ds.config import load_ds_config
from dflop_ds.data.demo import build_demo

SCHEMA_VERSION = 1
WARMUP_STEPS = 2
TIMEOUT_S = 900.0
CONFIG = Path("ds_configs/llava_onevision_tiny_cpu.json")

# Run -> its settings of the "dflop" block
RUNS: dict[str, dict[str, Any]] = {
    "padded": {"enabled": False},
    "blind": {"enabled": False},
    "split": {"scheduler": {"policy": "blind"}},
    "aware": {},
}
PADDED = ["padded"]
TITLES = {
    "padded": "stock DeepSpeed, padded",
    "blind": "stock DeepSpeed, packed, data-blind",
    "split": "dflop_ds, data-blind, time-balanced stages",
    "aware": "dflop_ds, data-aware",
}


def main() -> int:
    """Build the data, make the four runs, print one table and write the artifacts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    parser.add_argument("--num-steps", type=int, default=10, help="optimizer steps per run, warm-up included")
    parser.add_argument("--num-samples", type=int, default=480)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    start_s = time.perf_counter()
    demo = build_demo(args.out, num_samples=args.num_samples, seed=args.seed)
    print(
        f"data: {args.num_samples} samples with real photographs in {demo.train_path} (seed {args.seed})",
        flush=True,
    )
    for label in RUNS:
        content = json.dumps(run_config(label, args, demo), indent=1)
        (args.out / f"config_{label}.json").write_text(content)
    print(
        f"training {', '.join(RUNS)} in turn, {args.num_steps} steps each (log: {args.out}/ranks.log) ...",
        flush=True,
    )
    launch(args.out, list(RUNS), PADDED, args.num_steps)
    results = {label: json.loads((args.out / f"{label}.json").read_text()) for label in RUNS}
    rows = {label: summarise(result) for label, result in results.items()}
    summary = compare(rows, results)
    draw_timelines(args.out / "timelines.png", results)
    content = {
        "schema_version": SCHEMA_VERSION,
        "environment": environment.describe(),
        "seed": args.seed,
        "num_steps": args.num_steps,
        "warmup_steps": WARMUP_STEPS,
        **rows,
        "summary": summary,
    }
    (args.out / "result.json").write_text(json.dumps(content, indent=1))
    print_report(rows, summary, content["environment"])
    print(
        f"\nartifacts in {args.out}/: result.json, timelines.png, trace_aware.json and "
        f"trace_blind.json (ui.perfetto.dev)"
    )
    print(f"the demo took {time.perf_counter() - start_s:.0f} s")
    return 0


def launch(folder: Path, labels: list[str], padded: list[str], num_steps: int) -> None:
    """Start the two ranks through the deepspeed launcher and wait for them.

    They make the runs whose configurations are ``config_<label>.json`` in `folder`, in turn.
    """
    out = folder.resolve()
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2"]
    command += ["--master_port", str(free_port()), "--module", "benchmarks.demo_worker"]
    command += ["--out", str(out), "--labels", *labels, "--padded", *padded]
    path = [os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)}
    log = out / "ranks.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
        try:
            wait(process, out / "progress", num_steps)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
    if process.returncode != 0:
        raise SystemExit(f"the ranks failed with code {process.returncode}:\n{log.read_text()[-4000:]}")


def wait(process: subprocess.Popen[bytes], progress: Path, num_steps: int) -> None:
    """Wait for the ranks, showing how far they are."""
    progress.unlink(missing_ok=True)
    end_s = time.monotonic() + TIMEOUT_S
    with tqdm(total=num_steps, unit="step", disable=not sys.stderr.isatty()) as bar:
        while process.poll() is None:
            if time.monotonic() > end_s:
                raise SystemExit(f"the ranks took longer than {TIMEOUT_S:.0f} s and were ended")
            time.sleep(0.2)
            if progress.exists():
                bar.update(int(progress.read_text() or 0) - bar.n)


def run_config(label: str, args: argparse.Namespace, demo: Any) -> dict[str, Any]:
    """The shipped tiny configuration with the paths and settings of one run."""
    config = copy.deepcopy(load_ds_config(CONFIG))
    block = config["dflop"]
    block["model"]["path"] = str(demo.model_dir)
    block["data"] |= {"train_path": str(demo.train_path), "num_workers": 0}
    block["train"] |= {"num_steps": args.num_steps, "output_dir": str(args.out.resolve() / "profile")}
    for key, value in RUNS[label].items():
        block[key] = {**block.get(key, {}), **value} if isinstance(value, dict) else value
    return config


def summarise(result: dict[str, Any]) -> dict[str, Any]:
    """Figures of one run over its measured steps."""
    steps = slice(WARMUP_STEPS, None)
    times_s = result["step_times_s"][steps]
    rates = [num / took_s for num, took_s in zip(result["useful_tokens"][steps], times_s, strict=True)]
    row = {
        "median_step_time_s": statistics.median(times_s),
        "useful_tokens_per_s": statistics.median(rates),
        "bubble_fraction": statistics.median(result["bubble_fractions"][steps]),
        "imbalance": statistics.median(result["imbalances"][steps]),
        "padding_share": result["padding_share"],
        "first_loss": result["losses"][0],
        "last_loss": result["losses"][-1],
        "losses": result["losses"],
        "step_times_s": result["step_times_s"],
        "stages": result["stages"],
    }
    for key in ("exposed_planning_s", "background_planning_s", "num_fallbacks"):
        if key in result:
            row[key] = result[key]
    if "exposed_planning_s" in result:
        row["exposed_planning_share"] = result["exposed_planning_s"] / sum(result["step_times_s"])
    return row


def compare(rows: dict[str, Any], results: dict[str, Any]) -> dict[str, float]:
    """Speedups between the runs, and how far balancing moved the loss."""
    time_s = {label: row["median_step_time_s"] for label, row in rows.items()}
    pairs = zip(results["split"]["losses"], results["aware"]["losses"], strict=True)
    return {
        "speedup": time_s["blind"] / time_s["aware"],
        "speedup_over_padded": time_s["padded"] / time_s["aware"],
        "speedup_by_packing": time_s["padded"] / time_s["blind"],
        "speedup_by_split": time_s["blind"] / time_s["split"],
        "speedup_by_balance": time_s["split"] / time_s["aware"],
        "blind_step_time_s": time_s["blind"],
        "aware_step_time_s": time_s["aware"],
        "max_loss_difference": max(abs(a - b) for a, b in pairs),
        "exposed_planning_share": rows["aware"]["exposed_planning_share"],
    }


def print_report(rows: dict[str, Any], summary: dict[str, float], machine: dict[str, Any]) -> None:
    """The table, the speedups and where they were measured."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    print(f"\n2 ranks (pipeline of 2 stages) on {machine['num_cores']} cores of {machine['cpu']}; {versions}")
    print(f"medians over the steps after {WARMUP_STEPS} warm-up steps; real computation, nothing emulated;")
    print(
        "samples were decoded before the steps in every run, since two cores hold two stages and no "
        "data worker\n"
    )
    head = (
        "run",
        "step s",
        "tokens/s",
        "bubble",
        "imbalance",
        "padding",
        "first loss",
        "last loss",
        "planning",
    )
    print("{:<44}{:>8}{:>10}{:>8}{:>11}{:>9}{:>12}{:>11}{:>10}".format(*head))
    for label, row in rows.items():
        share = row.get("exposed_planning_share")
        planning = "-" if share is None else f"{share:.2%}"
        print(
            f"{TITLES[label]:<44}{row['median_step_time_s']:>8.3f}{row['useful_tokens_per_s']:>10.0f}"
            f"{row['bubble_fraction']:>8.1%}{row['imbalance']:>11.2f}{row['padding_share']:>9.1%}"
            f"{row['first_loss']:>12.4f}{row['last_loss']:>11.4f}{planning:>10}"
        )
    print(
        "\nplanning: share of the step time for which training waited for a plan or its broadcast; "
        "stock losses are "
        "means over\nmicrobatches, dflop_ds losses are means over the tokens of the global batch"
    )
    print(
        "imbalance: longest over mean microbatch of a stage; data-aware steps begin and end with small "
        "ones on purpose,\nwhich fills and drains the pipeline faster"
    )
    print(
        f"layers per stage: {sizes_of_stages(rows['blind']['stages'])} by parameters (stock), "
        f"{sizes_of_stages(rows['aware']['stages'])} by predicted time (dflop_ds)"
    )
    print(
        f"\ndata-aware is {summary['speedup']:.2f}x faster than data-blind stock DeepSpeed "
        f"(engine and stage split {summary['speedup_by_split']:.2f}x, balance "
        f"{summary['speedup_by_balance']:.2f}x) and "
        f"{summary['speedup_over_padded']:.2f}x faster than padded "
        f"(packing {summary['speedup_by_packing']:.2f}x)"
    )
    print(
        f"largest loss difference, data-aware against data-blind order: {summary['max_loss_difference']:.2e}"
    )


def sizes_of_stages(boundaries: Sequence[int]) -> list[int]:
    """Layers of each stage."""
    return [stop - start for start, stop in itertools.pairwise(boundaries)]


def draw_timelines(path: Path, results: dict[str, Any]) -> None:
    """Timelines of one step, data-blind above data-aware."""
    labels = ("blind", "split", "aware")
    step = typical_step([results[label]["step_times_s"] for label in labels])
    runs = [(TITLES[label], results[label]["passes"][step]) for label in labels]
    draw(path, runs, f"The same global batch, measured: step {step}, whose times are closest to the medians")


def typical_step(step_times_s: Sequence[Sequence[float]]) -> int:
    """The step after the warm-up in which the runs took most nearly their median times.

    Parameters
    ----------
    step_times_s : sequence of sequence of float
        Seconds of every step, per run.
    """
    medians_s = [statistics.median(times_s[WARMUP_STEPS:]) for times_s in step_times_s]

    def distance(step: int) -> float:
        pairs = zip(step_times_s, medians_s, strict=True)
        return sum(abs(math.log(times_s[step] / median_s)) for times_s, median_s in pairs)

    return min(range(WARMUP_STEPS, len(step_times_s[0])), key=distance)


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
