"""Timelines of pipeline steps as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

_SHARE_OF_A_DIGIT = 0.004  # of the width of the time axis; narrower passes have no number
_COLOURS = {"ForwardPass": "#4c78a8", "BackwardPass": "#f58518"}


def draw(path: Path, runs: Sequence[tuple[str, Sequence[Sequence[Any]]]], title: str) -> None:
    """Draw one row of axes per run, on one common time axis.

    Parameters
    ----------
    path : Path
        PNG to write.
    runs : sequence of (title, passes)
        A pass is ``(stage, instruction name, microbatch, start_s, duration_s)``.
    title : str
    """
    figure, axes = plt.subplots(len(runs), 1, figsize=(14, 1.6 * len(runs) + 1.2), sharex=True, squeeze=False)
    narrowest_s = _SHARE_OF_A_DIGIT * max(
        max(p[3] + p[4] for p in passes) - min(p[3] for p in passes) for _, passes in runs
    )
    for axis, (label, passes) in zip(axes[:, 0], runs, strict=True):
        origin_s = min(p[3] for p in passes)
        for stage, name, microbatch, start_s, duration_s in passes:
            axis.barh(
                stage,
                duration_s,
                left=start_s - origin_s,
                color=_COLOURS[name],
                edgecolor="white",
                linewidth=0.6,
            )
            if duration_s >= narrowest_s * len(str(microbatch)):
                axis.text(
                    start_s - origin_s + duration_s / 2,
                    stage,
                    str(microbatch),
                    ha="center",
                    va="center",
                    fontsize=6,
                )
        axis.set_yticks(sorted({p[0] for p in passes}))
        axis.set_ylabel("stage")
        axis.invert_yaxis()
        axis.set_title(label, fontsize=9, loc="left")
    axes[-1, 0].set_xlabel("seconds (blue: forward, orange: backward; numbers: microbatch)")
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
