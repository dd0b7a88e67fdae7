"""``dflop-ds export``: a checkpoint as a Hugging Face directory."""

from __future__ import annotations

import argparse
from pathlib import Path

from dflop_ds.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="checkpoint, or folder of them")
    parser.add_argument("out", type=Path, metavar="OUT", help="new directory for from_pretrained()")
    parser.add_argument("--tag", help="name of the checkpoint in the folder (default: the latest)")
    parser.add_argument("--model", type=Path, help="model directory of the training, if it has moved")
    dtypes = ("as_trained", "bf16", "fp32")
    parser.add_argument("--dtype", choices=dtypes, default="as_trained", help="precision of the weights")
    parser.add_argument(
        "--max-shard-gb", type=float, default=5.0, help="largest file, in 10^9 bytes (default: 5)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what OUT holds")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Export, and print where to."""
    # Imported late: the other verbs do not need torch.
    from dflop_ds.runtime.checkpoint_folder import find
    from dflop_ds.runtime.export import export_checkpoint

    if not arguments.max_shard_gb > 0:
        raise ConfigError(f"--max-shard-gb must be positive, found {arguments.max_shard_gb}; correct it.")
    directory = find(arguments.checkpoint, arguments.tag)
    if directory is None:
        raise ConfigError(
            f"{arguments.checkpoint} must be a checkpoint or a folder of checkpoints, found none; correct it."
        )
    out = export_checkpoint(
        directory,
        arguments.out,
        source=arguments.model,
        dtype=arguments.dtype,
        max_shard_bytes=int(arguments.max_shard_gb * 1e9),
        overwrite=arguments.overwrite,
    )
    print(f"wrote {out} from {directory}")
    return 0
