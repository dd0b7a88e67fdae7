"""``dflop-ds demo-data``: write a small model and a small multimodal data set."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb to the parser of ``dflop-ds``."""
    parser = verbs.add_parser("demo-data", help="write a small model and data set to train on")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write to")
    parser.add_argument("--num-samples", type=_positive, default=256, metavar="N", help="default: 256")
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


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, found {value}")
    return value
