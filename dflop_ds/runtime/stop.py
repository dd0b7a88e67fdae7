"""Ending a run early: signals on any rank, and one step at which all ranks agree to stop."""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Callable, Iterator
from typing import Any

import torch
from deepspeed import comm as dist

from dflop_ds.runtime import compat, distributed

logger = logging.getLogger(__name__)

_KEY = "dflop_ds/stop"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """A wish to stop that any rank may have.

    Rank 0 sends the decision along with the next plan, so that no step needs a collective of its own for
    it; the other ranks tell rank 0 through the key-value store of the process group.
    """

    def __init__(self) -> None:
        self.requested = False
        self._published = False

    def request(self) -> None:
        """Ask for an end after the running step; may be called from a signal handler."""
        self.requested = True

    def publish(self) -> None:
        """Tell rank 0 of this rank's wish; once per step."""
        if self.requested and not self._published and dist.get_rank() != 0:
            compat.process_group_store().set(_KEY, "1")
            self._published = True

    def seen(self) -> bool:
        """Whether any rank is known to want an end (rank 0)."""
        if not self.requested and dist.get_world_size() > 1:
            self.requested = bool(compat.process_group_store().check([_KEY]))
        return self.requested

    def agree(self) -> bool:
        """Whether any rank wants an end by now; a collective call, for work without plans."""
        wish = torch.tensor([self.requested], dtype=torch.int64, device=distributed.device())
        dist.all_reduce(wish, op=dist.ReduceOp.MAX)
        self.requested = bool(wish.item())
        return self.requested


@contextlib.contextmanager
def on_signals(request: Callable[[], None]) -> Iterator[None]:
    """While active, SIGINT and SIGTERM ask for an end instead of ending the process.

    A launcher may send several signals for one Ctrl-C, so further ones are ignored.

    Parameters
    ----------
    request : callable
        E.g. ``engine.request_stop``.
    """

    def handle(number: int, frame: Any) -> None:
        logger.info("%s: training stops after this step", signal.Signals(number).name)
        request()

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave_signals_to_rank(worker_id: int) -> None:
    """Initialise a data worker: where its rank handles signals, the worker works on until told to end.

    Signals reach the whole process group, and the running step still needs its samples.
    """
    for number in _SIGNALS:
        if callable(signal.getsignal(number)) and signal.getsignal(number) is not signal.default_int_handler:
            signal.signal(number, signal.SIG_IGN)
