"""State of the random number generators of a rank, as JSON."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator


def capture(device: torch.device) -> dict[str, Any]:
    """State of Python's, NumPy's and torch's global generators, and of the device's."""
    version, words, cached = random.getstate()
    keys = np.random.get_state(legacy=False)
    keys["state"]["key"] = keys["state"]["key"].tolist()
    state = {"python": [version, list(words), cached], "numpy": keys, "torch": _text(torch.get_rng_state())}
    if device.type != "cpu":
        state[device.type] = _text(get_accelerator().get_rng_state())
    return state


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Set the generators to what :func:`capture` found; a device of another kind keeps its own."""
    version, words, cached = state["python"]
    random.setstate((version, tuple(words), cached))
    numpy_state = state["numpy"]
    key = np.array(numpy_state["state"]["key"], dtype=np.uint32)
    np.random.set_state({**numpy_state, "state": {**numpy_state["state"], "key": key}})
    torch.set_rng_state(_tensor(state["torch"]))
    if device.type != "cpu" and device.type in state:
        get_accelerator().set_rng_state(_tensor(state[device.type]))


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
