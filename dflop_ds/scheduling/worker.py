"""The solver process: ``python -m dflop_ds.scheduling.worker``, talked to through its standard pipes.

The first frame is a planner; every further frame asks for the plan of one step. The process ends with its
input, or with its parent.
"""

from __future__ import annotations

import os
import sys
import threading
import time

from dflop_ds.scheduling import transport

_PARENT_CHECK_S = 1.0


def main() -> int:
    """Answer until the input ends."""
    requests = sys.stdin.buffer
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # Whatever prints must not get between the frames.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    first = transport.read_frame(requests)
    if first is None:
        return 0
    planner = transport.unpack_planner(first)
    while (request := transport.read_frame(requests)) is not None:
        step = int(transport.unpack(request)[0]["step"])
        try:
            answer = transport.pack_planned(planner.plan(step))
        except Exception as error:
            answer = transport.pack({"error": f"{type(error).__name__}: {error}"}, {})
        try:
            transport.write_frame(answers, answer)
        except BrokenPipeError:
            return 0
    return 0


def _end_with_parent(parent: int) -> None:
    """End this process when its parent has ended, even if the pipe was inherited by others."""
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
