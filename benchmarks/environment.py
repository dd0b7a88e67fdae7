"""What a result was measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

_PACKAGES = ("dflop_ds", "torch", "deepspeed", "transformers", "scikit-learn", "ortools", "numpy")


def describe() -> dict[str, Any]:
    """Hardware, versions and thread settings of this machine."""
    return {
        "cpu": _cpu_model(),
        "num_cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
