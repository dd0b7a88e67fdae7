"""Entry point of ``dflop-ds``: one verb per file, of which only the one that runs is imported."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from dflop_ds.errors import DflopError

#: What every verb does; the module has the name of the verb.
VERBS = {
    "config": "print the schema of the dflop block, or check a file",
    "demo-data": "write a small model and data set to train on",
    "doctor": "check versions, build tools, locks and space of this machine",
    "export": "write a checkpoint in Hugging Face format",
    "plan": "choose the parallel layout for your data, model and cluster",
    "profile": "measure what the cost model learns from, and how good it is",
    "schedule": "put one global batch into microbatches, or audit a plan log",
    "simulate": "predict the steps of a training configuration",
}
#: Exit code of an error that is explained on stderr, as for a wrong command line.
EXIT_ERROR = 2
#: Exit code after Ctrl-C, as shells count it.
EXIT_INTERRUPTED = 130


def build_parser(verb: str | None) -> argparse.ArgumentParser:
    """Return the parser of all verbs, with the arguments of one of them.

    The others are not imported, so that ``doctor`` explains a machine on which they could not be.
    """
    parser = argparse.ArgumentParser(
        prog="dflop-ds", description="Data-aware pipeline training of multimodal LLMs on DeepSpeed."
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, summary in VERBS.items():
        own = verbs.add_parser(name, help=summary, description=summary)
        if name == verb:
            importlib.import_module(f"dflop_ds.cli.{name.replace('-', '_')}").add_arguments(own)
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
        Exit code: 0 done, 1 a check failed, 2 an error that is explained on stderr, 130 Ctrl-C.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    verb = next((word for word in words if not word.startswith("-")), None)
    arguments = build_parser(verb).parse_args(words)
    try:
        return int(arguments.run(arguments))
    except (DflopError, OSError) as error:
        print(f"dflop-ds: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("dflop-ds: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
