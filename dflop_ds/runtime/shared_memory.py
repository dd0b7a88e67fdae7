"""Shared memory that DeepSpeed's CPU op creates and never removes.

Every rank of a CPU run makes a segment of 66 MiB in ``/dev/shm``, which outlives the process: some
hundred launches fill the machine's memory. Once all ranks have opened each other's segments their
names can go; the mapped memory stays valid until the processes end, however they end.
"""

from __future__ import annotations

import os
from pathlib import Path

from deepspeed import comm as dist

_FOLDER = Path("/dev/shm")
_PREFIX = "deepspeed_allreduce_buffer"


def forget_segment_names() -> None:
    """Remove the name of this rank's segment, if it has one; a collective call.

    All ranks must have initialised ``deepspeed.comm``.
    """
    dist.barrier()
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    name = f"{_PREFIX}_{os.getuid()}_{address}_{port}_{dist.get_rank()}"
    (_FOLDER / name).unlink(missing_ok=True)
