"""``dflop-ds simulate`` on files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dflop_ds.cli.main import main
from dflop_ds.cost.features import ProfileRow
from dflop_ds.profiling.table import Fingerprint, ProfileTable, model_hash
from dflop_ds.scheduling.plan_log import measured_line
from dflop_ds.shapes import SampleShape, ShapeTable
from tests.support.kinds import TILED_KINDS
from tests.unit.test_cli_schedule import CONFIG

UNIT_S = 1e-4


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A plan of 2 stages x 2 replicas, 64 samples, and a profile in which time grows with size alone."""
    rng = np.random.default_rng(0)
    shapes = []
    for index in range(64):
        tiles, text = int(rng.integers(0, 6)), int(rng.lognormal(4.0, 1.0)) + 4
        shapes.append(SampleShape(f"id-{index}", tiles, 0, text, text + 16 * tiles, text // 2))
    ShapeTable.from_shapes(shapes).save(tmp_path / "shapes.npz")
    rows = []
    for kind in TILED_KINDS:
        for size in (1, 2, 4, 8):
            counts = (size, 16 * size, 50 * size, 2500 * size, size, 20 * size)
            rows.append(ProfileRow(kind, *counts, UNIT_S * size, 2 * UNIT_S * size, 1000 * size))
    fingerprint = Fingerprint("cpu", "Some CPU", {"torch": "2"}, "float32", "auto", False, model_hash(CONFIG))
    parameters = dict.fromkeys(TILED_KINDS, 1000)
    ProfileTable(rows, fingerprint, parameters=parameters).save(tmp_path / "profile.json")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    plan = {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 4,
        "dflop": {
            "model": {"path": str(tmp_path)},
            "parallel": {"pipeline_stages": 2, "split": [5, 6]},
            "scheduler": {"deterministic_time_s": 0.02},
        },
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    return tmp_path


def _arguments(files: Path, *more: str) -> list[str]:
    given = ["--shapes", str(files / "shapes.npz"), "--profile", str(files / "profile.json")]
    return ["simulate", str(files / "plan.json"), *given, "--steps", "2", *more]


def test_it_predicts_steps_and_names_who_made_others_wait(files, capsys) -> None:
    trace, png = files / "out" / "trace.json", files / "out" / "step.png"
    assert main(_arguments(files, "--trace", str(trace), "--png", str(png))) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("PREDICTED steps: 2 stages x 2 replicas, 4 microbatches of 4")
    rows = [line.split() for line in lines[2:4]]
    assert [row[0] for row in rows] == ["0", "1"]
    assert all(float(row[1]) <= float(row[2]) for row in rows)
    stages = [line.split() for line in lines if line.strip().startswith(("0 ", "1 "))][2:]
    assert [row[1] for row in stages] == ["5", "6"]
    assert any("replica" in line and "heaviest id-" in line for line in lines)
    events = json.loads(trace.read_text())["traceEvents"]
    bars = [event for event in events if event["ph"] == "X"]
    assert len(bars) == 2 * 2 * 2 * 4  # passes x stages x replicas x microbatches
    last_s = max(event["ts"] + event["dur"] for event in bars) / 1e6
    assert last_s == pytest.approx(float(rows[0][1]), rel=1e-3)  # nothing follows without --hardware
    assert png.read_bytes().startswith(b"\x89PNG")


def test_a_slower_network_and_blocking_sends_take_longer(files, capsys) -> None:
    times_s = []
    networks = (
        ["--overlapped-sends"],
        ["--overlapped-sends", "--latency-us", "500"],
        ["--latency-us", "500"],
        ["--hardware", "cpu", "--latency-us", "500"],
        ["--hardware", "cpu", "--latency-us", "500", "--bandwidth-gb-s", "0.001"],
    )
    for network in networks:
        assert main(_arguments(files, "--policy", "blind", *network)) == 0
        times_s.append(float(capsys.readouterr().out.splitlines()[2].split()[1]))
    assert times_s == sorted(times_s)
    assert times_s[0] < times_s[1] and times_s[3] < times_s[4]


def test_a_plan_log_is_simulated_beside_what_it_measured(files, capsys) -> None:
    from dflop_ds.config import BatchSizes, load_ds_config, parse_dflop
    from dflop_ds.scheduling.plan_log import plan_line
    from dflop_ds.scheduling.planner import StepPlanner

    table = ShapeTable.load(files / "shapes.npz")
    ds_config = load_ds_config(files / "plan.json")
    config = parse_dflop(ds_config)
    blind = config.scheduler.model_copy(update={"policy": "blind"})
    planner = StepPlanner.from_config(
        config.model_copy(update={"scheduler": blind}),
        BatchSizes.from_ds_config(ds_config, 2),
        table=table,
        rows=np.arange(64),
        num_replicas=2,
        costs=None,
    )
    names = dict(enumerate(table.sample_ids))
    passes = [("ForwardPass", 0, 0.5, 0.1), ("BackwardPass", 0, 0.7, 0.2)]
    lines = [plan_line(planner.plan(0), names)]
    lines.append(measured_line(0, stage=0, replica=0, step_time_s=9.0, microbatch_s=[0.3], passes=passes))
    log, trace = files / "plans.jsonl", files / "trace.json"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(_arguments(files, "--plan-log", str(log), "--trace", str(trace))) == 0
    found = capsys.readouterr().out.splitlines()[2].split()
    assert main(_arguments(files, "--policy", "blind")) == 0
    alone = capsys.readouterr().out.splitlines()[2].split()
    assert found[1] == alone[1]
    assert found[3] == "9"
    assert found[4].startswith("-")
    events = json.loads(trace.read_text())["traceEvents"]
    names_of = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    bars = [event for event in events if event["ph"] == "X"]
    measured = [event for event in bars if names_of[event["pid"]].startswith("measured")]
    assert [(event["ts"], event["dur"]) for event in measured] == [
        (0.0, pytest.approx(1e5)),
        (pytest.approx(2e5), pytest.approx(2e5)),
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gradient_accumulation_steps": None}, "--num-replicas"),
        ({"dflop": {"parallel": {"pipeline_stages": "auto"}}}, "pipeline_stages as a number"),
        ({"dflop": {"parallel": {"pipeline_stages": 2, "split": "uniform"}}}, "split as a list"),
        ({"dflop": {"parallel": {"pipeline_stages": 2, "split": [3, 3]}}}, "must place all 11 layers"),
        ({"dflop": {"model": {}}}, "--model"),
    ],
)
def test_what_is_missing_is_named(files, change, message, capsys) -> None:
    plan = json.loads((files / "plan.json").read_text())
    for key, value in change.items():
        plan[key] = {**plan[key], **value} if key == "dflop" else value
    (files / "plan.json").write_text(json.dumps({key: value for key, value in plan.items() if value}))
    assert main(_arguments(files)) == 2
    assert message in capsys.readouterr().err


def test_a_profile_of_shared_layers_is_refused_and_another_type_is_noted(files, capsys) -> None:
    profile = json.loads((files / "profile.json").read_text())
    for change, code in (({"tensor_parallel_degree": 2}, 2), ({"dtype": "bfloat16"}, 0)):
        fingerprint = {**profile["fingerprint"], **change}
        (files / "profile.json").write_text(json.dumps({**profile, "fingerprint": fingerprint}))
        assert main(_arguments(files)) == code
        printed = capsys.readouterr()
        if code:
            assert "found one of tensor-parallel degree 2" in printed.err
        else:
            assert "layer times are of bfloat16, the configuration trains in float32" in printed.out


def test_wrong_arguments_are_named_before_the_work(files, capsys) -> None:
    assert main([*_arguments(files), "--trace-step", "2"]) == 2
    assert "--trace-step must be below --steps, found 2 and 2" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([*_arguments(files), "--steps", "0"])
    assert "argument --steps: must be a whole number of at least 1" in capsys.readouterr().err
    for option in ("--trace", "--png"):
        assert main([*_arguments(files), option, str(files / "plan.json" / "out")]) == 2
        printed = capsys.readouterr()
        assert f"{option} must be a file that can be written" in printed.err
        assert not printed.out


def test_frozen_parts_have_less_to_do(files, tiny_demo, capsys) -> None:
    # The demo model: embedding, 2 blocks and projector in stage 0, embedding, 2 blocks, norm and head in 1.
    plan = json.loads((files / "plan.json").read_text())
    plan["dflop"]["model"] = {"path": str(tiny_demo.model_dir)}
    profile = json.loads((files / "profile.json").read_text())
    model_config = json.loads((tiny_demo.model_dir / "config.json").read_text())
    profile["fingerprint"]["model_hash"] = model_hash(model_config)
    (files / "profile.json").write_text(json.dumps(profile))
    plan["dflop"]["parallel"]["split"] = [4, 5]
    busy_s = []
    lora = {"match": ["llm"], "rank": 1}
    for finetune in ({}, {"freeze": ["encoder", "projector"]}, {"lora": lora}):
        plan["dflop"]["finetune"] = finetune
        (files / "plan.json").write_text(json.dumps(plan))
        assert main(_arguments(files, "--policy", "blind")) == 0
        lines = capsys.readouterr().out.splitlines()
        table = lines[lines.index("") + 2 :]
        busy_s.append([float(line.split()[2]) for line in table[:2]])
    # A backward takes twice a forward here, and a stage without trained parameters has none.
    assert busy_s[1][0] == pytest.approx(busy_s[0][0] / 3, rel=0.01)
    assert busy_s[1][1] <= busy_s[0][1]
    assert busy_s[2][0] == pytest.approx(busy_s[0][0] / 3, rel=0.01)


def test_the_buffer_of_zero_1_has_the_configured_size(files, capsys) -> None:
    plan = json.loads((files / "plan.json").read_text())
    peaks_mb = []
    for num_values in (10**6, 10**8):
        plan["zero_optimization"] = {"stage": 1, "reduce_bucket_size": num_values}
        (files / "plan.json").write_text(json.dumps(plan))
        assert main(_arguments(files, "--policy", "blind")) == 0
        lines = capsys.readouterr().out.splitlines()
        peaks_mb.append([float(line.split()[4]) for line in lines[lines.index("") + 2 :][:2]])
    # fp32: 4 bytes a value.
    assert np.subtract(peaks_mb[1], peaks_mb[0]) == pytest.approx([396.0, 396.0], abs=0.2)


def test_frozen_weights_are_not_reduced(files, tiny_demo, capsys) -> None:
    plan = json.loads((files / "plan.json").read_text())
    plan["dflop"]["model"] = {"path": str(tiny_demo.model_dir)}
    plan["dflop"]["parallel"]["split"] = [4, 5]
    profile = json.loads((files / "profile.json").read_text())
    model_config = json.loads((tiny_demo.model_dir / "config.json").read_text())
    profile["fingerprint"]["model_hash"] = model_hash(model_config)
    profile["parameters"] = dict.fromkeys(TILED_KINDS, 10**10)
    (files / "profile.json").write_text(json.dumps(profile))
    steps_s = {}
    for frozen in ("encoder", "llm.embed"):
        plan["dflop"]["finetune"] = {"freeze": ["encoder", frozen]}
        (files / "plan.json").write_text(json.dumps(plan))
        assert main(_arguments(files, "--policy", "blind", "--hardware", "cpu")) == 0
        steps_s[frozen] = float(capsys.readouterr().out.splitlines()[2].split()[1])
    # Stage 1 has 5 layers of 10^10 parameters, or 4 without the embedding; passes take next to nothing.
    assert steps_s["llm.embed"] == pytest.approx(steps_s["encoder"] * 4 / 5, rel=0.02)


def test_checkpointing_that_was_not_profiled_adds_a_forward(files, capsys) -> None:
    plan = json.loads((files / "plan.json").read_text())
    plan["dflop"]["scheduler"]["policy"] = "blind"
    busy_s = []
    for checkpointing in (False, True):
        plan["dflop"]["parallel"]["activation_checkpointing"] = checkpointing
        (files / "plan.json").write_text(json.dumps(plan))
        assert main(_arguments(files)) == 0
        lines = capsys.readouterr().out.splitlines()
        busy_s.append([float(line.split()[2]) for line in lines[lines.index("") + 2 :][:2]])
    # 1 forward and 2 backward; then 1 forward and 2 + 1.
    assert busy_s[1] == pytest.approx([seconds * 4 / 3 for seconds in busy_s[0]], rel=0.01)


def test_what_the_planner_writes_can_be_simulated(files, capsys) -> None:
    best = files / "best.json"
    given = ["--shapes", str(files / "shapes.npz"), "--profile", str(files / "profile.json")]
    given += ["--hardware", "cpu"]
    assert main(["plan", str(files / "plan.json"), "--gpus", "4", *given, "--out", str(best)]) == 0
    chosen = json.loads(best.read_text())
    capsys.readouterr()
    assert main(["simulate", str(best), *given, "--steps", "1"]) == 0
    stages = chosen["dflop"]["parallel"]["pipeline_stages"]
    assert capsys.readouterr().out.startswith(f"PREDICTED steps: {stages} stages x {4 // stages} replicas")
