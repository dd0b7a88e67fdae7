"""Parity of every model family with ``transformers``: logits and gradients, alone and packed.

    python -m benchmarks.parity --json OUT

Tiny models with random weights in fp32. Differences are of the whole model: media rows and token
ids in, logits and gradients of the mean cross entropy out.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import environment
from benchmarks.parity.compare import TOLERANCE, Pair
from benchmarks.parity.variants import VARIANTS

SCHEMA_VERSION = 1


def main() -> int:
    """Compare, print the table, write it. The exit status is 1 where a difference is too large."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--only", default="", help="only variants whose name contains this text")
    parser.add_argument("--seed", type=int, default=0, help="of weights")
    arguments = parser.parse_args()
    start_s = time.perf_counter()
    print(f"{'variant':<30}{'case':<22}{'logits':>10}{'gradients':>11}  largest at")
    rows: list[dict[str, Any]] = []
    for variant in VARIANTS:
        if arguments.only not in variant.name:
            continue
        pair = Pair(variant, arguments.seed)
        for case in variant.cases:
            found = pair.compare(case)
            rows.append({"variant": variant.name, "case": case, "holds": found.holds, **vars(found)})
            mark = "" if found.holds else "  ABOVE"
            print(
                f"{variant.name:<30}{case:<22}{found.logits:>10.1e}{found.gradient:>11.1e}  "
                f"{found.parameter}{mark}"
            )
    worst = {
        "max_logit_difference": max((row["logits"] for row in rows), default=0.0),
        "max_gradient_difference": max((row["gradient"] for row in rows), default=0.0),
        "num_cases": len(rows),
        "all_hold": all(row["holds"] for row in rows),
    }
    machine = environment.describe()
    versions = machine["versions"]
    print(
        f"\n{len(rows)} cases, fp32, seed {arguments.seed}: logits differ by "
        f"{worst['max_logit_difference']:.1e} at most, gradients by "
        f"{worst['max_gradient_difference']:.1e} relative (tolerance {TOLERANCE:g}); "
        f"torch {torch.__version__}, transformers {versions['transformers']}, {machine['cpu']}"
    )
    if arguments.json:
        content = {
            "schema_version": SCHEMA_VERSION,
            "environment": machine,
            "seed": arguments.seed,
            "tolerance": TOLERANCE,
            "seconds": time.perf_counter() - start_s,
            "rows": rows,
            "summary": worst,
        }
        arguments.json.write_text(json.dumps(content, indent=1))
    return 0 if worst["all_hold"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
