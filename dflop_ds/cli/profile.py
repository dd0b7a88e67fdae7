"""``dflop-ds profile``: measure layers, read the shapes of the data, state the prediction error."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np

from dflop_ds.cli.arguments import check_writable

_MOST_LISTED = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    subjects = parser.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    model = _subject(subjects, "model", "time one layer of every kind, at shapes of the training data")
    model.add_argument("--out", type=Path, required=True, metavar="FILE", help="profile to write (JSON)")
    model.add_argument(
        "--budget-s", type=float, metavar="SECONDS", help="instead of dflop.cost.profile_budget_s"
    )
    model.set_defaults(run=run_model)
    data = _subject(subjects, "data", "read the shapes of the training data, from file headers")
    data.add_argument("--out", type=Path, required=True, metavar="FILE", help="shape table to write (NPZ)")
    data.add_argument("--processes", type=int, metavar="N", help="instead of dflop.data.scan_processes")
    data.set_defaults(run=run_data)
    report = _subject(subjects, "report", "held-out errors of the cost model and of its alternatives")
    report.add_argument("--profile", type=Path, required=True, metavar="FILE", help="of `profile model`")
    report.add_argument("--num-stages", type=int, default=2, metavar="N", help="pipeline stages (default 2)")
    report.add_argument("--png", type=Path, metavar="FILE", help="scatter plot to write")
    report.set_defaults(run=run_report)


def _subject(
    subjects: argparse._SubParsersAction[argparse.ArgumentParser], name: str, help_text: str
) -> argparse.ArgumentParser:
    parser = subjects.add_parser(name, help=help_text, description=help_text)
    parser.add_argument(
        "config", type=Path, metavar="CONFIG", help="DeepSpeed configuration with a dflop block"
    )
    return parser


def run_model(arguments: argparse.Namespace) -> int:
    """Measure and save; ``dflop.cost.profile`` may then name the file.

    Started on several ranks by a launcher, it times layers cut over them (tensor parallelism), and
    rank 0 writes.
    """
    from dflop_ds.config import load_ds_config, parse_dflop
    from dflop_ds.runtime.setup import profile_model  # imports torch and DeepSpeed

    ds_config = load_ds_config(arguments.config)
    check_writable(arguments.out, "--out")
    partial = arguments.out.with_name(arguments.out.name + ".partial.jsonl")
    config = parse_dflop(ds_config)
    if arguments.budget_s is not None:
        cost = config.cost.model_copy(update={"profile_budget_s": arguments.budget_s})
        config = config.model_copy(update={"cost": cost})
    table = profile_model(ds_config, config, partial)
    if int(os.environ.get("RANK", "0")) != 0:
        return 0
    table.save(arguments.out)
    degree = table.fingerprint.tensor_parallel_degree
    cut = f", cut over {degree} ranks" if degree > 1 else ""
    print(f"wrote {len(table)} layer timings of {table.fingerprint.hardware}{cut} to {arguments.out}")
    for limit in table.limits:
        print(f"out of memory: {limit}")
    return 0


def run_data(arguments: argparse.Namespace) -> int:
    """Write the shape table and a histogram, print a summary, list what cannot be used.

    Shapes are kept in ``FILE.cache``; unchanged files are not read again. The exit code is 1 if a sample
    is broken.
    """
    from dflop_ds.config import load_ds_config, parse_dflop
    from dflop_ds.errors import ConfigError
    from dflop_ds.profiling.plots import draw_histograms
    from dflop_ds.runtime.setup import profile_data
    from dflop_ds.shapes import SHAPE_COLUMNS

    config = parse_dflop(load_ds_config(arguments.config))
    picture = arguments.out.with_suffix(".png")
    if picture == arguments.out:
        raise ConfigError(
            f"--out must not be the picture of the histograms, found {picture}; end it in .npz."
        )
    check_writable(arguments.out, "--out")
    cache = arguments.out.with_name(arguments.out.name + ".cache")
    found = profile_data(config, cache, arguments.processes)
    found.table.save(arguments.out)
    draw_histograms(picture, found.table)
    print(f"{len(found.table)} samples in {arguments.out}, histograms in {picture}\n")
    print(f"{'per sample':<20}{'mean':>10}{'median':>10}{'p95':>10}{'max':>10}{'sum':>14}")
    for name in SHAPE_COLUMNS:
        column = getattr(found.table, name)
        median, high = np.quantile(column, [0.5, 0.95])
        print(
            f"{name:<20}{column.mean():>10.1f}{median:>10.0f}{high:>10.0f}{column.max():>10.0f}"
            f"{column.sum():>14.0f}"
        )
    if found.dropped:
        print(f"\n{len(found.dropped)} samples cannot be used:")
    for sample in found.dropped[:_MOST_LISTED]:
        print(f"  [{sample.index}] {sample.reason}")
    if len(found.dropped) > _MOST_LISTED:
        print(f"  ... and {len(found.dropped) - _MOST_LISTED} more")
    return 1 if found.dropped else 0


def run_report(arguments: argparse.Namespace) -> int:
    """Print the errors on shapes that were left out of the fit, in 5 folds."""
    from dflop_ds.config import load_ds_config, parse_dflop
    from dflop_ds.cost.evaluation import NUM_FOLDS, cross_validate, error_table
    from dflop_ds.profiling.plots import draw_scatter
    from dflop_ds.profiling.table import ProfileTable
    from dflop_ds.runtime.setup import stages_for_report

    ds_config = load_ds_config(arguments.config)
    table = ProfileTable.load(arguments.profile)
    dims, stages = stages_for_report(ds_config, parse_dflop(ds_config), table, arguments.num_stages)
    held_out = cross_validate(table.rows, dims, stages)
    print(f"Prediction error on profiled shapes left out of the fit ({NUM_FOLDS} folds), {arguments.profile}")
    print(f"{table.fingerprint.hardware}, {table.fingerprint.dtype}, {table.fingerprint.versions}")
    print("forward plus backward; stages are added up from measured layers; alternatives: MAPE\n")
    print("\n".join(error_table(held_out)))
    if arguments.png is not None:
        arguments.png.parent.mkdir(parents=True, exist_ok=True)
        draw_scatter(arguments.png, held_out)
        print(f"\nscatter plot in {arguments.png}")
    return 0
