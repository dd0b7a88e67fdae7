"""Numbers for ``Trainer.log``: means over the steps since the last record."""

from __future__ import annotations

from collections import deque

import numpy as np

from dflop_ds.scheduling.rank_planner import PlannedBins

PREFIX = "dflop/"
_RATIOS_KEPT = 16


class StepMetrics:
    """Collects what each step was predicted to take and took."""

    def __init__(self) -> None:
        self._rows: list[dict[str, float]] = []
        self._ratios: deque[float] = deque(maxlen=_RATIOS_KEPT)
        self.num_fallbacks = 0

    def add(self, planned: PlannedBins, measured_s: float) -> None:
        """Note a step.

        Parameters
        ----------
        planned : PlannedBins
        measured_s : float
            From the request for its data to the end of the step.
        """
        found = planned.found
        row = {
            "padding_share": found.padding_share,
            "useful_tokens_per_s": planned.useful_tokens / max(measured_s, 1e-9),
            "measured_step_s": measured_s,
            "planning_s": found.planning_s,
        }
        if found.predicted_s and found.blind_s and found.imbalance is not None:
            # Predictions leave out optimizer and loading; the median ratio of past steps makes up for them.
            ratio = float(np.median(self._ratios)) if self._ratios else 1.0
            row["imbalance"] = found.imbalance
            row["predicted_step_s"] = found.predicted_s * ratio
            row["gain_estimate"] = found.blind_s / found.predicted_s
            self._ratios.append(measured_s / found.predicted_s)
        self.num_fallbacks += found.fallback_reason is not None
        self._rows.append(row)

    def take(self) -> dict[str, float]:
        """Means since the last call, and the number of fallbacks of the run; empty without steps."""
        rows, self._rows = self._rows, []
        if not rows:
            return {}
        names = sorted({name for row in rows for name in row})
        means = {PREFIX + name: float(np.mean([row[name] for row in rows if name in row])) for name in names}
        return means | {PREFIX + "fallbacks": float(self.num_fallbacks)}
