"""Figures of profiles: histograms of shapes, and predicted against measured times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dflop_ds.cost.evaluation import HeldOut
from dflop_ds.shapes import ShapeTable

_BINS = 40
_COLUMNS = 3


def draw_histograms(path: str | Path, table: ShapeTable) -> None:
    """One histogram per column of a shape table, as PNG."""
    columns: dict[str, npt.NDArray[Any]] = {
        "tiles": table.num_tiles,
        "frames": table.num_frames,
        "encoder inputs": table.encoder_inputs,
        "text tokens": table.text_tokens,
        "LLM tokens": table.llm_tokens,
        "supervised tokens": table.target_tokens,
    }
    if table.num_patches.any():
        columns["patches"] = table.num_patches
    if table.audio_s.any():
        columns["seconds of audio"] = table.audio_s
    figure, axes = _axes(len(columns))
    for axis, (name, column) in zip(axes, columns.items(), strict=False):
        axis.hist(column, bins=_BINS, color="tab:blue")
        axis.set_xlabel(f"{name} per sample")
        axis.set_ylabel("samples")
        axis.set_yscale("log")
    _save(figure, axes, len(columns), path, f"Shapes of {len(table)} samples, from headers")


def draw_scatter(path: str | Path, held_out: HeldOut) -> None:
    """Predicted against measured milliseconds of every held-out shape, one panel per target, as PNG."""
    figure, axes = _axes(len(held_out.measured_s))
    for axis, (target, measured_s) in zip(axes, held_out.measured_s.items(), strict=False):
        positive = measured_s > 0
        for name, predictions in held_out.predicted_s.items():
            axis.scatter(
                measured_s[positive] * 1e3,
                predictions[target][positive] * 1e3,
                s=14 if name == "cost model" else 6,
                label=name,
                alpha=0.7,
                zorder=3 if name == "cost model" else 2,
            )
        ends = np.array([measured_s[positive].min(), measured_s[positive].max()]) * 1e3
        axis.plot(ends, ends, color="black", linewidth=0.8)
        axis.set(title=target, xlabel="measured ms", ylabel="predicted ms", xscale="log", yscale="log")
    axes[0].legend(fontsize=7)
    title = "Forward plus backward time of shapes left out of the fit (stages added up from layers)"
    _save(figure, axes, len(held_out.measured_s), path, title)


def _axes(number: int) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = -(-number // _COLUMNS)
    figure = Figure(figsize=(4.2 * _COLUMNS, 3.2 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, _COLUMNS, squeeze=False).flat)


def _save(figure: Any, axes: list[Any], number: int, path: str | Path, title: str) -> None:
    for axis in axes[number:]:
        axis.set_visible(False)
    figure.suptitle(title)
    figure.savefig(path, dpi=100, format="png")
