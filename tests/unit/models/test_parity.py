"""Logits and gradients of the pipeline layers equal those of ``transformers`` with the same weights."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from benchmarks.parity import __main__ as report
from benchmarks.parity.compare import TOLERANCE, Pair
from benchmarks.parity.variants import VARIANTS

BY_NAME = {variant.name: variant for variant in VARIANTS}


@functools.cache
def _pair(name: str) -> Pair:
    return Pair(BY_NAME[name])


@pytest.mark.parametrize(
    ("variant", "case"), [(variant.name, case) for variant in VARIANTS for case in variant.cases]
)
def test_logits_and_gradients_equal_transformers(variant: str, case: str) -> None:
    found = _pair(variant).compare(case)
    assert found.logit_std > 0.1
    assert found.logits <= TOLERANCE
    assert found.gradient <= TOLERANCE, found.parameter


def test_a_wrong_weight_is_noticed() -> None:
    """The comparison itself, on a model of which one weight was changed a little."""
    pair = Pair(VARIANTS[0])
    parameter = next(pair.layers[-1].parameters())
    parameter.data[0, 0] += 0.01
    assert not pair.compare("text").holds


def test_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "parity.json"
    name = VARIANTS[0].name
    monkeypatch.setattr(report, "VARIANTS", VARIANTS[:1])
    monkeypatch.setattr("sys.argv", ["x", "--json", str(out), "--only", name])
    assert report.main() == 0
    content = json.loads(out.read_text())
    assert content["schema_version"] == 1
    assert {row["case"] for row in content["rows"]} == set(BY_NAME[name].cases)
    assert content["summary"]["all_hold"]
    assert content["summary"]["max_logit_difference"] <= TOLERANCE
    assert name in capsys.readouterr().out
