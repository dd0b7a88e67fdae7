"""``dflop-ds demo-data``: write a small model and a small multimodal data set."""

from __future__ import annotations

import argparse
from pathlib import Path

from dflop_ds.cli.arguments import whole_number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write to")
    parser.add_argument("--num-samples", type=whole_number(1), default=256, metavar="N", help="default: 256")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="default: 0")
    parser.add_argument(
        "--media",
        choices=("images", "audio"),
        default="images",
        help="images: pictures and clips with a LLaVA-OneVision model (default); audio: recordings of tones "
        "with a Qwen2-Audio model",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the data set."""
    # These import torch and transformers.
    if arguments.media == "audio":
        from dflop_ds.data.demo_audio import build_audio_demo as build
    else:
        from dflop_ds.data.demo import build_demo as build

    build(arguments.out, num_samples=arguments.num_samples, seed=arguments.seed)
    print(f"wrote {arguments.num_samples} samples below {arguments.out}")
    return 0
