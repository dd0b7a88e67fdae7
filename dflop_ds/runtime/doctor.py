"""Checks of the machine that explain, before training, why it would fail or hang.

The ``check_*`` functions judge values that they are given; :func:`examine` collects the values.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

from dflop_ds.errors import EnvironmentProblem
from dflop_ds.runtime.versions import SUPPORTED, installed_version, is_supported, supported_range

#: Folder name of the op that DeepSpeed compiles at its first use on a CPU.
CPU_OP = "deepspeed_shm_comm"
#: A lock without a running compiler is stale after this time, in seconds ...
IDLE_LOCK_AGE_S = 30.0
#: ... and any lock after this one.
MAX_LOCK_AGE_S = 600.0
GIB = 2**30

_COMPILERS = frozenset(
    {
        "ninja",
        "c++",
        "g++",
        "gcc",
        "cc1plus",
        "as",
        "ld",
        "ld.bfd",
        "ld.gold",
        "ld.lld",
        "collect2",
        "clang",
        "clang++",
        "nvcc",
        "cicc",
        "ptxas",
    }
)


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """Outcome of one check.

    Attributes
    ----------
    name : str
        What was checked.
    status : {"ok", "warn", "FAIL"}
        FAIL: training cannot work; warn: it may not.
    detail : str
        The value found.
    remedy : str
        What to do; empty where all is well.
    """

    name: str
    status: Literal["ok", "warn", "FAIL"]
    detail: str
    remedy: str = ""


def check_version(name: str, version: str | None) -> Check:
    """Judge the version of a package, None meaning that it is not installed."""
    wanted = supported_range(name)
    install = "Use another Python." if name == "python" else f"Run: pip install '{name}{wanted}'"
    if version is None:
        return Check(name, "FAIL", f"not installed, needs {wanted}", install)
    if not is_supported(name, version):
        return Check(name, "FAIL", f"{version}, needs {wanted}", install)
    return Check(name, "ok", f"{version} (supported: {wanted})")


def check_accelerator(name: str | None, count: int) -> Check:
    """Judge the accelerator that DeepSpeed found, None meaning that DeepSpeed does not load."""
    if name is None:
        return Check(
            "accelerator", "FAIL", "DeepSpeed does not load", "Repair the packages that failed above."
        )
    if name == "cpu":
        return Check("accelerator", "ok", "cpu (no GPU found: for tests and small models)")
    if count == 0:
        return Check(
            "accelerator", "FAIL", f"{name}, 0 devices", "Check the driver and CUDA_VISIBLE_DEVICES."
        )
    return Check("accelerator", "ok", f"{name}, {count} devices")


def check_lock(lock: Path, age_s: float, compiler_alive: bool) -> Check:
    """Judge a build lock; a stale one makes every later run wait for ever.

    Parameters
    ----------
    lock : Path
        The lock file.
    age_s : float
        Time since it was made, in seconds.
    compiler_alive : bool
        Whether a compiler or ninja is running on this machine.
    """
    if age_s > MAX_LOCK_AGE_S or (age_s > IDLE_LOCK_AGE_S and not compiler_alive):
        why = "no compiler is running" if not compiler_alive else "no build takes so long"
        return Check(
            "build lock",
            "FAIL",
            f"{lock} is {age_s:.0f} s old and {why}: a build was killed, and every run would hang",
            f"Delete the file: rm '{lock}'",
        )
    return Check(
        "build lock",
        "warn",
        f"{lock} is {age_s:.0f} s old: a build may be running",
        "Wait, then check again.",
    )


def check_tool(name: str, found: str | None, needed: bool, remedy: str) -> Check:
    """Judge whether a build tool was found; it is only needed where DeepSpeed compiles."""
    if found is not None:
        return Check(name, "ok", found)
    return Check(name, "FAIL" if needed else "warn", "not found", remedy)


def check_cpu_op(built: bool, needed: bool) -> Check:
    """Judge whether DeepSpeed's CPU op is compiled."""
    if built:
        return Check("CPU op", "ok", "built")
    if not needed:
        return Check("CPU op", "ok", "not needed with this accelerator")
    return Check(
        "CPU op",
        "warn",
        "not built: the first run compiles it for about a minute",
        "Run: dflop-ds doctor --prebuild",
    )


def check_space(name: str, size_bytes: int | None, warn_bytes: int, fail_bytes: int, remedy: str) -> Check:
    """Judge the size of a file system, None meaning that it does not exist."""
    if size_bytes is None:
        return Check(name, "warn", "does not exist", remedy)
    detail = f"{size_bytes / GIB:.1f} GiB"
    if size_bytes < fail_bytes:
        return Check(name, "FAIL", f"{detail}, needs {fail_bytes / GIB:.1f} GiB", remedy)
    if size_bytes < warn_bytes:
        return Check(name, "warn", f"{detail}, {warn_bytes / GIB:.1f} GiB or more is advised", remedy)
    return Check(name, "ok", detail)


def extensions_dir() -> Path:
    """Return the folder in which torch builds extensions: TORCH_EXTENSIONS_DIR or its default."""
    explicit = os.environ.get("TORCH_EXTENSIONS_DIR")
    if explicit:
        return Path(explicit)
    from torch.utils.cpp_extension import get_default_build_root

    return Path(get_default_build_root())


def find_locks(root: Path) -> list[Path]:
    """Return the build locks below an extensions folder, which may not exist."""
    return sorted(path for depth in ("*/lock", "*/*/lock") for path in root.glob(depth) if path.is_file())


