"""The ``deepspeed`` launcher: one node with two ranks, and two nodes with one rank each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dflop_ds.cli.main import main
from dflop_ds.scheduling.plan_log import audit, read_plan_log
from tests.support.ranks import free_port
from tests.support.training import demo_paths, ds_config

pytestmark = pytest.mark.dist

ADAM = {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}


def write_config(demo: Any, out: Path, profile: Path | None = None) -> Path:
    out.mkdir()
    block: dict[str, Any] = {
        "data": {"num_workers": 1, "eval_path": str(demo.train_path)},
        "train": {"num_steps": 3, "output_dir": str(out), "eval_every": 2, "save_every": 3},
        "telemetry": {"trace": str(out / "trace.json"), "plan_log": str(out / "plans.jsonl")},
    }
    if profile is not None:
        block["cost"] = {"profile": str(profile)}
    config = ds_config(demo_paths(demo), out, block, optimizer=ADAM)
    path = out / "config.json"
    path.write_text(json.dumps(config))
    return path


def start_launcher(config: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "deepspeed.launcher.runner", *options]
    command += ["--module", "dflop_ds.train", "--deepspeed_config", str(config)]
    log = (config.parent / f"launcher{len(list(config.parent.glob('launcher*')))}.log").open("w")
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True)


def finish(processes: list[subprocess.Popen[bytes]], folder: Path, timeout_s: float = 180) -> None:
    end = time.monotonic() + timeout_s
    try:
        codes = [process.wait(max(1.0, end - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    logs = "\n".join(path.read_text()[-4000:] for path in sorted(folder.glob("launcher*.log")))
    assert codes == [0] * len(processes), logs


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def check_simulated_beside(run: Path) -> None:
    """The log of a run can be simulated; what both ranks measured is laid beside it."""
    shapes, trace = str(run / "shapes.npz"), run / "simulated.json"
    assert main(["profile", "data", str(run / "config.json"), "--out", shapes]) == 0
    files = ["--shapes", shapes, "--profile", str(run / "profile.json"), "--num-replicas", "1"]
    log = ["--plan-log", str(run / "plans.jsonl"), "--steps", "3", "--trace", str(trace)]
    assert main(["simulate", str(run / "config.json"), *files, *log]) == 0
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(names.values()) == ["measured replica 0", "predicted replica 0"]
    bars = {(names[event["pid"]], event["tid"], event["name"]) for event in events if event["ph"] == "X"}
    assert len(bars) == 2 * 2 * 2 * 4  # sources x stages x passes x microbatches


@pytest.mark.compat
def test_one_node_and_two_nodes(tiny_demo: Any, tmp_path: Path) -> None:
    one = tmp_path / "one"
    config = write_config(tiny_demo, one)
    finish([start_launcher(config, "--num_gpus", "2", "--master_port", str(free_port()))], one)
    lines = metrics(one)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[2]["loss"] < lines[0]["loss"]
    assert "eval_loss" in lines[1] and "eval_loss" not in lines[0]
    assert (one / "checkpoints" / "latest").read_text() == "global_step3"
    plans = [json.loads(line) for line in (one / "plans.jsonl").read_text().splitlines()]
    assert sorted(i for plan in plans[:3] for members in plan["bins"] for i in members) == list(range(24))
    logged = read_plan_log(one / "plans.jsonl")
    assert audit(logged).problems == ()
    assert [len(step.measured[0]["microbatch_s"]) for step in logged[:3]] == [4] * 3
    assert all(len(step.line["bin_costs_s"]) == len(step.plan.bins) for step in logged)
    assert [sorted(line["stage"] for line in step.measured) for step in logged[:3]] == [[0, 1]] * 3
    check_simulated_beside(one)
    events = json.loads((one / "trace.json").read_text())["traceEvents"]
    passes = [event for event in events if event.get("name", "").startswith(("ForwardPass", "BackwardPass"))]
    assert len(passes) == 2 * 2 * 4  # stages x passes x microbatches

    two = tmp_path / "two"
    config = write_config(tiny_demo, two, profile=one / "profile.json")
    hosts = two / "hosts"
    hosts.write_text("127.0.0.1 slots=1\nlocalhost slots=1\n")
    port = str(free_port())
    nodes = [
        start_launcher(
            config,
            *("--hostfile", str(hosts), "--no_ssh", "--node_rank", str(node)),
            *("--master_addr", "127.0.0.1", "--master_port", port),
        )
        for node in range(2)
    ]
    finish(nodes, two)
    assert [line["loss"] for line in metrics(two)] == [line["loss"] for line in lines]
    assert [line.get("eval_loss") for line in metrics(two)] == [line.get("eval_loss") for line in lines]
