"""The exception tree of dflop_ds.

Every message states what must hold, the value that was found and the remedy.
"""

from __future__ import annotations


class DflopError(Exception):
    """Base class of every error that dflop_ds raises on purpose."""


class ConfigError(DflopError):
    """A configuration value is missing, unknown, contradictory or out of range."""


class UnsupportedVersionError(DflopError):
    """An installed package is outside the range that dflop_ds supports."""


class EnvironmentProblem(DflopError):
    """The machine is not ready: a stale build lock, a missing compiler, a missing package."""


class DataError(DflopError):
    """A sample, or a media file that it names, cannot be used.

    Parameters
    ----------
    message : str
        What must hold, the value found and the remedy.
    sample_id : str, optional
        Identifier of the offending sample.
    """

    def __init__(self, message: str, sample_id: str | None = None) -> None:
        super().__init__(message if sample_id is None else f"sample {sample_id!r}: {message}")
        self.sample_id = sample_id


class ModelError(DflopError):
    """A model configuration or checkpoint that the pipeline layers cannot represent."""


class CostModelError(DflopError):
    """A profile or cost model is empty, damaged, of another schema or of another model."""


class SchedulingError(DflopError):
    """A scheduling problem is malformed: a negative, NaN or infinite cost, a size mismatch."""


class InfeasibleError(SchedulingError):
    """No assignment satisfies the hard limits.

    Parameters
    ----------
    message : str
        Which limit cannot hold and what would help.
    min_bins : int, optional
        Smallest number of bins that is known to work, when more bins would help.
    """

    def __init__(self, message: str, min_bins: int | None = None) -> None:
        super().__init__(message)
        self.min_bins = min_bins


class PlanError(DflopError):
    """Ranks disagree about a plan, or a plan does not describe the data that arrived."""
