"""Which versions of Python and of the packages below us are supported, and why."""

from __future__ import annotations

import importlib.metadata
import re

from dflop_ds.errors import EnvironmentProblem, UnsupportedVersionError

#: Package name -> (first supported release, first unsupported release or None).
SUPPORTED: dict[str, tuple[tuple[int, ...], tuple[int, ...] | None]] = {
    "python": ((3, 10), None),
    "torch": ((2, 6), None),
    "deepspeed": ((0, 19, 3), (0, 20)),
    "transformers": ((5,), (6,)),
}


def parse_release(version: str) -> tuple[int, ...]:
    """Return the release numbers of a version: ``"0.19.8+cpu"`` gives ``(0, 19, 8)``.

    Raises
    ------
    UnsupportedVersionError
        If the text does not start with a number.
    """
    match = re.match(r"\d+(\.\d+)*", version)
    if match is None:
        raise UnsupportedVersionError(
            f"a version must start with release numbers, found {version!r}. Reinstall the package."
        )
    return tuple(int(part) for part in match.group().split("."))


def supported_range(name: str) -> str:
    """Return the supported range of a package as a requirement, such as ``>=5,<6``."""
    first, after = SUPPORTED[name]
    text = ">=" + ".".join(map(str, first))
    return text if after is None else text + ",<" + ".".join(map(str, after))


def is_supported(name: str, version: str) -> bool:
    """Tell whether a version of a package named in :data:`SUPPORTED` is supported."""
    first, after = SUPPORTED[name]
    release = parse_release(version)
    return release >= first and (after is None or release < after)


def installed_version(name: str) -> str | None:
    """Return the installed version of a distribution, or None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def require_supported_deepspeed(version: str | None = None) -> None:
    """Refuse a DeepSpeed that would train wrongly or was never tested.

    Parameters
    ----------
    version : str, optional
        Version to judge; the installed one by default.

    Raises
    ------
    UnsupportedVersionError
        If the version is outside the supported range.
    EnvironmentProblem
        If DeepSpeed is not installed.
    """
    if version is None:
        version = installed_version("deepspeed")
    if version is None:
        raise EnvironmentProblem(
            "DeepSpeed must be installed, found none. Run: pip install "
            f"'deepspeed{supported_range('deepspeed')}'"
        )
    if is_supported("deepspeed", version):
        return
    if parse_release(version) < SUPPORTED["deepspeed"][0]:
        reason = (
            "releases 0.18.3 to 0.19.2 divide the gradients of early pipeline stages by the "
            "accumulation steps twice, and older ones are not tested"
        )
    else:
        reason = "later releases are not tested with the engine's internals that dflop_ds extends"
    raise UnsupportedVersionError(
        f"DeepSpeed must be {supported_range('deepspeed')}, found {version}: {reason}. "
        f"Run: pip install 'deepspeed{supported_range('deepspeed')}'"
    )
