"""The launcher's entry point: ``deepspeed --module dflop_ds.train --deepspeed_config FILE``."""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import deepspeed
from deepspeed import comm as dist

from dflop_ds.config import DflopConfig, load_ds_config, parse_dflop
from dflop_ds.errors import DflopError
from dflop_ds.runtime import distributed
from dflop_ds.runtime.initialize import initialize
from dflop_ds.runtime.report import write_reports
from dflop_ds.runtime.setup import Setup, prepare
from dflop_ds.runtime.versions import require_supported_deepspeed

logger = logging.getLogger("dflop_ds.train")


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the configuration says; the exit code is 0 on success, 2 on a stated error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        train(args)
    except DflopError as error:
        rank = dist.get_rank() if dist.is_initialized() else args.local_rank
        logger.error("rank %d: %s", rank, error)
        return 2
    return 0


def train(args: argparse.Namespace) -> None:
    """Prepare, train, report."""
    require_supported_deepspeed()
    ds_config = load_ds_config(args.deepspeed_config or "")
    config = parse_dflop(ds_config)
    distributed.start()
    setup = prepare(ds_config, config)
    engine, _, _, _ = initialize(
        model=setup.model,
        model_parameters=[p for p in setup.model.parameters() if p.requires_grad],
        training_data=setup.dataset,
        collate_fn=setup.collate_fn,
        config=ds_config,
    )
    try:
        run_steps(engine, setup, config)
        write_reports(engine, config)
    finally:
        engine.destroy()


def run_steps(engine: Any, setup: Setup, config: DflopConfig) -> None:
    """The training loop; rank 0 logs and appends one line per step to ``metrics.jsonl``."""
    num_steps = total_steps(config, len(setup.dataset.table), engine.train_batch_size())
    metrics = MetricsFile(Path(config.train.output_dir) / "metrics.jsonl")
    for step in range(1, num_steps + 1):
        start_s = time.perf_counter()
        loss = float(engine.train_batch())
        line = {"step": step, "loss": loss, "step_time_s": time.perf_counter() - start_s}
        if due(config.train.eval_every, step) and setup.eval_dataset is not None and config.enabled:
            line["eval_loss"] = engine.evaluate(setup.eval_dataset)
        if dist.get_rank() == 0:
            metrics.append(line)
            if step % config.train.log_every == 0:
                logger.info("%d steps: %s", num_steps, " ".join(f"{k} {v:.6g}" for k, v in line.items()))
        if due(config.train.save_every, step):
            engine.save_checkpoint(str(Path(config.train.output_dir) / "checkpoints"))


class MetricsFile:
    """JSON lines of what was measured, complete after every step; written anew by every run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._started = False

    def append(self, line: dict[str, Any]) -> None:
        """Add one line; what is not finite becomes ``null``."""
        if not self._started:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text("", encoding="utf-8")
            self._started = True
        line = {key: value if math.isfinite(value) else None for key, value in line.items()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def due(every: int | None, step: int) -> bool:
    """Whether something that happens every so many steps happens now."""
    return every is not None and step % every == 0


def total_steps(config: DflopConfig, num_samples: int, batch_size: int) -> int:
    """Optimizer steps to train."""
    if config.train.num_steps is not None:
        return config.train.num_steps
    per_epoch = (
        num_samples // batch_size if config.data.tail == "drop" else math.ceil(num_samples / batch_size)
    )
    # Rounded first: 0.07 epochs of 100 steps are 7 steps, although 0.07 * 100 > 7.
    return math.ceil(round((config.train.num_epochs or 0) * per_epoch, 6))


def run() -> NoReturn:
    """Leave the process with the exit code of :func:`main`.

    After an error other ranks may be gone already, so nothing is said goodbye to: the launcher
    ends the ranks that are left.
    """
    code = main()
    if code == 0 and dist.is_initialized():
        dist.destroy_process_group()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
