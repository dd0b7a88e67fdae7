"""``dflop-ds doctor``: check the machine, and build what DeepSpeed needs on a CPU."""

from __future__ import annotations

import argparse

from dflop_ds.runtime import doctor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument(
        "--prebuild", action="store_true", help="first build DeepSpeed's CPU op where it is needed (a minute)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print one line per check; return 1 if a check failed."""
    checks = doctor.examine()
    if arguments.prebuild and not doctor.failed(checks):
        doctor.prebuild_cpu_op(lambda line: print(line, flush=True))
        checks = doctor.examine()
    for check in checks:
        print(f"{check.status:<5}{check.name:<22}{check.detail}")
        if check.remedy:
            print(f"{'':<27}-> {check.remedy}")
    if doctor.failed(checks):
        print("This machine is not ready.")
        return 1
    return 0
