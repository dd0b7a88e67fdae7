import json

import numpy as np
import pytest

from dflop_ds.errors import SchedulingError
from dflop_ds.simulation.step import simulate_steps
from dflop_ds.simulation.trace import SCHEMA_VERSION, TraceEvent, step_events, write_trace
from dflop_ds.simulation.work import ModuleWork


def test_a_trace_names_replicas_and_stages(tmp_path):
    path = tmp_path / "step.json"
    events = [
        TraceEvent("forward 0", 1, 0, 0, 0.5, 0.25, {"num_samples": 3}),
        TraceEvent("backward 4", 0, 2, 4, 1.0, 0.0),
    ]
    write_trace(path, events, title="simulated")
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["otherData"] == {"schema_version": SCHEMA_VERSION, "title": "simulated"}
    bars = [each for each in document["traceEvents"] if each["ph"] == "X"]
    assert bars[0] == {
        "ph": "X",
        "name": "forward 0",
        "cat": "forward",
        "pid": 0,
        "tid": 1,
        "ts": 0.5e6,
        "dur": 0.25e6,
        "args": {"microbatch": 0, "num_samples": 3},
    }
    names = {
        (each["name"], each["pid"], each.get("tid")): each["args"].get("name")
        for each in document["traceEvents"]
        if each["ph"] == "M"
    }
    assert names["process_name", 2, None] == "replica 2"
    assert names["thread_name", 0, 1] == "stage 1"


def test_a_simulated_step_becomes_bars():
    # 2 replicas x 2 stages x 3 microbatches of 1 s forward and 2 s backward: (3 + 1) x 3 s.
    shape = (1, 2, 2, 3)
    events = step_events(simulate_steps(ModuleWork(np.ones(shape), np.full(shape, 2.0))))
    assert len(events) == 24
    assert sum(event.duration_s for event in events) == pytest.approx(36.0)
    assert max(event.start_s + event.duration_s for event in events) == pytest.approx(12.0)
    assert {(event.replica, event.stage) for event in events} == {(0, 0), (0, 1), (1, 0), (1, 1)}


@pytest.mark.parametrize(
    "event",
    [
        TraceEvent("bad", 0, 0, 0, float("nan"), 1.0),
        TraceEvent("bad", 0, 0, 0, 0.0, -1.0),
        TraceEvent("bad", 0, 0, 0, 0.0, 1.0, {"value": float("inf")}),
        TraceEvent("bad", 0, 0, 0, 0.0, 1.0, {"value": np.int64(3)}),
    ],
)
def test_what_is_not_json_is_refused_before_writing(tmp_path, event):
    path = tmp_path / "step.json"
    with pytest.raises(SchedulingError):
        write_trace(path, [event], title="t")
    assert not path.exists()
