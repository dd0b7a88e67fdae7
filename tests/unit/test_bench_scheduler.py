"""The scheduler benchmark: its shipped traces, and a small run through its command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import instances, scheduler


@pytest.mark.parametrize("family", scheduler.FAMILIES)
def test_every_family_is_drawn_the_same_again(family: str) -> None:
    first, second = instances.draw(family, 64, 3), instances.draw(family, 64, 3)
    assert first.llm_tokens.tolist() == second.llm_tokens.tolist()
    assert len(first) == 64
    assert (first.llm_tokens > 0).all()
    assert (instances.module_costs_s(first)[:, 1] > 0).all()


def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    trace = tmp_path / "mine.csv"
    trace.write_text(
        "kind,width,height,num_images,duration_s,text_tokens\n"
        "image,640,480,1,,50\nimage,640,480,3,,20\nvideo,,,,12.5,40\ntext,,,,,900\n"
    )
    out = tmp_path / "out.json"
    options = ["--num-samples", "32", "--num-bins", "16", "--time-limit-s", "0.1", "--num-seeds", "1"]
    monkeypatch.setattr("sys.argv", ["x", "--json", str(out), "--trace", str(trace), *options])
    assert scheduler.main() == 0
    content = json.loads(out.read_text())
    methods = content["cases"][0]["methods"]
    assert content["cases"][0]["ours_never_above_lpt"]
    assert {"random", "rebalance", "karmarkar_karp", "lpt", "ours"} <= set(methods)
    assert methods["ours"]["ratio"] <= methods["lpt"]["ratio"]
    printed = capsys.readouterr().out
    assert "SIMULATED" in printed
    assert "seeds 0..0" in printed
