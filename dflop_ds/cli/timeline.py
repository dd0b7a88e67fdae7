"""A step as a picture: one row per rank, predicted and measured on one time axis."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from pathlib import Path

from dflop_ds.simulation.trace import TraceEvent

_COLOURS = {"forward": "#4c78a8", "backward": "#f58518"}
_MAX_ROWS = 128
_MAX_LABELS = 1200
_SHARE_OF_A_DIGIT = 0.0035  # of the width of the time axis; narrower passes have no number


def draw_timeline(path: Path, events: Sequence[TraceEvent], title: str) -> None:
    """Draw forwards and backwards of one step.

    Where there are too many ranks for one picture, those of the replicas that end last are drawn.

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

    shown = slowest_replicas(events)
    num_replicas = len({event.replica for event in events})
    if len(shown) < num_replicas:
        title += f"; the {len(shown)} of {num_replicas} replicas that end last"
    events = [event for event in events if event.replica in shown]
    rows = sorted({(event.replica, event.stage, event.source) for event in events}, key=_row_order)
    several_sources = len({source for _, _, source in rows}) > 1
    figure = Figure(figsize=(14, 1.6 + 0.28 * len(rows)))
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    position = {row: index for index, row in enumerate(rows)}
    bars = collections.defaultdict(list)
    for event in events:
        row = position[event.replica, event.stage, event.source]
        bars[row, event.name.split(" ", maxsplit=1)[0], event.source].append(event)
    for (row, direction, source), drawn in bars.items():
        axis.broken_barh(
            [(event.start_s, event.duration_s) for event in drawn],
            (row - 0.4, 0.8),
            facecolors=_COLOURS[direction],
            alpha=1.0 if source != "measured" else 0.6,
            edgecolor="white",
            linewidth=0.4,
        )
    digit_s = _SHARE_OF_A_DIGIT * max(event.start_s + event.duration_s for event in events)
    wide = [event for event in events if event.duration_s >= digit_s * len(str(event.microbatch))]
    for event in wide if len(wide) <= _MAX_LABELS else []:
        row = position[event.replica, event.stage, event.source]
        middle_s = event.start_s + event.duration_s / 2
        axis.text(middle_s, row, str(event.microbatch), ha="center", va="center", fontsize=5)
    labels = [f"replica {replica} stage {stage}" for replica, stage, _ in rows]
    if several_sources:
        labels = [f"{label} {source}" for label, (_, _, source) in zip(labels, rows, strict=True)]
    axis.set_yticks(range(len(rows)), labels, fontsize=6)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_xlabel("seconds (blue: forward, orange: backward; numbers: microbatch)")
    axis.set_title(title, fontsize=10, loc="left")
    figure.tight_layout()
    figure.savefig(path, dpi=130, format="png")


def slowest_replicas(events: Sequence[TraceEvent]) -> set[int]:
    """Replicas that end last, as many as there is room for."""
    ends_s: dict[int, float] = {}
    for event in events:
        ends_s[event.replica] = max(ends_s.get(event.replica, 0.0), event.start_s + event.duration_s)
    rows_each = len({(event.stage, event.source) for event in events})
    slowest = sorted(ends_s, key=lambda replica: (-ends_s[replica], replica))
    return set(slowest[: max(1, _MAX_ROWS // max(1, rows_each))])


def _row_order(row: tuple[int, int, str]) -> tuple[int, int, bool]:
    replica, stage, source = row
    return replica, stage, source == "measured"
