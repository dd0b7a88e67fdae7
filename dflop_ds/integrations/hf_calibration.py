"""Microbatch costs measured while training: forward times of the first steps, and a fit."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
import torch

from dflop_ds.cost.microbatch_cost import MicrobatchCost, MicrobatchSizes, fit_microbatch_cost
from dflop_ds.errors import CostModelError
from dflop_ds.flops import BACKWARD_RATIO

logger = logging.getLogger(__name__)

_ENCODER_NAMES = ("vision", "visual", "audio", "image_encoder", "multi_modal_projector")
_NUM_UNMEASURED = 1
_MAX_EXTENSIONS = 4


class ForwardTimer:
    """Seconds of each forward pass of a model in training, by hooks on the bare model.

    Wrappers (DDP, DeepSpeed) wait for other ranks before they call the model; that is left out. On CUDA,
    events are recorded and read at the end of the step, without stopping the device in between.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._marks: list[tuple[Any, Any]] = []
        self._start: Any = None
        self._handles = [
            model.register_forward_pre_hook(self._before),
            model.register_forward_hook(self._after),
        ]

    def take(self) -> list[float]:
        """Seconds of the passes since the last call."""
        marks, self._marks = self._marks, []
        if marks and isinstance(marks[0][0], torch.cuda.Event):
            torch.cuda.synchronize()
            return [start.elapsed_time(end) / 1e3 for start, end in marks]
        return [end - start for start, end in marks]

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _before(self, module: torch.nn.Module, inputs: Any) -> None:
        self._start = _now() if module.training else None

    def _after(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if self._start is not None:
            self._marks.append((self._start, _now()))
            self._start = None


class Calibration:
    """Collects measured microbatches of all ranks until costs can be fitted.

    Parameters
    ----------
    num_steps : int
        Steps to measure; the first step of a run is not measured. Extended up to four times where they do not
        suffice, for example because all samples had one shape.
    waits_for_slowest : bool
        Ranks wait for each other inside a forward pass (ZeRO 3).
    llm_factor, encoder_factor : float
        Forward plus backward over forward time.

    Attributes
    ----------
    has_given_up : bool
        Whether measuring has failed for good.
    """

    def __init__(
        self, num_steps: int, *, waits_for_slowest: bool, llm_factor: float, encoder_factor: float
    ) -> None:
        self._num_steps, self._waits = num_steps, waits_for_slowest
        self._factors = {"llm": llm_factor, "encoder": encoder_factor}
        self._num_seen, self._num_extensions, self._num_missing = 0, 0, 0
        self._sizes: list[np.ndarray] = []
        self._measured_s: list[np.ndarray] = []
        self.has_given_up = False

    def add(self, sizes: MicrobatchSizes, measured_s: np.ndarray) -> MicrobatchCost | None:
        """Add a step; returns costs once they can be fitted.

        Parameters
        ----------
        sizes : MicrobatchSizes, shape (num_slots, num_ranks)
        measured_s : ndarray, shape (num_slots, num_ranks)
            Forward seconds, the same numbers on every rank.
        """
        self._num_seen += 1
        if self._num_seen <= _NUM_UNMEASURED:
            return None
        if not (np.isfinite(measured_s) & (measured_s > 0)).all():
            self._num_missing += 1
            if self._num_missing == self._num_steps * _MAX_EXTENSIONS:
                self._give_up("forward passes of the model were not seen, once or more per microbatch")
            return None
        self._sizes.append(np.stack([sizes.tokens, sizes.squared_tokens, sizes.encoder_inputs]))
        self._measured_s.append(measured_s)
        if len(self._measured_s) < self._num_steps * (1 + self._num_extensions):
            return None
        try:
            rows = MicrobatchSizes(*np.concatenate(self._sizes, axis=1))
            cost = fit_microbatch_cost(rows, np.concatenate(self._measured_s), waits_for_slowest=self._waits)
        except CostModelError as error:
            self._num_extensions += 1
            if self._num_extensions == _MAX_EXTENSIONS:
                self._give_up(error)
            return None
        return cost.scaled(**self._factors)

    def _give_up(self, reason: object) -> None:
        self.has_given_up = True
        logger.warning("no costs could be measured, the data-blind order stays: %s", reason)


def backward_factors(model: torch.nn.Module) -> tuple[float, float]:
    """Forward plus backward over forward time, of the LLM and of the encoder.

    A layer with trained weights computes two gradients per product, one with frozen weights computes that of
    its input only, and a frozen encoder computes none.
    """
    trained = {True: 0, False: 0}
    total = {True: 0, False: 0}
    for name, parameter in model.named_parameters():
        is_encoder = any(part in name for part in _ENCODER_NAMES)
        number = getattr(parameter, "ds_numel", parameter.numel())
        total[is_encoder] += number
        trained[is_encoder] += number if parameter.requires_grad else 0
    mostly = {part: 2 * trained[part] > total[part] for part in total}
    llm = 1.0 + BACKWARD_RATIO * (1.0 if mostly[False] else 0.5)
    encoder = 1.0 + BACKWARD_RATIO * (1.0 if mostly[True] else 0.5 if trained[True] else 0.0)
    return llm, encoder


def _now() -> Any:
    if torch.cuda.is_available():
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    return time.perf_counter()
