"""Run a worker script as several ranks on this machine, with a timeout that ends only them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

GRACE_S = 8.0
ROOT = Path(__file__).parents[2]
WORKERS = Path(__file__).parent.parent / "dist" / "workers"


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(
    worker: str,
    arguments: dict[str, Any],
    out: Path,
    *,
    num_ranks: int = 2,
    timeout_s: float = 240.0,
    expect: int = 0,
) -> list[dict[str, Any]]:
    """Start ``tests/dist/workers/<worker>.py`` once per rank and read what each one reports.

    Each worker gets ``arguments`` as JSON and may write ``out/rank<r>.json``.

    Raises
    ------
    AssertionError
        If a rank does not exit with ``expect``, or not in time; with the output of all ranks.
    """
    out.mkdir(parents=True, exist_ok=True)
    port = free_port()
    processes, logs = [], []
    for rank in range(num_ranks):
        env = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        }
        log = out / f"rank{rank}.log"
        logs.append(log)
        command = [sys.executable, str(WORKERS / f"{worker}.py"), json.dumps({**arguments, "out": str(out)})]
        with log.open("w") as file:
            processes.append(
                subprocess.Popen(
                    command, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
                )
            )
    codes = _wait(processes, timeout_s)
    if any(code != expect for code in codes):
        text = "\n".join(
            f"--- rank {rank} (exit {codes[rank]})\n{log.read_text()[-6000:]}"
            for rank, log in enumerate(logs)
        )
        raise AssertionError(f"{worker}: exit codes {codes}, expected {expect}\n{text}")
    reports = [out / f"rank{rank}.json" for rank in range(num_ranks)]
    return [json.loads(path.read_text()) if path.exists() else {} for path in reports]


def _wait(processes: list[subprocess.Popen[bytes]], timeout_s: float) -> list[int | None]:
    """Exit codes; the ranks that are still running at the end are killed and count as ``None``."""
    end = time.monotonic() + timeout_s
    failed_at: float | None = None
    while time.monotonic() < end and any(p.poll() is None for p in processes):
        if failed_at is None and any(p.poll() not in (None, 0) for p in processes):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > GRACE_S:
            break
        time.sleep(0.1)
    codes = [p.poll() for p in processes]
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return codes
