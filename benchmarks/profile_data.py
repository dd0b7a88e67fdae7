"""How many image files per second and core `dflop-ds profile data` reads, on a warm cache.

Files are JPEGs of 200 to 1,000 px; every record has one of them and some text, which is tokenised as well.
The second scan reads nothing that has not changed. Rates are per second of CPU time of the one process.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a file as well

from benchmarks import environment
from dflop_ds.config import DflopConfig, parse_dflop
from dflop_ds.data.demo import build_demo
from dflop_ds.runtime.setup import profile_data

SCHEMA_VERSION = 1
NUM_PICTURES = 20
SHORTEST_PX, LONGEST_PX = 200, 1000
ANSWER = "A cat sits on a mat beside the window and looks at the birds. " * 3


def main() -> int:
    """Write files, scan them twice, print the rates, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    parser.add_argument("--num-files", type=int, default=4000, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.getLogger("dflop_ds").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        config = write_data(Path(folder), args.num_files, args.seed)
        scan(config, Path(folder) / "first.npz")  # warms the file cache
        fresh_s = scan(config, Path(folder) / "second.npz")
        again_s = scan(config, Path(folder) / "second.npz")
    summary = {
        "files_per_s_per_core": args.num_files / fresh_s,
        "unchanged_files_per_s_per_core": args.num_files / again_s,
    }
    content = {
        "schema_version": SCHEMA_VERSION,
        "environment": environment.describe(),
        "num_files": args.num_files,
        "seed": args.seed,
        "summary": summary,
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(content, indent=1))
    machine = content["environment"]
    print(f"Measured rate of reading shapes from headers: {args.num_files} JPEG files, warm cache, 1 process")
    print(f"{machine['num_cores']} cores of {machine['cpu']}; {machine['versions']}; seed {args.seed}")
    for name, rate in summary.items():
        print(f"{name:<34}{rate:>10,.0f}")
    return 0


def write_data(folder: Path, num_files: int, seed: int) -> DflopConfig:
    """A model directory, JPEG files and their records."""
    demo = build_demo(folder / "demo", num_samples=8, seed=seed)
    rng = np.random.default_rng(seed)
    pictures = [_picture(rng) for _ in range(NUM_PICTURES)]
    records: list[dict[str, Any]] = []
    for number in range(num_files):
        name = f"{number}.jpg"
        (folder / name).write_bytes(pictures[number % NUM_PICTURES])
        turns = [
            {"from": "human", "value": "<image>\nWhat is in the picture?"},
            {"from": "gpt", "value": ANSWER},
        ]
        records.append({"id": str(number), "image": name, "conversations": turns})
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    block = {"model": {"path": str(demo.model_dir)}, "data": {"train_path": str(path)}}
    return parse_dflop({"dflop": block})


def _picture(rng: np.random.Generator) -> bytes:
    height, width = (int(side) for side in rng.integers(SHORTEST_PX, LONGEST_PX, 2))
    blocks = rng.integers(0, 255, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(blocks).resize((width, height)).save(file, "JPEG")
    return file.getvalue()


def scan(config: DflopConfig, cache: Path) -> float:
    """CPU seconds of one scan."""
    start_s = time.process_time()
    profile_data(config, cache, 1)
    return time.process_time() - start_s


if __name__ == "__main__":
    sys.exit(main())
