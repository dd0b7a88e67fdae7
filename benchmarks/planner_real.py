"""A REAL run on two ranks: the stages that the planner chose against DeepSpeed's own partitions.

The model has the proportions of LLaVA-OneVision-0.5B (SigLIP-so400m with Qwen2-0.5B), an eighth as wide
and a quarter as deep, and learns from clips, as in video instruction tuning. Frames are pooled to a quarter
of their patches before they reach the LLM, so that the encoder does most of the work, and the vocabulary
holds parameters that cost little time: counts of parameters or of layers say little about time. With the
default model of the demo, whose images are not pooled and whose vocabulary is small, the split by
parameters happens to be the one by time.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.demo import launch
from dflop_ds.cli import plan
from dflop_ds.config import load_ds_config
from dflop_ds.data.demo import build_demo
from dflop_ds.data.demo_model import TinyModelDims
from dflop_ds.planning.evaluation import Evaluator
from dflop_ds.planning.hardware import load_hardware
from dflop_ds.planning.layout import Degrees, Layout
from dflop_ds.planning.stages import StageTable

DIMS = TinyModelDims(
    tile_px=112,
    grid_side=2,
    vision_hidden=144,
    vision_intermediate=538,
    vision_layers=7,
    vision_heads=4,
    text_hidden=112,
    text_intermediate=608,
    text_layers=6,
    text_heads=7,
    text_kv_heads=1,
    vocab_size=18992,
)
LABELS = ("planned", "parameters", "uniform")
NUM_SAMPLES = 640  # of which 15 % are clips
BATCH_SIZE = 16
WARMUP_STEPS = 2


def real_run(out: Path, num_steps: int, seed: int) -> dict[str, Any]:
    """Profile, plan, train three ways in turn; medians of the step times and the stages of each."""
    out.mkdir(parents=True, exist_ok=True)
    demo = build_demo(out, num_samples=NUM_SAMPLES, seed=seed, dims=DIMS)
    records = [json.loads(line) for line in demo.train_path.read_text().splitlines()]
    train_path = demo.media_root / "clips.jsonl"
    kept = [record for record in records if "video" in record]
    train_path.write_text("".join(json.dumps(record) + "\n" for record in kept))
    config = _base_config(demo.model_dir, train_path, out, num_steps)
    _write(out / "config.json", config)
    path = str(out / "config.json")
    _dflop_ds("profile", "data", path, "--out", str(out / "shapes.npz"))
    _dflop_ds("profile", "model", path, "--out", str(out / "profile.json"))
    target = out / "config_planned.json"
    options = ["--gpus", "2", "--hardware", "cpu", "--min-stages", "2", "--simulations", "0"]
    files = ["--shapes", str(out / "shapes.npz"), "--profile", str(out / "profile.json")]
    printed = _dflop_ds("plan", path, *options, *files, "--out", str(target))
    planned = load_ds_config(target)
    for label in LABELS[1:]:
        other = copy.deepcopy(planned)
        other["dflop"]["parallel"]["split"] = label
        _write(out / f"config_{label}.json", other)
    launch(out, list(LABELS), [], num_steps)
    results = {label: json.loads((out / f"{label}.json").read_text()) for label in LABELS}
    predicted_s = predicted_steps_s(out, planned, {label: results[label]["stages"] for label in LABELS})
    rows = {
        label: {
            "predicted_step_time_s": predicted_s[label],
            "median_step_time_s": statistics.median(result["step_times_s"][WARMUP_STEPS:]),
            "bubble_fraction": statistics.median(result["bubble_fractions"][WARMUP_STEPS:]),
            "stages": result["stages"],
            "step_times_s": result["step_times_s"],
        }
        for label, result in results.items()
    }
    return {
        "runs": rows,
        "num_microbatches": planned["gradient_accumulation_steps"],
        "batch_size": BATCH_SIZE,
        "num_samples": len(kept),
        "plan_report": printed,
    }


def predicted_steps_s(out: Path, planned: dict[str, Any], stages: dict[str, list[int]]) -> dict[str, float]:
    """What the planner predicts of every run: step times with its microbatches and the run's stages."""
    files = ["--shapes", str(out / "shapes.npz"), "--profile", str(out / "profile.json"), "--gpus", "2"]
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    arguments = parser.parse_args([str(out / "config.json"), *files])
    profiles = plan.read_profiles(arguments.profile)
    workload = plan.make_workload(planned, arguments, load_hardware("cpu"), profiles)
    evaluator = Evaluator(StageTable(workload))
    count = planned["gradient_accumulation_steps"]
    layout = Layout(
        encoder=None,
        llm=Degrees(1, 2, 1),
        num_microbatches=count,
        activation_checkpointing=planned["dflop"]["parallel"]["activation_checkpointing"],
        zero_stage=planned["zero_optimization"]["stage"],
    )
    return {
        label: evaluator.evaluate(layout, tuple(b - a for a, b in itertools.pairwise(edges))).step_s
        for label, edges in stages.items()
    }


def _base_config(model_dir: Path, train_path: Path, out: Path, num_steps: int) -> dict[str, Any]:
    return {
        "train_batch_size": BATCH_SIZE,
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 1000000,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}},
        "zero_optimization": {"stage": 0},
        "dflop": {
            "model": {"path": str(model_dir.resolve())},
            "data": {
                "train_path": str(train_path.resolve()),
                "media_root": str(train_path.parent.resolve()),
                "frames_per_second": 4.0,
                "num_workers": 0,
            },
            "parallel": {"pipeline_stages": 2},
            "cost": {"profile_budget_s": 20.0},
            "train": {"num_steps": num_steps, "output_dir": str(out.resolve() / "train")},
        },
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1))


def _dflop_ds(*arguments: str) -> str:
    """Run the command-line tool with the thread setting of the ranks; what it printed."""
    path = os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "dflop_ds.cli.main", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        raise SystemExit(f"dflop-ds {' '.join(arguments)} failed:\n{done.stdout}\n{done.stderr[-4000:]}")
    return done.stdout
