"""Entry point of ``dflop-ds``: one sub-command per file of this package."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from dflop_ds.cli import config, demo_data, doctor, export, plan, profile, schedule, simulate
from dflop_ds.errors import DflopError

#: Exit code of an error that is explained on stderr, as for a wrong command line.
EXIT_ERROR = 2


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with every verb."""
    parser = argparse.ArgumentParser(
        prog="dflop-ds", description="Data-aware pipeline training of multimodal LLMs on DeepSpeed."
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in (config, demo_data, doctor, export, plan, profile, schedule, simulate):
        verb.add_parser(verbs)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments after the program name; those of the process by default.

    Returns
    -------
    int
        Exit code: 0 done, 1 a check failed, 2 an error that is explained on stderr.
    """
    arguments = build_parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except (DflopError, OSError) as error:
        print(f"dflop-ds: {error}", file=sys.stderr)
        return EXIT_ERROR


if __name__ == "__main__":
    sys.exit(main())
