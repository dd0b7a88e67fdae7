"""``dflop-ds config``: print the schema of the "dflop" block, or check a DeepSpeed JSON."""

from __future__ import annotations

import argparse
import json
from typing import Any

from dflop_ds.config import (
    BATCH_KEYS,
    BatchSizes,
    DflopConfig,
    json_schema,
    load_ds_config,
    parse_dflop,
    validate_for_pipeline,
)
from dflop_ds.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    schema = actions.add_parser("schema", help="print the JSON schema of the dflop block")
    schema.set_defaults(run=run_schema)
    check = actions.add_parser("check", help="load and validate a DeepSpeed JSON file")
    check.add_argument("file", metavar="FILE", help="DeepSpeed configuration, with or without a dflop block")
    check.add_argument(
        "--num-ranks", type=int, help="number of ranks that will run it, to check the batch sizes exactly"
    )
    check.add_argument(
        "--trainer", action="store_true", help="for the Hugging Face Trainer: skip the rules of the pipeline"
    )
    check.set_defaults(run=run_check)


def run_schema(arguments: argparse.Namespace) -> int:
    """Print the schema."""
    print(json.dumps(json_schema(), indent=2))
    return 0


def run_check(arguments: argparse.Namespace) -> int:
    """Validate a file; problems are raised as ConfigError."""
    ds_config = load_ds_config(arguments.file)
    block = parse_dflop(ds_config)
    if "dflop" in ds_config:
        print(f"dflop block: {'enabled' if block.enabled else 'not enabled'}")
    elif not arguments.trainer:
        print('no "dflop" block: dflop_ds is not enabled')
    if not arguments.trainer:
        _check_pipeline(ds_config)
        replicas = _replicas(ds_config, block, arguments.num_ranks)
        sizes = BatchSizes.from_ds_config(ds_config, replicas)
        print(
            f"batch: {sizes.train_batch_size} samples = {replicas} replicas x {sizes.num_microbatches} "
            f"microbatches x {sizes.micro_batch_size} samples"
        )
        if arguments.num_ranks is None:
            print("the number of replicas is a guess from the file; give --num-ranks to check it")
    print(f"{arguments.file}: ok")
    return 0


def _check_pipeline(ds_config: dict[str, Any]) -> None:
    try:
        validate_for_pipeline(ds_config)
    except ConfigError as error:
        if "dflop" in ds_config:
            raise
        raise ConfigError(
            f"{error}\nThese are the rules of the pipeline; a file for the Hugging Face Trainer is checked "
            "with --trainer."
        ) from None


def _replicas(ds_config: dict[str, Any], block: DflopConfig, num_ranks: int | None) -> int:
    stages = block.parallel.pipeline_stages
    if num_ranks is not None:
        if stages == "auto":
            return 1
        if num_ranks < 1 or num_ranks % stages:
            raise ConfigError(
                f"the number of ranks must be a multiple of the {stages} pipeline stages, found {num_ranks}. "
                "Change --num-ranks or dflop.parallel.pipeline_stages."
            )
        return num_ranks // stages
    values: list[Any] = [ds_config.get(key) for key in BATCH_KEYS]
    if all(isinstance(value, int) and value > 0 for value in values):
        train, micro, steps = values
        return max(1, train // (micro * steps))
    return 1
