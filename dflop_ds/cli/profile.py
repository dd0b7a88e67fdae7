"""``dflop-ds profile model``: time the layers of a model on this machine's device."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb to the parser of ``dflop-ds``."""
    parser = verbs.add_parser("profile", help="measure what the cost model learns from")
    subjects = parser.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    model = subjects.add_parser("model", help="time one layer of every kind, at shapes of the training data")
    model.add_argument(
        "config", type=Path, metavar="CONFIG", help="DeepSpeed configuration with a dflop block"
    )
    model.add_argument("--out", type=Path, required=True, metavar="FILE", help="profile to write (JSON)")
    model.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure and save; ``dflop.cost.profile`` may then name the file."""
    from dflop_ds.config import load_ds_config, parse_dflop
    from dflop_ds.runtime.setup import profile_model  # imports torch and DeepSpeed

    ds_config = load_ds_config(arguments.config)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    partial = arguments.out.with_name(arguments.out.name + ".partial.jsonl")
    table = profile_model(ds_config, parse_dflop(ds_config), partial)
    table.save(arguments.out)
    print(f"wrote {len(table)} layer timings of {table.fingerprint.hardware} to {arguments.out}")
    return 0
