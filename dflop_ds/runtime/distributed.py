"""Small collectives on bytes, without pickle, and errors that reach every rank."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from dflop_ds import errors
from dflop_ds.errors import DflopError

logger = logging.getLogger(__name__)

_OK, _FAILED = b"+", b"-"


def start(**options: Any) -> None:
    """Join the process group that the launcher describes, and take this rank's own device.

    DeepSpeed takes the device only when it builds an engine; until then every rank of a machine would
    run its collectives on the first one, which NCCL refuses.

    Parameters
    ----------
    options
        Of ``deepspeed.init_distributed``, which leaves an existing group as it is.
    """
    share_cores()
    deepspeed.init_distributed(dist_backend=get_accelerator().communication_backend_name(), **options)
    if "LOCAL_RANK" in os.environ:
        get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))


def share_cores() -> None:
    """Divide the cores of this machine among its ranks, unless ``OMP_NUM_THREADS`` says how many to use.

    On a CPU torch starts a thread per core in every rank; more threads than cores wait for each other in
    every operation, and a step takes minutes.
    """
    num_ranks = int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)
    on_cpu = get_accelerator().device_name() == "cpu"
    if on_cpu and num_ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_ranks))


def leave(code: int = 0) -> NoReturn:
    """End this rank without the teardown of the interpreter, which may race with torch's threads.

    After an error other ranks may be gone already, so nothing is said goodbye to: the launcher ends the
    ranks that are left.

    Parameters
    ----------
    code : int
        Exit code; 0 is success.
    """
    if code == 0 and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def device() -> torch.device:
    """Device of this rank, on which its collectives run."""
    return torch.device(get_accelerator().current_device_name())


def broadcast_bytes(payload: bytes | None, src: int = 0) -> bytes:
    """Send bytes from one rank to all.

    Parameters
    ----------
    payload : bytes or None
        Ignored except on ``src``.
    """
    if dist.get_world_size() == 1:
        return payload or b""
    here = dist.get_rank() == src
    size = torch.tensor([len(payload or b"") if here else 0], dtype=torch.int64, device=device())
    dist.broadcast(size, src=src)
    data = torch.empty(int(size.item()), dtype=torch.uint8, device=device())
    if here and payload:
        data.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    if data.numel():
        dist.broadcast(data, src=src)
    return data.cpu().numpy().tobytes()


def on_first_rank(produce: Callable[[], bytes]) -> bytes:
    """Run ``produce`` on rank 0 only and give its result to all ranks.

    Raises
    ------
    DflopError
        On *every* rank, with rank 0's message, if ``produce`` fails on rank 0.
    """
    message: bytes | None = None
    if dist.get_rank() == 0:
        try:
            message = _OK + produce()
        except DflopError as error:
            message = _FAILED + _describe(error)
        except Exception as error:  # every rank must learn of it before it waits in a collective
            logger.exception("rank 0 failed unexpectedly")
            message = _FAILED + _describe(DflopError(f"{type(error).__name__}: {error}"))
    message = broadcast_bytes(message)
    if message[:1] == _FAILED:
        raise _revive(message[1:], "rank 0")
    return message[1:]


def together(check: Callable[[], Any]) -> Any:
    """Run a check on every rank; if it fails anywhere, fail everywhere.

    Returns
    -------
    object
        What ``check`` returned on this rank.

    Raises
    ------
    DflopError
        This rank's own error, or that of the lowest failing rank.
    """
    own: DflopError | None = None
    result: Any = None
    try:
        result = check()
    except DflopError as error:
        own = error
    except Exception as error:  # every rank must learn of it before it waits in a collective
        logger.exception("this rank failed unexpectedly")
        own = DflopError(f"{type(error).__name__}: {error}")
    world_size = dist.get_world_size()
    failed = torch.full(
        (1,), world_size if own is None else dist.get_rank(), dtype=torch.int64, device=device()
    )
    dist.all_reduce(failed, op=dist.ReduceOp.MIN)
    first = int(failed.item())
    if first == world_size:
        return result
    description = broadcast_bytes(_describe(own) if own is not None else None, src=first)
    raise own if own is not None else _revive(description, f"rank {first}")


def _describe(error: DflopError) -> bytes:
    return json.dumps({"type": type(error).__name__, "message": str(error)}).encode()


def _revive(description: bytes, where: str) -> DflopError:
    outcome = json.loads(description)
    kind = getattr(errors, outcome["type"], DflopError)
    return kind(f"[{where}] {outcome['message']}")