def compiler_running(proc: Path = Path("/proc")) -> bool:
    """Tell whether a compiler or ninja is running; True where that cannot be found out."""
    if not proc.is_dir():
        return True
    for entry in proc.glob("[0-9]*/comm"):
        try:
            if entry.read_text().strip() in _COMPILERS:
                return True
        except OSError:  # the process ended meanwhile
            continue
    return False


def lock_checks(root: Path, now_s: float | None = None) -> list[Check]:
    """Judge every build lock below an extensions folder."""
    now_s = time.time() if now_s is None else now_s
    alive = compiler_running()
    checks = []
    for lock in find_locks(root):
        try:
            age_s = max(0.0, now_s - lock.stat().st_mtime)
        except FileNotFoundError:  # released meanwhile
            continue
        checks.append(check_lock(lock, age_s, alive))
    return checks or [Check("build lock", "ok", "none")]


def cpu_op_built(root: Path) -> bool:
    """Tell whether the CPU op lies compiled below an extensions folder."""
    return any(any(root.glob(f"{depth}{CPU_OP}/{CPU_OP}.so")) for depth in ("", "*/"))


def find_accelerator() -> tuple[str | None, int]:
    """Return the name and number of the devices that DeepSpeed sees; None if it does not load."""
    try:
        from deepspeed.accelerator import get_accelerator

        accelerator = get_accelerator()
        return str(accelerator._name), int(accelerator.device_count())
    except Exception:  # whatever a broken installation raises
        return None, 0


def examine() -> list[Check]:
    """Run every check on this machine, in the order in which problems build on each other."""
    versions = {name: installed_version(name) for name in SUPPORTED}
    versions["python"] = ".".join(map(str, sys.version_info[:3]))
    checks = [check_version(name, version) for name, version in versions.items()]
    accelerator, count = find_accelerator()
    on_cpu = accelerator == "cpu"
    checks.append(check_accelerator(accelerator, count))
    if versions["torch"] is not None:
        root = extensions_dir()
        source = "set" if os.environ.get("TORCH_EXTENSIONS_DIR") else "not set, torch's default"
        checks.append(Check("TORCH_EXTENSIONS_DIR", "ok", f"{root} ({source})"))
        checks += lock_checks(root)
        checks.append(check_cpu_op(cpu_op_built(root), on_cpu))
    return checks + _tool_checks(on_cpu) + _space_checks()


def _tool_checks(needed: bool) -> list[Check]:
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    beside = Path(sys.executable).parent
    ninja = f"Put {beside} on PATH (activate the environment)."
    if not (beside / "ninja").exists():
        ninja = "Run: pip install ninja"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    package = "python{}.{}-dev".format(*sys.version_info)
    return [
        check_tool("C++ compiler", compiler, needed, "Install g++ (package g++ or gcc-c++)."),
        check_tool("ninja", shutil.which("ninja"), needed, ninja),
        check_tool(
            "Python.h", str(header) if header.is_file() else None, needed, f"Install the headers ({package})."
        ),
    ]


def _space_checks() -> list[Check]:
    shm = Path("/dev/shm")
    size = shutil.disk_usage(shm).total if shm.is_dir() else None
    grow = "Give the container more shared memory, such as --shm-size 8g."
    free = shutil.disk_usage(Path.cwd()).free
    return [
        check_space("/dev/shm size", size, GIB, GIB // 16, grow),
        check_space("free disk here", free, 10 * GIB, GIB, "Free some space, or work on a larger disk."),
    ]


def failed(checks: Iterable[Check]) -> bool:
    """Tell whether one of the checks failed."""
    return any(check.status == "FAIL" for check in checks)


def prebuild_cpu_op(report: Callable[[str], None], poll_s: float = 1.0) -> None:
    """Compile DeepSpeed's CPU op unless it is there, or the accelerator is another one.

    Waits for a build that is running, but never for a stale lock.

    Parameters
    ----------
    report : callable
        Receives one line of progress at a time.
    poll_s : float
        Time between looks at a lock, in seconds.

    Raises
    ------
    EnvironmentProblem
        If a stale lock is in the way or the build fails.
    """
    accelerator, _ = find_accelerator()
    if accelerator != "cpu":
        report(f"the CPU op is not needed with the accelerator {accelerator!r}")
        return
    root = extensions_dir()
    waiting = False
    while find_locks(root):
        stale = [check for check in lock_checks(root) if check.status == "FAIL"]
        if stale:
            raise EnvironmentProblem(
                f"the build folder must not be locked; {stale[0].detail}. {stale[0].remedy}"
            )
        if not waiting:
            report(f"another build holds a lock below {root}; waiting for it")
        waiting = True
        time.sleep(poll_s)
    if cpu_op_built(root):
        report("the CPU op is already built; checking that it loads")
    else:
        report(f"building DeepSpeed's CPU op below {root}; this takes about a minute, do not interrupt it")
    started_s = time.monotonic()
    try:
        from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

        ShareMemCommBuilder().load(verbose=False)
    except Exception as error:  # RuntimeError, OSError, ImportError: every failure has the same remedy
        raise EnvironmentProblem(
            f"DeepSpeed's CPU op must build and load; {type(error).__name__}: {error}. "
            "See the checks of 'dflop-ds doctor' for a missing compiler, ninja or Python.h."
        ) from error
    report(f"the CPU op is ready after {time.monotonic() - started_s:.0f} s")
