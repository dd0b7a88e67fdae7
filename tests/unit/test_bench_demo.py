"""What the demo reports of measured steps."""

from benchmarks.demo import WARMUP_STEPS, sizes_of_stages, summarise, typical_step
from benchmarks.timeline import draw


def test_the_figure_shows_the_step_closest_to_the_medians():
    warm_up = [9.0] * WARMUP_STEPS
    # Medians 2 and 4. Of the steps 0 and 3 fit one run, 1 fits none, 2 fits both.
    blind, aware = [2.0, 6.0, 2.0, 1.0], [20.0, 9.0, 4.0, 4.0]
    assert typical_step([warm_up + blind, warm_up + aware]) == WARMUP_STEPS + 2


def test_one_slow_step_moves_neither_the_step_time_nor_the_rate():
    num_steps = WARMUP_STEPS + 3
    row = summarise(
        {
            "step_times_s": [1.0] * WARMUP_STEPS + [2.0, 2.0, 50.0],
            "useful_tokens": [100] * num_steps,
            "bubble_fractions": [0.1] * num_steps,
            "imbalances": [1.0] * num_steps,
            "padding_share": 0.0,
            "losses": [2.0] * num_steps,
            "stages": [0, 12, 19],
        }
    )
    assert row["median_step_time_s"] == 2.0
    assert row["useful_tokens_per_s"] == 50.0
    assert sizes_of_stages(row["stages"]) == [12, 7]


def test_passes_too_short_for_their_number_have_none(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("matplotlib.axes.Axes.text", lambda axis, x, y, text, **rest: drawn.append(text))
    passes = [[0, "ForwardPass", 11, 0.0, 1.0], [0, "BackwardPass", 7, 1.0, 0.001]]
    draw(tmp_path / "steps.png", [("run", passes)], "title")
    assert drawn == ["11"]
    assert (tmp_path / "steps.png").stat().st_size > 0
