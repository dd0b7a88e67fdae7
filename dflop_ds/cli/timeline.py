"""A step as a picture: one row per rank, predicted and measured on one time axis."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dflop_ds.simulation.trace import TraceEvent

_COLOURS = {"forward": "#4c78a8", "backward": "#f58518"}
_SHARE_OF_A_DIGIT = 0.0035  # of the width of the time axis; narrower passes have no number


def draw_timeline(path: Path, events: Sequence[TraceEvent], title: str) -> None:
    """Draw forwards and backwards of one step.

    Parameters
    ----------
    path : Path
        PNG to write.
    events : sequence of TraceEvent
        Named "forward ..." or "backward ...".
    title : str
        Says whether times are predicted or measured.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = sorted({(event.replica, event.stage, event.source) for event in events}, key=_row_order)
    figure = Figure(figsize=(14, 1.6 + 0.28 * len(rows)))
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    position = {row: index for index, row in enumerate(rows)}
    narrowest_s = _SHARE_OF_A_DIGIT * max(event.start_s + event.duration_s for event in events)
    for event in events:
        row = position[event.replica, event.stage, event.source]
        axis.barh(
            row,
            event.duration_s,
            left=event.start_s,
            color=_COLOURS[event.name.split(" ", maxsplit=1)[0]],
            alpha=1.0 if event.source != "measured" else 0.6,
            edgecolor="white",
            linewidth=0.4,
        )
        if event.duration_s >= narrowest_s * len(str(event.microbatch)):
            middle_s = event.start_s + event.duration_s / 2
            axis.text(middle_s, row, str(event.microbatch), ha="center", va="center", fontsize=5)
    labels = [f"replica {replica} stage {stage} {source}".rstrip() for replica, stage, source in rows]
    axis.set_yticks(range(len(rows)), labels, fontsize=6)
    axis.invert_yaxis()
    axis.set_xlabel("seconds (blue: forward, orange: backward; numbers: microbatch)")
    axis.set_title(title, fontsize=10, loc="left")
    figure.tight_layout()
    figure.savefig(path, dpi=130, format="png")


def _row_order(row: tuple[int, int, str]) -> tuple[int, int, bool]:
    replica, stage, source = row
    return replica, stage, source == "measured"
